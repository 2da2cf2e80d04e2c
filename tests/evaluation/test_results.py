"""Rows of an evaluation's results, and that its folder is written whole and read back."""

import json

import pytest

from gammalm.errors import DataError
from gammalm.evaluation.results import leaves_of, numbers_of, read_results, rows_of, samples_of, write_results

HARNESS = {
    "results": {
        "knowledge": {"alias": "knowledge", "acc,none": 0.5, "acc_stderr,none": 0.05, "sample_len": 30},
        "law": {"alias": "law", "acc,none": 0.4, "acc_stderr,none": 0.1, "acc_norm,none": 0.3, "acc_norm_stderr,none": "N/A"},
        "physics": {"alias": "physics", "sample_len": 20, "acc,none": 0.6, "acc_stderr,none": 0.1},
        "sums": {"alias": "sums", "sample_len": 5, "exact_match,strict": 0.2, "exact_match_stderr,strict": 0.1, "exact_match,lax": 0.4},
        "everything": {"alias": "everything"},
    },
    "group_subtasks": {"everything": ["knowledge", "sums"], "knowledge": ["law", "physics"]},
    "versions": {"law": 1.0, "sums": 3.0},
    "n-shot": {"law": 5, "physics": 5, "sums": 8},  # nothing of a group of groups
    "higher_is_better": {"law": {"acc": True, "acc_norm": True}, "physics": {"acc": True}, "knowledge": {"acc": True}, "sums": {}},
    "n-samples": {
        "law": {"original": 100, "effective": 10}, "physics": {"original": 200, "effective": 20}, "sums": {"original": 5, "effective": 5},
    },
}  # fmt: skip


def test_rows_are_flat_and_groups_count_their_tasks():
    rows = rows_of(HARNESS)
    assert [(row["task"], row["metric"], row["filter"]) for row in rows] == [
        ("knowledge", "acc", "none"), ("law", "acc", "none"), ("law", "acc_norm", "none"), ("physics", "acc", "none"),
        ("sums", "exact_match", "strict"), ("sums", "exact_match", "lax"),
    ]  # fmt: skip
    assert rows[0] == {
        "task": "knowledge", "group": True, "metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.05, "higher_is_better": True,
        "num_fewshot": 5, "items": 30, "of": 300, "version": None,
    }  # fmt: skip
    assert rows[2]["stderr"] is None and rows[2]["version"] == 1.0 and not rows[2]["group"]
    assert rows[4]["stderr"] == 0.1 and rows[5]["stderr"] is None and rows[5]["higher_is_better"] is None
    assert leaves_of(HARNESS, "everything") == ["law", "physics", "sums"]
    unequal = rows_of(HARNESS | {"n-shot": {"law": 5, "physics": 0, "knowledge": 5, "sums": 8}})
    assert [row["num_fewshot"] for row in unequal] == [None, 5, 5, 0, 8, 8]


def test_numbers_have_the_names_of_curves():
    rows = [*rows_of(HARNESS)[3:], {"task": "law", "metric": "said", "filter": "none", "value": "N/A"}]
    assert numbers_of(rows) == {"physics/acc": 0.6, "sums/exact_match/strict": 0.2, "sums/exact_match/lax": 0.4}


def test_a_folder_of_results_is_read_back(tmp_path):
    items = [{"doc_id": 0, "acc": 1.0, "doc": {"q": "问"}}, {"doc_id": 1, "acc": 0.0}]
    write_results(tmp_path, {"rows": rows_of(HARNESS)}, {"law": items, "old": items})
    write_results(tmp_path, {"rows": rows_of(HARNESS), "data": 1}, {"law": items[:1]})
    for path in (tmp_path, tmp_path / "results.json"):
        assert read_results(path) == {"format": 1, "rows": rows_of(HARNESS), "data": 1}
        assert samples_of(path, "law") == items[:1] and samples_of(path, "old") == []


def test_what_holds_no_results_is_said(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_results(tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DataError, match="holds no results"):
            read_results(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"format": 2, "rows": []}))
    with pytest.raises(DataError, match="format 2"):
        read_results(tmp_path)
