"""Atomic files: old or new, never a part; JSON lines survive a torn tail."""

import json
import os

import pytest

from gammalm.errors import DataError
from gammalm.files import append_jsonl, read_jsonl, write_json_atomic, write_text_atomic


def test_text_arrives_byte_for_byte_and_nothing_else_is_left(tmp_path):
    text = "γ = ½\r\nzwei\n汉字"
    write_text_atomic(tmp_path / "a.txt", "old and longer than what follows" * 9)
    write_text_atomic(tmp_path / "a.txt", text)
    assert (tmp_path / "a.txt").read_bytes() == text.encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_file_is_readable_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        write_text_atomic(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, failing):
    write_text_atomic(tmp_path / "a.txt", "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space"):
        write_text_atomic(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_is_no_json_leaves_the_old_file(tmp_path):
    write_json_atomic(tmp_path / "a.json", {"名": [1, 2.5, None]})
    with pytest.raises(TypeError):
        write_json_atomic(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"名": [1, 2.5, None]}


def test_rows_come_back_in_order(tmp_path):
    rows = [{"step": i, "text": "a\nb 汉", "loss": i / 3} for i in range(5)]
    for row in rows:
        append_jsonl(tmp_path / "m.jsonl", row)
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text(encoding="utf-8").splitlines()] == rows
    assert read_jsonl(tmp_path / "m.jsonl") == rows
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_torn_last_line_is_ignored_then_cut_off(tmp_path):
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 0})
    append_jsonl(path, {"step": 1, "text": "汉"})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole)):  # killed after any number of bytes
        path.write_bytes(whole[:cut])
        kept = [{"step": 0}] if cut >= first else []
        assert read_jsonl(path) == kept
        append_jsonl(path, {"step": 2})
        assert read_jsonl(path) == [*kept, {"step": 2}]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2"):
        read_jsonl(path)
