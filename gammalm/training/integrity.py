"""Proof that a folder holds what was written: one file of SHA-256 digests over all the others, and over itself.

`seal` writes it as the last act of saving, `inspect` compares before anything is read back. Knows nothing of arrays.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gammalm.files import write_text_atomic

SEAL = "checksums.json"
HASH_THREADS = 4  # SHA-256 runs at 1 to 2 GB/s per core and releases the interpreter lock


def _files(folder: Path) -> list[str]:
    """Every file below `folder` but the seal, as sorted relative POSIX names."""
    found = (Path(root, name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names)
    return sorted(name for name in found if name != SEAL)


def _digests(folder: Path, names: list[str], *, sync: bool) -> dict[str, dict[str, Any]]:
    """{name: {bytes, sha256}}; with `sync` each file is on the disk, not just in its cache, before it is read."""

    def one(name: str) -> dict[str, Any]:
        with open(folder / name, "rb") as f:
            if sync:
                os.fsync(f.fileno())
            digest = hashlib.file_digest(f, "sha256").hexdigest()
            return {"bytes": f.tell(), "sha256": digest}

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _encode(body: dict[str, Any]) -> str:
    text = json.dumps(body, indent=1)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}, indent=1) + "\n"


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Writes `folder`/checksums.json, atomically: size and digest of every file, and `facts` (JSON). Raises OSError."""
    write_text_atomic(folder / SEAL, _encode({"files": _digests(folder, _files(folder), sync=True), "facts": facts}))


def inspect(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """(facts, faults) of a sealed folder; no fault means that every byte is as it was sealed. Facts are {} where the seal is at fault."""
    try:
        text = (folder / SEAL).read_bytes().decode()
        body = json.loads(text)["body"]
        # Text against text: a byte that changed anywhere in the seal, be it a blank, is a fault.
        if _encode(body) != text:
            return {}, [f"{SEAL} is damaged"]
    except FileNotFoundError:
        return {}, [f"{SEAL} is missing"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        return {}, [f"{SEAL} is unreadable ({e})"]

    expected, present = body["files"], _files(folder)
    faults = [f"{name} is missing" for name in expected if name not in present]
    faults += [f"{name} does not belong" for name in present if name not in expected]
    whole = []
    try:
        for name in (n for n in expected if n in present):
            size, wanted = (folder / name).stat().st_size, expected[name]["bytes"]
            if size == wanted:
                whole.append(name)
            else:
                faults.append(f"{name} has {size} bytes instead of {wanted}")
        digests = _digests(folder, whole, sync=False)
    except OSError as e:
        return body["facts"], [*faults, f"unreadable: {e}"]
    faults += [f"{name} has changed contents" for name in whole if digests[name] != expected[name]]
    return body["facts"], faults
