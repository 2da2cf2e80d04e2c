"""Writes that a kill -9 or a full disk cannot leave half done: whole files by temporary file and rename, JSON lines by append.

One writer per file; any number of readers. Standard library only, so that every room may use it.
"""

import errno
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from gammalm.errors import ConfigError, DataError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # errno of a write for which there is no room, on the disk or in the user's share


def sync_folder(path: str | os.PathLike) -> None:
    """Makes renames inside the folder `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: str | os.PathLike) -> None:
    """Makes the folder of a run, with those above it, and proves that files can be made in it.

    Raises ConfigError; OSError where the disk is full.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ConfigError(f"No file can be made in {path} ({error.strerror}). Choose a --workdir that you may write to.") from error


def write_text_atomic(path: str | os.PathLike, text: str) -> None:
    """`write_bytes_atomic` of UTF-8 `text`."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | os.PathLike, content: bytes) -> None:
    """Writes `content` to `path`: a reader sees the old file or the new one, never a part. The folder must exist. Raises OSError."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json_atomic(path: str | os.PathLike, value: Any) -> None:
    """`write_text_atomic` of indented JSON. Raises TypeError where `value` is no JSON, OSError where it cannot be written."""
    write_text_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def append_jsonl(path: str | os.PathLike, row: dict[str, Any]) -> None:
    """Appends one JSON line and hands it to the operating system before returning.

    A last line that a killed writer left without its newline is cut off first, so that every other line stays readable.
    """
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    with os.fdopen(fd, "r+b") as f:
        size = f.seek(0, os.SEEK_END)
        if size:
            f.seek(size - 1)
            if f.read(1) != b"\n":
                f.seek(0)
                f.truncate(f.read().rfind(b"\n") + 1)
        f.write(line)


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a file that `append_jsonl` wrote; a last line still without its newline is left out, a missing file is [].

    Raises DataError naming the file and line that is no JSON.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as e:
            raise DataError(f"{path}, line {number}: no JSON ({e}). Remove that line, or the file if it is not worth keeping.") from e
    return rows
