"""How evenly the experts of mixtures were used: what the train rows of runs say of each mixture layer, and that at the end of a run.

Dense runs log nothing of it and have no load. Shapes: T logged steps, L mixture layers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import Best

TAIL = 0.05  # the share of last steps that counts as the end of a run


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of the experts in the runs of one group and γ: those at its best rate, or all of them while there is none.

    entropy, largest, smallest: per layer, the mean over the last steps of a run, then over runs; empty where nothing is logged of it.
    idle_ending, idle: (steps in which an expert of some layer got no token, steps looked at), of the last steps and of all logged ones.
    dropped: choices whose expert did not run, over all logged steps and layers; None where nothing is logged of it.
    curves: per run (tokens of each step, load entropy [T, L]).
    """

    rates: tuple[float, ...]
    runs: int
    entropy: tuple[float, ...]
    largest: tuple[float, ...]
    smallest: tuple[float, ...]
    idle_ending: tuple[int, int]
    idle: tuple[int, int]
    dropped: int | None
    curves: tuple[tuple[Sequence[int], np.ndarray], ...]

    def to_json(self) -> dict:
        """Plain data, without the curves."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "curves"}


def expert_loads(study: Study, best: Mapping[tuple[str, float], Best]) -> dict[tuple[str, float], Load]:
    """(group, γ) -> load, in the order of the grid; only where a run has logged one."""
    runs: dict[tuple[str, float], list[Run]] = {}
    for run in study.runs:
        key = (run.group, run.gamma)
        if run.gamma is not None and (key not in best or best[key].rate == run.rate) and by_layer(run, "load_entropy")[0]:
            runs.setdefault(key, []).append(run)
    return {key: _load(of) for key, of in runs.items()}


def by_layer(run: Run, name: str) -> tuple[list[dict], np.ndarray]:
    """The train rows that have `name` for every mixture layer, and its values [T, L]; no rows and [0] where there is none."""
    rows = [row for row in run.metrics["train"] if _numbers(row.get(name))]
    return rows, np.array([row[name] for row in rows])


def _numbers(values) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)


def _load(runs: Sequence[Run]) -> Load:
    smallest = [_ending(run, "load_min") for run in runs]
    dropped = [values.sum() for values in (by_layer(run, "dropped")[1] for run in runs) if values.size]
    entropies = [by_layer(run, "load_entropy") for run in runs]
    return Load(
        rates=tuple(sorted({run.rate for run in runs if run.rate is not None})),
        runs=len(runs),
        entropy=_layer_means([_ending(run, "load_entropy") for run in runs]),
        largest=_layer_means([_ending(run, "load_max") for run in runs]),
        smallest=_layer_means(smallest),
        idle_ending=_idle(smallest),
        idle=_idle([by_layer(run, "load_min")[1] for run in runs]),
        dropped=round(sum(dropped)) if dropped else None,
        curves=tuple(([row["tokens"] for row in rows], values) for rows, values in entropies),
    )


def _ending(run: Run, name: str) -> np.ndarray:
    """`name` over the last steps of what the run has logged, finished or not: [T, L], or [0]."""
    rows, values = by_layer(run, name)
    last = max((row["step"] for row in run.metrics["train"]), default=0)
    return values[[row["step"] > (1 - TAIL) * last for row in rows]] if rows else values


def _idle(smallest: Sequence[np.ndarray]) -> tuple[int, int]:
    """In how many steps a layer's smallest load is 0, and of how many."""
    return sum(int((values.min(axis=-1) == 0).sum()) for values in smallest if values.size), sum(len(values) for values in smallest)


def _layer_means(endings: Sequence[np.ndarray]) -> tuple[float, ...]:
    """Per layer, the mean over steps, then over runs."""
    means = [values.mean(axis=0) for values in endings if values.size]
    return tuple(np.mean(means, axis=0).tolist()) if means else ()
