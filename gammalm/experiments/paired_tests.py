"""Paired comparisons over seeds as they are reported in papers: t-test, effect size with its interval, correction for many tests."""

import dataclasses
import math
from collections.abc import Sequence

from scipy import optimize, stats

from gammalm.experiments.statistics import LEVEL, Estimate, Losses, differences, paired


@dataclasses.dataclass(frozen=True)
class Paired:
    """second − first over the seeds that both have.

    estimate: mean with its t-interval. p: of SciPy's paired t-test, two-sided; None with fewer than two seeds or where all differences are
    equal. effect: Cohen's d_z, mean over standard deviation of the differences, with the interval that the noncentral t distribution gives
    (none where it is too far out for SciPy to say).
    """

    estimate: Estimate
    p: float | None
    effect: Estimate


def paired_test(first: Losses, second: Losses) -> Paired | None:
    """The comparison {seed: value} against {seed: value}; None where they share no seed."""
    seeds = sorted(differences(first, second))
    if not seeds:
        return None
    found, n = paired(first, second), len(seeds)
    if found.low in (None, found.high):
        return Paired(found, None, Estimate(math.nan, n, None, None))
    test = stats.ttest_rel(*([of[seed] for seed in seeds] for of in (second, first)))
    t = float(test.statistic)
    bounds = (_noncentrality(t, n - 1, share) for share in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    effect = Estimate(t / math.sqrt(n), n, *(None if bound is None else bound / math.sqrt(n) for bound in bounds))
    return Paired(found, float(test.pvalue), effect)


def _noncentrality(t: float, freedom: int, share: float) -> float | None:
    """The noncentrality under which `share` of the noncentral t distribution lies below `t`."""

    def over(delta: float) -> float:
        return float(stats.nct.cdf(t, freedom, delta)) - share  # falls with delta; nan far out

    low = high = t
    step = 1.0
    while over(low) < 0 or over(high) > 0:
        low, high, step = (low - step if over(low) < 0 else low), (high + step if over(high) > 0 else high), 2 * step
    try:
        return optimize.brentq(over, low, high)
    except ValueError:  # it met a nan
        return None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values corrected for their number (Holm 1979): below α, a test holds while all tests together err with probability α.

    A test without a p-value (None) is not counted.
    """
    order = sorted((i for i, p in enumerate(p_values) if p is not None), key=lambda i: p_values[i])
    corrected: list[float | None] = [None] * len(p_values)
    reached = 0.0
    for rank, i in enumerate(order):
        reached = max(reached, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = reached
    return corrected
