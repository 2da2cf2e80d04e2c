"""Tensors of anybody's files, read when they are asked for: safetensors as memory maps, an Orbax folder leaf by leaf.

A tensor of a safetensors file is a map of its own, which ends with its last array: a model of any size is read within the memory of the
piece that is looked at (the library maps whole files, whose pages stay). The header is eight bytes with its length, then JSON
(https://huggingface.co/docs/safetensors). Nothing of a folder is run, and pickles are never opened.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from gammalm.errors import CheckpointError
from gammalm.interop.tensorfiles import tensor_files

HEADER_LIMIT = 100 * 2**20  # bytes, what the library allows
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor: `open()` gives its array, a map where the file allows it; None: of a dtype whose numbers are no weights as they
    stand (quantized, whole numbers)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    open: Callable[[], np.ndarray] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def read_safetensors(path: Path) -> list[Tensor]:
    """The tensors of a .safetensors file, or of a folder with one or several with an index. Raises CheckpointError for damaged ones."""
    files = [path] if path.is_file() else [path / name for name in tensor_files(path)]
    found = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in found:
                raise CheckpointError(f"{path}: tensor {tensor.name} is in two files. Fetch or export the folder again.")
            found[tensor.name] = tensor
    return list(found.values())


def _header(file: Path) -> list[Tensor]:
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise ValueError(f"its header cannot have {length} bytes")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        return [_tensor(file, name, entry, 8 + length, size) for name, entry in entries.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}). Fetch or export it again.") from error


def _tensor(file: Path, name: str, entry: dict, start: int, size: int) -> Tensor:
    shape, (begin, end), code = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    if code not in DTYPES:
        return Tensor(name, shape, code, None)
    dtype = np.dtype(DTYPES[code])
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"tensor {name} has the shape {list(shape)}")
    if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= start + end <= size:
        raise ValueError(f"tensor {name} of shape {list(shape)} does not lie in bytes {begin} to {end} of a file of {size} bytes")

    def open_map() -> np.ndarray:
        if end == begin:  # nothing to map
            return np.zeros(shape, dtype)
        return np.memmap(file, dtype, "r", start + begin, shape)

    return Tensor(name, shape, code, open_map)


def is_orbax(folder: Path) -> bool:
    """Whether `folder` holds one step of an Orbax checkpoint of a tree of arrays."""
    return (folder / "_METADATA").is_file()


def read_orbax(folder: Path) -> list[Tensor]:
    """The arrays of an Orbax checkpoint, whoever wrote it, by '/'-separated paths; each is read whole when it is opened.

    Raises CheckpointError where Orbax cannot read the folder.
    """
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        try:
            metadata = reader.metadata(folder.absolute()).item_metadata
            tree = metadata.tree
        except Exception as error:  # of many kinds, by what is missing
            raise CheckpointError(f"{folder} cannot be read as an Orbax checkpoint ({error}).") from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found, last = [], {}
    for path, leaf in leaves:
        shape, dtype = tuple(getattr(leaf, "shape", None) or ()), getattr(leaf, "dtype", None)
        readable = dtype is not None and jax.numpy.issubdtype(dtype, np.floating)
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        opened = _orbax_leaf(folder, path, shape, dtype, last) if readable else None
        found.append(Tensor("/".join(parts), shape, str(dtype), opened))
    return found


def _orbax_leaf(folder: Path, path: tuple, shape: tuple, dtype, last: dict) -> Callable[[], np.ndarray]:
    """Reads the leaf at `path`; `last` holds the one that was read last, which stacked layers ask for again and again."""

    def read() -> np.ndarray:
        if path in last:
            return last[path]
        import jax
        import orbax.checkpoint as ocp

        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.ShapeDtypeStruct(shape, dtype, sharding=here)
        for key in reversed(path):  # a tree that holds this leaf alone
            target = {getattr(key, "key", getattr(key, "name", None)): target} if not hasattr(key, "idx") else _list_with(key.idx, target)
        how = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
        )
        try:
            with ocp.PyTreeCheckpointer() as reader:
                (array,) = jax.tree.leaves(reader.restore(folder.absolute(), args=how))
        except Exception as error:
            raise CheckpointError(f"{folder}: {jax.tree_util.keystr(path)} cannot be read ({error}).") from error
        last.clear()
        last[path] = np.asarray(array)
        return last[path]

    return read


def _list_with(index: int, value) -> list:
    return [None] * index + [value]
