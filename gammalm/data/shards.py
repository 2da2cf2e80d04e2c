"""The prepared folder: its manifest, its token shards, and the checks that neither is damaged.

    manifest.json  tokenizer.model  token_bytes.npy  shards/<split>/<domain>-<lang>-NNNNN.npy  and  ...-NNNNN.offsets.npy

A shard is one array of token ids (uint16, or uint32 for vocabularies above 65,536), whole documents each ended by the end-of-document
token; its offsets, int64 [documents + 1], say where each begins and the last ends. Documents stand in the order of their hash.
"""

import json
from pathlib import Path

import numpy as np

from gammalm.data.fetch import file_sha256
from gammalm.errors import DataError
from gammalm.files import write_json_atomic

FORMAT = 1  # of the folder; raised when its meaning changes
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
NUMBERS = "numbers.json"  # in its place where token ids are numbers, not text (composition.py)
TOKEN_BYTES = "token_bytes.npy"
SPLITS = ("train", "validation")
SHARD_TOKENS = 16 * 2**20  # a shard is closed once it holds as many
VERIFIED_AT_OPEN = 256 * 2**20  # bytes; a folder up to this size is hashed whole whenever it is opened, in well under a second


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class ShardWriter:
    """Collects the documents of one split and group and writes shards of bounded size into folder `root`."""

    def __init__(self, root: Path, split: str, group: str, dtype: np.dtype):
        self.root, self.split, self.group, self.dtype = root, split, group, dtype
        self.entry = {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._held = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int) -> None:
        """Append documents: `tokens` concatenated, `lengths` of each with its end token, bytes of their text."""
        self.entry["bytes"] += int(text_bytes)
        ends = np.cumsum(lengths)
        start = done = 0
        while done < len(lengths):
            room = max(SHARD_TOKENS - self._held, 1)
            stop = int(np.searchsorted(ends, start + room)) + 1  # the document that fills the shard still goes in
            stop = min(stop, len(lengths))
            end = int(ends[stop - 1])
            self._tokens.append(tokens[start:end])
            self._lengths.append(lengths[done:stop])
            self._held += end - start
            start, done = end, stop
            if self._held >= SHARD_TOKENS:
                self._close_shard()

    def finish(self) -> dict:
        """Write what is held; returns the manifest entry of this split and group."""
        if self._held:
            self._close_shard()
        return self.entry

    def _close_shard(self):
        folder = self.root / "shards" / self.split
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.group}-{len(self.entry['shards']):05d}"
        tokens = np.concatenate(self._tokens).astype(self.dtype, copy=False)
        lengths = np.concatenate(self._lengths)
        np.save(folder / f"{stem}.npy", tokens)
        np.save(folder / f"{stem}.offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        files = {
            kind: describe(self.root, folder / f"{stem}{suffix}")
            for kind, suffix in (("tokens_file", ".npy"), ("offsets_file", ".offsets.npy"))
        }
        self.entry["shards"].append({"tokens": len(tokens), "documents": len(lengths), **files})
        self.entry["documents"] += len(lengths)
        self.entry["tokens"] += len(tokens)
        self._tokens, self._lengths, self._held = [], [], 0


def describe(root: Path, path: Path) -> dict:
    """What the manifest says of a file: its path in the folder, its size in bytes, its SHA-256."""
    return {"file": path.relative_to(root).as_posix(), "size": path.stat().st_size, "sha256": file_sha256(path)}


def write_manifest(root: Path, manifest: dict) -> None:
    write_json_atomic(root / MANIFEST, manifest)


def read_manifest(root) -> dict:
    """The manifest of a prepared folder. Raises DataError where there is none, where it is damaged, or of another format."""
    path = Path(root) / MANIFEST
    source = Path(root).name if Path(root).name in ("open-mix", "stdlib") else "SOURCE"
    remedy = f"Prepare it: gammalm data prepare --source {source} --vocab-size V --out {root}, with V at most the model's vocab_size."
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
    except OSError as error:
        raise DataError(f"{root} is no prepared corpus: {path} cannot be read ({error.strerror}). {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}). Delete the folder. {remedy}") from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version}, and this gammalm reads format {FORMAT}. Delete the folder. {remedy}")
    return manifest


def listed_files(manifest: dict) -> list[dict]:
    """Every file the manifest answers for, as `describe` gave it."""
    shards = [shard for group in manifest["groups"].values() for split in SPLITS for shard in group[split]["shards"]]
    return [manifest["tokenizer"], manifest["token_bytes"], *(shard[kind] for shard in shards for kind in ("tokens_file", "offsets_file"))]


def check_files(root, manifest: dict, *, hashes: bool | None = None) -> int:
    """Compare every file with the manifest: its size always; its SHA-256 too where `hashes`, or where None and the folder is small. The
    tokenizer and its byte table are always hashed.

    Returns the bytes hashed. Raises DataError naming the first file that is missing or differs.
    """
    files = listed_files(manifest)
    if hashes is None:
        hashes = sum(f["size"] for f in files) <= VERIFIED_AT_OPEN
    always = (manifest["tokenizer"], manifest["token_bytes"])
    for entry in files:
        path = Path(root) / entry["file"]
        try:
            size = path.stat().st_size
            if size != entry["size"]:
                problem = f"has {size:,} bytes and should have {entry['size']:,}"
            elif (hashes or entry in always) and file_sha256(path) != entry["sha256"]:
                problem = "does not have the content it was written with (SHA-256 differs)"
            else:
                continue
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if entry is manifest["tokenizer"]:
            problem += ", so the shards' ids would mean other text"
        raise DataError(f"{path} {problem}. Delete the folder {root} and prepare it again: gammalm data prepare.")
    return sum(f["size"] for f in files) if hashes else 0
