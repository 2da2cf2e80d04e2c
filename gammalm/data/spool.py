"""First half of preparing: documents of all sources into buckets on disk, by the hash of their text.

Equal texts meet in one bucket, so duplicates are found, and documents sorted, a bucket at a time: memory is bounded by the bucket, whatever
the corpus. The order of the documents, the split and what counts as a duplicate depend on the texts alone, not on workers or buckets.
"""

import collections
import dataclasses
import hashlib
import heapq
import os
import struct
from pathlib import Path

from gammalm.data.decontaminate import Contamination, Screen
from gammalm.errors import DataError

HEADER = struct.Struct("<16sIIHI")  # digest, task, number within the task, bytes of the group's name, bytes of the text
BUFFERED = 64 << 20  # bytes held for all buckets together before they are written
LOWEST = 5  # smallest split keys remembered per group
VALIDATION_SHARE = 0.0075  # of all documents, by hash
VALIDATION_DOCUMENTS = 4  # at least, per group, but never above a tenth of it (and one of at least two)


class LeftOut(Exception):
    """Raised by `task.documents`: this source cannot be used, for the reason given, and the others can."""


@dataclasses.dataclass
class Spooled:
    """What reading one task found: `documents` and `bytes` per group, skips by reason, the smallest split keys per group. `problem`: why
    nothing of it was kept, where it was left out. `contamination`: what was dropped for a piece of a benchmark."""

    documents: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lowest: dict = dataclasses.field(default_factory=dict)
    problem: str = ""
    contamination: Contamination = dataclasses.field(default_factory=Contamination)


@dataclasses.dataclass(frozen=True)
class Record:
    """One document. `digest`: 16 bytes of BLAKE2b of its text. `task`, `number`: where it came from. `text`: UTF-8 bytes."""

    digest: bytes
    task: int
    number: int
    group: str
    text: bytes

    @property
    def split_key(self) -> int:
        return split_key(self.digest)


def split_key(digest: bytes) -> int:
    """32 bits of the digest that decide train or validation; not the ones that order the documents."""
    return int.from_bytes(digest[8:12], "little")


def spool(task, index: int, folder: Path, buckets: int, screen: Path | None = None) -> Spooled:
    """Write the documents of `task` (number `index`) into the bucket files of this process, up to the task's quota of bytes (0: all).

    screen: folder of a saved `Screen`; documents in which it finds something are dropped and counted as `contaminated`. A task that is
    left out half-way takes back what it had written.
    """
    files = [folder / f"{bucket:04d}-{os.getpid()}.bin" for bucket in range(buckets)]
    before = [file.stat().st_size if file.exists() else 0 for file in files]
    try:
        return _spool(task, index, folder, files, screen and Screen.load(screen))
    except LeftOut as reason:
        for file, size in zip(files, before, strict=True):
            if file.exists():
                os.truncate(file, size)
        return Spooled(problem=str(reason))


def _spool(task, index: int, folder: Path, files: list[Path], screen: Screen | None) -> Spooled:
    found, buckets, total = Spooled(), len(files), 0
    held = [bytearray() for _ in files]

    def flush(bucket):
        with open(files[bucket], "ab") as file:
            file.write(held[bucket])
        held[bucket].clear()

    for number, (group, text) in enumerate(task.documents(found.skipped, folder)):
        data = text.encode("utf-8")
        if not text.strip():
            found.skipped["empty"] += 1
            continue
        if screen and (contamination := screen.find(text)):
            found.skipped["contaminated"] += 1
            found.contamination.add(contamination)
            continue
        digest = hashlib.blake2b(data, digest_size=16).digest()
        bucket = int.from_bytes(digest[:4], "big") * buckets >> 32
        name = group.encode()
        held[bucket] += HEADER.pack(digest, index, number, len(name), len(data)) + name + data
        if len(held[bucket]) >= BUFFERED // buckets:
            flush(bucket)
        found.documents[group] += 1
        found.bytes[group] += len(data)
        _keep_lowest(found.lowest.setdefault(group, []), [split_key(digest)])
        total += len(data)
        if task.quota and total >= task.quota:
            break
    for bucket in range(buckets):
        if held[bucket]:
            flush(bucket)
    return found


def _keep_lowest(lowest: list[int], keys: list[int]) -> None:
    """Merge keys into a sorted list of the smallest distinct ones."""
    if len(lowest) < LOWEST or min(keys) < lowest[-1]:
        lowest[:] = heapq.nsmallest(LOWEST, {*lowest, *keys})


def merge(parts: list[Spooled]) -> Spooled:
    """The findings of several tasks together."""
    whole = Spooled()
    for part in parts:
        whole.documents += part.documents
        whole.bytes += part.bytes
        whole.skipped += part.skipped
        whole.contamination.add(part.contamination)
        for group, keys in part.lowest.items():
            _keep_lowest(whole.lowest.setdefault(group, []), keys)
    return whole


def validation_limits(found: Spooled) -> dict[str, int]:
    """Per group the largest split key of a validation document: the share of all, or what gives a few documents where that gives none.

    A group of a single document has none (limit −1).
    """
    limits = {}
    for group, lowest in found.lowest.items():
        at_least = min(VALIDATION_DOCUMENTS, len(lowest) - 1, max(1, found.documents[group] // 10))
        few = lowest[at_least - 1] if at_least else -1
        limits[group] = max(few, int(VALIDATION_SHARE * 2**32)) if len(lowest) == LOWEST else few
    return limits


def load_bucket(folder: Path, bucket: int) -> tuple[list[Record], list[Record]]:
    """(documents in the order of their digest, exact duplicates dropped). Of equal texts the first in the sources' order stays."""
    records = []
    for path in sorted(folder.glob(f"{bucket:04d}-*.bin")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            digest, task, number, name_size, size = HEADER.unpack_from(data, at)
            at += HEADER.size
            group = data[at : at + name_size].decode()
            at += name_size
            records.append(Record(digest, task, number, group, data[at : at + size]))
            at += size
        if at != len(data):
            raise DataError(f"{path} was cut short while it was written. Is the disk full? Free some room and prepare again.")
    records.sort(key=lambda r: (r.digest, r.task, r.number))
    kept, dropped = [], []
    for record in records:
        (dropped if kept and kept[-1].digest == record.digest else kept).append(record)
    return kept, dropped
