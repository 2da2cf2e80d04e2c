"""Our model as a folder that transformers loads: config.json, safetensors, and the tokenizer where there is one.

Arrays are read one layer's tensor at a time and written as they are read. The folder appears whole or not at all. Beside the
standard files lies gammalm_config.json, the whole config of the run, which import takes up again; other programs pass over it.
"""

import dataclasses
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gammalm.config import to_json
from gammalm.errors import ConfigError
from gammalm.files import DISK_FULL, sync_folder, write_json_atomic
from gammalm.interop import portable
from gammalm.interop.table import Entry, entries, gpt2_entries, own_entries
from gammalm.interop.targets import OWN, TARGETS, config_json, not_llama_like, uncentrable
from gammalm.interop.tensorfiles import CODES, Slot, write_tensors
from gammalm.trees import flat

OUR_CONFIG = "gammalm_config.json"
MAX_SHARD = 5 * 10**9  # bytes


@dataclasses.dataclass
class Exported:
    """What was written: the target, its files of tensors, their number and bytes, and why each target before it was passed over."""

    target: str
    files: list[str]
    tensors: int
    bytes: int
    passed_over: dict[str, list[str]]


def reasons_against(name: str, model, params: dict, dtype: str) -> list[str]:
    """Why `config.model` with the nested arrays `params` cannot be written as the target `name` exactly; empty: it can."""
    if name == OWN:
        return not_llama_like(model)
    target = TARGETS[name]
    reasons = target.against(model)
    if target.centred and not reasons and dtype == "float32":  # a narrower dtype rounds by its nature
        for path, gain in flat(params).items():
            if path.endswith("/gain"):
                reasons += uncentrable(path, np.asarray(gain))
    return reasons


def choose_target(target: str, model, params: dict, dtype: str) -> tuple[str, dict[str, list[str]]]:
    """The target that `target` means (`auto`: the first that fits), and the reasons against those passed over. Raises ConfigError."""
    names = [*TARGETS, OWN]
    if target != "auto":
        if target not in names:
            raise ConfigError(f"--target {target} is none of auto, {', '.join(names)}.")
        reasons = reasons_against(target, model, params, dtype)
        if reasons:
            reasons = "\n  ".join(reasons)
            raise ConfigError(f"this model cannot be exported as {target}:\n  {reasons}\nLeave --target out to take the first that fits.")
        return target, {}
    passed_over = {}
    for name in names:
        reasons = reasons_against(name, model, params, dtype)
        if not reasons:
            return name, passed_over
        passed_over[name] = reasons
    reasons = "\n  ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in passed_over.items())
    raise ConfigError(f"this model cannot be exported: neither a family of transformers nor our modelling file has its parts:\n  {reasons}")


def require_free(out: Path) -> None:
    """Raises ConfigError unless the folder `out` is empty, or absent and nothing is seen that keeps it from being made."""
    try:
        if out.is_symlink():
            raise ConfigError(f"{out} is a symbolic link, which an export cannot replace. Name the folder itself.")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is no empty folder. Name another folder, or empty it.")
        above = next(folder for folder in out.absolute().parents if folder.exists())
    except OSError as error:
        raise _unusable(out, error) from error
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be made: {above} is {'not writable' if above.is_dir() else 'no folder'}. Name another folder.")


def _unusable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{out} cannot be made ({error.strerror}). Name another folder.")


def export_hf(
    config, params: dict, buffers: dict, out: str | os.PathLike, *,
    target: str = "auto", dtype: str = "float32", tokenizer: str | os.PathLike | None = None, tokenizer_sha256: str | None = None,
    max_shard: int = MAX_SHARD,
) -> Exported:  # fmt: skip
    """Writes the folder `out` (absent, or empty) for transformers.

    `params` and `buffers` are nested dicts of fp32 arrays as `Model` declares them. `dtype` float32 keeps every bit; bfloat16 rounds all
    but the routers. `tokenizer` is the file of a SentencePiece model of ours, `tokenizer_sha256` the hash of the one the model was
    trained with, where it is known. `max_shard` is in bytes.
    Raises ConfigError: `out` is not empty or cannot be made, `target` cannot represent the model (every reason is given), or the
    tokenizer is not the model's; DataError for a damaged tokenizer; OSError while writing.
    """
    out = Path(out).absolute()
    if dtype not in CODES:
        raise ConfigError(f"--dtype {dtype} is none of {', '.join(CODES)}.")
    require_free(out)
    name, passed_over = choose_target(target, config.model, params, dtype)
    vocabulary, eos = None, None
    if tokenizer is not None:
        from gammalm.interop.tokenizer import read_tokenizer, write_tokenizer

        vocabulary, eos = read_tokenizer(tokenizer, vocab_size=config.model.vocab_size, sha256=tokenizer_sha256)
    facts = dict(dtype=dtype, seq_len=config.data.seq_len, eos_token_id=eos)
    if name == OWN:
        table, keys = own_entries(config.model), portable.hf_config(config.model, **facts)
    else:
        rows = gpt2_entries(config.model) if name == "gpt2" else entries(config.model, centred=TARGETS[name].centred)
        table, keys = rows, config_json(TARGETS[name], config.model, **facts)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise _unusable(out, error) from error
    try:
        if vocabulary is not None:
            write_tokenizer(vocabulary, temporary, str(tokenizer))
        files, slots = _write_weights(temporary, table, flat(params) | flat(buffers), dtype, max_shard)
        write_json_atomic(temporary / "config.json", keys)
        to_json(config, temporary / OUR_CONFIG)
        if name == OWN:
            portable.copy_files(temporary)
        sync_folder(temporary)
        os.rename(temporary, out)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(out.parent)
    return Exported(name, files, len(slots), sum(slot.nbytes for slot in slots), passed_over)


def _write_weights(folder: Path, table: Iterator[Entry], arrays: dict, dtype: str, max_shard: int) -> tuple[list[str], list[Slot]]:
    by_name = {entry.name: entry for entry in table}

    def read(name: str) -> np.ndarray:
        entry = by_name[name]
        return entry.pack([np.asarray(arrays[part.path])[part.index] for part in entry.parts])

    slots = [Slot(name, "float32" if entry.wide else dtype, entry.shape) for name, entry in by_name.items()]
    return write_tensors(folder, slots, read, max_shard), slots
