"""What is measured of a model while it trains (config.monitor; downstream.py for config.downstream), and how its snapshots are read.

    <workdir>/monitors.jsonl        one row per kind and step: the fields of `gammalm analyze KIND --json`
    <workdir>/monitors/<step>.npz   under "condensation": cosines between rows of every matrix, for heat maps

`Monitor` is what `gammalm.training.loop.train` takes as its argument `monitor`. All processes measure alike; process 0 writes.
Shape legend: models/parts.py; S rows compared of a matrix.
"""

import functools
import io
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from gammalm.analysis.condensation import RowCosines, snapshot, snapshot_steps
from gammalm.analysis.flow import residual_flow
from gammalm.analysis.norms import norm_regime
from gammalm.analysis.sink import sink_scores
from gammalm.analysis.weights import weight_rows
from gammalm.config_checks import MONITORS
from gammalm.errors import DataError
from gammalm.experiments.downstream import Downstream
from gammalm.files import write_bytes_atomic
from gammalm.sharding import processes
from gammalm.sharding.mesh import BATCH_AXES, batch_sharding
from gammalm.training.lanes import Lane
from gammalm.training.monitoring import DOWNSTREAM
from gammalm.training.program import Program

SEQUENCES = 8  # read at each step, for sink, flow and norm
MOST_ROWS = 256  # of a matrix that are compared with each other
FOLDER = "monitors"  # of the run's folder

Found = tuple[dict, dict[str, float]]  # fields of a row, and numbers for TensorBoard by name


class Monitor:
    """The measurements of one run: the kinds of config.monitor, and the tasks of config.downstream.

    sink, flow and norm read one batch, the same at each step: SEQUENCES validation sequences (fewer where a micro-batch has fewer; as many
    as there are pieces where the mesh cuts a batch into more), of every domain in turn its first, second, ...
    """

    def __init__(self, lane: Lane, program: Program):
        c = lane.config
        self._kinds = tuple(dict.fromkeys(c.monitor.kinds))
        self._steps = frozenset({0, *snapshot_steps(c.train.steps, c.monitor.points)})
        self._downstream = Downstream(lane, program) if c.downstream.tasks else None
        self._model, self._mesh, self._eps = program.model, program.mesh, c.model.norm_eps  # ε is the run's: a program serves several
        self._folder = lane.run.workdir / FOLDER
        pieces = math.prod(program.mesh.shape[axis] for axis in BATCH_AXES)
        limit = min(SEQUENCES, c.batch.sequences // c.batch.micro_batches)
        self._sequences, self._split = pieces * max(1, limit // pieces), lane.validation

    def due(self, step: int) -> tuple[str, ...]:
        """See `gammalm.training.monitoring.Monitor`."""
        tested = self._downstream is not None and step in self._downstream.steps
        return (self._kinds if step in self._steps else ()) + (DOWNSTREAM,) * tested

    def measure(self, kind: str, step: int, weights: dict, moved: Callable[[], None]) -> Found:
        """See `gammalm.training.monitoring.Monitor`."""
        return self._downstream.measure(weights, moved) if kind == DOWNSTREAM else MEASURES[kind](self, step, weights)

    @functools.cached_property
    def _batches(self) -> list[dict]:
        sharding = batch_sharding(self._mesh)
        batch = first_sequences(self._split, self._sequences)
        return [{name: jax.make_array_from_callback(a.shape, sharding, lambda at, a=a: a[at]) for name, a in batch.items()}]

    def _over_text(self, measure: Callable, weights: dict) -> Found:
        row = measure(self._model, weights["params"], weights["buffers"], self._batches, self._eps).row()
        return row, dict(numbers(row))

    def sink(self, _, weights: dict) -> Found:
        return self._over_text(sink_scores, weights)

    def flow(self, _, weights: dict) -> Found:
        return self._over_text(residual_flow, weights)

    def norm(self, _, weights: dict) -> Found:
        return self._over_text(norm_regime, weights)

    def condensation(self, step: int, weights: dict) -> Found:
        rows, cosines = snapshot(self._model.specs, weights["params"], MOST_ROWS)
        if processes.leads():
            write_maps(self._folder, step, cosines)
        return {"matrices": rows}, by_matrix(rows, "stable_rank")

    def weights(self, _, weights: dict) -> Found:
        rows = weight_rows(self._model.specs, weights["params"])
        return {"matrices": rows}, by_matrix(rows, "std")


MEASURES = {kind: getattr(Monitor, kind) for kind in MONITORS}


def first_sequences(split, count: int) -> dict:
    """A host batch of `count` validation sequences: the first of every domain, the second of every domain, ... Raises DataError where the
    split has no domain."""
    if not split.domains:
        raise DataError(f"{split.path} has no validation text to measure a model on.")
    of_each = math.ceil(count / len(split.domains))
    heads = [next(split.validation(domain, slice(of_each))) for domain in split.domains]
    turns = itertools.islice(itertools.product(range(of_each), heads), count)
    picked = [{name: a[row] for name, a in head.items()} for row, head in turns]
    return {name: np.stack([one[name] for one in picked]) for name in picked[0]}


def numbers(value, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dicts and lists, with the way to it: ("layers/later/0", .1)."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from numbers(one, f"{name}/{key}" if name else str(key))
    if isinstance(value, int | float):
        yield name, value


def by_matrix(rows: list[dict], column: str) -> dict[str, float]:
    """`column` of the rows of matrices by "path/layer", as means over experts."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["path"] if row["layer"] is None else f"{row['path']}/{row['layer']}", []).append(row[column])
    return {name: float(np.mean(values)) for name, values in found.items()}


# ---- snapshots: fp16 of the cosines above the diagonal, which symmetry and ones complete


def write_maps(folder: Path, step: int, cosines: dict[tuple[str, int | None], RowCosines]) -> None:
    """Writes `folder`/<step>.npz, whole or not at all. Raises OSError."""
    arrays: dict[str, np.ndarray] = {}
    for (path, layer), one in cosines.items():
        name = path if layer is None else f"{path}@{layer}"
        arrays[name] = one.cosines_RR[np.triu_indices(len(one.cosines_RR), 1)].astype(np.float16)
        arrays[f"{name}/rows"] = one.kept_R.astype(np.int32)
        arrays[f"{name}/looked"] = np.array([one.compared, one.zero], np.int32)
    folder.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_bytes_atomic(folder / f"{step}.npz", content.getvalue())


def read_maps(workdir: str | Path, step: int) -> dict[tuple[str, int | None], RowCosines]:
    """(path, layer or None) -> cosines of up to MOST_ROWS evenly spaced rows, as kept after `step` of the run in `workdir`.

    Exact to 2⁻¹² (fp16). `analysis.condensation.heat_map` and `leader_clusters` take them, in either order. Of a mixture's experts those
    of the first. Raises DataError where there is no such snapshot or it is damaged.
    """
    file = Path(workdir) / FOLDER / f"{step}.npz"
    found = {}
    try:
        with np.load(file) as arrays:
            for name in (name for name in arrays.files if f"{name}/rows" in arrays.files):
                rows = arrays[f"{name}/rows"].astype(int)
                compared, zero = arrays[f"{name}/looked"].tolist()
                cosines_SS = np.eye(len(rows), dtype=np.float32)
                above = np.triu_indices(len(rows), 1)
                cosines_SS[above] = cosines_SS.T[above] = arrays[name]
                path, _, layer = name.partition("@")
                found[path, int(layer) if layer else None] = RowCosines(cosines_SS, rows, compared, zero)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} is no readable snapshot ({error}). Only runs with monitor.kinds condensation leave some.") from error
    return found
