"""What a claim of a paper is, and the one rule that judges it from the numbers of figures.

A claim names figures and reads their rows (numbers.jsonl; figures/catalog.py says what a row is), nothing else. It turns them into
parts: an estimate and the region that the claim puts it in, such as "below zero" for "small initialization lowers the loss". A part is

    reproduced      when its 95 % interval lies inside the region
    opposite        when the interval lies outside it; for a direction, when it excludes zero on the other side
    not resolved    when the interval reaches over the region's edge, or there is one seed and so no interval

and a claim is opposite if any part is, reproduced if all parts are, else not resolved. Without parts it needs scale: either nothing has
been measured yet, or no run at this scale could show it. Sizes of effects are compared only at the paper's own model size.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from scipy.stats import t as student_t

from gammalm.experiments.plots import compact
from gammalm.experiments.statistics import LEVEL, Estimate

REPRODUCED, OPPOSITE = "reproduced", "opposite"
NOT_RESOLVED, NEEDS_SCALE = "not resolved at this scale", "needs scale"
VERDICTS = (REPRODUCED, OPPOSITE, NOT_RESOLVED, NEEDS_SCALE)
FIRST_SOURCE, SECOND_SOURCE = "the paper", "the second source"
FIXED, TUNED = "fixed", "tuned"  # learning rates: one per size, as the paper has it; the best of those tried, for each side

Region = tuple[float, float]
BELOW: Region = (-math.inf, 0.0)
ABOVE: Region = (0.0, math.inf)
# "Unchanged", in nats: the paper calls .004 a change that barely is one and .038 a marked one; this lies between, on a log scale.
UNCHANGED: Region = (-0.01, 0.01)
SAME_SIZE = 2.0  # factor in parameters within which an effect is compared with the paper's in size


class Rows:
    """The rows of some figures, to pick from; those without a finite value are left out."""

    def __init__(self, rows: Iterable[Mapping]):
        self.rows = [row for row in rows if isinstance(row.get("value"), int | float) and math.isfinite(row["value"])]

    def pick(self, quantity: str, **labels) -> list[Mapping]:
        """Rows of a quantity whose labels are as given, from small to large models; a row without a rate is one at the fixed rate."""
        found = [row for row in self.rows if row.get("quantity") == quantity]
        for key, value in labels.items():
            found = [row for row in found if row.get(key, FIXED if key == "rate" else None) == value]
        return sorted(found, key=lambda row: row.get("parameters") or 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """One measured thing of a claim: what it is in words, its estimate, where the claim puts it, and the rows it was made of."""

    what: str
    estimate: Estimate
    region: Region
    rows: Sequence[Mapping]

    @property
    def verdict(self) -> str:
        low, high = self.estimate.low, self.estimate.high
        if low is None:
            return NOT_RESOLVED
        if low > self.region[0] and high < self.region[1]:
            return REPRODUCED
        return OPPOSITE if high < self.region[0] or low > self.region[1] else NOT_RESOLVED


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of a source, in our words with its figures, and how to measure it.

    measure: (rows of `figures`, FIXED or TUNED) -> parts, the headline first, [] while there is nothing to measure; None when no run of
    ours could show it. paper: the effect that the paper states, with our sign, and the parameters of the model it states it for.
    limits: one sentence on what a verdict here does not say; for a claim without `measure`, why it needs scale.
    """

    id: str
    section: str
    statement: str
    figures: tuple[str, ...]
    measure: Callable[[Rows, str], list[Part]] | None
    paper: tuple[float, float] | None = None
    limits: str = ""
    source: str = FIRST_SOURCE


def verdict(parts: Sequence[Part]) -> str:
    """The verdict on a claim with these parts, see the head of this file."""
    each = {part.verdict for part in parts}
    return NEEDS_SCALE if not each else OPPOSITE if OPPOSITE in each else REPRODUCED if each == {REPRODUCED} else NOT_RESOLVED


def judge(claim: Claim, rows: Iterable[Mapping]) -> dict:
    """The entry of a claim in the ledger, plain data; `rows` are those of all figures there are.

    value, low, high, seeds: of the headline part at the fixed rate. tuned: None where no rate was tuned.
    """
    own = Rows(row for row in rows if row.get("figure") in claim.figures)
    parts = {rate: claim.measure(own, rate) if claim.measure else [] for rate in (FIXED, TUNED)}
    used, used_tuned = ([row for part in parts[rate] for row in part.rows] for rate in (FIXED, TUNED))
    head = parts[FIXED][0].estimate if parts[FIXED] else None
    return {
        "id": claim.id,
        "source": claim.source,
        "section": claim.section,
        "statement": claim.statement,
        "figures": list(claim.figures),
        "measured": bool(parts[FIXED]),
        "verdict": verdict(parts[FIXED]),
        "verdict_tuned": verdict(parts[TUNED]) if parts[TUNED] else None,
        **({key: None for key in ("value", "low", "high", "seeds")} if head is None else _numbers(head)),
        "scale": _unique(row.get("scale") for row in used),
        "sizes": _unique(row.get("size") for row in used),
        "sizes_tuned": _unique(row.get("size") for row in used_tuned),
        "parameters": sorted(set(_unique(row.get("parameters") for row in used))),
        "said": _said(claim, parts[FIXED]),
        "parts": [_part(part) for part in parts[FIXED]],
        "parts_tuned": [_part(part) for part in parts[TUNED]],
    }


def same_size(here: Sequence[float], parameters: float) -> bool:
    """Whether models of `here` parameters are near enough to the paper's for the size of an effect to be compared."""
    return bool(here) and max(here) <= SAME_SIZE * parameters and min(here) >= parameters / SAME_SIZE


# ---- numbers for parts ---------------------------------------------------------------------------------------------------------------


def measured(row: Mapping) -> Estimate:
    """The estimate of a row; one without seeds is exact, a closed form."""
    if not row.get("seeds"):
        return exactly(row["value"])
    return Estimate(row["value"], row["seeds"], row.get("low"), row.get("high"))


def exactly(value: float) -> Estimate:
    """A number without sampling error."""
    return Estimate(value, 0, value, value)


def across(first: Mapping, second: Mapping) -> Estimate:
    """second − first of two rows with t-intervals that share no run, by Welch's rule; no interval where either has none."""
    pair = [measured(row) for row in (first, second)]
    mean, n = pair[1].mean - pair[0].mean, min(e.n for e in pair)
    if any(e.low is None or e.n < 2 for e in pair):
        return Estimate(mean, n, None, None)
    squares = [((e.high - e.low) / 2 / student_t.ppf(0.5 + LEVEL / 2, e.n - 1)) ** 2 for e in pair]
    total = sum(squares)
    if total == 0:
        return Estimate(mean, n, mean, mean)
    freedom = total**2 / sum(s**2 / (e.n - 1) for s, e in zip(squares, pair, strict=True))
    half = float(student_t.ppf(0.5 + LEVEL / 2, freedom)) * math.sqrt(total)
    return Estimate(mean, n, mean - half, mean + half)


# ---- words ---------------------------------------------------------------------------------------------------------------------------


def interval(value: float, low: float | None, high: float | None, seeds: int | None) -> str:
    """`−0.141 [−0.16, −0.12], 3 seeds`; exact numbers stand alone."""
    if not seeds:
        return f"{value:.3g}".replace("-", "−")
    bounds = f" [{low:.3g}, {high:.3g}]" if low is not None else ""
    return f"{value:.3g}{bounds}".replace("-", "−") + f", {seeds} seed{'s' if seeds > 1 else ''}"


def _said(claim: Claim, parts: Sequence[Part]) -> str:
    """What speaks for and against: each part, how the size of the effect compares, and the limits."""
    if claim.measure is None:
        return f"Not measured: {claim.limits}"
    if not parts:
        return f"Not measured yet: {', '.join(claim.figures)} {'has' if len(claim.figures) == 1 else 'have'} no numbers for it."
    side = {REPRODUCED: "for", OPPOSITE: "against", NOT_RESOLVED: "open"}
    listed = "; ".join(f"{p.what} {interval(**_numbers(p.estimate))} ({side[p.verdict]})" for p in parts)
    return " ".join(filter(None, (f"{listed}.", _compared(claim, parts[0]), claim.limits)))


def _compared(claim: Claim, head: Part) -> str:
    if claim.paper is None:
        return ""
    value, parameters = claim.paper
    here = [row["parameters"] for row in head.rows if row.get("parameters")]
    if same_size(here, parameters):
        return f"That is {head.estimate.mean / value:.2g} times the paper's {interval(value, None, None, 0)}."
    tested = f" and this has {compact(max(here))}" if here else ""
    return f"The paper's {interval(value, None, None, 0)} is for {compact(parameters)} parameters{tested}: only the direction is tested."


def _numbers(e: Estimate) -> dict:
    return {"value": e.mean, "low": e.low, "high": e.high, "seeds": e.n}


def _part(part: Part) -> dict:
    region = [None if math.isinf(bound) else bound for bound in part.region]
    return {"what": part.what, **_numbers(part.estimate), "region": region, "verdict": part.verdict}


def _unique(values: Iterable) -> list:
    return list(dict.fromkeys(value for value in values if value is not None))
