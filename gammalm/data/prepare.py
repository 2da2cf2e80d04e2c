"""From text to a prepared folder: read, drop duplicates, split, train the tokenizer, encode in parallel, write shards and manifest.

Everything is built in a temporary folder beside the result, which appears whole or not at all.
"""

import collections
import contextlib
import dataclasses
import os
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from gammalm.data import composition, open_mix, readers, shards, spool, tokenizer
from gammalm.data.benchmarks import named
from gammalm.data.decontaminate import benchmark_screen
from gammalm.data.fetch import fetch
from gammalm.data.workers import pool
from gammalm.errors import DataError
from gammalm.files import DISK_FULL
from gammalm.progress import Progress

BUCKET_BYTES = 24 * 2**20  # of text that a worker holds at a time
MAX_BUCKETS = 1024
IN_PROCESS_BYTES = 8 * 2**20  # smaller corpora are prepared in this process: workers would take longer to start
ENCODED_AT_ONCE = 2**20  # bytes of text
SAMPLE_BYTES = 10 * 2**20  # of text the tokenizer is trained on, the same for every group as far as it goes
SAMPLE_DOCUMENT = 16 * 2**10  # characters of one document in the sample
SCREEN = "screen"  # folder of what decontamination looks for
WORKER_PROBLEMS = (BrokenProcessPool, MemoryError)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to prepare. `source`: open-mix, stdlib, tfds:NAME, composition[:EXAMPLES], or files as readers.file_tasks takes them.
    `max_mb`: megabytes of text (10^6 bytes; 0: all). `out`: the folder to make; None: data/<name of the source>.
    `replace`: put it in the place of a corpus made with other arguments. `decontaminate`: benchmarks (data.benchmarks) of which no document
    may hold a piece, or `all`."""

    source: tuple[str, ...]
    out: Path | None = None
    vocab_size: int = 16384
    max_mb: float = 0.0
    replace: bool = False
    decontaminate: tuple[str, ...] = ()
    quiet: bool = False

    @property
    def folder(self) -> Path:
        if self.out:
            return Path(self.out)
        first = self.source[0].partition("=")[2] or self.source[0]
        return Path("data") / (first if first in ("open-mix", "stdlib") else Path(first.replace(":", "-")).name.split(".")[0])

    def arguments(self) -> dict:
        """What the result depends on, as the manifest records it; files with their size and time of change."""
        stamps = {}
        if self.examples is not None:
            if self.decontaminate:
                raise DataError("--decontaminate looks for text, and the composition task has none. Leave it out.")
            return {"source": list(self.source), "vocab_size": composition.VOCAB_SIZE, "max_mb": 0.0, "decontaminate": [], "files": {}}
        if not self._named:
            stamps = {t.name: [t.path.stat().st_size, t.path.stat().st_mtime_ns] for t in readers.file_tasks(list(self.source))}
        given = {"source": list(self.source), "vocab_size": self.vocab_size, "max_mb": self.max_mb}
        return given | {"decontaminate": sorted(benchmark.name for benchmark in named(self.decontaminate)), "files": stamps}

    @property
    def _named(self) -> bool:
        return len(self.source) == 1 and (self.source[0] in ("open-mix", "stdlib") or self.source[0].startswith("tfds:"))

    @property
    def examples(self) -> int | None:
        """How many examples of the composition task are asked for; None: text is. Raises DataError for what is no number."""
        name, _, count = self.source[0].partition(":")
        if name != "composition" or Path(self.source[0]).exists():
            return None
        if len(self.source) > 1 or not (count or "1").isdecimal():
            raise DataError(f"--source {' '.join(self.source)}: write composition or composition:EXAMPLES, a whole number, alone.")
        return int(count or composition.EXAMPLES)

    def tasks(self, note) -> tuple[list, list[dict]]:
        """(what to read, with each its share of the bytes; what had to be left out, with the reason). Fetches the open mix."""
        limit = int(self.max_mb * 1e6)
        if not self._named:
            tasks = readers.file_tasks(list(self.source))
            if not limit:
                return tasks, []
            given = file_shares(limit, tasks)
            return [dataclasses.replace(t, quota=max(1, int(given[t]))) for t in tasks], []
        if self.source[0].startswith("tfds:"):
            return [readers.TfdsTask(self.source[0].removeprefix("tfds:"), limit)], []
        wanted = open_mix.SOURCES if self.source[0] == "open-mix" else (open_mix.STANDARD_LIBRARY,)
        fetched = fetch(list(dict.fromkeys(s.package for s in wanted if s.package)), note=note)
        had = [s for s in wanted if s.package is None or fetched[s.package].archive]
        given = open_mix.shares(self.max_mb, had)
        tasks = [open_mix.SourceTask(s, s.package and fetched[s.package].archive, int(given[s] * 1e6)) for s in had]
        left_out = [{"name": s.name, "group": s.group, "reason": fetched[s.package].problem} for s in wanted if s not in had]
        return tasks, left_out


def file_shares(limit: int, tasks: list) -> dict:
    """Bytes each file may give: evenly over groups, then files, none more than its text is estimated to hold."""
    groups: dict = {}
    for task in tasks:
        groups.setdefault((task.domain, task.lang), []).append(task)
    level = open_mix.water_level(limit, {g: sum(t.text_size for t in members) for g, members in groups.items()})
    given: dict = {}
    for group, members in groups.items():
        given |= open_mix.water_level(level[group], {t: t.text_size for t in members})
    return given


def prepare(request: Request, note=lambda line: None) -> dict:
    """Prepare a corpus and return its manifest, with "already_prepared" true where the same request was already fulfilled.

    `note` receives lines for people: sources and licences, what is left out, what is wrong. Raises DataError: nothing to read, no room,
    a folder that is not ours or a corpus made with other arguments in the way, a vocabulary too small.
    """
    out = request.folder
    if request.vocab_size < tokenizer.MIN_VOCAB or request.max_mb < 0:
        raise DataError(f"--vocab-size must be at least {tokenizer.MIN_VOCAB} (256 bytes and the letters), --max-mb at least 0.")
    arguments = request.arguments()
    if (manifest := _already(out, arguments, request.replace, note)) is not None:
        return manifest | {"already_prepared": True}
    try:
        with _building(out) as work:
            manifest = _build(request, arguments, work, note)
            _publish(work, out)
    except OSError as error:
        hint = "Free some room" if error.errno in DISK_FULL else "Check its permissions"
        raise DataError(f"Preparing {out} failed: {error.strerror} ({error.filename or out}). {hint}, or choose another --out.") from error
    except WORKER_PROBLEMS as error:
        raise DataError("A worker process ended, most likely for lack of memory. Close other programs, or give --max-mb.") from error
    return manifest | {"already_prepared": False}


def _already(out: Path, arguments: dict, replace: bool, note) -> dict | None:
    """The manifest where `out` was prepared by the same arguments and is whole; None where it must be prepared (anew).

    Raises DataError where something that is no prepared corpus is in the way, or, unless `replace`, a corpus made with other arguments.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / shards.MANIFEST).is_file():
        raise DataError(f"{out} exists and is no prepared corpus. Choose another --out.")
    manifest = shards.read_manifest(out)
    made = {"decontaminate": []} | manifest["arguments"]  # corpora made before it could be asked for
    if any(made[name] != arguments[name] for name in ("source", "vocab_size", "max_mb", "decontaminate")):
        told = f"--source {' '.join(made['source'])} --vocab-size {made['vocab_size']} --max-mb {made['max_mb']:g}"
        told += f" --decontaminate {' '.join(made['decontaminate'])}" if made["decontaminate"] else ""
        if not replace:
            raise DataError(f"{out} holds a corpus made with other arguments: {told}. Give another --out, or --replace to lose that one.")
        note(f"{out} was prepared with other arguments ({told}): it is replaced")
        return None
    if made["files"] != arguments["files"]:
        note(f"{out} was prepared from files that have changed since: it is replaced")
        return None
    try:
        shards.check_files(out, manifest)
    except DataError as error:
        note(f"{error} This is done now.")
        return None
    return manifest


@contextlib.contextmanager
def _building(out: Path):
    """A temporary folder beside `out`, gone afterwards whatever happens. Those of processes that were killed are removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in out.parent.glob(f".{out.name}.preparing-*"):
        try:
            os.kill(int(stale.name.rpartition("-")[2]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(stale, ignore_errors=True)
        except PermissionError:
            pass
    work = out.parent / f".{out.name}.preparing-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, out: Path) -> None:
    """Put work/result in the place of `out`; an older corpus there steps aside first and is removed last."""
    old = work / "replaced"
    if out.exists():
        os.replace(out, old)
    os.replace(work / "result", out)


def _build(request: Request, arguments: dict, work: Path, note) -> dict:
    """Everything but publication, in folder `work`. Returns the manifest, also written to work/result."""
    (result := work / "result").mkdir()
    head = {"format": shards.FORMAT, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "arguments": arguments}
    if request.examples is not None:
        shards.write_manifest(result, manifest := head | composition.build(result, request.examples))
        return manifest
    tasks, left_out = request.tasks(note)
    for line in left_out_lines(left_out):
        note(line)
    (spool_folder := work / "spool").mkdir()
    (work / "parts").mkdir()
    screen = benchmark_screen(request.decontaminate, note) if request.decontaminate else None
    if screen:
        (work / SCREEN).mkdir()
        screen.save(work / SCREEN)
    total = sum(task.size for task in tasks)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    buckets = min(MAX_BUCKETS, max(1 if total <= IN_PROCESS_BYTES else 2 * workers, -(-total // BUCKET_BYTES)))
    with pool(0 if total <= IN_PROCESS_BYTES else workers) as run:
        found = _read(tasks, spool_folder, buckets, screen and work / SCREEN, run, request.quiet)
        unusable = [
            {"name": task.name, "group": task.source.group, "reason": part.problem}
            for task, part in zip(tasks, found, strict=True)
            if part.problem
        ]
        for line in left_out_lines(unusable):
            note(line)
        model = _train_tokenizer(spool_folder, buckets, found, request, workers)
        (result / shards.TOKENIZER).write_bytes(model)
        tok = tokenizer.Tokenizer(model)
        groups, duplicates = _encode(work, result, buckets, found, tok, run, request.quiet)
    np.save(result / shards.TOKEN_BYTES, tok.token_bytes())
    for group, splits in groups.items():
        if not splits["validation"]["documents"]:
            note(f"{group} has no validation documents: it holds too few documents to give one away")
    manifest = head | {
        "tokenizer": shards.describe(result, result / shards.TOKENIZER) | {"vocab_size": tok.vocab_size, "eod_id": tok.eod_id},
        "token_bytes": shards.describe(result, result / shards.TOKEN_BYTES),
        "groups": groups,
        "sources": [_source_entry(task, found[i], duplicates[i]) for i, task in enumerate(tasks) if not found[i].problem],
        "left_out": left_out + unusable,
    }
    if screen:
        manifest["decontamination"] = screen.report(spool.merge(found).contamination)
    shards.write_manifest(result, manifest)
    return manifest


def left_out_lines(left_out: list[dict]) -> list[str]:
    """One line per reason: which sources of the open mix are left out for it."""
    reasons: dict[str, list[str]] = {}
    for entry in left_out:
        reasons.setdefault(entry["reason"], []).append(entry["name"])
    return [f"left out ({reason}): {', '.join(names)}" for reason, names in reasons.items()]


def _source_entry(task, found: spool.Spooled, duplicates: int) -> dict:
    """What the manifest says of one source."""
    source = getattr(task, "source", None)
    return {
        "name": task.name,
        "licence": source.licence if source else "the user's own",
        "package": source.package.name if source and source.package else None,
        "documents": sum(found.documents.values()),
        "bytes": sum(found.bytes.values()),
        "skipped": dict(found.skipped),
        "duplicates": duplicates,
    }


def _read(tasks, folder: Path, buckets: int, screen: Path | None, run, quiet: bool) -> list[spool.Spooled]:
    """Spool all tasks, the largest first, but for what `screen` finds. Raises DataError where nothing usable was found."""
    order = sorted(range(len(tasks)), key=lambda i: -tasks[i].size)
    progress = Progress("reading", sum(t.size for t in tasks) / 1e6, "MB", quiet=quiet)
    found: list = [None] * len(tasks)
    for position, result in run(spool.spool, [(tasks[i], i, folder, buckets, screen) for i in order]):
        task = tasks[order[position]]
        found[order[position]] = result
        progress.advance(task.size / 1e6, task.name)
    whole = spool.merge(found)
    progress.close(f"{sum(whole.documents.values()):,} documents, {sum(whole.bytes.values()) / 1e6:.1f} MB of text")
    if not whole.documents:
        if problems := [f"{task.name}: {part.problem}" for task, part in zip(tasks, found, strict=True) if part.problem]:
            raise DataError(f"No source can be used. {'; '.join(problems)}.")
        reasons = ", ".join(f"{n} {reason}" for reason, n in whole.skipped.items()) or "there are none"
        where = ", ".join(t.name for t in tasks)
        raise DataError(f'No usable document in {where}: {reasons}. Text is expected as UTF-8, under the key "text".')
    return found


def _train_tokenizer(folder: Path, buckets: int, found, request: Request, workers: int) -> bytes:
    """Train on a sample that gives every group the same room; buckets are already in random order."""
    whole = spool.merge(found)
    room = open_mix.water_level(SAMPLE_BYTES, dict(whole.bytes))
    sample = []
    for bucket in range(buckets):
        for record in spool.load_bucket(folder, bucket)[0]:
            if room[record.group] > 0:
                text = record.text.decode()[:SAMPLE_DOCUMENT]
                room[record.group] -= len(text.encode())
                sample.append(text)
        if all(left <= 0 for left in room.values()):
            break
    progress = Progress("training the tokenizer", 1, "model", quiet=request.quiet)
    model = tokenizer.train(sample, request.vocab_size, threads=workers)
    progress.close(f"sample of {sum(len(t.encode()) for t in sample) / 1e6:.1f} MB")
    return model


def _encode(work: Path, result: Path, buckets: int, found, tok, run, quiet: bool) -> tuple[dict, collections.Counter]:
    """Encode all buckets and write the shards in their order. Returns the manifest's groups and duplicates per task."""
    whole = spool.merge(found)
    limits = spool.validation_limits(whole)
    dtype = shards.token_dtype(tok.vocab_size)
    writers = {(s, g): shards.ShardWriter(result, s, g, dtype) for g in sorted(whole.documents) for s in shards.SPLITS}
    progress = Progress("encoding", sum(whole.bytes.values()) / 1e6, "MB", quiet=quiet)
    waiting, following, duplicates = {}, 0, collections.Counter()
    arguments = [(work / "spool", b, result / shards.TOKENIZER, limits, work / "parts", dtype.str) for b in range(buckets)]
    for bucket, encoded in run(encode_bucket, arguments):
        waiting[bucket] = encoded
        progress.advance(encoded["bytes"] / 1e6)
        while following in waiting:  # shards follow the order of the buckets, whichever is encoded first
            encoded = waiting.pop(following)
            following += 1
            duplicates += encoded["duplicates"]
            for (split, group), part in encoded["parts"].items():
                writers[split, group].add(np.load(part["tokens"]), np.load(part["lengths"]), part["bytes"])
                os.remove(part["tokens"])
                os.remove(part["lengths"])
    groups = {}
    for (split, group), writer in writers.items():
        domain, _, lang = group.rpartition("-")
        groups.setdefault(group, {"domain": domain, "lang": lang})[split] = writer.finish()
    tokens = sum(g[s]["tokens"] for g in groups.values() for s in shards.SPLITS)
    progress.close(f"{tokens:,} tokens, {sum(duplicates.values()):,} duplicates dropped")
    return groups, duplicates


def _ids(tok, records, dtype):
    """Token ids of each record, ended by the end-of-document token; encoded in batches, since lists of Python numbers are large."""
    batch, size = [], 0
    for i, record in enumerate(records):
        batch.append(record.text.decode())
        size += len(record.text)
        if size >= ENCODED_AT_ONCE or i == len(records) - 1:
            for document in tok.encode(batch):
                yield np.array([*document, tok.eod_id], dtype)
            batch, size = [], 0


def encode_bucket(folder: Path, bucket: int, model: Path, limits: dict, parts: Path, dtype: str) -> dict:
    """Encode one bucket's documents into part files per split and group; runs in a worker. Removes the bucket's spool files."""
    tok = tokenizer.Tokenizer.load(model)
    kept, dropped = spool.load_bucket(folder, bucket)
    members: dict = {}
    for record in kept:
        split = "validation" if record.split_key <= limits[record.group] else "train"
        members.setdefault((split, record.group), []).append(record)
    found = {}
    for (split, group), records in members.items():
        ids = list(_ids(tok, records, np.dtype(dtype)))
        stem = parts / f"{bucket:04d}-{split}-{group}"
        np.save(f"{stem}.tokens.npy", np.concatenate(ids))
        np.save(f"{stem}.lengths.npy", np.array([len(d) for d in ids], np.int64))
        found[split, group] = {
            "tokens": f"{stem}.tokens.npy",
            "lengths": f"{stem}.lengths.npy",
            "bytes": sum(len(r.text) for r in records),
        }
    for path in folder.glob(f"{bucket:04d}-*.bin"):
        os.remove(path)
    return {
        "parts": found,
        "bytes": sum(len(r.text) for r in kept) + sum(len(r.text) for r in dropped),
        "duplicates": collections.Counter(r.task for r in dropped),
    }
