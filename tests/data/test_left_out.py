"""Sources of the open mix whose package is not what it was: left out, with the reason said and recorded, and the rest goes on."""

import json
import re

import pytest

from gammalm.data import open_mix, shards, spool
from gammalm.data.load import GroupTokens
from gammalm.data.prepare import Request, prepare
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import DataError

LONG_ENOUGH = "a text that is long enough to count as a document"
TEXTS = [f"Document {i}: {LONG_ENOUGH}. " * (i % 7 + 1) for i in range(60)]


def prepared(out):
    notes = []
    return prepare(Request(("open-mix",), out, vocab_size=600, quiet=True), notes.append), notes


def texts_of(out, group):
    manifest, tok = shards.read_manifest(out), Tokenizer.load(out / shards.TOKENIZER)
    for split in shards.SPLITS:
        stream = GroupTokens(out, manifest, group, split)
        for start, length in zip(*stream.documents(), strict=True):
            yield tok.decode(stream.read(int(start), int(length)))


def moved(folder):
    return [open_mix.read_text(folder / "package/moved.txt")]


def renamed_key(_):
    return json.loads(json.dumps([{"name": LONG_ENOUGH}]))[0]["title"]


def half_way(_):
    for i in range(40):
        yield f"{i}", lambda i=i: [f"never kept, {LONG_ENOUGH} {i}"]
    yield "last", lambda: (_ for _ in ()).throw(json.JSONDecodeError("Expecting value", "x", 0))


def mix_of(monkeypatch, **units):
    """An open mix of sources without a package, each with its own `units`."""
    sources = tuple(open_mix.Source(name, "web", "en", 1, "none", None, (), u) for name, u in units.items())
    monkeypatch.setattr(open_mix, "SOURCES", sources)


def test_a_source_that_is_not_as_expected_is_left_out(tmp_path, monkeypatch):
    """Files moved, keys renamed, a fault after documents were already spooled, a glob without a match: the rest is prepared."""
    bad = {
        "moved": (open_mix.entries(moved), "FileNotFoundError: .*'package/moved.txt'"),
        "renamed": (open_mix.entries(renamed_key), "KeyError: 'title'"),
        "half way": (half_way, "JSONDecodeError: Expecting value"),
        "no match": (open_mix.files("**/*.txt"), "no usable document in its package: nothing is where it was expected"),
        "too short": (open_mix.entries(lambda _: ["short"]), "no usable document in its package: 1 too_short"),
    }
    good = open_mix.entries(lambda _: TEXTS)
    monkeypatch.setattr(spool, "BUFFERED", 200)  # documents reach the disk as they come
    mix_of(monkeypatch, first=good, **{name: units for name, (units, _) in bad.items()})
    manifest, notes = prepared(tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out", "web-en")) == sorted(TEXTS)
    assert [s["name"] for s in manifest["sources"]] == ["first"]
    assert [e["name"] for e in manifest["left_out"]] == list(bad)
    for (name, (_, told)), entry in zip(bad.items(), manifest["left_out"], strict=True):
        assert re.search(told, entry["reason"]) and str(tmp_path) not in entry["reason"]
        assert any(re.search(told, line) and name in line for line in notes)
    assert shards.read_manifest(tmp_path / "out")["left_out"] == manifest["left_out"]

    mix_of(monkeypatch, **{name: units for name, (units, _) in bad.items()})
    with pytest.raises(DataError, match="No source can be used. moved: .*; too short: "):
        prepared(tmp_path / "out2")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_no_room_is_no_reason_to_leave_a_source_out(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device", "x")

    mix_of(monkeypatch, first=open_mix.entries(lambda _: TEXTS), full=open_mix.entries(full))
    with pytest.raises(DataError, match="No space left on device .*Free some room"):
        prepared(tmp_path / "out")
