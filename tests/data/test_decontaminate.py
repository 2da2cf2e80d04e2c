"""Decontamination: a piece of an item is found in whatever form it was copied, nothing else is, and what is dropped is counted."""

import json
import random

import numpy as np
import pytest

from gammalm.cli.main import main
from gammalm.data import shards
from gammalm.data.decontaminate import RUN, SHORTEST, Screen, corpus_contamination, run_hashes, words
from gammalm.data.prepare import Request, prepare
from gammalm.errors import DataError
from tests.data import benchmark_package as package

VOCABULARY = [f"w{i}" for i in range(12)]  # so few words that runs that are nearly equal abound


def naive(parts, text):
    """Whether a text holds a run of `parts`, by comparing words."""
    found = words(text)
    for place, part in enumerate(map(words, parts)):
        length = min(len(part), RUN)
        enough = length == RUN or (place == 0 and length >= SHORTEST)
        runs = {tuple(part[i : i + length]) for i in range(len(part) - length + 1)} if enough else set()
        if any(tuple(found[i : i + length]) in runs for i in range(len(found) - length + 1)):
            return True
    return False


def test_it_finds_what_a_comparison_of_words_finds():
    rng = random.Random(0)
    draw = lambda n: " ".join(rng.choice(VOCABULARY) for _ in range(n))  # noqa: E731
    items = [tuple(draw(rng.choice([3, 8, 9, 12, 13, 20])) for _ in range(rng.choice([1, 3]))) for _ in range(40)]
    screen = Screen.build({"first": items[:25], "second": items[25:]})
    hits = 0
    for _ in range(400):
        part = words(rng.choice(rng.choice(items)))
        start = rng.randrange(max(1, len(part) - SHORTEST))
        piece = part[start : start + rng.choice([7, 8, 12, 13, 20])]
        text = f"{draw(rng.randrange(6))} {', '.join(piece)}! {draw(rng.randrange(6))}"
        found = screen.find(text)
        holders = {i for i, parts in enumerate(items) if naive(parts, text)}
        assert (found is not None) == bool(holders)
        if found:
            hits += 1
            assert set(found.items) <= holders
            assert set(found.documents) == {"first" if i < 25 else "second" for i in found.items}
    assert 50 < hits < 350


def test_layout_case_and_width_do_not_hide_a_copy():
    item = "The quick brown fox jumps over the lazy dog while Élodie counts 1,000 sheep in the meadow."
    screen = Screen.build({"b": [(item,)], "zh": [("小初始化使模型先凝聚再学习数据中的规律。",)]})
    for copy in (item.upper(), item.replace(" ", "\n- "), item.replace("quick", "ｑｕｉｃｋ"), f"…{item[4:]}", item.replace(" ", "_* *")):
        assert screen.find(copy).documents == {"b": 1}, copy
    assert screen.find("他说：小初始化使模型先凝聚，再学习数据中……").documents == {"zh": 1}
    assert screen.find(item.replace("fox", "cat").replace("while", "as")) is None  # no 13 words in a row are left
    assert screen.find("") is None and Screen.build({}).find(item) is None


def test_short_items_are_counted_and_not_looked_for():
    screen = Screen.build({"b": [("one two three",), ("a b c d e f g h",), ("x y", "k l m n o p q r s")]})
    assert screen.find("one two three") is None and screen.find("a b c d e f g") is None
    assert screen.find("so a b c d e f g h") and not screen.find("k l m n o p q r s")  # a choice of nine words
    assert screen.report(screen.find("a b c d e f g h"))["benchmarks"]["b"] == {
        "items": 3, "not_checked": 2, "items_met": 1, "documents": 1, "examples": ["a b c d e f g h"]
    }  # fmt: skip


def test_hashes_are_those_of_the_runs_alone():
    ids = words(" ".join(VOCABULARY))
    whole, part = run_hashes(ids, (8, 10)), run_hashes(ids[2:], (8, 10))
    assert np.array_equal(whole[8][2:], part[8]) and len(whole[8]) == 5 and len(whole[10]) == 3
    assert len(np.unique(np.concatenate([*whole.values()]))) == 8
    assert len(run_hashes(ids[:4], (8, 10))[8]) == 0


def test_saved_and_mapped_it_finds_the_same(tmp_path):
    screen = Screen.build({"b": [("a b c d e f g h i",)]})
    screen.save(tmp_path)
    assert Screen.load(tmp_path).find("a b c d e f g h i") == screen.find("a b c d e f g h i")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Two files: one with a copy of a GSM8K question in a long document, one of a multiple-choice question."""
    package.use(monkeypatch, tmp_path)
    clean = [f"Document {i}: the model condenses before it learns, {i} times over and over." for i in range(30)]
    copied = f"Homework of the week. {package.SHARED.lower()} -- and so on."
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [*clean[:15], copied]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [package.ARC[0][0], *clean[15:], package.ARC[2][0]]))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def test_prepare_drops_and_counts(sources, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["data", "prepare", "--source", *sources, "--vocab-size", "512", "--out", str(out)]
    assert main([*command, "--decontaminate", "gsm8k", "arc_challenge"]) == 0
    assert "gsm8k  1 documents hold a piece of 1 of 2 items (1 are too short to look for)" in capsys.readouterr().out
    manifest = shards.read_manifest(out)
    assert [s["skipped"] for s in manifest["sources"]] == [{"contaminated": 1}, {"contaminated": 1}]
    assert sum(s["documents"] for s in manifest["sources"]) == 31  # the short question stays: it says nothing
    found = manifest["decontamination"]["benchmarks"]
    assert found["arc_challenge"]["documents"] == 1 and found["arc_challenge"]["not_checked"] == 1
    with pytest.raises(DataError, match="other arguments: .*--decontaminate arc_challenge gsm8k"):
        prepare(Request(tuple(sources), out, 512, quiet=True))
    assert prepare(Request(tuple(sources), out, 512, decontaminate=("gsm8k", "arc_challenge", "gsm8k"), quiet=True))["already_prepared"]
    screen = Screen.build({"a": [(package.SHARED,)], "b": [("the model condenses before it learns 3 times",)]})
    found = corpus_contamination(out, manifest, screen)["benchmarks"]
    assert [entry["documents"] for entry in found.values()] == [0, 1]


def test_inspect_counts_in_a_corpus_that_was_not_decontaminated(sources, tmp_path, capsys):
    out = tmp_path / "out"
    manifest = prepare(Request(tuple(sources), out, 512, quiet=True))
    assert "decontamination" not in manifest and manifest["arguments"]["decontaminate"] == []
    assert main(["data", "inspect", str(out), "--contamination", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["contamination"]["benchmarks"]
    assert {name: entry["documents"] for name, entry in found.items() if entry["documents"]} == {"arc_challenge": 1, "gsm8k": 1}


def test_a_corpus_from_before_is_still_the_one_asked_for(sources, tmp_path):
    request = Request(tuple(sources), tmp_path / "out", 512, quiet=True)
    manifest = prepare(request)
    del manifest["arguments"]["decontaminate"], manifest["already_prepared"]
    shards.write_manifest(tmp_path / "out", manifest)
    assert prepare(request)["already_prepared"]


def test_what_cannot_be_asked_for(sources, tmp_path):
    with pytest.raises(DataError, match="no benchmark 'bbh' to look for but arc_challenge, .*; all means all of them"):
        prepare(Request(("open-mix",), tmp_path / "out", decontaminate=("gsm8k", "bbh"), quiet=True))  # before anything is fetched
    with pytest.raises(DataError, match="composition task has none"):
        prepare(Request(("composition:100",), tmp_path / "out", decontaminate=("all",), quiet=True))
