"""The matrices of a model that somebody stored: which piece of which tensor each is, and on which side its inputs are.

A matrix is what one group of inputs is multiplied by: q, k and v apart where they are stored side by side, every expert and layer apart.
Names and shapes say what a tensor is (torch_names.py, jax_names.py); where they do not, the matrix has no fan-in and a reason instead.
Shape legend: stored shapes as they are; a matrix is [rows, columns] as it lies, its inputs along the columns (torch's Linear, an embedding)
or along the rows (a Conv1D, a kernel of JAX).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from gammalm.interop.mapped import Tensor

# What a matrix does; "other": nobody said. Those of attention and the feed-forward layer follow the names that theory and configs use.
KINDS = (
    "embed", "position", "head", "q", "k", "v", "qkv", "out", "gate", "q_down", "q_up", "kv_down", "kv_up", "ffn_gate", "ffn_up",
    "ffn_gate_up", "ffn_down", "router", "other",
)  # fmt: skip
BLOCK = 2**22  # numbers of a matrix in fp32 at a time


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix: `open()` gives its numbers as [rows, columns], or with the rows cut into groups, [groups, rows of one, columns].

    inputs: "rows" or "columns", the side that is summed over; None: not known, and `unsaid` says why. fan_out is the other side.
    """

    name: str
    kind: str
    layer: int | None
    expert: int | None
    rows: int
    columns: int
    inputs: str | None
    dtype: str
    open: Callable[[], np.ndarray]
    unsaid: str = ""

    @property
    def fan_in(self) -> int | None:
        return {"rows": self.rows, "columns": self.columns, None: None}[self.inputs]

    @property
    def fan_out(self) -> int | None:
        return {"rows": self.columns, "columns": self.rows, None: None}[self.inputs]

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def blocks(self) -> Iterator[np.ndarray]:
        """The matrix in fp32, rows after rows, [some rows, columns] of about BLOCK numbers at most. What is not finite stays so."""
        array = self.open()
        step = max(1, BLOCK // max(1, math.prod(array.shape[1:])))
        for start in range(0, len(array), step):
            yield np.asarray(array[start : start + step], np.float32).reshape(-1, self.columns)


@dataclasses.dataclass(frozen=True)
class Vector:
    """A stored vector, or a stack of them: a norm's gain, a bias, or something else. `values()` are its numbers in fp32."""

    name: str
    kind: str  # gain, bias or other
    layer: int | None
    size: int
    values: Callable[[], np.ndarray]


@dataclasses.dataclass
class Weights:
    """What was found in the files. `unread`: names of tensors that were passed over, and why; `notes`: what was taken for granted."""

    matrices: list[Matrix]
    vectors: list[Vector]
    unread: dict[str, str]
    notes: list[str]


def piece(tensor: Tensor, name: str, kind: str, *, inputs: str | None, layer: int | None = None, expert: int | None = None,
          view: tuple[int, ...] = (), at: tuple = (), rows: int = 0, unsaid: str = "") -> Matrix:  # fmt: skip
    """The matrix that `tensor`, reshaped to `view` (empty: as it is) and indexed `at`, holds. rows: 0 where all but the last axis are."""
    shape = _shape_at(view or tensor.shape, at)
    rows = rows or math.prod(shape[:-1])
    columns = math.prod(shape) // max(1, rows)

    def open_piece() -> np.ndarray:
        array = tensor.open()
        array = (array.reshape(view) if view else array)[at]
        return array if array.shape[-1] == columns else array.reshape(rows, columns)

    return Matrix(name, kind, layer, expert, rows, columns, inputs, tensor.dtype, open_piece, unsaid)


def _shape_at(shape: tuple[int, ...], at: tuple) -> tuple[int, ...]:
    """Shape of an array of `shape` indexed `at`; broadcast from one number, so that none is made."""
    return np.broadcast_to(np.False_, shape)[at].shape


def vector(tensor: Tensor, layer: int | None, kind: str, at: tuple = (), name: str = "") -> Vector:
    return Vector(name or tensor.name, kind, layer, math.prod(_shape_at(tensor.shape, at)), functools.partial(_values, tensor, at))


def _values(tensor: Tensor, at: tuple) -> np.ndarray:
    return np.asarray(tensor.open()[at], np.float32).reshape(-1)


def same_numbers(a: Matrix, b: Matrix) -> bool:
    """Whether two matrices of one shape hold the same numbers; reads no further than the first difference."""
    if (a.rows, a.columns) != (b.rows, b.columns):
        return False
    return all(np.array_equal(x, y) for x, y in zip(a.blocks(), b.blocks(), strict=True))
