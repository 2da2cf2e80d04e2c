"""Condensation: how far the neurons of a matrix point the same way, and how few directions it uses (science 7).

Two measures: the stable rank ‖W‖_F²/‖W‖₂², and the cosines between rows, a row being the weights of one output neuron. Cosines are
numbers (mean, clusters) and a heat map, in one of two row orders. One order per figure, taken anew at each snapshot.
Shapes: w_RD one matrix, R output neurons by D inputs; cosines_RR of the R rows that are kept; stacks as in weights.py.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.analysis.spectral import stable_rank, top_singular
from gammalm.analysis.walk import fetch
from gammalm.analysis.weights import copies_of, matrix_paths, matrix_stack, outputs_first
from gammalm.initializers.specs import ParamSpec
from gammalm.trees import flat

ALIKE = 0.4  # cosine above which a row joins a cluster's leader, as in the group's heat maps of transformers
MOST_ROWS = 8192  # compared with each other at a time: R × R in fp32 is then 256 MiB
ORDERS = ("leader", "eigenvector")


@dataclasses.dataclass(frozen=True)
class RowCosines:
    """Cosines between the rows of a matrix that are not zero, and which rows they are.

    cosines_RR fp32; kept_R their numbers; compared: rows looked at; zero: how many of them were zero and dropped.
    """

    cosines_RR: np.ndarray
    kept_R: np.ndarray
    compared: int
    zero: int


def snapshot_steps(last: int, points: int = 24) -> list[int]:
    """`points` steps at which to look, log-spaced from 1 to `last`, both included, since condensation happens early; of fewer steps all.

    Early ones that would be less than a step apart are consecutive, and the others spread over what is left.
    """
    steps = [1] if last > 0 else []
    while steps and steps[-1] < last:
        left = max(1, points - len(steps))
        steps.append(max(steps[-1] + 1, round(steps[-1] * (last / steps[-1]) ** (1 / left))))
    return steps


def random_stable_rank(rows: int, columns: int) -> float:
    """mn/(√m+√n)²: of independent weights of mean 0 and one variance, for large m and n, whatever γ is (science 7)."""
    return rows * columns / (math.sqrt(rows) + math.sqrt(columns)) ** 2


def random_mean_cosine(fan_in: int) -> float:
    """√(2/(π·fan_in)): mean |cosine| of independent normal rows, for a large fan-in (science 7)."""
    return math.sqrt(2 / (math.pi * fan_in))


def stable_ranks(specs: Mapping[str, ParamSpec], params: Mapping) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Path -> (stable rank, its relative error) of each matrix [*copies]; pure, so that it can be jitted and run where `params` lie."""
    arrays = flat(params)
    return {path: stable_rank(matrix_stack(arrays[path], specs[path])) for path in matrix_paths(specs)}


def row_cosines(w_RD, most_rows: int = MOST_ROWS) -> RowCosines:
    """Cosines between the rows of `w_RD`; of more than `most_rows` rows as many evenly spaced ones. Zero rows are dropped."""
    taken = _spaced(len(w_RD), most_rows)
    return _kept(*jax.device_get(_cosines(jnp.asarray(w_RD), taken)), taken)


def _spaced(rows: int, most: int) -> np.ndarray:
    return np.arange(rows) if rows <= most else np.linspace(0, rows - 1, most).round().astype(int)


def _kept(cosines: np.ndarray, alive: np.ndarray, taken: np.ndarray) -> RowCosines:
    return RowCosines(cosines[np.ix_(alive, alive)] if not alive.all() else cosines, taken[alive], len(taken), int((~alive).sum()))


@jax.jit
def _cosines(w_RD, taken):
    """Cosines and which rows are not zero, of a matrix or of each in a stack."""
    w_RD = jnp.take(w_RD, taken, axis=-2).astype(jnp.float32)
    largest_R1 = jnp.max(jnp.abs(w_RD), axis=-1, keepdims=True)
    alive_R1 = largest_R1 != 0
    scaled_RD = w_RD / jnp.where(alive_R1, largest_R1, 1.0)  # first, as squares of tiny weights would be zero in fp32
    unit_RD = scaled_RD / jnp.where(alive_R1, jnp.linalg.norm(scaled_RD, axis=-1, keepdims=True), 1.0)
    return jnp.matmul(unit_RD, jnp.swapaxes(unit_RD, -1, -2), precision=jax.lax.Precision.HIGHEST), alive_R1[..., 0]


def mean_absolute(cosines_RR: np.ndarray) -> float:
    """Mean |cosine| over pairs of different rows; NaN for fewer than two."""
    R = len(cosines_RR)
    if R < 2:
        return math.nan
    blocks = np.array_split(cosines_RR, -(-R // 256))  # so that no copy of a large matrix is made
    total = sum(np.abs(block).sum(dtype=np.float64) for block in blocks) - np.abs(np.diagonal(cosines_RR)).sum(dtype=np.float64)
    return float(total / (R * (R - 1)))


def leader_clusters(cosines_RR: np.ndarray, threshold: float = ALIKE) -> np.ndarray:
    """The cluster [R] of each row, numbered as they are found: the first row without a cluster leads the next one, which every other row
    without a cluster joins whose cosine with the leader is above `threshold`.

    Source: the group's public code ([S], science 7). One pass, so the result depends on the order of rows.
    """
    cluster_R = np.full(len(cosines_RR), -1)
    found = 0
    for leader in range(len(cosines_RR)):
        if cluster_R[leader] < 0:
            joins = (cluster_R < 0) & (cosines_RR[leader] > threshold)
            joins[leader] = True
            cluster_R[joins] = found
            found += 1
    return cluster_R


def row_order(cosines_RR: np.ndarray, rule: str) -> np.ndarray:
    """Positions [R] of the rows in the order of a heat map, by `rule`, one of ORDERS: "leader" puts clusters one after another;
    "eigenvector" sorts by the entries of the top eigenvector of the cosines, whose largest entry is positive."""
    if rule == "leader":
        return np.argsort(leader_clusters(cosines_RR), kind="stable")
    if rule != "eigenvector":
        raise ValueError(f"row_order: {rule!r} is none of {', '.join(ORDERS)}.")
    if not len(cosines_RR):
        return np.arange(0)
    vector_R = np.asarray(top_singular(jnp.asarray(cosines_RR)).left)  # symmetric, no negative eigenvalue: singular is eigen
    return np.argsort(vector_R * np.sign(vector_R[np.argmax(np.abs(vector_R))]), kind="stable")


def heat_map(cosines: RowCosines, rule: str, size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """(image [s, s], row numbers [s]) with s ≤ size: cosines in the order of `rule`.

    Of more rows, evenly spaced ones of that order: each pixel is the cosine of two rows, not a mean over many.
    """
    order = row_order(cosines.cosines_RR, rule)
    if len(order) > size:
        order = order[np.linspace(0, len(order) - 1, size).round().astype(int)]
    return cosines.cosines_RR[np.ix_(order, order)], cosines.kept_R[order]


@functools.partial(jax.jit, static_argnames="spec")
def output_rows(w, index, spec: ParamSpec):
    """One matrix of a parameter as w_RD; `index` is its place among the copies (weights.copies_of)."""
    one = matrix_stack(w, spec)[tuple(index)]
    return one if outputs_first(spec) else one.T


def condensation_rows(specs: Mapping[str, ParamSpec], params: Mapping, paths: list[str] | None = None) -> Iterator[dict]:
    """One JSON-ready row per matrix of `paths` (None: all): stable rank and row cosines, each with what random weights would have.

    path, layer, expert; rows, fan_in; stable_rank, stable_rank_error (relative), stable_rank_random; rows_compared, zero_rows;
    mean_abs_cosine, mean_abs_cosine_random; clusters of the rows compared, largest_cluster (its share of them). None where a figure means
    nothing. Matrix by matrix, so that one R × R array exists at a time.
    """
    arrays = flat(params)
    for path in matrix_paths(specs) if paths is None else paths:
        spec = specs[path]
        ranks, errors = jax.device_get(stable_rank(matrix_stack(arrays[path], spec)))
        for index, names in copies_of(spec):
            cosines = row_cosines(output_rows(arrays[path], index, spec))
            sizes = np.bincount(leader_clusters(cosines.cosines_RR))
            yield _row(path, spec, names, ranks[index], errors[index], cosines) | {
                "clusters": len(sizes), "largest_cluster": float(sizes.max() / sizes.sum()) if len(sizes) else None,
            }  # fmt: skip


def snapshot(specs: Mapping[str, ParamSpec], params: Mapping, most_rows: int) -> tuple[list[dict], dict[tuple, RowCosines]]:
    """What a monitor keeps of one moment: the rows of `condensation_rows` without clusters, and by (path, layer or None) the cosines of
    up to `most_rows` evenly spaced rows, from which clusters and heat maps in either order can be had later.

    Of a mixture's experts those of the first alone; for the others what is said of rows is None. The device is asked for everything at
    once. Several processes: as `walk.fetch`.
    """
    arrays, asked = flat(params), {}
    for path, ranks in stable_ranks(specs, params).items():
        stack, spec = matrix_stack(arrays[path], specs[path]), specs[path]
        one = jnp.take(stack, 0, axis=spec.axes.index("experts")) if "experts" in spec.axes else stack
        one = one if outputs_first(spec) else jnp.swapaxes(one, -1, -2)
        asked[path] = ranks, _cosines(one, _spaced(one.shape[-2], most_rows))
    rows, kept, there = [], {}, fetch(asked)
    for path in asked:  # fetching sorts them
        spec, ((ranks, errors), (cosines, alive)) = specs[path], there[path]
        for index, names in copies_of(spec):
            found = None
            if not names["expert"]:
                at = index[: bool(spec.layers)]
                found = kept[path, names["layer"]] = _kept(cosines[at], alive[at], _spaced(spec.fans()[1], most_rows))
            rows.append(_row(path, spec, names, ranks[index], errors[index], found))
    return rows, kept


def _row(path: str, spec: ParamSpec, names: dict, rank, error, cosines: RowCosines | None) -> dict:
    """One matrix in JSON; None where a figure means nothing."""
    fan_in, fan_out = spec.fans()
    mean = math.nan if cosines is None else mean_absolute(cosines.cosines_RR)
    return {
        "path": path, **names, "rows": fan_out, "fan_in": fan_in,
        "stable_rank": float(rank), "stable_rank_error": float(error), "stable_rank_random": random_stable_rank(fan_out, fan_in),
        "rows_compared": cosines and cosines.compared, "zero_rows": cosines and cosines.zero,
        "mean_abs_cosine": None if math.isnan(mean) else mean, "mean_abs_cosine_random": random_mean_cosine(fan_in),
    }  # fmt: skip
