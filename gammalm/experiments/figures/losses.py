"""Figures of final losses: the gap between γ .5 and 1 by size, scaling laws, loss against γ.

Quantities of their rows, in nats per token where nothing else is said; labels: size, parameters, arm, gamma where they apply. `rate` is
"fixed" (each size at its own, as in the paper) or "tuned" (each side at the best of those tried).

    validation loss     final
    gap                 loss(γ = 1) − loss(γ = .5) of an arm: below zero, the small initialization is better. A "gain" is minus that
    gap contrast        gap(adjusted) − gap(plain)
    adjustment effect   loss(adjusted) − loss(plain) at one γ
    effective size gain .79: as good as a standard model 79 % larger; `by` "law" (joint fit) or "interpolation" (at size N = `x`)
    law E, law alpha    of L = E + A N^-alpha, N the parameters without embedding and head (analysis/scaling.py)
    difference from 1   loss(γ) − loss(γ = 1)
    best gamma          the γ of the lowest loss (statistics.minimum)

The paper, sections 2.1, 2.2 and 2.4; science 5 and 8.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from gammalm.analysis.scaling import Scaling, fit_scaling
from gammalm.errors import ConfigError
from gammalm.experiments import plots, statistics
from gammalm.experiments.figures.catalog import TRAINED, Drawing, Figure, about, dense_sizes, point
from gammalm.experiments.figures.cells import (
    ARM_COLOURS,
    ARM_MARKERS,
    ARM_WORDS,
    GAMMAS,
    Gap,
    cells_of,
    finished,
    gaps_of,
    losses_of,
    tuned_notes,
)
from gammalm.experiments.results import Run, Study
from gammalm.experiments.sizes import at_rates, losses_by_size
from gammalm.experiments.statistics import Estimate

# ---- the gap by size: fig1b ------------------------------------------------------------------------------------------------------------


@plots.styled
def _gap_by_size(study: Study, scale: str) -> Drawing:
    title = "Gain of γ = 1 by model size, plain architecture"
    runs = finished(study, cells_of(study.grid, dense_sizes(study.grid), ["plain"], rates=True))
    gaps = gaps_of(runs, study)
    canvas, axes = plots.panel(title, "parameters", "loss(γ = .5) − loss(γ = 1), nats")
    if gaps:
        _gains(axes, gaps, "plain")
    caption = (
        "How much lower the final validation loss is with γ = 1 than with γ = .5, paired by seed, with 95 % intervals; small marks: "
        "single seeds. Fixed rate: both at the learning rate of their size. Tuned: each γ at the best of the rates tried."
    )
    missing = [] if gaps else ["No size has finished a seed at both γ's."]
    rows = [gap.row("fig1b") for gap in gaps]
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", notes=[*missing, *tuned_notes(gaps)])


def _gains(axes, gaps: Sequence[Gap], arm: str) -> None:
    """The gains of one arm against size: a line at the fixed rates, open marks at tuned ones."""
    axes.axhline(0, color="#1b1f27", lw=1)
    for rate, look in (
        ("fixed", {"color": ARM_COLOURS[arm], "marker": ARM_MARKERS[arm], "lw": 1.6, "ms": 6, "label": "fixed rate"}),
        ("tuned", {"color": "#0e7490", "marker": "D", "mfc": "white", "lw": 0, "ms": 7, "label": "tuned rate"}),
    ):
        shift = 1.0 if rate == "fixed" else 1.18  # so that bars at one size stand side by side
        of = {gap.parameters * shift: gap for gap in gaps if gap.arm == arm and gap.rate == rate}
        if of:
            plots.estimates(axes, {x: _minus(gap.estimate) for x, gap in of.items()}, look)
            for x, gap in of.items():
                values = [-value for value in gap.by_seed.values()]
                axes.plot([x] * len(values), values, "_", ms=7, color=look["color"], alpha=0.6)
    axes.set_xscale("log")
    sizes = sorted({gap.parameters for gap in gaps})
    plots.ticks(axes.xaxis, sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plots.compact(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(plots.signed))
    axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    axes.margins(y=0.15)
    axes.legend(loc="best")


def _minus(e: Estimate) -> Estimate:
    return Estimate(-e.mean, e.n, None if e.low is None else -e.high, None if e.high is None else -e.low)


# ---- the scaling law: fig2a ------------------------------------------------------------------------------------------------------------


@plots.styled
def _scaling(study: Study, scale: str) -> Drawing:
    title, arms = "Scaling with size: γ = .5 and γ = 1", ("adjusted", "plain")
    runs = finished(study, cells_of(study.grid, dense_sizes(study.grid), arms, rates=True))
    gaps = gaps_of(runs, study)
    rows = [gap.row("fig2a") for gap in gaps] + _contrasts(gaps) + _adjustments(runs)
    canvas = Canvas(figsize=(7.2, 5.6), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    axes = canvas.subplot_mosaic([["adjusted", "plain"], ["gain", "gain"]], height_ratios=[3, 2.4])
    axes["plain"].sharey(axes["adjusted"])
    by_arm = losses_by_size([run for run in runs if "lr" not in run.cell.labels])
    notes, dots = tuned_notes(gaps), []
    for arm in arms:
        by_gamma = by_arm.get(arm, {})
        fit = None
        if set(GAMMAS) <= set(by_gamma):
            ((_, pair),) = at_rates(*(by_gamma[g] for g in GAMMAS))
            try:
                fit = fit_scaling(*pair)
            except ConfigError as error:
                notes.append(f"{arm}: {error}")
        _law_panel(axes[arm], arm, by_gamma, fit)
        if fit:
            rows += _law_rows(arm, fit, max(run.row["parameters"] for run in runs if run.cell.labels["arm"] == arm))
            dots += _size_gains(arm, fit)
            notes += [f"{arm}: {note}" for note in fit.notes]
    rows += _validation_rows(runs)
    if dots:
        _factors(axes["gain"], dots)
    else:
        axes["gain"].set_axis_off()
    caption = (
        "Above: final validation loss against size (parameters without embedding and head), seeds as small marks, 95 % intervals, and the "
        "joint law L = E + A N^−α with one E and α for both γ's. Below: how many times larger a model with γ = .5 must be to do as well as "
        "one with γ = 1, from the law and by interpolation at each size, with bootstrap intervals over seeds. Each size at its own rate."
    )
    return Drawing(canvas, rows, f"{title}. {caption} {about([run for run in runs if 'lr' not in run.cell.labels], scale)}", notes=notes)


def _validation_rows(runs: Sequence[Run]) -> list[dict]:
    by_point: dict = {}
    for run in sorted(runs, key=lambda run: run.row["parameters"]):
        if "lr" not in run.cell.labels:
            key = (run.cell.labels["size"], run.row["parameters"], run.cell.labels["arm"], run.gamma)
            by_point.setdefault(key, []).append(run.loss)
    return [
        point("fig2a", "validation loss", statistics.estimate(values), size=size, parameters=parameters, arm=arm, gamma=g, rate="fixed")
        for (size, parameters, arm, g), values in by_point.items()
    ]


def _contrasts(gaps: Sequence[Gap]) -> list[dict]:
    """Rows of gap(adjusted) − gap(plain) wherever both are known, paired by seed."""
    rows = []
    by_key = {(gap.size, gap.rate, gap.arm): gap for gap in gaps}
    for (size, rate, arm), gap in by_key.items():
        plain = by_key.get((size, rate, "plain"))
        if arm == "adjusted" and plain and (difference := statistics.paired(plain.by_seed, gap.by_seed)):
            rows.append(point("fig2a", "gap contrast", difference, size=size, parameters=gap.parameters, rate=rate))
    return rows


def _adjustments(runs: Sequence[Run]) -> list[dict]:
    """loss(adjusted) − loss(plain) of every size and γ at the fixed rate."""
    rows, own = [], [run for run in runs if "lr" not in run.cell.labels]
    for size, g in itertools.product(dict.fromkeys(run.cell.labels["size"] for run in own), GAMMAS):
        sides = [losses_of(own, size=size, gamma=g, arm=arm) for arm in ("plain", "adjusted")]
        if difference := statistics.paired(*sides):
            parameters = max(run.row["parameters"] for run in own if run.cell.labels["size"] == size)
            rows.append(point("fig2a", "adjustment effect", difference, size=size, parameters=parameters, gamma=g, rate="fixed"))
    return rows


def _law_panel(axes, arm: str, by_gamma: Mapping, fit: Scaling | None) -> None:
    axes.set_title(ARM_WORDS[arm], fontsize=10, loc="left")
    axes.set_xlabel("N, parameters of the body")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plots.compact(x)))
    colours, markers = plots.colours(GAMMAS), plots.markers(GAMMAS)
    for g in GAMMAS:
        losses = {N: next(iter(by_rate.values())) for N, by_rate in sorted(by_gamma.get(g, {}).items())}
        if not losses:
            continue
        look = {"color": colours[g], "marker": markers[g], "ms": 6, "lw": 0, "label": f"γ = {g:g}"}
        plots.estimates(axes, {N: statistics.estimate(values.values()) for N, values in losses.items()}, look)
        for N, values in losses.items():
            axes.plot([N] * len(values), list(values.values()), "_", ms=7, color=colours[g], alpha=0.6)
        if fit and fit.law:
            N = np.geomspace(min(losses), max(losses), 60)
            A = fit.law.A_standard if g == GAMMAS[0] else fit.law.A_small
            axes.plot(N, fit.law.E + A * N**-fit.law.alpha, color=colours[g], lw=1.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _law_rows(arm: str, fit: Scaling, parameters: int) -> list[dict]:
    """The law's rows, labelled with the parameters of the largest model, and the gain at each size."""
    seeds, rows = min(one.seeds for one in fit.sizes), []
    if fit.law:
        for quantity, name, labels in (
            ("law E", "E", {}), ("law alpha", "alpha", {}), ("effective size gain", "gain", {"by": "law"}),
        ):  # fmt: skip
            value, interval = getattr(fit.law, name), fit.intervals.get(name, (None, None))
            rows.append(point("fig2a", quantity, Estimate(value, seeds, *interval), arm=arm, rate="fixed", parameters=parameters, **labels))
    for one in fit.sizes:
        if one.gain is not None:
            e = Estimate(one.gain, one.seeds, *(one.gain_interval or (None, None)))
            labels = {"by": "interpolation", "x": one.N, "extrapolated": one.extrapolated}
            rows.append(point("fig2a", "effective size gain", e, arm=arm, rate="fixed", **labels))
    return rows


def _size_gains(arm: str, fit: Scaling) -> list[tuple[str, Estimate, str]]:
    """Rows of the lower panel: (name, estimate of the gain, colour)."""
    colour = ARM_COLOURS[arm]
    found = [(f"{arm}, law", Estimate(fit.law.gain, 1, *fit.intervals.get("gain", (None, None))), colour)] if fit.law else []
    for one in fit.sizes:
        if one.gain is not None:
            name = f"{arm}, N = {plots.compact(one.N)}" + "*" * one.extrapolated
            found.append((name, Estimate(one.gain, one.seeds, *(one.gain_interval or (None, None))), colour))
    return found


def _factors(axes, found: Sequence[tuple[str, Estimate, str]], widest: float = 30.0) -> None:
    """Gains as factors of size on a logarithmic axis that ends at `widest`."""
    edge = np.log(widest)

    def log(gain: float | None) -> float | None:
        return None if gain is None else float(np.clip(np.log1p(max(gain, -1 + 1e-12)), -edge, edge))

    plots.dots(axes, [(name, Estimate(log(e.mean), e.n, log(e.low), log(e.high)), colour) for name, e, colour in found])
    axes.set_xlim(-1.03 * edge, 1.03 * edge)
    at = [1 / 30, 0.1, 1 / 3, 1, 3, 10, 30]
    axes.set_xticks([np.log(x) for x in at], [f"×{x:.2g}" for x in at])
    axes.set_xlabel("size of a γ = .5 model that does as well; * extrapolated; cut off at ×30")


# ---- loss against γ: fig3b -------------------------------------------------------------------------------------------------------------


@plots.styled
def _by_gamma(study: Study, scale: str) -> Drawing:
    size, arms = dense_sizes(study.grid)[0], ("plain", "adjusted")
    title = f"Loss against γ, {size}"
    runs = finished(study, cells_of(study.grid, [size], arms, gammas=()))
    canvas, axes = plots.panel(title, "γ", "validation loss (nats per token)", (4.8, 3.9))
    rows, notes, lowest = [], [], []
    for shift, arm in zip((-0.008, 0.008), arms, strict=True):
        of = [run for run in runs if run.cell.labels["arm"] == arm]
        table = {g: losses_of(of, gamma=g) for g in sorted({run.gamma for run in of})}
        if not table:
            continue
        look = {"color": ARM_COLOURS[arm], "marker": ARM_MARKERS[arm], "ms": 6, "lw": 1.6, "label": ARM_WORDS[arm]}
        points = {g: statistics.estimate(losses.values()) for g, losses in table.items()}
        plots.estimates(axes, {g + shift: e for g, e in points.items()}, look)
        for g, losses in table.items():
            axes.plot([g + shift] * len(losses), list(losses.values()), "_", ms=7, color=look["color"], alpha=0.6)
        shared = {"size": size, "arm": arm, "parameters": of[0].row["parameters"], "rate": "fixed"}
        rows += [point("fig3b", "validation loss", e, **shared, gamma=g, x=g) for g, e in points.items()]
        from_one = {g: statistics.paired(table.get(1.0, {}), losses) for g, losses in table.items() if g != 1}
        rows += [point("fig3b", "difference from 1", e, **shared, gamma=g) for g, e in from_one.items() if e]
        best = statistics.minimum(table)
        if best is None:
            notes.append(f"{arm}: fewer than three γ's share a seed, so no minimum is sought.")
            continue
        rows.append(point("fig3b", "best gamma", Estimate(best.at, best.n, best.low, best.high), **shared))
        lowest.append((arm, best))
        notes += _minimum_notes(arm, best)
    plots.ticks(axes.xaxis, sorted({run.gamma for run in runs}))
    axes.margins(x=0.08, y=0.12)
    low, high = axes.get_ylim()
    for i, (arm, best) in enumerate(lowest):
        y = low - (0.05 + 0.07 * i) * (high - low)
        if best.low is not None:
            axes.plot([best.low, best.high], [y, y], color=ARM_COLOURS[arm], lw=2.4, solid_capstyle="butt")
        axes.plot([best.at], [y], "v", ms=8, color=ARM_COLOURS[arm], mec="white")
    axes.set_ylim(low - 0.2 * (high - low) * bool(lowest), high)
    axes.legend(loc="best")
    said = "; ".join(f"{arm}: {best.at:.2f}{_bounds(best)}" for arm, best in lowest)
    caption = (
        "Final validation loss, mean over seeds with 95 % intervals; small marks: single seeds. Triangles and bars at the foot: where the "
        "loss is lowest, by the parabola through the lowest mean and its neighbours, with a bootstrap interval over seeds"
    )
    return Drawing(canvas, rows, f"{title}. {caption}{f' ({said})' if said else ''}. {about(runs, scale)}", notes=notes)


def _bounds(best: statistics.Minimum) -> str:
    return "" if best.low is None else f" [{best.low:.2f}, {best.high:.2f}]"


def _minimum_notes(arm: str, best: statistics.Minimum) -> list[str]:
    notes = []
    if best.edge:
        notes.append(f"{arm}: the lowest mean is at the {best.edge} γ that was run; the minimum may lie beyond it.")
    elif best.low is not None and best.beyond > 0.025:
        share = f"{100 * best.beyond:.0f} %"
        notes.append(f"{arm}: in {share} of the resamples the lowest mean is at an end of the scan: the interval is open there.")
    if best.low is None:
        notes.append(f"{arm}: one seed, so the minimum has no interval.")
    elif best.n < 3:
        notes.append(f"{arm}: an interval from {best.n} seeds leaves the truth out more often than 5 % of the time.")
    return notes


# ---- the table -------------------------------------------------------------------------------------------------------------------------


FIGURES = {
    figure.id: figure
    for figure in (
        Figure(
            "fig1b", "Gain of γ = 1 against size", "2.1", TRAINED,
            lambda grid: cells_of(grid, dense_sizes(grid), ["plain"], rates=True), _gap_by_size,
        ),
        Figure(
            "fig2a", "Scaling law with the adjustments", "2.2", TRAINED,
            lambda grid: cells_of(grid, dense_sizes(grid), ["plain", "adjusted"], rates=True), _scaling,
        ),
        Figure(
            "fig3b", "Loss against γ", "2.4", TRAINED,
            lambda grid: cells_of(grid, dense_sizes(grid)[:1], ["plain", "adjusted"], gammas=()), _by_gamma,
        ),
    )
}  # fmt: skip
