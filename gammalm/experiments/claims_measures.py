"""How claims read the rows of figures: functions (rows, rate) -> parts for claims_list.py.

Each says what is looked at and which region supports a claim; what a part and a region are is said in claims.py. The names of quantities
are those that experiments/figures write.
"""

from collections.abc import Callable, Iterable, Mapping

from gammalm.experiments.claims import ABOVE, BELOW, FIXED, Part, Region, Rows, across, exactly, measured, same_size
from gammalm.experiments.statistics import Estimate, estimate, paired

Measure = Callable[[Rows, str], list[Part]]
TOLERANCE = 0.02  # of an exponent in the width
COMPARABLE: Region = (0.5, 2.0)  # "matches", said of two norms
NEAR_RANDOM: Region = (0.8, 1.25)  # "as high as that of random matrices", as a ratio


# ---- one row, one part ---------------------------------------------------------------------------------------------------------------


def each(quantity: str, region: Region, what: str = "", **labels) -> Measure:
    """A part for every row of a quantity, from small to large models."""
    return lambda rows, rate: [_part(row, region, what) for row in rows.pick(quantity, rate=rate, **labels)]


def every_size(quantity: str, region: Region, what: str = "", **labels) -> Measure:
    """The same, for claims about sizes: nothing while there is one."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        parts = each(quantity, region, what, **labels)(rows, rate)
        return parts if len(parts) > 1 else []

    return measure


def smallest(quantity: str, region: Region, what: str = "", **labels) -> Measure:
    """The same of the smallest model alone; at the tuned rate nothing, where another one is tuned."""
    return lambda rows, rate: _of_size(rows, rate, 0, quantity, region, what, labels)


def largest(quantity: str, region: Region, what: str = "", **labels) -> Measure:
    """The same of the largest model alone."""
    return lambda rows, rate: _of_size(rows, rate, -1, quantity, region, what, labels)


def largest_of_several(quantity: str, region: Region, what: str = "", **labels) -> Measure:
    """The same where a smaller model has been measured too, without which none is known to be the large one."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        return largest(quantity, region, what, **labels)(rows, rate) if len(rows.pick(quantity, rate=FIXED, **labels)) > 1 else []

    return measure


def _of_size(rows: Rows, rate: str, place: int, quantity: str, region: Region, what: str, labels: Mapping) -> list[Part]:
    trained = rows.pick(quantity, rate=FIXED, **labels)
    found = rows.pick(quantity, rate=rate, **labels)
    return [_part(row, region, what) for row in found if row.get("size") == trained[place].get("size")] if trained else []


def all_of(*measures: Measure) -> Measure:
    """The parts of several measures, the headline first; none while one of them has none."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = [one(rows, rate) for one in measures]
        return [part for parts in found for part in parts] if all(found) else []

    return measure


def untrained(quantity: str, region: Region, what: str, **labels) -> Measure:
    """A number that needs no training: it stands as it is if it has no interval."""
    return lambda rows, rate: [_settled(row, region, what) for row in rows.pick(quantity, rate=rate, **labels)]


def _settled(row: Mapping, region: Region, what: str) -> Part:
    return Part(what, exactly(row["value"]) if row.get("low") is None else measured(row), region, [row])


def _part(row: Mapping, region: Region, what: str) -> Part:
    return Part(" ".join(filter(None, (row.get("size"), what))) or row["quantity"], measured(row), region, [row])


def task_gains(region: Region, at: float | None = None, **labels) -> Measure:
    """Gains of table1 in points, a part for each benchmark. Their intervals are over the items of one pair of adjusted models.

    A gain resolves nothing where both models are no better than guessing, and, for a claim on its size, where theirs is not about `at`.
    """

    def measure(rows: Rows, rate: str) -> list[Part]:
        pair = {"arm": "adjusted", "gamma": 1.0, "standard": 0.5}
        return [_task_gain(row, region, at) for row in rows.pick("gain", rate=rate, **pair, **labels)]

    return measure


def _task_gain(row: Mapping, region: Region, at: float | None) -> Part:
    guessing = len(row["at_chance"]) == 2
    found = measured(row)
    if guessing or (at and not same_size([row["parameters"] or 0], at)):
        found = Estimate(found.mean, found.n, None, None)
    return Part(f"{row['benchmark']}{', both guessing' * guessing}, points", found, region, [row])


# ---- over sizes ----------------------------------------------------------------------------------------------------------------------


def shrinks(**labels) -> Measure:
    """The gap is less far below zero at the largest size than at the smallest; nothing with one size."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = rows.pick("gap", rate=rate, **labels)
        if len(found) < 2:
            return []
        small, large = found[0], found[-1]
        return [Part(f"gap of {large.get('size')} minus gap of {small.get('size')}", across(small, large), ABOVE, [small, large])]

    return all_of(measure, smallest("gap", BELOW, "gap", **labels))


def apart(quantity: str, first: Mapping, second: Mapping, region: Region, what: str) -> Measure:
    """The rows labelled `second` minus those labelled `first`, at the largest model, as if they shared no run."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        ends = [rows.pick(quantity, rate=rate, **labels)[-1:] for labels in (first, second)]
        if not all(ends) or ends[0][0].get("size") != ends[1][0].get("size"):
            return []
        return [Part(what, across(ends[0][0], ends[1][0]), region, [ends[0][0], ends[1][0]])]

    return measure


# ---- the sweep over γ ----------------------------------------------------------------------------------------------------------------


def against_one(keep: Callable[[float], bool], arm: str) -> Measure:
    """loss(γ) − loss(γ=1) is above zero, for the γ that `keep` takes."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = sorted(rows.pick("difference from 1", arm=arm, rate=rate), key=lambda row: row["gamma"])
        return [_part(row, ABOVE, f"loss at γ={row['gamma']:g} minus loss at γ=1") for row in found if keep(row["gamma"])]

    return measure


# ---- residual flow before training ---------------------------------------------------------------------------------------------------


def follows(branch: str) -> Measure:
    """The measured exponent of the residual flow in the width is 1 − γ at every γ, with ε out of the way."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = sorted(rows.pick("measured exponent", branch=branch, eps=1e-12, rate=rate), key=lambda row: row["gamma"])
        return [_exponent(row) for row in found]

    return measure


def _exponent(row: Mapping) -> Part:
    said = 1 - row["gamma"]
    return _settled(row, (said - TOLERANCE, said + TOLERANCE), f"γ={row['gamma']:g}, paper {said:g}:".replace("-", "−"))


def flow_regimes(branch: str) -> Measure:
    """At the largest width: the flow exceeds the embedding below γ=1, is comparable at 1 and smaller beyond."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = rows.pick("flow", branch=branch, eps=1e-12, rate=rate)
        widest = max((row["d"] for row in found), default=None)
        at = sorted((row for row in found if row["d"] == widest), key=lambda row: row["gamma"])
        return [_settled(row, _regime(row["gamma"]), f"γ={row['gamma']:g}, d={widest}:") for row in at]

    return measure


def _regime(gamma: float) -> Region:
    return (1.0, float("inf")) if gamma < 1 else COMPARABLE if gamma == 1 else (0.0, 1.0)


# ---- curves over training ------------------------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]  # (step, value), by step


def falls(curve: Curve) -> float:
    """Lowest value of the first half of training against the first one, as a relative change."""
    return _early(curve, min) / curve[0][1] - 1


def climbs(curve: Curve) -> float:
    """Last value against the lowest of the first half of training, as a relative change."""
    return curve[-1][1] / _early(curve, min) - 1


def fades(curve: Curve) -> float:
    """Last value minus the highest of the first half of training."""
    return curve[-1][1] - highest(curve)


def highest(curve: Curve) -> float:
    """Highest value of the first half of training."""
    return _early(curve, max)


def _early(curve: Curve, pick: Callable) -> float:
    return pick(value for step, value in curve if step <= curve[-1][0] / 2)


def over_training(quantity: str, gamma: float, read: Callable[[Curve], float], region: Region, what: str, **labels) -> Measure:
    """`read` of the curve of every matrix, mean over matrices; the interval is over seeds, as matrices of one run are not independent."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = rows.pick(quantity, gamma=gamma, rate=rate, **labels)
        values = _by_seed(found, read)
        return [Part(what, estimate(values.values()), region, found)] if values else []

    return measure


def gammas_apart(quantity: str, read: Callable[[Curve], float], region: Region, what: str) -> Measure:
    """The same at γ=1 minus that at γ=.5, paired by seed."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = {gamma: rows.pick(quantity, gamma=gamma, rate=rate) for gamma in (0.5, 1.0)}
        standard, small = (_by_seed(found[gamma], read) for gamma in (0.5, 1.0))
        difference = paired(standard, small)
        return [Part(what, difference, region, found[0.5] + found[1.0])] if difference else []

    return measure


def by_matrix(quantity: str, gamma: float, reads: Mapping[str, tuple[Callable[[Curve], float], Region]]) -> Measure:
    """`over_training` for every kind of matrix apart and every reading {what: (read, region)}."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        kinds = dict.fromkeys(row["matrix"] for row in rows.pick(quantity, gamma=gamma, rate=rate))
        measures = [
            over_training(quantity, gamma, read, region, f"{kind} {what}", matrix=kind)
            for kind in kinds
            for what, (read, region) in reads.items()
        ]
        return [part for one in measures for part in one(rows, rate)]

    return measure


def starts_random(rows: Rows, rate: str) -> list[Part]:
    """The first stable rank of every matrix against that of random matrices of its shape, mean over matrices, at both γ."""
    random = {row["matrix"]: row["value"] for row in rows.pick("random stable rank", rate=rate)}
    parts = []
    for gamma in (0.5, 1.0):
        found = [row for row in rows.pick("stable rank", gamma=gamma, rate=rate) if row["matrix"] in random]
        scaled = [{**row, "value": row["value"] / random[row["matrix"]]} for row in found]
        if values := _by_seed(scaled, lambda curve: curve[0][1]):
            parts.append(Part(f"γ={gamma:g}, times that of random matrices:", estimate(values.values()), NEAR_RANDOM, found))
    return parts


def _by_seed(rows: Iterable[Mapping], read: Callable[[Curve], float]) -> dict[int, float]:
    """{seed: mean over matrices of `read`}; figures that show the same point count it once, a curve of one point says nothing."""
    points: dict = {}
    for row in rows:
        points.setdefault(row.get("seed", 0), {}).setdefault((row["matrix"], row.get("layer")), {})[row["x"]] = row["value"]
    found = {}
    for seed, matrices in points.items():
        values = [read(sorted(curve.items())) for curve in matrices.values() if len(curve) > 1]
        if values:
            found[seed] = sum(values) / len(values)
    return found
