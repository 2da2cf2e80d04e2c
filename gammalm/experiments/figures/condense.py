"""Figures of condensation, from runs that were measured while they trained: cosines between rows, stable ranks, over the steps.

The paper does not say which matrices it shows [R]: we show queries and the FFN's up-projection of the first layer as heat maps (fig4d,
fig4e) and their stable ranks (fig4f, fig4g); of its appendix, every matrix in four groups: queries and keys (fig5), values, gate and output
(fig6), the FFN (fig7), embedding and head (fig8).

Quantities of their rows; labels matrix (its path below a layer, as attn/q), layer (from 0; none of the embedding), gamma, seed:

    row cosine, random row cosine      mean |cosine| between rows after `x` steps, 0 the fresh state; what random rows have
    stable rank, random stable rank    the same; of a mixture's experts the mean
    initial, lowest, final stable rank, step of lowest stable rank   of the mean over layers, with layer "mean"

Sections: the paper's 2.6 and 7; science 7.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gammalm.analysis.condensation import heat_map
from gammalm.errors import ConfigError, DataError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import TRAINED, Drawing, Figure, about, point
from gammalm.experiments.figures.cells import GAMMAS
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.monitors import read_maps
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import Estimate

SHOWN = ("attn/q", "ffn/up")
ORDER = "leader"  # of the rows of a heat map, taken anew at each snapshot
SNAPSHOTS = 5
GROUPS = {"fig5": ("attn/q", "attn/k"), "fig6": ("attn/v", "attn/gate", "attn/out"), "fig7": ("ffn/",), "fig8": ("embed/", "head/")}
FRESH = 0.5  # where step 0 stands on a logarithmic axis
COLUMNS = {"stable rank": "stable_rank", "row cosine": "mean_abs_cosine"}

Curves = dict[tuple[str, int | None], dict[int, float]]  # (matrix, layer) -> step -> value


def monitored(grid: Grid, gammas: Sequence[float] = GAMMAS) -> list[Cell]:
    """The cells whose weights are measured while they train."""
    return [c for c in grid.cells if "condensation" in c.overrides.get("monitor.kinds", ()) and c.labels["gamma"] in gammas]


def curves_of(run: Run, column: str) -> Curves:
    """`column` of the matrices of a run over its steps, mean over experts; what is not known (None) is left out."""
    found: dict = {}
    for row in run.monitors.get("condensation", []):
        for matrix in row["matrices"]:
            if matrix[column] is not None:
                name = matrix["path"].partition("layers/")[2] or matrix["path"]
                found.setdefault((name, matrix["layer"]), {}).setdefault(row["step"], []).append(matrix[column])
    return {key: {step: float(np.mean(values)) for step, values in steps.items()} for key, steps in found.items()}


def mean_over_layers(curves: Curves, matrix: str) -> dict[int, float]:
    """step -> mean over the layers that have a value at that step."""
    of = [curve for (name, _), curve in curves.items() if name == matrix]
    return {step: float(np.mean([curve[step] for curve in of if step in curve])) for step in sorted(set().union(*of))}


def _measured(study: Study, gammas: Sequence[float]) -> list[Run]:
    """The runs that have measured something. Raises ConfigError where there are none."""
    names = {cell.name for cell in monitored(study.grid, gammas)}
    runs = [run for run in study.runs if run.cell.name in names and run.monitors.get("condensation")]
    if not runs:
        raise ConfigError(f"{study.workdir}: no run has measured its weights while it trained. Train those with monitor.kinds.")
    return runs


def _value(value: float, seeds: int = 1) -> Estimate:
    return Estimate(value, seeds, None, None)


def curve_rows(figure: str, run: Run, quantity: str, matrices: Sequence[str]) -> list[dict]:
    """Rows of the curves of one run."""
    labels = {"size": run.cell.labels["size"], "gamma": run.gamma, "seed": run.seed}
    return [
        point(figure, quantity, _value(value), **labels, matrix=matrix, layer=layer, x=step)
        for (matrix, layer), curve in curves_of(run, COLUMNS[quantity]).items()
        if matrix in matrices
        for step, value in sorted(curve.items())
    ]


def random_value(run: Run, quantity: str, matrix: str) -> float | None:
    """What a matrix of independent weights of this shape has, the same at every step and layer; None: not known."""
    random = curves_of(run, f"{COLUMNS[quantity]}_random")
    return next((value for (name, _), curve in random.items() if name == matrix for value in curve.values()), None)


def random_rows(figure: str, run: Run, quantity: str, matrices: Sequence[str]) -> list[dict]:
    """A row for each matrix of `random_value`, which is alike for all runs of a size."""
    found = {matrix: random_value(run, quantity, matrix) for matrix in matrices}
    labels = {"size": run.cell.labels["size"]}
    return [point(figure, f"random {quantity}", _value(value, 0), **labels, matrix=m) for m, value in found.items() if value is not None]


def summary_rows(figure: str, run: Run, matrices: Sequence[str]) -> list[dict]:
    """Initial, lowest and final stable rank of each matrix, and when it is lowest."""
    labels = {"size": run.cell.labels["size"], "gamma": run.gamma, "seed": run.seed, "layer": "mean"}
    curves, rows = curves_of(run, "stable_rank"), []
    for matrix in matrices:
        curve = mean_over_layers(curves, matrix)
        lowest = min(curve, key=curve.get)
        values = {
            "initial stable rank": curve[min(curve)], "lowest stable rank": curve[lowest],
            "step of lowest stable rank": lowest, "final stable rank": curve[max(curve)],
        }  # fmt: skip
        rows += [point(figure, quantity, _value(value), **labels, matrix=matrix) for quantity, value in values.items()]
    return rows


def _matrices(runs: Sequence[Run], prefixes: Sequence[str] = ("",)) -> list[str]:
    """The matrices of the runs that begin with one of `prefixes`, in the model's order."""
    names = dict.fromkeys(name for run in runs for name, _ in curves_of(run, "stable_rank"))
    return [name for name in names if name.startswith(tuple(prefixes))]


# ---- stable ranks: fig4f, fig4g, fig5 to fig8 ----------------------------------------------------------------------------------------


def steps_axis(axes, last: int) -> None:
    """A logarithmic axis of steps that has a place for step 0."""
    axes.set_xscale("log")
    decades = [10**n for n in range(int(np.log10(max(last, 1))) + 1)]
    plots.ticks(axes.xaxis, [FRESH, *decades])
    axes.xaxis.set_major_formatter(lambda x, _: "0" if x == FRESH else f"{x:,.0f}")
    axes.set_xlabel("step")


def _rank_panel(axes, runs: Sequence[Run], matrix: str) -> None:
    """Stable rank of one matrix over the steps: thin each layer, strong their mean; dashed what a random matrix has."""
    colour, marker = plots.colours(GAMMAS), plots.markers(GAMMAS)
    axes.set_title(matrix, fontsize=10, loc="left")
    last = 1
    for run in runs:
        curves = curves_of(run, "stable_rank")
        for (name, _), curve in curves.items():
            if name == matrix:
                axes.plot([max(step, FRESH) for step in curve], list(curve.values()), color=colour[run.gamma], lw=0.7, alpha=0.5)
        mean = mean_over_layers(curves, matrix)
        look = {"color": colour[run.gamma], "lw": 1.7, "marker": marker[run.gamma], "ms": 3.5}
        axes.plot([max(step, FRESH) for step in mean], list(mean.values()), **look)
        last = max(last, *mean)
    if (random := random_value(runs[0], "stable rank", matrix)) is not None:
        axes.axhline(random, color="#1b1f27", lw=1, ls="--")
    axes.set_ylim(bottom=0)
    steps_axis(axes, last)


@plots.styled
def _ranks(study: Study, scale: str, *, figure: str, title: str, prefixes: Sequence[str], gammas: Sequence[float]) -> Drawing:
    runs = _measured(study, gammas)
    matrices = _matrices(runs, prefixes)
    if not matrices:
        raise ConfigError(f"{figure}: the monitored runs have no matrix that begins with {' or '.join(prefixes)}.")
    size = runs[0].cell.labels["size"]
    columns = min(3, len(matrices))
    lines = -(-len(matrices) // columns)
    canvas = Canvas(figsize=(max(4.4, 3.3 * columns), 0.8 + 2.6 * lines), layout="constrained")
    canvas.suptitle(f"{title}, {size}", x=0.02, ha="left", fontsize=11, fontweight="bold")
    grid = canvas.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(matrices) :]:
        axes.set_axis_off()
    for axes, matrix in zip(grid.flat, matrices, strict=False):
        _rank_panel(axes, runs, matrix)
    for axes in grid[:, 0]:
        axes.set_ylabel("stable rank")
    look = plots.colours(GAMMAS), plots.markers(GAMMAS)
    shown = [gamma for gamma in GAMMAS if any(run.gamma == gamma for run in runs)]
    handles = [Line2D([], [], color=look[0][g], marker=look[1][g], ms=4, lw=1.7, label=f"γ = {g:g}") for g in shown]
    handles.append(Line2D([], [], color="#1b1f27", lw=1, ls="--", label="random matrix"))
    canvas.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    rows = [row for run in runs for row in curve_rows(figure, run, "stable rank", matrices)]
    rows += random_rows(figure, runs[0], "stable rank", matrices)
    rows += [row for run in runs for row in summary_rows(figure, run, matrices)]
    caption = (
        "Stable rank ‖W‖_F²/‖W‖₂² over training, from before the first step (0) on: strong the mean over layers, thin each layer. Dashed: "
        f"a matrix of independent weights of this shape. Arm: {runs[0].cell.labels['arm']}."
    )
    return Drawing(canvas, rows, f"{title}, {size}. {caption} {about(runs, scale)}", notes=_unfinished(runs))


def _unfinished(runs: Sequence[Run]) -> list[str]:
    return [f"{run.cell.name} is {run.status}: what it has measured so far." for run in runs if run.status != "done"]


# ---- heat maps: fig4d, fig4e -----------------------------------------------------------------------------------------------------------


def snapshots_of(run: Run, count: int = SNAPSHOTS) -> list[int]:
    """Steps at which heat maps are shown: the first, the last, and evenly spaced ones of those that were measured between."""
    steps = [row["step"] for row in run.monitors["condensation"]]
    return sorted({steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)})


def maps_of(run: Run, steps: Sequence[int]) -> tuple[Mapping, list[str]]:
    """{(matrix, step): heat map [s, s]} of the matrices that are shown, of the first layer; and what is missing, in sentences."""
    found, notes = {}, []
    for step in steps:
        try:
            maps = read_maps(run.folder, step)
        except DataError as error:
            notes.append(str(error))
            continue
        for matrix in SHOWN:
            cosines = next((one for (path, layer), one in maps.items() if path.endswith(f"layers/{matrix}") and layer == 0), None)
            if cosines is not None:
                found[matrix, step] = heat_map(cosines, ORDER)[0]
    if not found:
        raise ConfigError(f"{run.cell.name}: no snapshot of {' or '.join(SHOWN)} can be read. {' '.join(notes)}")
    return found, notes


@plots.styled
def _maps(study: Study, scale: str, *, figure: str, gamma: float) -> Drawing:
    runs = _measured(study, [gamma])
    run = runs[0]
    steps = snapshots_of(run)
    maps, notes = maps_of(run, steps)
    title = f"Cosines between rows over training, γ = {gamma:g}, {run.cell.labels['size']}"
    canvas = Canvas(figsize=(1.75 * len(steps) + 1.2, 1.9 * len(SHOWN) + 0.7), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    grid = canvas.subplots(len(SHOWN), len(steps), squeeze=False)
    means, image = curves_of(run, "mean_abs_cosine"), None
    for i, matrix in enumerate(SHOWN):
        for j, step in enumerate(steps):
            axes = grid[i, j]
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if (matrix, step) in maps:
                image = axes.imshow(maps[matrix, step], cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
                axes.set_xlabel(f"mean |cos| {means[matrix, 0][step]:.3f}", fontsize=8)
            if i == 0:
                axes.set_title(f"step {step:,}", fontsize=10)
            if j == 0:
                axes.set_ylabel(f"{matrix}, layer 0", fontsize=9)
    canvas.colorbar(image, ax=grid, label="cosine", shrink=0.7, aspect=30, pad=0.01)
    rows = [row for one in runs for row in curve_rows(figure, one, "row cosine", _matrices(runs))]
    rows += random_rows(figure, run, "row cosine", _matrices(runs))
    caption = (
        "Cosine between the weights of every two output neurons (up to 256 evenly spaced ones) of the first layer's queries and of its "
        f"FFN's up-projection, at {len(steps)} steps. Rows are ordered anew at each step by greedy leader clustering at cosine > 0.4; zero "
        f"rows are left out. Below: the mean |cosine| of different rows. The maps are of seed {run.seed}. "
        f"Arm: {run.cell.labels['arm']}."
    )
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", notes=[*notes, *_unfinished(runs)])


# ---- the table -------------------------------------------------------------------------------------------------------------------------


def _figure(id_: str, title: str, section: str, gammas: Sequence[float], draw) -> Figure:
    return Figure(id_, title, section, TRAINED, lambda grid: monitored(grid, gammas), draw)


def _ranks_figure(id_: str, title: str, section: str, prefixes: Sequence[str], gammas: Sequence[float] = GAMMAS) -> Figure:
    draw = functools.partial(_ranks, figure=id_, title=title, prefixes=prefixes, gammas=gammas)
    return _figure(id_, title, section, gammas, draw)


FIGURES = {
    figure.id: figure
    for figure in (
        _figure("fig4d", "Cosines between rows over training, γ = 1", "2.6", [1.0], functools.partial(_maps, figure="fig4d", gamma=1.0)),
        _figure("fig4e", "Cosines between rows over training, γ = .5", "2.6", [0.5], functools.partial(_maps, figure="fig4e", gamma=0.5)),
        _ranks_figure("fig4f", "Stable rank over training, γ = 1", "2.6", SHOWN, [1.0]),
        _ranks_figure("fig4g", "Stable rank over training, γ = .5", "2.6", SHOWN, [0.5]),
        _ranks_figure("fig5", "Stable rank of queries and keys", "7", GROUPS["fig5"]),
        _ranks_figure("fig6", "Stable rank of values, gate and output", "7", GROUPS["fig6"]),
        _ranks_figure("fig7", "Stable rank of the feed-forward matrices", "7", GROUPS["fig7"]),
        _ranks_figure("fig8", "Stable rank of embedding and head", "7", GROUPS["fig8"]),
    )
}
