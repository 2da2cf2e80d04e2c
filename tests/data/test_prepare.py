"""Preparing from every kind of file: what comes out is what went in, once, split by the text alone; faults are named or counted."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from gammalm.data import open_mix, readers, shards
from gammalm.data import prepare as prepare_module
from gammalm.data.load import GroupTokens
from gammalm.data.prepare import Request, prepare
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import DataError

HERE = os.path.dirname(__file__)
TEXTS = [f"Document {i}: " + "the model condenses before it learns. " * (i % 7 + 1) for i in range(60)]


def run(source, out, **settings):
    settings = dict(vocab_size=600, quiet=True) | settings
    return prepare(Request(tuple(str(s) for s in source), out, **settings))


def texts_of(out, manifest, splits=shards.SPLITS):
    tok = Tokenizer.load(out / "tokenizer.model")
    found = []
    for group in manifest["groups"]:
        for split in splits:
            stream = GroupTokens(out, manifest, group, split)
            found += [tok.decode(stream.read(s, n - 1)) for s, n in zip(*(a.tolist() for a in stream.documents()), strict=True)]
    return found


def write_jsonl(path, records, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    return path


def write_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_every_kind_of_file(tmp_path):
    records = [{"text": t} for t in TEXTS]
    write_jsonl(tmp_path / "a.jsonl", records[:20])
    write_jsonl(tmp_path / "b.jsonl.gz", records[20:40], gzip.open)
    write_parquet(tmp_path / "c.parquet", {"text": TEXTS[40:], "other": list(range(20))})
    (tmp_path / "d.txt").write_bytes("Line one\r\n\r\n\tline three 你好 \n".encode())
    out = tmp_path / "out"
    manifest = run([tmp_path / n for n in ("a.jsonl", "b.jsonl.gz", "c.parquet")] + [f"notes-zh={tmp_path / 'd.txt'}"], out)
    assert sorted(texts_of(out, manifest)) == sorted([*TEXTS, "Line one\r\n\r\n\tline three 你好 \n"])
    assert list(manifest["groups"]) == ["notes-zh", "text-und"]
    assert [s["documents"] for s in manifest["sources"]] == [20, 20, 20, 1]


def test_windows_line_ends_blank_lines_and_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({"text": t}).encode() for t in TEXTS) + b"\r\n\r\n")
    manifest = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out", manifest)) == sorted(TEXTS)
    assert manifest["sources"][0]["skipped"] == {}


def test_what_cannot_be_read_is_counted(tmp_path):
    lines = [json.dumps({"text": t}).encode() for t in TEXTS]
    lines += [
        b'{"text": "\xff\xfe broken"}',
        b"{not json",
        b'["a list"]',
        b'{"text": 5}',
        b'{"text": "  \\n"}',
        b'{"text": "\\ud800 half"}',
        b'{"body": "x"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    manifest = run([tmp_path / "a.jsonl"], tmp_path / "out")
    assert manifest["sources"][0]["skipped"] == {"undecodable": 2, "bad_json": 1, "no_text": 3, "empty": 1}
    assert len(texts_of(tmp_path / "out", manifest)) == len(TEXTS)


def test_parquet_nulls_bytes_and_missing_column(tmp_path):
    write_parquet(
        tmp_path / "a.parquet", {"text": [TEXTS[0].encode(), b"\xff\xff", None, TEXTS[1].encode()], "lang": ["en", "en", "en", "de"]}
    )
    manifest = run([tmp_path / "a.parquet"], tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out", manifest)) == sorted(TEXTS[:2])
    assert manifest["sources"][0]["skipped"] == {"undecodable": 1, "no_text": 1}
    assert list(manifest["groups"]) == ["text-de", "text-en"]
    write_parquet(tmp_path / "b.parquet", {"content": ["x"]})
    with pytest.raises(DataError, match='no column "text" but content'):
        run([tmp_path / "b.parquet"], tmp_path / "out2")


def test_text_files_are_cut_without_losing_a_byte(tmp_path):
    text = "".join(f"Paragraph {i} with some words.\r\n" + "\n" * (i % 3 == 0) for i in range(9000)) + "中" * 900_000
    (tmp_path / "book.txt").write_bytes(text.encode())
    parts = [r["text"].decode() for r in readers.plain_text(tmp_path / "book.txt", {})]
    assert "".join(parts) == text
    assert len(parts) > 5 and max(len(p.encode()) for p in parts) <= 2 * readers.LINE_PART + 4


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.jsonl", b"", "No usable document"),
        ("a.jsonl", b"{broken\n", "1 bad_json"),
        ("a.txt", b"\n \n", "1 empty"),
        ("a.csv", b"x", "kind that is not read"),
        ("a.parquet", b"PAR1 not", "no whole Parquet"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "cut"}' * 100, mtime=0)[:-20], "damaged or cut short"),
        ("a.jsonl.gz", b"not gzip", "damaged or cut short"),
        (None, b"", "no file"),
    ],
)
def test_files_that_give_nothing_are_errors(tmp_path, name, content, told):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_bytes(content)
    with pytest.raises(DataError, match=told):
        run([path], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ([name] if name else [])  # nothing half made is left


def test_exact_duplicates_go_and_the_first_source_keeps_them(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS + TEXTS[:10]])
    write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in TEXTS[5:15] + ["new text of b " * 5]])
    out = tmp_path / "out"
    manifest = run([f"one={tmp_path / 'a.jsonl'}", f"two={tmp_path / 'b.jsonl'}"], out)
    assert [s["duplicates"] for s in manifest["sources"]] == [10, 10]
    assert sorted(texts_of(out, manifest)) == sorted([*TEXTS, "new text of b " * 5])
    assert manifest["groups"]["two-und"]["train"]["documents"] == 1


def test_split_and_order_depend_on_the_texts_alone(tmp_path, monkeypatch):
    """Reversed input, many buckets and worker processes: the same validation set, the same shards bit for bit."""
    texts = [f"{i} " + "words " * (i % 50 + 1) for i in range(1500)]
    write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in reversed(texts)])
    one = run([tmp_path / "a.jsonl"], tmp_path / "one")
    monkeypatch.setattr(prepare_module, "IN_PROCESS_BYTES", 0)
    two = run([tmp_path / "b.jsonl"], tmp_path / "two")
    assert one["groups"] == two["groups"] and one["tokenizer"] == two["tokenizer"]
    held_out = set(texts_of(tmp_path / "one", one, ["validation"]))
    assert 4 <= len(held_out) < 30
    more = [{"text": t} for t in texts + [f"later {i} " * 9 for i in range(500)]]
    three = run([write_jsonl(tmp_path / "c.jsonl", more)], tmp_path / "three")
    assert held_out & set(texts_of(tmp_path / "three", three)) == held_out
    assert len(held_out - set(texts_of(tmp_path / "three", three, ["validation"]))) <= 1  # texts that come later do not move those before


def test_small_groups_give_a_document_away_and_single_ones_do_not(tmp_path):
    write_jsonl(tmp_path / "two.jsonl", [{"text": t} for t in TEXTS[:2]])
    write_jsonl(tmp_path / "one.jsonl", [{"text": "alone " * 30}])
    manifest = run([f"two={tmp_path / 'two.jsonl'}", f"one={tmp_path / 'one.jsonl'}"], tmp_path / "out")
    counts = {g: [e[s]["documents"] for s in shards.SPLITS] for g, e in manifest["groups"].items()}
    assert counts == {"one-und": [1, 0], "two-und": [1, 1]}


def test_max_mb_is_shared_evenly(tmp_path):
    rng = np.random.default_rng(0)
    for name, documents in (("big", 600), ("small", 40)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": " ".join(map(str, rng.integers(0, 9999, 100)))} for _ in range(documents)])
    manifest = run([f"{n}={tmp_path / n}.jsonl" for n in ("big", "small")], tmp_path / "out", max_mb=0.1)
    taken = {s["name"].split("/")[-1]: s["bytes"] for s in manifest["sources"]}
    assert 0.098e6 < sum(taken.values()) < 0.102e6
    assert 0.012e6 < taken["small.jsonl"] < 0.025e6  # all of it; the rest went to the other


def test_water_level():
    assert open_mix.water_level(10, {"a": 1, "b": 100, "c": 100}) == {"a": 1, "b": 4.5, "c": 4.5}
    assert open_mix.water_level(1000, {"a": 1, "b": 2}) == {"a": 1, "b": 2}


def test_prepared_before_ends_at_once_and_changes_prepare_anew(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    out = tmp_path / "out"
    notes = []
    first = run([path], out)
    stamp = (out / "manifest.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.delattr(prepare_module, "_build")  # nothing is read, encoded or written
        patch.delattr(prepare_module, "_building")
        assert run([path], out) == first | {"already_prepared": True}
    assert (out / "manifest.json").stat().st_mtime_ns == stamp
    shard = next((out / "shards" / "train").glob("*00.npy"))
    shard.write_bytes(shard.read_bytes()[:-1])
    request = Request((str(path),), out, vocab_size=600, quiet=True)
    assert not prepare(request, notes.append)["already_prepared"] and "bytes and should have" in notes[0]
    write_jsonl(path, [{"text": t} for t in TEXTS[:30]])
    assert prepare(request, notes.append)["sources"][0]["documents"] == 30 and "have changed" in notes[1]
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "out"}


def test_a_corpus_made_with_other_arguments_is_replaced_only_when_told(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    out = tmp_path / "out"
    first = run([path], out)
    for other in ({"vocab_size": 700}, {"max_mb": 0.001}):
        with pytest.raises(DataError, match="other arguments: .*a.jsonl --vocab-size 600 --max-mb 0. Give another --out, or --replace"):
            run([path], out, **other)
    with pytest.raises(DataError, match="other arguments"):
        run([f"notes={path}"], out)
    assert run([path], out) == first | {"already_prepared": True}
    assert run([path], out, replace=True) == first | {"already_prepared": True}
    second = run([path], out, vocab_size=700, replace=True)
    assert second["arguments"]["vocab_size"] == 700 and shards.read_manifest(out) | {"already_prepared": False} == second


def test_a_missing_folder_is_told_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(DataError, match="gammalm data prepare --source open-mix --vocab-size V --out .*/open-mix, with V at most"):
        shards.read_manifest(tmp_path / "open-mix")
    with pytest.raises(DataError, match="gammalm data prepare --source SOURCE --vocab-size V --out .*/mine, with V at most"):
        shards.read_manifest(tmp_path / "mine")


def test_what_is_not_ours_stays(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="no prepared corpus"):
        run([path], out)
    (out / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(DataError, match="damaged"):
        run([path], out)
    assert (out / "thesis.tex").read_text() == "years of work"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_a_data_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DataError, match="permissions"):
            run([path], tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_full_disk_is_a_data_error_and_leaves_nothing(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])

    def full(*_, **__):
        raise OSError(28, "No space left on device", "shard.npy")

    monkeypatch.setattr(shards.np, "save", full)
    with pytest.raises(DataError, match="No space left on device .*Free some room"):
        run([path], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_leavings_of_a_killed_process_are_removed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    stale = tmp_path / f".out.preparing-{finished.pid}"
    living = tmp_path / f".out.preparing-{os.getppid()}"
    stale.mkdir(), living.mkdir()
    run([path], tmp_path / "out")
    assert not stale.exists() and living.exists()


def test_large_vocabularies_take_four_bytes(corpus, tmp_path, monkeypatch):
    assert [shards.token_dtype(v) for v in (600, 2**16, 2**16 + 1)] == [np.uint16, np.uint16, np.uint32]
    monkeypatch.setattr(shards, "token_dtype", lambda _: np.dtype(np.uint32))
    large = run(corpus[1]["arguments"]["source"], tmp_path / "large")
    for group in large["groups"]:
        one, two = GroupTokens(*corpus, group, "train"), GroupTokens(tmp_path / "large", large, group, "train")
        assert np.array_equal(one.read(0, one.n_tokens), two.read(0, two.n_tokens))
    entry = large["groups"]["code-en"]["train"]["shards"][0]
    assert entry["tokens_file"]["size"] >= 4 * entry["tokens"]


def test_the_manifest_answers_for_counts(corpus):
    out, manifest = corpus
    assert json.loads((out / "manifest.json").read_text()) == {k: v for k, v in manifest.items() if k != "already_prepared"}
    on_disk = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} - {"manifest.json"}
    assert on_disk == {f["file"] for f in shards.listed_files(manifest)}
    for group, entry in manifest["groups"].items():
        for split in shards.SPLITS:
            stream = GroupTokens(out, manifest, group, split)
            starts, lengths = stream.documents()
            assert (len(starts), stream.n_tokens, lengths.sum()) == (
                entry[split]["documents"],
                entry[split]["tokens"],
                entry[split]["tokens"],
            )
            table = np.load(out / "token_bytes.npy")
            assert table[stream.read(0, stream.n_tokens)].sum() == entry[split]["bytes"]


def test_standard_library_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    manifest = run(["stdlib"], tmp_path / "out", max_mb=0.5)
    assert list(manifest["groups"]) == ["code-en"] and manifest["left_out"] == []
    texts = texts_of(tmp_path / "out", manifest)
    assert 0.45e6 < sum(len(t.encode()) for t in texts) < 0.7e6
    assert sum("import " in t for t in texts) > len(texts) / 2
    assert manifest["sources"][0]["licence"] == "PSF-2.0"


class FakeDatasets:
    """Stands for tensorflow_datasets: what is used of it is `load` and `as_numpy`."""

    @staticmethod
    def load(name, split, shuffle_files):
        assert split == "train" and not shuffle_files
        if name != "books":
            raise ValueError("Dataset not found")
        return [{"text": t.encode()} for t in TEXTS]

    as_numpy = staticmethod(iter)


def test_tfds(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", FakeDatasets)
    monkeypatch.setattr(readers, "import_tensorflow", lambda: None)
    monkeypatch.setattr(prepare_module, "IN_PROCESS_BYTES", 1 << 40)
    manifest = run(["tfds:books"], tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out", manifest)) == sorted(TEXTS)
    with pytest.raises(DataError, match="tfds:nothing cannot be loaded .*not found"):
        run(["tfds:nothing"], tmp_path / "out2")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match="Install them with pip"):
        run(["tfds:books"], tmp_path / "out3")


@pytest.mark.parametrize("settings, told", [({"vocab_size": 300}, "vocab-size must be at least"), ({"max_mb": -1.0}, "max-mb")])
def test_arguments_that_cannot_be(tmp_path, settings, told):
    with pytest.raises(DataError, match=told):
        run(["stdlib"], tmp_path / "out", **settings)
