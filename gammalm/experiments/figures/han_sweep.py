"""E1 of the second source: training against the initial standard deviation σ, which is the same for every matrix of a net; `han_bands`
says how a σ is judged.

Quantities of the rows, at x = σ where they have one; label optimizer:

    test loss, test accuracy, train loss    after the last epoch (training: mean over it); a seed that is not finite is left out
    accuracy below best                     test accuracy minus that of the best σ (by mean), paired by seed
    gradient norm                           of a layer's kernel, `at` "first step" or "last epoch" (mean); as log10
    share of seeds                          in which σ is `band` by the rule for one seed
    share                                   of the σ in a `range` of the source that are `band`, mean over seeds
    share diverged                          of the σ in that range whose numbers were not finite
    log10 best std                          log10 of the σ with the best test accuracy, by seed
    log10 stable from, log10 stable to      ends of the stable σ, halfway to the next one, by seed
    c_phi, d_phi                            of an `activation` at unit variance: E[φ(z)²]/Var z and E[φ'(z)²], closed forms that σ rests on
    critical std                            theory.mlp.critical_std, `direction` forward or backward: a closed form, nothing is fitted

Shape legend: training/nets.py.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gammalm.errors import ConfigError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import Drawing, Figure, point
from gammalm.experiments.figures.han_bands import LOUD, NAMES, NEAR, QUIET, RANGES, accuracy, judge, numbers
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import Estimate, estimate
from gammalm.theory.activations import c_phi, d_phi
from gammalm.theory.mlp import critical_std

BANDS = dict(zip(NAMES, ("#dbeafe", "#f3f4f6", "#dcfce7", "#fee2e2"), strict=True))
DIRECTIONS = {"forward": ("#1b1f27", "--"), "backward": ("#6b7280", ":")}
CEILING = 30.0  # of the drawn losses


class Sweep:
    """The runs of one optimizer, [K] values of σ with S seeds each, and what the rule makes of them."""

    def __init__(self, optimizer: str, runs: Sequence[Run]):
        self.optimizer = optimizer
        self.widths = runs[0].cell.config().model.widths
        self.activation = runs[0].cell.config().model.activation
        self.guess = math.log(max(2, self.widths[-1]))  # one output tells two classes apart
        self.stds = sorted({run.cell.labels["std"] for run in runs})
        self.of = {std: {run.seed: run for run in runs if run.cell.labels["std"] == std} for std in self.stds}
        means = {std: float(np.mean([accuracy(run) for run in of.values()])) for std, of in self.of.items()}
        self.best = max(means, key=means.get)
        self.bands = {std: judge(list(of.values()), means[self.best], self.guess) for std, of in self.of.items()}
        # The same rule for one seed, against the best of that seed.
        self.seeds = sorted(set.intersection(*(set(of) for of in self.of.values())))
        self.by_seed = {}
        for seed in self.seeds:
            best = max(accuracy(of[seed]) for of in self.of.values())
            self.by_seed[seed] = {std: judge([of[seed]], best, self.guess) for std, of in self.of.items()}

    def values(self, std: float, name: str) -> list[float]:
        """The last entry of a record's list, of the seeds where it is finite."""
        last = [float(numbers(run, name)[-1]) for run in self.of[std].values()]
        return [value for value in last if math.isfinite(value)]

    def gradient(self, std: float, at: int) -> np.ndarray:
        """log10 of the gradient norms [S, L] at entry `at` of the records; seeds where they are not finite or zero are left out."""
        norm_SL = np.array([numbers(run, "gradient_norm")[at] for run in self.of[std].values()])
        return np.log10(norm_SL[np.all(np.isfinite(norm_SL) & (norm_SL > 0), axis=1)])

    def edges(self, seed: int) -> tuple[float, float] | None:
        """log10 of where the stable σ begin and end in one seed; None where there are none."""
        stable = [i for i, std in enumerate(self.stds) if self.by_seed[seed][std] == "stable"]
        if not stable:
            return None
        log = np.log10(self.stds)
        step = log[1] - log[0] if len(log) > 1 else 0.0
        return float(log[stable[0]] - step / 2), float(log[stable[-1]] + step / 2)

    def rows(self) -> list[dict]:
        """Everything the figure says, see the head of this file."""
        rows, own = [], {"optimizer": self.optimizer}
        best = {seed: accuracy(run) for seed, run in self.of[self.best].items()}
        for std in self.stds:
            at = own | {"std": std, "x": std}
            for quantity in ("test loss", "test accuracy", "train loss"):
                if found := self.values(std, quantity.replace(" ", "_")):
                    rows.append(_row(quantity, estimate(found), at))
            below = [accuracy(run) - best[seed] for seed, run in self.of[std].items() if seed in best]
            rows.append(_row("accuracy below best", estimate(below), at))
            for where, entry in (("first step", 0), ("last epoch", -1)):
                for layer, logs in enumerate(self.gradient(std, entry).T, start=1):
                    if len(logs):
                        rows.append(_row("gradient norm", estimate(logs), at | {"layer": layer, "at": where}))
            for band in BANDS:
                share = float(np.mean([bands[std] == band for bands in self.by_seed.values()])) if self.by_seed else 0.0
                labels = at | {"band": band, "is": self.bands[std] == band}
                rows.append(_row("share of seeds", Estimate(share, len(self.seeds), None, None), labels))
        return rows + self._summaries(own)

    def _summaries(self, own: dict) -> list[dict]:
        rows = []
        for band, (low, high) in RANGES.items():
            inside, labels = [std for std in self.stds if low <= std <= high], own | {"band": band, "range": f"{low:g} to {high:g}"}
            if inside and self.seeds:
                shares = [float(np.mean([bands[std] == band for std in inside])) for bands in self.by_seed.values()]
                rows.append(_row("share", estimate(shares), labels))
                gone = [float(np.mean([self.of[std][seed].row["diverged_at"] is not None for std in inside])) for seed in self.seeds]
                rows.append(_row("share diverged", estimate(gone), labels))
        peaks = [math.log10(max(self.stds, key=lambda std: accuracy(self.of[std][seed]))) for seed in self.seeds]
        if peaks:
            rows.append(_row("log10 best std", estimate(peaks), own))
        edges = [edge for seed in self.seeds if (edge := self.edges(seed))]
        for i, end in enumerate(("from", "to")):
            if edges:
                rows.append(_row(f"log10 stable {end}", estimate([edge[i] for edge in edges]), own))
        for direction in DIRECTIONS:
            exact = Estimate(critical_std(self.widths, self.activation, direction), 0, None, None)
            rows.append(_row("critical std", exact, own | {"direction": direction}))
        return rows


def _row(quantity: str, e: Estimate, labels: dict) -> dict:
    return point("han-e1", quantity, e, **labels)


def _constants() -> list[dict]:
    """What the source gives of ReLU and GELU."""
    return [
        _row(quantity, Estimate(float(constant(activation, 1.0)), 0, None, None), {"activation": activation})
        for quantity, constant in (("c_phi", c_phi), ("d_phi", d_phi))
        for activation in ("relu", "gelu")
    ]


# ---- drawing ---------------------------------------------------------------------------------------------------------------------------


@plots.styled
def _draw(study: Study, scale: str) -> Drawing:
    done = [run for run in study.runs if run.status == "done"]
    if not done:
        raise ConfigError("han-e1: no run has finished. Run it again without --no-training.")
    sweeps = [
        Sweep(name, [run for run in done if run.cell.labels["optimizer"] == name])
        for name in dict.fromkeys(run.cell.labels["optimizer"] for run in done)
    ]
    title = "Training against the initial standard deviation σ"
    canvas = Canvas(figsize=(10.2, 12.6), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    panels = canvas.subplots(4, len(sweeps), squeeze=False)
    colours = colormaps["turbo"]
    scale_of = LogNorm(sweeps[0].stds[0], sweeps[0].stds[-1])
    for sweep, column in zip(sweeps, panels.T, strict=True):
        column[0].set_title(_said(sweep), fontsize=10, loc="left")
        _trajectories(column[0], sweep, lambda std: colours(scale_of(std)))
        _outcome(column[1], column[2], sweep)
        _gradients(column[3], sweep)
        for axes in column[1:]:
            _bands(axes, sweep)
            axes.set_xlabel("σ")
    canvas.colorbar(ScalarMappable(scale_of, colours), ax=list(panels[0]), label="σ", pad=0.01)
    handles = [Patch(color=colour, label=band) for band, colour in BANDS.items()]
    handles += [
        Line2D([], [], color=colour, ls=ls, label=f"critical σ, {name}: {critical_std(sweeps[0].widths, sweeps[0].activation, name):.3f}")
        for name, (colour, ls) in DIRECTIONS.items()
    ]
    handles.append(Line2D([], [], color="#15803d", lw=4, alpha=0.5, label="the source's stable band"))
    canvas.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    rows = [row for sweep in sweeps for row in sweep.rows()] + _constants()
    return Drawing(canvas, rows, f"{title}. {_caption(sweeps, done)}", notes=[_found(sweep) for sweep in sweeps])


def _said(sweep: Sweep) -> str:
    rate = next(iter(sweep.of[sweep.best].values())).cell.config().optimizer.learning_rate
    return f"{ {'sgd': 'SGD', 'adam': 'Adam'}[sweep.optimizer] }, rate {rate:g}"


def _trajectories(axes, sweep: Sweep, colour) -> None:
    """Training loss against epochs, a line per σ, mean over seeds; a line ends where a seed is not finite."""
    for std in sweep.stds:
        curve_SP = np.minimum([numbers(run, "curve") for run in sweep.of[std].values()], 1e6)
        epochs = len(next(iter(sweep.of[std].values())).row["train_loss"])
        x_P = (np.arange(curve_SP.shape[1]) + 0.5) * epochs / curve_SP.shape[1]
        axes.plot(x_P, curve_SP.mean(axis=0), color=colour(std), lw=1.1)
    axes.axhline(sweep.guess, color="#1b1f27", lw=0.8, ls=":")
    axes.set_yscale("log")
    axes.set_ylim(top=CEILING)
    axes.set_xlabel("epochs")
    axes.set_ylabel(f"training loss (cut off at {CEILING:g})")


def _outcome(loss, hits, sweep: Sweep) -> None:
    """Final losses, and final accuracy, against σ."""
    for name, look in (("test_loss", {"color": "#9a3412", "marker": "o"}), ("train_loss", {"color": "#1d4ed8", "marker": "s"})):
        points = {std: estimate(values) for std in sweep.stds if (values := sweep.values(std, name))}
        plots.estimates(loss, points, look | {"ms": 4, "lw": 1.3, "label": name.replace("_", " ").replace("train", "training")})
    loss.axhline(sweep.guess, color="#1b1f27", lw=0.8, ls=":")
    loss.set_yscale("log")
    loss.set_ylim(top=CEILING)
    loss.set_ylabel(f"loss at the end (cut off at {CEILING:g})")
    loss.legend(loc="upper left")
    points = {std: estimate([accuracy(run) for run in of.values()]) for std, of in sweep.of.items()}
    plots.estimates(hits, points, {"color": "#9a3412", "marker": "o", "ms": 4, "lw": 1.3})
    hits.set_ylim(0, 1.02)
    hits.set_ylabel("test accuracy at the end")


def _gradients(axes, sweep: Sweep) -> None:
    """Gradient norm of each layer's kernel against σ: at the first step, and dashed over the last epoch."""
    layers = len(sweep.widths) - 1
    for at, ls in ((0, "-"), (-1, "--")):
        logs = {std: sweep.gradient(std, at) for std in sweep.stds}
        for layer in range(layers):
            points = {std: 10 ** float(log_SL[:, layer].mean()) for std, log_SL in logs.items() if len(log_SL)}
            label = f"layer {layer + 1}" if at == 0 else None
            axes.plot(list(points), list(points.values()), color=colormaps["viridis"](layer / layers), ls=ls, lw=1.3, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("gradient norm (dashed: last epoch)")
    axes.legend(loc="upper left")


def _bands(axes, sweep: Sweep) -> None:
    """The band of each σ as the ground of its stretch; the source's stable band along the bottom; the critical σ's."""
    log = np.log10(sweep.stds)
    half = (log[1] - log[0]) / 2 if len(log) > 1 else 0.1
    for std, at in zip(sweep.stds, log, strict=True):
        axes.axvspan(10 ** (at - half), 10 ** (at + half), color=BANDS[sweep.bands[std]], lw=0, zorder=0)
    axes.plot(RANGES["stable"], [0.012, 0.012], transform=axes.get_xaxis_transform(), color="#15803d", lw=4, alpha=0.5, clip_on=False)
    for direction, (colour, ls) in DIRECTIONS.items():
        axes.axvline(critical_std(sweep.widths, sweep.activation, direction), color=colour, ls=ls, lw=1.2)
    axes.set_xscale("log")
    axes.set_xlim(10 ** (log[0] - half), 10 ** (log[-1] + half))
    axes.grid(visible=False)


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def _caption(sweeps: Sequence[Sweep], runs: Sequence[Run]) -> str:
    config = runs[0].cell.config()
    widths = "-".join(map(str, config.model.widths))
    return (
        f"A {widths} net with {config.model.activation} on {config.data.name} ({runs[0].row['source']}), {len(sweeps[0].stds)} values of σ "
        f"for all matrices, biases 0, {len(sweeps[0].seeds)} seeds, batches of {config.batch.examples}, {config.train.epochs} epochs. "
        f"Bars: 95 % over seeds. Bands by a rule fixed before the runs: exploding, a number that is not finite or an epoch whose mean "
        f"training loss exceeds {LOUD:g} ln 10; vanishing, a last training loss above {QUIET:g} ln 10; stable, neither and within "
        f"{NEAR:g} of the best accuracy; degraded, the rest. Dotted: the loss of guessing. Critical σ: at which the net passes on the mean "
        "square of its inputs (forward), or of the gradient by its outputs (backward), unchanged; a closed form. Gradients that are 0, "
        "where units have died, or not finite are not drawn. Optimizers, rates, epochs, batch and standardized pixels are ours; the source "
        "does not give them."
    )


def _found(sweep: Sweep) -> str:
    """Which σ are in which band, from small to large, in a sentence."""
    parts = []
    for band, stretch in itertools.groupby(sweep.stds, key=sweep.bands.get):
        found = list(stretch)
        parts.append(f"{band} {found[0]:.2g}" + (f" to {found[-1]:.2g} ({len(found)} values)" if len(found) > 1 else ""))
    return f"{_said(sweep)}: {'; '.join(parts)}; best accuracy at σ = {sweep.best:.2g}."


FIGURES = {
    "han-e1": Figure("han-e1", "Training against the initial standard deviation", "E1", ("cpu",), lambda grid: list(grid.cells), _draw,
                     "grids/han_e1"),
}  # fmt: skip
