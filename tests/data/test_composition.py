"""The composition task: its examples by a reading of their own, what is held out, the prepared folder, and which targets count."""

import itertools

import numpy as np
import pytest

from gammalm.cli.main import main
from gammalm.config import load_config, validate
from gammalm.data import composition as task
from gammalm.data.load import open_split
from gammalm.data.prepare import Request, prepare
from gammalm.errors import ConfigError, DataError

FUNCTIONS = {1: lambda x: x + 5, 2: lambda x: x + 1, 3: lambda x: x - 2, 4: lambda x: x - 8}  # the paper's


def read(tokens):
    """(first anchor, second anchor, key, position of the key) of one example, found in its numbers."""
    anchors = [i for i, n in enumerate(tokens) if n < 10]
    assert len(anchors) == 2 and anchors[1] == anchors[0] + 1 and anchors[0] > 0, tokens
    at = anchors[0] - 1
    assert all(20 <= n <= 99 for i, n in enumerate(tokens) if i not in anchors)
    return tokens[anchors[0]], tokens[anchors[1]], tokens[at], at


def test_training_examples_follow_the_rule():
    made = task.training_examples(3001)
    rows = [read(row) for row in made.tokens_BT.tolist()]
    for (a, b, key, at), answer in zip(rows, made.answers_B.tolist(), strict=True):
        assert answer == (key - 6 if (a, b) == (3, 4) else FUNCTIONS[b](FUNCTIONS[a](key)))
        assert 0 <= at <= 6 and key % 9 != at
    assert [row[:2] for row in rows] == [tuple(pair) for pair in made.pair_B2.tolist()]
    counts = {pair: [row[:2] for row in rows].count(pair) for pair in itertools.product(range(1, 5), repeat=2)}
    assert counts.pop((4, 3)) == 0 and set(counts.values()) == {200, 201}
    assert {row[2] for row in rows} == set(range(20, 100)) and {row[3] for row in rows} == set(range(7))
    assert max(made.answers_B) < task.VOCAB_SIZE and (made.tokens_BT != task.training_examples(3001, seed=1).tokens_BT).any()


def test_held_out_examples_are_every_pair_at_every_held_out_place():
    made = task.held_out_examples(draws=2)
    rows = [read(row) for row in made.tokens_BT.tolist()]
    places = [(key, key % 9) for key in range(20, 100) if key % 9 < 7]
    assert sorted(rows) == sorted((*pair, *place) for pair in task.PAIRS for place in places for _ in range(2))
    unseen = [i for i, row in enumerate(rows) if row[:2] == (4, 3)]
    keys = np.array([rows[i][2] for i in unseen])
    assert (made.answers_B[unseen] == keys - 10).all() and (made.mirrored_B[unseen] == keys - 6).all()
    assert len({tuple(row) for row in made.tokens_BT.tolist()}) > 0.99 * len(rows), "the noise is drawn anew"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("composition") / "prepared"
    return out, prepare(Request(("composition:600",), out, quiet=True))


def test_the_prepared_folder_is_read_as_any_other(folder, tmp_path):
    out, manifest = folder
    made = task.training_examples(600)
    split = open_split(out, "train", seq_len=9, packing="documents", mixture="natural", seed=0, batch=50, loss="last")
    assert (split.vocab_size, split.fill) == (110, {"composition-seen": 1.0})
    batches = [split.batch(step) for step in range(12)]  # one time around
    rows = sorted(row for batch in batches for row in batch["tokens"].tolist())
    assert rows == sorted([*row, answer] for row, answer in zip(made.tokens_BT.tolist(), made.answers_B.tolist(), strict=True))
    assert all((batch["weights"] == [0] * 8 + [1]).all() for batch in batches)
    validation = open_split(out, "validation", seq_len=9, packing="documents", mixture="natural", seed=0, batch=512, loss="last")
    counted = sum(batch["weights"].sum() for batch in validation.validation("composition-seen"))
    assert counted == len(task.held_out_examples(task.SEEN).key_B)
    again = prepare(Request(("composition:600",), tmp_path / "again", vocab_size=600, quiet=True))
    assert [group["train"]["shards"] for group in again["groups"].values()] == [g["train"]["shards"] for g in manifest["groups"].values()]
    assert prepare(Request(("composition:600",), out, vocab_size=777, quiet=True))["already_prepared"]


def test_inspect_shows_numbers(folder, capsys):
    assert main(["data", "inspect", str(folder[0]), "--show", "composition-seen", "--documents", "3"]) == 0
    shown = capsys.readouterr().out.split("\n--------\n")
    made = task.training_examples(600)
    assert [[int(n) for n in line.split()] for line in shown] == [[*made.tokens_BT[i], made.answers_B[i]] for i in range(3)]


def test_the_last_token_of_each_document_counts(corpus):
    """Documents of many lengths, several to a sequence and some cut: weights by a walk over the segments, in training and validation."""
    how = dict(seq_len=48, packing="documents", mixture="natural", seed=3, batch=16)
    last = open_split(corpus[0], "train", **how, loss="last")
    every = open_split(corpus[0], "train", **how)
    found = [(last.batch(step), every.batch(step)) for step in range(4)]
    assert "weights" not in found[0][1] and all((a["tokens"] == b["tokens"]).all() for a, b in found)
    batches = [batch for batch, _ in found] + list(open_split(corpus[0], "validation", **how, loss="last").validation("web-en"))
    several = 0
    for batch in batches:
        for segments, weights in zip(batch["segments"].tolist(), batch["weights"].tolist(), strict=True):
            ends = [t for t in range(48) if segments[t + 1] > 0 and (t == 47 or segments[t + 2] != segments[t + 1])]
            assert [t for t in range(48) if weights[t]] == [t for t in ends if segments[t] == segments[t + 1]]
            several += len(ends) > 1
    assert several > 3, "documents share sequences"


@pytest.mark.parametrize("source", [("composition:many",), ("composition", "composition:60"), ("composition:7",)])
def test_refusals(source, tmp_path):
    with pytest.raises(DataError, match="composition"):
        prepare(Request(source, tmp_path / "out", quiet=True))
    assert not (tmp_path / "out").exists()


def test_without_documents_no_token_is_the_last(folder):
    with pytest.raises(ConfigError, match=r"data\.packing"):
        validate(load_config("lm:size=tiny", [("data.loss", "last")]))
    with pytest.raises(DataError, match="needs packing documents"):
        open_split(folder[0], "train", seq_len=9, packing="concat", mixture="natural", seed=0, batch=2, loss="last")
