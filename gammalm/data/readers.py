"""Documents from the user's own files (.jsonl, .jsonl.gz, .parquet, .txt) and from TensorFlow Datasets, streamed.

A file is given as PATH or as DOMAIN=PATH or DOMAIN-LANG=PATH; a record's own "domain" and "lang" fields go before that. What cannot be
read is skipped and counted by reason: undecodable, bad_json, no_text, empty.
"""

import codecs
import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from gammalm.errors import DataError
from gammalm.quiet_tf import import_tensorflow

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt")
COMPRESSION = 4  # of text in .jsonl.gz and .parquet, roughly
TEXT_PART = 32 * 1024  # bytes of a .txt file after which an empty line begins a new document
LINE_PART = 1 << 20  # a line of a .txt file longer than this many bytes is read in parts
GROUP = re.compile(r"(?:([a-z0-9_]+)(?:-([a-z]{2,3}))?=)?(.+)", re.DOTALL)
DEFAULT_DOMAIN, DEFAULT_LANG = "text", "und"  # und: undetermined (ISO 639)


def suffix_of(path: Path) -> str | None:
    return next((s for s in sorted(SUFFIXES, key=len, reverse=True) if path.name.lower().endswith(s)), None)


@dataclasses.dataclass(frozen=True)
class FileTask:
    """Reads one file in a worker process, at most `quota` bytes of text from its beginning (0: all)."""

    path: Path
    domain: str
    lang: str
    quota: int = 0

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def text_size(self) -> int:
        """An estimate of the bytes of text it holds."""
        return self.size * (COMPRESSION if suffix_of(self.path) in (".jsonl.gz", ".parquet") else 1)

    def documents(self, skipped, scratch: Path) -> Iterator[tuple[str, str]]:
        """(group, text) of each document. Raises DataError for a file that is damaged as a whole."""
        read = {".jsonl": jsonl, ".jsonl.gz": jsonl, ".parquet": parquet, ".txt": plain_text}[suffix_of(self.path)]
        try:
            for record in read(self.path, skipped):
                yield from _document(record, self.domain, self.lang, skipped)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.path} is damaged or cut short ({error}). Get it again.") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror or error}).") from error


def file_tasks(arguments: list[str]) -> list[FileTask]:
    """One task per file of `[DOMAIN[-LANG]=]PATH` arguments; a folder stands for all readable files in it.

    Raises DataError for a path that is missing, a folder without readable files, or a kind of file that is not read.
    """
    tasks = []
    for argument in arguments:
        domain, lang, name = GROUP.fullmatch(argument).groups()
        if domain and Path(argument).exists():  # a file whose own name holds "="
            domain, lang, name = None, None, argument
        path = Path(name)
        if not path.exists():
            raise DataError(
                f"There is no file {path}. --source takes open-mix, stdlib, tfds:NAME, or files and folders as [DOMAIN[-LANG]=]PATH."
            )
        found = sorted(p for p in path.rglob("*") if p.is_file() and suffix_of(p)) if path.is_dir() else [path]
        if not found:
            raise DataError(f"The folder {path} holds no {', '.join(SUFFIXES)} file.")
        for file in found:
            if not suffix_of(file):
                raise DataError(f"{file} is of a kind that is not read. Give {', '.join(SUFFIXES)}.")
            tasks.append(FileTask(file, domain or DEFAULT_DOMAIN, lang or DEFAULT_LANG))
    return tasks


def _document(record: dict, domain: str, lang: str, skipped) -> Iterator[tuple[str, str]]:
    """A record's group and text, or nothing and a count of why."""
    text = record.get("text")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            skipped["undecodable"] += 1
            return
    if not isinstance(text, str):
        skipped["no_text"] += 1
    elif not text.strip():
        skipped["empty"] += 1
    elif not _encodable(text):
        skipped["undecodable"] += 1
    else:
        group = f"{_tag(record.get('domain'), domain)}-{_tag(record.get('lang'), lang)}"
        yield group, text


def _encodable(text: str) -> bool:
    """False for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _tag(value, default: str) -> str:
    tag = re.sub(r"[^a-z0-9_]+", "_", str(value).lower()).strip("_") if value else ""
    return tag or default


def jsonl(path: Path, skipped) -> Iterator[dict]:
    """Records of a JSON-lines file, gzipped or not; Unix or Windows line ends; a byte-order mark is ignored."""
    with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                skipped["undecodable"] += 1
            except ValueError:
                skipped["bad_json"] += 1
            else:
                yield record if isinstance(record, dict) else {}


def parquet(path: Path, skipped) -> Iterator[dict]:
    """Records of a Parquet file, a row batch at a time. Raises DataError where it is none or has no column "text"."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise DataError(f'{path} has no column "text" but {", ".join(names)}. Rename the column that holds the text.')
            for batch in file.iter_batches(batch_size=512, columns=[n for n in ("text", "domain", "lang") if n in names]):
                for i in range(batch.num_rows):
                    try:
                        yield {name: batch.column(name)[i].as_py() for name in batch.schema.names}
                    except UnicodeDecodeError:
                        skipped["undecodable"] += 1
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is no whole Parquet file ({error}). Get it again.") from error


def plain_text(path: Path, skipped) -> Iterator[dict]:
    """A text file as documents that joined are the file: cut at an empty line once 32 KiB are full, and at the latest after 1 MiB."""
    part, size = [], 0

    def whole():
        return {"text": b"".join(part).removeprefix(codecs.BOM_UTF8)}

    with open(path, "rb") as file:
        while line := file.readline(LINE_PART):
            while not line.endswith(b"\n") and len(line) >= LINE_PART and _cut_in_character(file):
                line += file.read(1)
            part.append(line)
            size += len(line)
            if (size >= TEXT_PART and not line.strip()) or size >= LINE_PART:
                yield whole()
                part, size = [], 0
    if part:
        yield whole()


def _cut_in_character(file) -> bool:
    following = file.peek(1)[:1]
    return bool(following) and 0x80 <= following[0] < 0xC0


@dataclasses.dataclass(frozen=True)
class TfdsTask:
    """Reads the training split of a TensorFlow dataset that has a text feature."""

    dataset: str
    quota: int = 0

    @property
    def name(self) -> str:
        return f"tfds:{self.dataset}"

    size = 1 << 30  # unknown before it is opened

    def documents(self, skipped, scratch: Path) -> Iterator[tuple[str, str]]:
        """(group, text); TensorFlow is imported here and sees no accelerator. Raises DataError where it cannot be had or has no text."""
        try:
            import_tensorflow()
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise DataError(f"tfds:{self.dataset} needs tensorflow-datasets and tensorflow ({error}). Install them with pip.") from error
        try:
            dataset = tfds.load(self.dataset, split="train", shuffle_files=False)
        except Exception as error:  # tfds raises many kinds: unknown name, no network, no such split
            raise DataError(f"tfds:{self.dataset} cannot be loaded ({str(error).splitlines()[0][:200]}).") from error
        for example in tfds.as_numpy(dataset):
            yield from _document(example, DEFAULT_DOMAIN, DEFAULT_LANG, skipped)
