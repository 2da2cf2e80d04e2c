"""What the numbers of a grid allow to be said: seed means with intervals, paired differences, best rates, gaps between γ's.

A difference is always loss(second) − loss(first), in nats per token: below zero, the second is better. It is paired by seed: runs
with one seed share their initial draws and their data order. Intervals are two-sided Student t at 95 %, for one comparison at a time;
one seed gives no interval. Shapes: everything here is a mapping {seed: loss}, keyed by (group, γ, rate).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from scipy.stats import t as student_t

from gammalm.analysis.scaling import widening
from gammalm.experiments.results import Study

LEVEL = 0.95
Losses = Mapping[int, float]  # seed -> loss
Table = Mapping[tuple[str, float, float], Losses]  # (group, γ, rate) -> losses


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds, with the bounds of its interval; bounds are None with one seed."""

    mean: float
    n: int
    low: float | None
    high: float | None

    @property
    def sign(self) -> int | None:
        """-1 or 1 when the interval excludes zero, 0 when it does not, None without an interval."""
        if self.low is None:
            return None
        return -1 if self.high < 0 else 1 if self.low > 0 else 0


def estimate(values: Iterable[float], level: float = LEVEL) -> Estimate | None:
    """Mean and t-interval of independent values; None for no values."""
    values = list(values)
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, 1, None, None)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = float(student_t.ppf(0.5 + level / 2, n - 1)) * math.sqrt(variance / n)
    return Estimate(mean, n, mean - half, mean + half)


def paired(first: Losses, second: Losses) -> Estimate | None:
    """The mean of second − first over the seeds that both have; None when they share none."""
    return estimate(differences(first, second).values())


def differences(first: Losses, second: Losses) -> dict[int, float]:
    """seed -> second − first, of the seeds that both have."""
    return {seed: second[seed] - first[seed] for seed in sorted(first) if seed in second}


def losses(study: Study) -> dict[tuple[str, float, float], dict[int, float]]:
    """Final validation losses of the finished cells, by (group, γ, rate) in the grid's order."""
    table: dict = {}
    for run in study.done():
        table.setdefault((run.group, run.gamma, run.rate), {})[run.seed] = run.loss
    return table


@dataclasses.dataclass(frozen=True)
class Best:
    """The rate with the lowest seed-mean loss, of the rates that have a result.

    edge: "lowest" or "highest" when no scanned rate beyond it has a result, "only" when there is one rate, else "".
    missing: planned rates without a result. uneven: the rates were compared over different sets of seeds.
    """

    rate: float
    estimate: Estimate
    edge: str
    missing: tuple[float, ...]
    uneven: bool


def best_rate(by_rate: Mapping[float, Losses], planned: Iterable[float] = ()) -> Best | None:
    """The best of the rates {rate: losses}; None when there are none."""
    if not by_rate:
        return None
    means = {rate: estimate(values.values()) for rate, values in by_rate.items()}
    best = min(means, key=lambda rate: (means[rate].mean, rate))
    ordered = sorted(means)
    edge = "only" if len(ordered) == 1 else {ordered[0]: "lowest", ordered[-1]: "highest"}.get(best, "")
    uneven = len({frozenset(values) for values in by_rate.values()}) > 1
    return Best(best, means[best], edge, tuple(sorted(set(planned) - set(means))), uneven)


def best_rates(table: Table, planned: Mapping[tuple[str, float], Iterable[float]]) -> dict[tuple[str, float], Best]:
    """The best rate of every (group, γ) that has a result; `planned` has the rates of the grid."""
    by_key: dict = {}
    for (group, gamma, rate), values in table.items():
        by_key.setdefault((group, gamma), {})[rate] = values
    return {key: best_rate(rates, planned.get(key, ())) for key, rates in by_key.items()}


@dataclasses.dataclass(frozen=True)
class Minimum:
    """Where a loss is lowest along an axis, with the bounds of an interval; bounds are None with one seed.

    edge: "lowest" or "highest" when the lowest mean is at that end of what was scanned: the minimum may lie beyond it. beyond: the share
    of resamples whose lowest mean is at an end; an interval that reaches an end is open there.
    """

    at: float
    n: int
    low: float | None
    high: float | None
    edge: str
    beyond: float


def minimum(by_x: Mapping[float, Losses], resamples: int = 2000, seed: int = 0) -> Minimum | None:
    """The x at the vertex of the parabola through the lowest mean loss and its two neighbours; at an end of the scan, that end.

    The interval is the middle 95 % of the same for resampled seeds, one draw for all x, deviations from the mean widened
    (`analysis.scaling.widening`). Taken over the seeds that all x have. None with fewer than three x or without such seeds. Shapes: S
    seeds, X places, R resamples.
    """
    x_X = np.array(sorted(by_x), np.float64)
    seeds = sorted(set.intersection(*(set(values) for values in by_x.values()))) if by_x else []
    if len(x_X) < 3 or not seeds:
        return None
    losses_SX = np.array([[by_x[x][s] for x in x_X] for s in seeds])
    mean_X, n = losses_SX.mean(0), len(seeds)
    at, i = _vertex(x_X, mean_X)
    edge = {0: "lowest", len(x_X) - 1: "highest"}.get(i, "")
    if n == 1:
        return Minimum(at, 1, None, None, edge, float(edge != ""))
    picked_RS = np.random.default_rng(seed).integers(0, n, (resamples, n))
    means_RX = mean_X + widening(n) * (losses_SX[picked_RS].mean(1) - mean_X)
    found = [_vertex(x_X, means) for means in means_RX]
    low, high = np.quantile([x for x, _ in found], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    beyond = sum(j in (0, len(x_X) - 1) for _, j in found) / resamples
    return Minimum(at, n, float(low), float(high), edge, beyond)


def _vertex(x_X, y_X) -> tuple[float, int]:
    """Where the parabola through the lowest y and its neighbours is lowest, and the place of that y; at an end, its own x."""
    i = int(np.argmin(y_X))
    if i in (0, len(x_X) - 1):
        return float(x_X[i]), i
    left, right = x_X[i] - x_X[i - 1], x_X[i + 1] - x_X[i]
    up_left, up_right = y_X[i - 1] - y_X[i], y_X[i + 1] - y_X[i]
    bend = left * up_right + right * up_left
    shift = (right**2 * up_left - left**2 * up_right) / (2 * bend) if bend > 0 else 0.0
    return float(x_X[i] + shift), i


def gamma_pair(gammas: Iterable[float]) -> tuple[float, float] | None:
    """The two γ's whose gap is the headline: .5 → 1 where both were run, else the lowest → the highest; None with fewer than two."""
    gammas = sorted(set(gammas))
    if len(gammas) < 2:
        return None
    return (0.5, 1.0) if {0.5, 1.0} <= set(gammas) else (gammas[0], gammas[-1])


@dataclasses.dataclass(frozen=True)
class Difference:
    """A paired difference of two sets of cells, `first` and `second` as titles: `γ=0.5`, `adjusted`.

    rate: where both were taken; None when each side is at its own best rate. rates: those of the two sides; None for a contrast of gaps.
    """

    group: str
    first: str
    second: str
    rate: float | None
    rates: tuple[float, float] | None
    estimate: Estimate
    by_seed: Mapping[int, float]


def gaps(table: Table, best: Mapping[tuple[str, float], Best]) -> list[Difference]:
    """Every γ against the first of `gamma_pair`, per group: at each rate that both have, then at the best rate of each γ."""
    pair = gamma_pair(gamma for _, gamma, _ in table)
    found = []
    for group in _unique(group for group, _, _ in table) if pair else ():
        for gamma in sorted({g for of, g, _ in table if of == group} - {pair[0]}):
            sides = [(group, pair[0]), (group, gamma)]
            for rate in sorted({r for of, _, r in table if of == group}):
                found += _difference(table, group, [(*side, rate) for side in sides], [f"γ={g:g}" for _, g in sides], rate)
            found += _at_best(table, best, group, sides, [f"γ={g:g}" for _, g in sides])
    return found


def arm_differences(table: Table, best: Mapping, arms: Mapping[str, tuple[str, str]]) -> list[Difference]:
    """Arms against each other, at one γ and one rate, and at the best rate of each.

    arms: group -> (what the groups of one comparison share, the arm's name).
    """
    found = []
    groups = [group for group in _unique(group for group, _, _ in table) if group in arms]
    for one, other in itertools.combinations(groups, 2):
        if arms[one][0] != arms[other][0]:
            continue
        titles = [arms[one][1], arms[other][1]]
        for gamma in sorted({g for of, g, _ in table if of == one} & {g for of, g, _ in table if of == other}):
            name = " · ".join(filter(None, (arms[one][0], f"γ={gamma:g}")))
            for rate in sorted({r for of, g, r in table if of == one and g == gamma}):
                found += _difference(table, name, [(one, gamma, rate), (other, gamma, rate)], titles, rate)
            found += _at_best(table, best, name, [(one, gamma), (other, gamma)], titles)
    return found


def gap_contrasts(found: Iterable[Difference], arms: Mapping[str, tuple[str, str]]) -> list[Difference]:
    """How much the gap between two γ's differs between arms, paired by seed: gap(second arm) − gap(first arm)."""
    contrasts = []
    for one, other in itertools.combinations(found, 2):
        same = (one.first, one.second, one.rate) == (other.first, other.second, other.rate)
        if same and one.group in arms and other.group in arms and arms[one.group][0] == arms[other.group][0]:
            by_seed = differences(one.by_seed, other.by_seed)
            if by_seed:
                name = " · ".join(filter(None, (arms[one.group][0], f"{one.first} → {one.second}")))
                titles = (arms[one.group][1], arms[other.group][1])
                contrasts.append(Difference(name, *titles, one.rate, None, estimate(by_seed.values()), by_seed))
    return contrasts


def headline(found: Iterable[Difference]) -> list[Difference]:
    """One difference per (group, first, second): at the best rates, else at the one fixed rate there is."""
    chosen: dict = {}
    for item in found:  # the best rates come after the fixed ones
        chosen[item.group, item.first, item.second] = item
    return list(chosen.values())


def _at_best(table: Table, best: Mapping, group: str, sides: list[tuple[str, float]], titles: list[str]) -> list[Difference]:
    """The difference with each side at its best rate; nothing where both have one and the same rate, as that is the fixed-rate one."""
    if not all(side in best for side in sides):
        return []
    rates = {side: {rate for *of, rate in table if tuple(of) == side} for side in sides}
    if len(set.union(*rates.values())) == 1:
        return []
    return _difference(table, group, [(*side, best[side].rate) for side in sides], titles, None)


def _difference(table: Table, group: str, keys: list, titles: list[str], rate: float | None) -> list[Difference]:
    """The difference as a list of one; empty when a side has no result or they share no seed."""
    by_seed = differences(*(table.get(key, {}) for key in keys))
    if not by_seed:
        return []
    return [Difference(group, titles[0], titles[1], rate, (keys[0][2], keys[1][2]), estimate(by_seed.values()), by_seed)]


def _unique(items: Iterable) -> list:
    return list(dict.fromkeys(items))
