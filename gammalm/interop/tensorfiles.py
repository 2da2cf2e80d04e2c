"""Files of tensors in the safetensors format: written one tensor at a time, read one tensor at a time; pickles are never opened.

The library writes a file from a dict that holds it whole, so the writer is our own: eight bytes with the length of the header,
the header as JSON, the numbers in the header's order (https://huggingface.co/docs/safetensors). Reading is the library's.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from gammalm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CODES = {"float32": "F32", "bfloat16": "BF16"}  # dtype -> its name in a header
READABLE = ("F32", "BF16", "F16")  # all of which fp32 holds exactly


class Slot(NamedTuple):
    """What a header says of a tensor: its name, dtype (a key of CODES) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _write_file(path: Path, slots: list[Slot], read: Callable[[str], np.ndarray]) -> None:
    # The wider dtype first, so that every tensor begins at a multiple of its own item size.
    slots = sorted(slots, key=lambda slot: -numpy_dtype(slot.dtype).itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}  # which axes are what: transformers asks for it
    end = 0
    for slot in slots:
        header[slot.name] = {"dtype": CODES[slot.dtype], "shape": list(slot.shape), "data_offsets": [end, end + slot.nbytes]}
        end += slot.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for slot in slots:
            array = np.ascontiguousarray(read(slot.name), numpy_dtype(slot.dtype))
            assert array.shape == slot.shape, (slot, array.shape)
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(folder: Path, slots: Iterable[Slot], read: Callable[[str], np.ndarray], max_bytes: int) -> list[str]:
    """Writes the tensors `slots` into `folder`, one file or several of up to `max_bytes` with an index; the names of the files.

    `read(name)` gives a tensor when its turn comes: no more than one is held. A tensor above `max_bytes` has a file of its own.
    """
    shards: list[list[Slot]] = [[]]
    size = total = 0
    for slot in slots:
        if shards[-1] and size + slot.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(slot)
        size += slot.nbytes
        total += slot.nbytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], read)
        return [SINGLE]
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, read)
    where = {slot.name: name for name, shard in zip(names, shards, strict=True) for slot in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1) + "\n", "utf-8")
    return names


class Tensors:
    """The tensors of a checkpoint folder by name. A context manager. Raises CheckpointError: no safetensors there, or damaged ones."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder, self.where = folder, {}
        self._files = []
        for name in tensor_files(folder):
            try:
                file = safe_open(folder / name, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / name} cannot be read ({error}). Fetch or export it again.") from error
            self._files.append(file)
            for tensor in file.keys():
                if tensor in self.where:
                    raise CheckpointError(f"{folder}: tensor {tensor} is in two files. Fetch or export the folder again.")
                self.where[tensor] = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self._files:
            file.__exit__(None, None, None)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.where[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """The tensor in the dtype it has in the file. Raises CheckpointError for a dtype that fp32 cannot hold."""
        dtype = self.where[name].get_slice(name).get_dtype()
        if dtype not in READABLE:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}; what can be imported is {', '.join(READABLE)}.")
        return self.where[name].get_tensor(name)


def tensor_files(folder: Path) -> list[str]:
    """Names of the safetensors files of the checkpoint in `folder`; the single file where there is an index too, as transformers does."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of tensors ({error!r}). Fetch it again.") from error
        bad = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        missing = [name for name in names if name not in bad and not (folder / name).is_file()]
        if bad or missing:
            raise CheckpointError(f"{folder}: {INDEX} names {', '.join(map(str, bad + missing))}, not in the folder. Fetch the rest of it.")
        return names
    found = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run any program when they are read and are "
            "therefore never opened. Convert them to safetensors where you trust them."
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; is it a model folder?")
