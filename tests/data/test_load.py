"""Batches are a pure function of the step: any rows, any host count, any restart; validation covers each token once; damage is named."""

import json
import shutil
import threading
import time

import numpy as np
import pytest

from gammalm.data import shards
from gammalm.data.load import GroupTokens, open_split
from gammalm.data.loader import Loader
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import DataError

T, B = 48, 8


def opened(path, split="train", **changes):
    settings = dict(seq_len=T, packing="concat", mixture="natural", seed=3, batch=B)
    return open_split(path, split, **settings | changes)


def whole_stream(path, manifest, group, split):
    """The reference: all shards of a group, read plainly."""
    entries = manifest["groups"][group][split]["shards"]
    return np.concatenate([np.load(path / e["tokens_file"]["file"]) for e in entries]).astype(int)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_batch_has_the_promised_form(corpus, packing):
    split = opened(corpus[0], packing=packing)
    batch = split.batch(0)
    assert batch["tokens"].shape == (B, T + 1) and batch["tokens"].dtype == np.int32
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < split.vocab_size
    assert ("segments" in batch) == (packing == "documents")


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_rows_of_several_hosts_make_the_global_batch(corpus, packing):
    split = opened(corpus[0], packing=packing)
    for hosts in (1, 2, 4):
        share = B // hosts
        parts = [opened(corpus[0], packing=packing).batch(5, rows=slice(h * share, (h + 1) * share)) for h in range(hosts)]
        for key, whole in split.batch(5).items():
            assert np.array_equal(np.concatenate([p[key] for p in parts]), whole)


def test_any_step_without_the_steps_before_it(corpus):
    walked = opened(corpus[0])
    history = [walked.batch(i) for i in range(30)]
    fresh = opened(corpus[0])
    for step in (29, 3, 17):
        assert np.array_equal(fresh.batch(step)["tokens"], history[step]["tokens"])


def test_the_seed_orders_and_every_epoch_is_shuffled_anew(corpus):
    a, b = opened(corpus[0], batch=64), opened(corpus[0], batch=64, seed=4)
    assert not np.array_equal(a.batch(0)["tokens"], b.batch(0)["tokens"])
    only = opened(corpus[0], mixture="code:1", batch=1)
    n = only.windows["code-en"]
    first, second = ([only.batch(i)["tokens"][0].tobytes() for i in range(k * n, (k + 1) * n)] for k in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_one_epoch_of_concat_is_the_stream_exactly_once(corpus):
    path, manifest = corpus
    split = opened(path, mixture="web-zh:1", batch=1)
    stream = whole_stream(path, manifest, "web-zh", "train")
    n = split.windows["web-zh"]
    expected = sorted(tuple(stream[np.arange(k * T, k * T + T + 1) % len(stream)]) for k in range(n))
    assert sorted(tuple(split.batch(i)["tokens"][0]) for i in range(n)) == expected
    assert (n - 1) * T < len(stream) <= n * T
    assert split.epochs(n) == {"web-zh": 1.0} and split.epochs(2 * n + n // 2)["web-zh"] == pytest.approx(2.5, abs=1 / n)


def test_mixture_shares_hold_in_what_is_drawn(corpus):
    path, manifest = corpus
    split = opened(path, mixture="web-en:1,code:3", batch=16)
    rows = {tuple(row) for row in np.concatenate([split.batch(i)["tokens"] for i in range(8)])}
    code = whole_stream(path, manifest, "code-en", "train")
    windows = {tuple(code[np.arange(k * T, k * T + T + 1) % len(code)]) for k in range(split.windows["code-en"])}
    assert abs(len(rows & windows) - 96) <= 1  # three quarters of 128
    assert split.shares == {"web-en": 0.25, "code-en": 0.75}
    assert split.epochs(8)["code-en"] == pytest.approx(96 / split.windows["code-en"], rel=0.02)


def test_documents_are_whole_and_apart(corpus):
    """Each segment is a stretch of one document, and the end token stands nowhere but at a document's end."""
    path, manifest = corpus
    split = opened(path, packing="documents", mixture="web-en:1", batch=1)
    stream = whole_stream(path, manifest, "web-en", "train")
    texts = [tuple(d) for d in np.split(stream, np.flatnonzero(stream == split.eod_id) + 1)[:-1]]
    joined = "|".join(",".join(map(str, d)) for d in texts)
    seen = 0
    for i in range(split.windows["web-en"]):
        batch = split.batch(i)
        tokens, segments = batch["tokens"][0], batch["segments"][0]
        assert (tokens[segments == 0] == split.eod_id).all()
        assert (np.diff(segments[segments > 0]) >= 0).all() and segments[0] == 1
        for s in range(1, segments.max() + 1):
            piece = tokens[segments == s]
            assert split.eod_id not in piece[:-1]
            assert ",".join(map(str, piece)) in joined
            seen += len(piece) - 1
    assert seen == sum(len(d) - 1 for d in texts)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_validation_counts_every_token_with_a_context_once(corpus, packing):
    path, manifest = corpus
    split = opened(path, "validation", packing=packing, batch=3)
    assert split.domains == ["code-en", "web-en", "web-zh"]
    table = split.token_bytes
    for group in split.domains:
        stream = whole_stream(path, manifest, group, "validation")
        first = np.zeros(len(stream), bool)
        first[0] = True
        if packing == "documents":
            first[1:] = stream[:-1] == split.eod_id
        counted, held = np.zeros(split.vocab_size), 0.0
        for batch in split.validation(group):
            assert batch["tokens"].shape == (3, T + 1) and batch["weights"].shape == (3, T)
            np.add.at(counted, batch["tokens"][:, 1:], batch["weights"])
            held += (table[batch["tokens"][:, 1:]] * batch["weights"]).sum()
        assert np.array_equal(counted, np.bincount(stream[~first], minlength=split.vocab_size))
        assert held == manifest["groups"][group]["validation"]["bytes"] - table[stream[first]].sum()


def test_validation_rows_of_hosts_make_the_whole(corpus):
    split = opened(corpus[0], "validation", packing="documents", batch=4)
    halves = zip(split.validation("web-en", slice(0, 2)), split.validation("web-en", slice(2, 4)), strict=True)
    for whole, (a, b) in zip(split.validation("web-en"), halves, strict=True):
        for key in whole:
            assert np.array_equal(np.concatenate([a[key], b[key]]), whole[key])


def test_reading_across_shards(corpus, tmp_path, monkeypatch):
    """The same corpus in many small shards gives the same batches."""
    from gammalm.data.prepare import Request, prepare

    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    source = corpus[1]["arguments"]["source"]
    manifest = prepare(Request(tuple(source), tmp_path / "many", vocab_size=600, quiet=True))
    assert len(manifest["groups"]["code-en"]["train"]["shards"]) > 5
    for packing in ("concat", "documents"):
        one, many = opened(corpus[0], packing=packing), opened(tmp_path / "many", packing=packing)
        for step in range(20):
            assert np.array_equal(one.batch(step)["tokens"], many.batch(step)["tokens"])


def test_a_group_shorter_than_a_sequence_repeats(corpus):
    split = opened(corpus[0], seq_len=200_000, mixture="web-zh:1", batch=1)
    n = GroupTokens(*corpus, "web-zh", "train").n_tokens
    tokens = split.batch(0)["tokens"][0]
    assert n < 200_000 and np.array_equal(tokens[n : 2 * n], tokens[:n])


def damaged(corpus, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(corpus[0], copy)
    change(copy)
    return copy


def shard(folder):
    return next(iter(sorted((folder / "shards" / "train").glob("code-en-00000.npy"))))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(folder, key, value):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda f: flip(shard(f)), "code-en-00000.npy does not have the content"),
        (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-10]), "code-en-00000.npy has .* bytes and should have"),
        (lambda f: shard(f).unlink(), "code-en-00000.npy cannot be read"),
        (lambda f: flip(f / "tokenizer.model"), "tokenizer.model .* would mean other text"),
        (lambda f: flip(f / "token_bytes.npy"), "token_bytes.npy does not have"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "no prepared corpus"),
        (lambda f: edit(f, "format", 99), "format 99"),
    ],
)
def test_damage_names_the_file_and_what_to_do(corpus, tmp_path, change, told):
    with pytest.raises(DataError, match=told) as caught:
        opened(damaged(corpus, tmp_path, change))
    assert "prepare" in str(caught.value).lower()


def test_large_folders_check_sizes_at_open_and_hashes_on_demand(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "VERIFIED_AT_OPEN", 0)
    folder = damaged(corpus, tmp_path, lambda f: flip(shard(f)))
    opened(folder)
    with pytest.raises(DataError, match="code-en-00000"):
        shards.check_files(folder, shards.read_manifest(folder), hashes=True)
    with pytest.raises(DataError, match="other text"):
        opened(damaged(corpus, tmp_path / "b", lambda f: flip(f / "tokenizer.model")))


def test_unknown_domain_split_and_folder(corpus, tmp_path):
    with pytest.raises(DataError, match="no 'wiki' but"):
        opened(corpus[0], mixture="wiki:1")
    with pytest.raises(DataError, match="no validation domain 'web'"):
        next(opened(corpus[0], "validation").validation("web"))
    with pytest.raises(DataError, match="gammalm data prepare"):
        opened(tmp_path / "nothing")
    with pytest.raises(DataError, match="packing="):
        opened(corpus[0], packing="padded")


def test_tokens_decode_to_the_documents_that_went_in(corpus):
    path, manifest = corpus
    given = {json.loads(line)["text"] for line in open(manifest["arguments"]["source"][0], encoding="utf-8")}
    tok = Tokenizer.load(path / "tokenizer.model")
    found = []
    for group in manifest["groups"]:
        for split in shards.SPLITS:
            stream = GroupTokens(path, manifest, group, split)
            found += [tok.decode(stream.read(s, n)) for s, n in zip(*(a.tolist() for a in stream.documents()), strict=True)]
    assert len(found) == len(given) and set(found) == given


def test_loader_gives_the_steps_in_order_from_any_start(corpus):
    split = opened(corpus[0])
    with Loader(split, start_step=7, rows=slice(2, 5), prefetch=3) as loader:
        for expected in range(7, 15):
            step, batch = next(loader)
            assert step == expected and np.array_equal(batch["tokens"], split.batch(step, slice(2, 5))["tokens"])
        assert loader.take_waited() > 0 and loader.take_waited() == 0
    with pytest.raises(StopIteration):
        next(loader)
    assert not [t for t in threading.enumerate() if t.name.startswith("gammalm-data")]


class Slow:
    def batch(self, step, rows):
        time.sleep(0.05)
        if step == 3:
            raise DataError("step 3 is broken")
        return {"tokens": np.zeros(1)}


def test_loader_raises_what_its_worker_raised_at_that_step_and_measures_the_wait():
    loader = Loader(Slow(), prefetch=2)
    assert [next(loader)[0] for _ in range(3)] == [0, 1, 2]
    assert loader.waited >= 0.05
    with pytest.raises(DataError, match="step 3 is broken"):
        next(loader)
    assert not [t for t in threading.enumerate() if t.name.startswith("gammalm-data")]


def test_loader_works_ahead():
    with Loader(Slow(), prefetch=2) as loader:
        next(loader)
        time.sleep(0.15)
        loader.take_waited()
        next(loader)
        assert loader.take_waited() < 0.03  # made while we slept
