"""How a standard deviation of E1's sweep is judged, by a rule written before any run was made; no drawing here.

`guess` is the loss of guessing evenly, ln 10.

    exploding    in any seed a loss or gradient is not finite, or the mean training loss of some epoch exceeds 1.1 · guess
    vanishing    in most seeds the training loss of the last epoch is above .9 · guess: next to nothing was learned
    stable       neither, in no seed, and the test accuracy is within .02 of the best of the sweep (means over seeds)
    degraded     anything else: it learns, and ends worse
"""

import math
from collections.abc import Sequence

import numpy as np

from gammalm.experiments.results import Run

LOUD, QUIET, NEAR = 1.1, 0.9, 0.02
NAMES = ("vanishing", "degraded", "stable", "exploding")
RANGES = {"stable": (1e-2, 1e-1), "vanishing": (0.0, 1e-3), "exploding": (1.0, math.inf)}  # of σ, as the source has them


def judge(runs: Sequence[Run], best: float, guess: float) -> str:
    """The band of one σ from its seeds; `best`: the best mean test accuracy of the sweep, `guess`: the loss of guessing evenly."""
    lasting = [numbers(run, "train_loss") for run in runs]
    if any(run.row["diverged_at"] or not np.all(loss_E <= LOUD * guess) for run, loss_E in zip(runs, lasting, strict=True)):
        return "exploding"
    idle = sum(loss_E[-1] > QUIET * guess for loss_E in lasting)
    if idle * 2 > len(runs):
        return "vanishing"
    return "stable" if idle == 0 and np.mean([accuracy(run) for run in runs]) >= best - NEAR else "degraded"


def numbers(run: Run, name: str) -> np.ndarray:
    """A list of a run's record as float64; what was not finite is so."""
    return np.vectorize(float, otypes=[np.float64])(np.array(run.row[name], object))


def accuracy(run: Run) -> float:
    """Test accuracy after the last epoch."""
    return run.row["test_accuracy"][-1]
