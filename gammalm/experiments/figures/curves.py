"""Figures of loss curves side by side: γ .5 and 1 by size, the ablations of ε and gate, the mixtures of experts.

Quantities of their rows, in nats per token; labels: size, parameters, arm, gamma, and rate "fixed" (each size at its own, as in the paper).

    train loss          mean over seeds, smoothed, at `x` tokens
    validation loss     final
    gap                 loss(γ = 1) − loss(γ = .5) of an arm: below zero, the small initialization is better
    eps effect          loss(eps) − loss(plain): ε = 1e-12 against 1e-5, both without gate
    gate effect         loss(adjusted) − loss(eps): elementwise gate against none, both with ε = 1e-12
    gap contrast        gap(adjusted) − gap(plain) of a mixture
    gate contrast       gate effect at γ = 1 − gate effect at γ = .5

The paper, sections 2.1 and 2.3; science 2, 3 and 9.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from gammalm.errors import ConfigError
from gammalm.experiments import plots, statistics
from gammalm.experiments.figures.catalog import TRAINED, Drawing, Figure, about, dense_sizes, largest, mixture_sizes, point
from gammalm.experiments.figures.cells import ARM_COLOURS, ARM_WORDS, GAMMAS, cells_of, finished, losses_of
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import Estimate

EPS, GATE = "loss(ε = 1e-12) − loss(ε = 1e-5), nats", "loss(gate) − loss(no gate), nats"  # titles of axes
DOTS = "Filled: the 95 % interval over seeds excludes zero; open: it does not, or there is one seed."


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two sets of runs compared: the labels they share, those of either side, and what changed − base is called in the rows."""

    title: str
    shared: Mapping
    base: Mapping
    changed: Mapping
    quantity: str

    def look(self, side: Mapping) -> dict:
        """Name and colour of a side by what tells the sides apart."""
        if "gamma" in side:
            return {"label": f"γ = {side['gamma']:g}", "color": plots.colours(GAMMAS)[side["gamma"]]}
        return {"label": ARM_WORDS[side["arm"]], "color": ARM_COLOURS[side["arm"]]}


@plots.styled
def _side_by_side(study: Study, scale: str, id_: str, title: str, cells: Sequence[Cell], pairs: Sequence[_Pair], dots: str) -> Drawing:
    """A panel of curves for each pair; below them, where `dots` gives that panel its axis title, each pair's final difference.

    Curves are training losses, mean over seeds; the frame leaves out the first fifth, where every curve falls steeply.
    """
    runs = finished(study, cells)
    notes = [f"{pair.title}: nothing has finished." for pair in pairs if not any(_is(run, pair.shared) for run in runs)]
    pairs = [pair for pair in pairs if any(_is(run, pair.shared) for run in runs)]
    columns, lines = min(2, len(pairs)), -(-len(pairs) // 2)
    below = 0.95 + 0.32 * len(pairs) if dots else 0
    canvas = Canvas(figsize=(4.4 if columns == 1 else 7.2, 0.3 + 2.7 * lines + below), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    names = [f"curve{i}" if i < len(pairs) else "." for i in range(columns * lines)]
    mosaic = [names[i : i + columns] for i in range(0, len(names), columns)] + ([["dots"] * columns] if dots else [])
    axes = canvas.subplot_mosaic(mosaic, height_ratios=[2.7] * lines + ([below] if dots else []))
    rows, found = [], []
    for i, pair in enumerate(pairs):
        rows += _curves(axes[f"curve{i}"], pair, runs, id_)
        sides = [losses_of(runs, **pair.shared, **side) for side in (pair.base, pair.changed)]
        difference = statistics.paired(*sides)
        if difference is None:
            notes.append(f"{pair.title}: no seed has finished on both sides, so nothing is compared.")
        else:
            parameters = max(run.row["parameters"] for run in runs if _is(run, pair.shared))
            rows.append(point(id_, pair.quantity, difference, **pair.shared, parameters=parameters, rate="fixed"))
            found.append((pair.title, difference, pair.look(pair.changed)["color"]))
    rows += _contrast(id_, pairs, runs)
    if dots and found:
        plots.dots(axes["dots"], found)
        axes["dots"].set_xlabel(dots)
    elif dots:
        axes["dots"].set_axis_off()
    caption = (
        "Lines: training loss, mean over seeds, smoothed. Marks: final validation loss with 95 % intervals over seeds; training batches "
        "follow the training mixture, validation the whole split, so line and mark need not meet."
    )
    caption += f" Below: differences of the final validation loss, paired by seed. {DOTS}" if dots else ""
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", notes=notes)


def _contrast(id_: str, pairs: Sequence[_Pair], runs: Sequence[Run]) -> list[dict]:
    """The row of the second pair's difference minus the first's, paired by seed, where there are two pairs of one model."""
    if len(pairs) != 2 or pairs[0].shared["size"] != pairs[1].shared["size"]:
        return []
    sides = [[losses_of(runs, **pair.shared, **side) for side in (pair.base, pair.changed)] for pair in pairs]
    contrast = statistics.paired(*(statistics.differences(base, changed) for base, changed in sides))
    if contrast is None:
        return []
    size, name = pairs[0].shared["size"], f"{pairs[0].quantity.removesuffix(' effect')} contrast"
    parameters = max(run.row["parameters"] for run in runs if run.cell.labels["size"] == size)
    return [point(id_, name, contrast, size=size, parameters=parameters, rate="fixed")]


def _is(run: Run, labels: Mapping) -> bool:
    return labels.items() <= run.cell.labels.items()


def _curves(axes, pair: _Pair, runs: Sequence[Run], id_: str) -> list[dict]:
    """Draws both sides of a pair and gives their rows."""
    axes.set_title(pair.title, fontsize=10, loc="left")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    rows, inside = [], []
    for marker, shift, side in (("o", 1.0, pair.base), ("s", 1.025, pair.changed)):  # so that two equal ends can be told apart
        labels = {**pair.shared, **side}
        of = [run for run in runs if _is(run, labels)]
        if not of:
            continue
        look = pair.look(side)
        parameters = {"parameters": of[0].row["parameters"], "rate": "fixed"}
        tokens, losses = _mean_curve(of)
        keep = plots.keep_points(len(tokens)) if tokens else []
        rows += [point(id_, "train loss", Estimate(losses[i], len(of), None, None), **labels, **parameters, x=tokens[i]) for i in keep]
        axes.plot([tokens[i] for i in keep], [losses[i] for i in keep], lw=1.5, **look)
        end = statistics.estimate(run.loss for run in of)
        last = max(run.row["tokens"] for run in of)
        rows.append(point(id_, "validation loss", end, **labels, **parameters))
        axes.plot([last * shift], [end.mean], marker, ms=6, color=look["color"], mec="white", mew=0.8, clip_on=False, zorder=4)
        if end.low is not None:
            axes.plot([last * shift] * 2, [end.low, end.high], lw=1.6, color=look["color"])
        inside += [end.mean, *(loss for at, loss in zip(tokens, losses, strict=True) if at >= 0.2 * last)]
    if inside:
        margin = 0.06 * (max(inside) - min(inside)) or 0.1
        axes.set_ylim(min(inside) - margin, max(inside) + margin)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plots.compact(x)))
        axes.legend(loc="upper right")
    return rows


def _mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Tokens that all runs have logged a finite training loss at, and the mean of these losses, smoothed."""
    logged = [{row["tokens"]: row["loss"] for row in run.metrics["train"] if np.isfinite(row.get("loss") or np.nan)} for run in runs]
    tokens = sorted(set.intersection(*map(set, logged)))
    return tokens, plots.smoothed([sum(losses[at] for losses in logged) / len(logged) for at in tokens])


def _curves_by_size(study: Study, scale: str) -> Drawing:
    sizes = dense_sizes(study.grid)
    pairs = [_gamma_pair(size, size, "plain") for size in sizes]
    title = "Plain architecture: γ = .5 and γ = 1 by model size"
    return _side_by_side(study, scale, "fig1a", title, cells_of(study.grid, sizes, ["plain"]), pairs, "")


def _gamma_pair(title: str, size: str, arm: str) -> _Pair:
    return _Pair(title, {"size": size, "arm": arm}, {"gamma": 0.5}, {"gamma": 1.0}, "gap")


def _arms(study: Study, scale: str, *, id_: str, title: str, base: str, changed: str, dots: str, gammas: Sequence[float]) -> Drawing:
    """Two arms against each other at the largest dense size, at each of `gammas`."""
    quantity = {"eps": "eps effect", "adjusted": "gate effect"}[changed]
    size = largest(study.grid)
    pairs = [_Pair(f"γ = {g:g}", {"size": size, "gamma": g}, {"arm": base}, {"arm": changed}, quantity) for g in gammas]
    cells = cells_of(study.grid, [size], [base, changed], gammas)
    return _side_by_side(study, scale, id_, f"{title}, {size}", cells, pairs, dots)


def _mixture(study: Study, scale: str, *, id_: str, which: int) -> Drawing:
    """One mixture of experts, plain and adjusted."""
    size = _mixture_size(study.grid, which)
    pairs = [_gamma_pair(arm, size, arm) for arm in ("plain", "adjusted")]
    title, cells = f"Mixture of experts {size}: γ = .5 and γ = 1", cells_of(study.grid, [size], ["plain", "adjusted"])
    return _side_by_side(study, scale, id_, title, cells, pairs, "loss(γ = 1) − loss(γ = .5), nats")


def _mixture_size(grid: Grid, which: int) -> str:
    sizes = mixture_sizes(grid)
    if which >= len(sizes):
        raise ConfigError(f"grid {grid.name} has {len(sizes)} sizes of mixtures of experts; this figure is of number {which + 1}.")
    return sizes[which]


def _ablation(id_: str, title: str, base: str, changed: str, dots: str, gammas: Sequence[float]) -> Figure:
    draw = functools.partial(_arms, id_=id_, title=title, base=base, changed=changed, dots=dots, gammas=gammas)
    return Figure(id_, title, "2.1", TRAINED, lambda grid: cells_of(grid, [largest(grid)], [base, changed], gammas), draw)


def _mixture_figure(id_: str, title: str, which: int) -> Figure:
    def reads(grid: Grid) -> list[Cell]:
        return cells_of(grid, mixture_sizes(grid)[which : which + 1], ["plain", "adjusted"])

    return Figure(id_, title, "2.3", TRAINED, reads, functools.partial(_mixture, id_=id_, which=which))


FIGURES = {
    figure.id: figure
    for figure in (
        Figure(
            "fig1a", "Loss curves at γ = .5 and 1 by size", "2.1", TRAINED,
            lambda grid: cells_of(grid, dense_sizes(grid), ["plain"]), _curves_by_size,
        ),
        _ablation("fig1d", "Norm constant ε at γ = 1", "plain", "eps", EPS, (1.0,)),
        _ablation("fig1e", "Norm constant ε at γ = .5", "plain", "eps", EPS, (0.5,)),
        _ablation("fig1h", "Gated attention at γ = .5 and 1", "eps", "adjusted", GATE, GAMMAS),
        _mixture_figure("fig2b", "The smaller mixture of experts", 0),
        _mixture_figure("fig2c", "The larger mixture of experts", 1),
    )
}  # fmt: skip
