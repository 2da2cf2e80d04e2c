"""The seal of a folder: any change to any file, the seal included, is a fault that names the file."""

import hashlib
import json
import os

import numpy as np
import pytest

from gammalm.training.integrity import SEAL, inspect, seal

FACTS = {"step": 3, "extra": {"loss": 0.1, "text": "γ", "nested": [1, None, True]}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "deep" / "data").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "meta").write_bytes(b"{}")
    (tmp_path / "empty").write_bytes(b"")
    seal(tmp_path, FACTS)
    return tmp_path


def test_a_sealed_folder_has_no_faults_and_gives_its_facts_back(folder):
    assert inspect(folder) == (FACTS, [])


def test_the_digests_are_sha256(folder):
    files = json.loads((folder / SEAL).read_text())["body"]["files"]
    assert sorted(files) == ["empty", "meta", "sub/deep/data"]
    for name, entry in files.items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_every_flipped_bit_and_every_cut_of_the_seal_is_a_fault(folder):
    whole = (folder / SEAL).read_bytes()
    bits = np.random.default_rng(0).integers(8, size=len(whole))
    for i, bit in enumerate(bits):
        for data in (whole[:i] + bytes([whole[i] ^ (1 << int(bit))]) + whole[i + 1 :], whole[:i]):
            (folder / SEAL).write_bytes(data)
            assert inspect(folder)[1] != [], i


@pytest.mark.parametrize(
    ("hurt", "fault"),
    [
        (lambda p: (p / "sub/deep/data").write_bytes(bytes(range(256)) * 39 + bytes(256)), "sub/deep/data has changed contents"),
        (lambda p: os.truncate(p / "sub/deep/data", 256), "sub/deep/data has 256 bytes instead of 10240"),
        (lambda p: (p / "empty").write_bytes(b"x"), "empty has 1 bytes instead of 0"),
        (lambda p: (p / "empty").unlink(), "empty is missing"),
        (lambda p: (p / "meta").rename(p / "sub/meta"), "meta is missing"),
        (lambda p: (p / "sub/stray").write_bytes(b""), "sub/stray does not belong"),
        (lambda p: (p / SEAL).unlink(), "checksums.json is missing"),
        (lambda p: (p / SEAL).write_text("[]"), "checksums.json is unreadable"),
    ],
)
def test_each_kind_of_damage_is_named(folder, hurt, fault):
    hurt(folder)
    assert fault in " ".join(inspect(folder)[1])
