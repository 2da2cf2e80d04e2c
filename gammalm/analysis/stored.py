"""Figures of one stored matrix of any size, read in blocks of rows: how its weights are distributed, and how many directions it uses.

Memory is a block beside what the spectrum needs: the matrix in fp32, of at most SPECTRUM numbers; of a larger one as many evenly spaced
rows are taken. Shapes: a matrix [m, n] as it lies; a block [some rows, n].
"""

import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from gammalm.analysis.spectral import stable_rank
from gammalm.analysis.weights import SPARSE
from gammalm.initializers import equivalent_gamma

SPECTRUM = 2**27  # numbers of a matrix whose spectrum is looked at whole
PIECE = 2**22  # numbers that are looked at together
DIRECT = 256  # shorter side up to which all singular values come at once, from AᵀA in float64


def figures(blocks: Callable[[], Iterable[np.ndarray]], rows: int, columns: int, fan_in: int | None, *, spectrum: bool = True) -> dict:
    """JSON-ready figures of the matrix [rows, columns] whose fp32 `blocks()` give it row by row.

    mean, std (about the mean), largest |w|; kurtosis, 3 for normal weights; near_zero, the share of |w| ≤ .1 std; gamma = ln(1/std)/
    ln(fan_in) (science 1); stable_rank ‖W‖_F²/‖W‖₂², stable_rank_error (relative), stable_rank_random, what independent weights of one
    variance have (science 7), of `stable_rank_rows` rows. None: has no meaning here, or was not asked for. `not_finite`: NaNs and
    infinities; where there are any, nothing else is given.
    """
    found = dict.fromkeys(("mean", "std", "largest", "kurtosis", "near_zero", "gamma"))
    found |= {"stable_rank": None, "stable_rank_error": None, "stable_rank_random": None, "stable_rank_rows": None, "not_finite": 0}
    step = -(-rows * columns // SPECTRUM)  # every step-th row is kept
    kept = _aligned(-(-rows // step), columns) if spectrum else None
    sums, start = _Sums(), 0
    for block in blocks():
        found["not_finite"] += sums.add(block)
        if kept is not None:
            first = -start % step
            part = block[first::step]
            kept[(start + first) // step : (start + first) // step + len(part)] = part
        start += len(block)
    if found["not_finite"]:
        return found
    std = sums.std()
    found |= {"mean": sums.mean(), "std": std, "largest": sums.largest, "kurtosis": sums.kurtosis()}
    again = [] if std == 0 else np.array_split(kept, -(-kept.size // PIECE)) if step == 1 and spectrum else blocks()
    near = sum(int(np.count_nonzero(np.abs(block) <= np.float32(SPARSE * std))) for block in again)
    found["near_zero"] = near / (rows * columns) if std else float(found["mean"] == 0)
    if std > 0 and fan_in is not None and fan_in > 1:
        found["gamma"] = equivalent_gamma(std, fan_in)
    if kept is not None and min(kept.shape) > 1:
        value, error = _stable_rank(kept)
        found |= {"stable_rank": value, "stable_rank_error": error, "stable_rank_rows": len(kept)}
        found["stable_rank_random"] = random_stable_rank(*kept.shape)
    return found


def _aligned(rows: int, columns: int) -> np.ndarray:
    """An empty fp32 matrix that JAX takes over on the CPU without a copy, as it does from addresses that are multiples of 64 bytes."""
    size = 4 * rows * columns
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(np.float32).reshape(rows, columns)


def random_stable_rank(m: int, n: int) -> float:
    """mn/(√m+√n)²: what a matrix of independent weights of one variance has as it grows, whatever that variance is. Science 7."""
    return m * n / (math.sqrt(m) + math.sqrt(n)) ** 2


def lowest_random_stable_rank(m: int, n: int) -> float:
    """What a matrix of independent normal weights falls below about once in 10⁵ draws.

    Its largest squared singular value is (√m+√n)² + (√m+√n)(1/√m+1/√n)^⅓·t in units of the variance, t of the Tracy–Widom law of order 1
    (Johnstone 2001, doi:10.1214/aos/1009210544); t = 5 is exceeded that rarely.
    """
    root = math.sqrt(m) + math.sqrt(n)
    return m * n / (root**2 + 5 * root * (1 / math.sqrt(m) + 1 / math.sqrt(n)) ** (1 / 3))


def _stable_rank(w: np.ndarray) -> tuple[float, float]:
    if min(w.shape) <= DIRECT:
        scale = float(np.abs(w).max()) or 1.0
        a = w.astype(np.float64) / scale
        gram = a @ a.T if w.shape[0] <= w.shape[1] else a.T @ a
        top = np.linalg.eigvalsh(gram)[-1]
        return (float(np.trace(gram) / top), 0.0) if top > 0 else (0.0, 0.0)
    value, error = stable_rank(jnp.asarray(w))
    return float(value), float(error)


class _Sums:
    """Sums of powers up to the fourth about a pilot, in float64; blocks are summed in fp32, in units of the first one's spread."""

    def __init__(self):
        self.count, self.powers, self.pilot, self.unit, self.largest = 0, np.zeros(5), 0.0, 0.0, 0.0

    def add(self, block: np.ndarray) -> int:
        """Number of entries that are not finite."""
        low, high = float(block.min()), float(block.max())
        if not math.isfinite(high - low):
            return int(block.size - np.count_nonzero(np.isfinite(block)))
        self.largest = max(self.largest, -low, high)
        if not self.unit and low == high and (not self.count or low == self.pilot):  # one number so far
            self.pilot = low
            self.count += block.size
            self.powers[0] += block.size
            return 0
        if not self.unit:
            pilot = float(block.mean(dtype=np.float64))
            self._restart(pilot, float(block.std(dtype=np.float64)) or abs(pilot - self.pilot))
        x = (block.reshape(-1) - np.float32(self.pilot)) / np.float32(self.unit)
        x2 = x * x
        sums = (x.size, x.sum(dtype=np.float64), np.dot(x, x), np.dot(x2, x), np.dot(x2, x2))
        self.powers += np.array(sums, np.float64)
        self.count += x.size
        return 0

    def _restart(self, pilot: float, unit: float) -> None:
        """Makes `pilot` and `unit` those of the sums; all numbers so far were self.pilot."""
        at = (self.pilot - pilot) / unit
        self.powers = self.count * np.array([1.0, at, at**2, at**3, at**4])
        self.pilot, self.unit = pilot, unit

    def _central(self) -> tuple[float, float, float]:
        _, a, b, c, d = self.powers / self.count
        return a, b - a**2, d - 4 * a * c + 6 * a**2 * b - 3 * a**4

    def mean(self) -> float:
        return self.pilot + self._central()[0] * (self.unit or 1.0)

    def std(self) -> float:
        return math.sqrt(max(self._central()[1], 0.0)) * self.unit

    def kurtosis(self) -> float | None:
        _, second, fourth = self._central()
        return fourth / second**2 if self.unit and second > 0 else None
