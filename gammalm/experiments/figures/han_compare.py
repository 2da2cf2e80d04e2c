"""E2 of the second source: initializers against each other on UCI Wine Quality, paired by seed.

What is measured of a run. Training losses are means over the batches of an epoch.

    epochs to target    when its training loss first falls below the target, on the line through its value at the start (of the test rows:
                        none has been trained on) and at the middle of each epoch; as many as there are where it never does. The target is
                        where Xavier normal has made nine tenths of its way from ln 2, the loss of guessing, to its last loss (mean over
                        seeds), for each label and optimizer
    final loss          training loss of the last epoch
    train accuracy      of the last epoch, as the training loss
    test accuracy       after the last epoch

Quantities of the rows; labels measure, target (the label that is learned), optimizer:

    mean, median        of a `preset`
    difference          second − first, with the t-interval; first and second are presets. `p` by SciPy's paired t-test, `p_holm` corrected
                        for all comparisons of the figure; `effect` Cohen's d_z with effect_low, effect_high
    log spread ratio    ln of the standard deviation over seeds of the final loss, second − first, by a bootstrap over seeds
    target loss         see above; `missed`, of a preset's runs, on the rows of epochs to target

The source compares Xavier normal with Kaiming, normal in one place and uniform in another; so both, and uniform with uniform.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gammalm.analysis.scaling import widening
from gammalm.errors import ConfigError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import Drawing, Figure, point
from gammalm.experiments.paired_tests import Paired, holm, paired_test
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import LEVEL, Estimate, estimate

REFERENCE, WAY, GUESS = "xavier_normal", 0.9, math.log(2)
MEASURES = ("epochs to target", "final loss", "train accuracy", "test accuracy")
UNIFORM = ("xavier_uniform", "kaiming_uniform")
SHOWN = {"kaiming_normal": ("#9a3412", "o"), "kaiming_uniform": ("#d97706", "s")}  # against Xavier normal, in the lower panels
COLOURS = {
    "xavier_normal": ("#1d4ed8", "-"), "xavier_uniform": ("#60a5fa", "--"), "kaiming_normal": ("#9a3412", "-"),
    "kaiming_uniform": ("#d97706", "--"), "lecun_normal": ("#15803d", "-"), "torch_linear": ("#6b7280", ":"),
}  # fmt: skip
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The runs of one label and optimizer by preset and seed."""

    target: str
    optimizer: str
    runs: Mapping[str, Mapping[int, Run]]

    @property
    def labels(self) -> dict:
        return {"target": self.target, "optimizer": self.optimizer}

    @property
    def target_loss(self) -> float | None:
        """The training loss to be reached; None while the reference has no run."""
        last = [run.row["train_loss"][-1] for run in self.runs.get(REFERENCE, {}).values()]
        return GUESS - WAY * (GUESS - float(np.mean(last))) if last else None

    def values(self, preset: str, measure: str) -> dict[int, float]:
        """seed -> what was measured of its run."""
        runs = self.runs.get(preset, {})
        if measure == "epochs to target":
            goal = self.target_loss
            return {} if goal is None else {seed: epochs_to(run.row, goal)[0] for seed, run in runs.items()}
        name = {"final loss": "train_loss", "train accuracy": "train_accuracy", "test accuracy": "test_accuracy"}[measure]
        return {seed: run.row[name][-1] for seed, run in runs.items()}

    def missed(self, preset: str) -> int:
        """How many runs never reach the target."""
        goal = self.target_loss
        return 0 if goal is None else sum(not epochs_to(run.row, goal)[1] for run in self.runs.get(preset, {}).values())


def epochs_to(row: Mapping, goal: float) -> tuple[float, bool]:
    """(epochs until the training loss falls below `goal`, whether it does), see the head of this file."""
    at = [0.0, *(epoch + 0.5 for epoch in range(len(row["train_loss"])))]
    losses = [row["test_loss"][0], *row["train_loss"]]
    for (x, y), (after, below) in itertools.pairwise(zip(at, losses, strict=True)):
        if y <= goal:
            return x, True
        if below <= goal:
            return x + (after - x) * (y - goal) / (y - below), True
    return float(len(row["train_loss"])), False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One measure of one setting, second − first."""

    setting: Setting
    measure: str
    first: str
    second: str
    test: Paired


def comparisons(settings: Sequence[Setting]) -> list[Comparison]:
    """Every preset against the reference, and Kaiming uniform against Xavier uniform, in every measure and setting that has both."""
    found = []
    for setting, measure in itertools.product(settings, MEASURES):
        pairs = [(REFERENCE, preset) for preset in setting.runs if preset != REFERENCE] + [UNIFORM]
        for first, second in pairs:
            if test := paired_test(setting.values(first, measure), setting.values(second, measure)):
                found.append(Comparison(setting, measure, first, second, test))
    return found


def spread_ratio(first: Mapping[int, float], second: Mapping[int, float], resamples: int = 2000) -> Estimate | None:
    """ln of sd(second)/sd(first) over the seeds that both have; the interval is the middle 95 % over resampled seeds, widened as in
    `analysis.scaling`. None with fewer than three seeds."""
    seeds = sorted(set(first) & set(second))
    if len(seeds) < 3:
        return None
    pair_2S = np.array([[of[seed] for seed in seeds] for of in (first, second)])

    def ratio(pair):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(pair[1].std(-1, ddof=1) / pair[0].std(-1, ddof=1))

    value = float(ratio(pair_2S))
    picked_RS = np.random.default_rng(0).integers(0, len(seeds), (resamples, len(seeds)))
    drawn_R = ratio(pair_2S[:, picked_RS])
    drawn_R = value + widening(len(seeds)) * (drawn_R[np.isfinite(drawn_R)] - value)
    low, high = np.quantile(drawn_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, len(seeds), float(low), float(high))


def rows_of(settings: Sequence[Setting], compared: Sequence[Comparison]) -> list[dict]:
    """Everything the figure says, see the head of this file."""
    rows = []
    for setting in settings:
        for preset, measure in itertools.product(setting.runs, MEASURES):
            if values := list(setting.values(preset, measure).values()):
                labels = {"measure": measure, **setting.labels, "preset": preset}
                labels |= {"missed": setting.missed(preset)} if measure == "epochs to target" else {}
                rows.append(_row("mean", estimate(values), labels))
                rows.append(_row("median", Estimate(float(np.median(values)), len(values), None, None), labels))
        if setting.target_loss is not None:
            rows.append(_row("target loss", Estimate(setting.target_loss, 0, None, None), setting.labels))
        for second in SHOWN:
            if e := spread_ratio(*(setting.values(preset, "final loss") for preset in (REFERENCE, second))):
                rows.append(_row("log spread ratio", e, {**setting.labels, "first": REFERENCE, "second": second}))
    for one, p in zip(compared, holm([one.test.p for one in compared]), strict=True):
        labels = {"measure": one.measure, **one.setting.labels, "first": one.first, "second": one.second}
        effect = one.test.effect
        tested = {"p": one.test.p, "p_holm": p, "effect": effect.mean, "effect_low": effect.low, "effect_high": effect.high}
        rows.append(_row("difference", one.test.estimate, labels) | tested)
    return rows


def _row(quantity: str, e: Estimate, labels: dict) -> dict:
    return point("han-e2", quantity, e, **labels)


# ---- drawing ---------------------------------------------------------------------------------------------------------------------------


def settings_of(study: Study) -> list[Setting]:
    """The finished runs by label and optimizer, in the grid's order; runs that diverged are left out."""
    found: dict = {}
    for run in study.runs:
        if run.status == "done" and run.row["diverged_at"] is None:
            of = found.setdefault((run.cell.labels["target"], run.cell.labels["optimizer"]), {})
            of.setdefault(run.cell.labels["preset"], {})[run.seed] = run
    return [Setting(*key, runs) for key, runs in found.items()]


@plots.styled
def _draw(study: Study, scale: str) -> Drawing:
    settings = settings_of(study)
    if not settings:
        raise ConfigError("han-e2: no run has finished. Run it again without --no-training.")
    compared = comparisons(settings)
    rows = rows_of(settings, compared)
    title = "Xavier against Kaiming on UCI Wine Quality"
    canvas = Canvas(figsize=(10.2, 9.6), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    above, below = canvas.subfigures(2, 1, height_ratios=(6, 3.6))
    curves = above.subplots(2, math.ceil(len(settings) / 2), squeeze=False).ravel()
    for axes, setting in itertools.zip_longest(curves, settings):
        if setting is None:
            axes.set_axis_off()
        else:
            _curves(axes, setting)
    handles = [Line2D([], [], color=colour, ls=ls, label=name) for name, (colour, ls) in COLOURS.items()]
    above.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    shown = ("epochs to target", "final loss", "test accuracy")
    for axes, measure in zip(below.subplots(1, len(shown)), shown, strict=True):
        _differences(axes, [one for one in compared if one.measure == measure and one.first == REFERENCE and one.second in SHOWN])
        axes.set_title(measure, fontsize=10, loc="left")
        if measure != shown[0]:
            axes.set_yticklabels([])
    left_out = sum(run.status == "done" and run.row["diverged_at"] is not None for run in study.runs)
    notes = [f"{left_out} runs with numbers that are not finite are left out."] if left_out else []
    return Drawing(canvas, rows, f"{title}. {_caption(settings, rows)}", notes=notes + [_found(s, rows) for s in settings])


def _curves(axes, setting: Setting) -> None:
    """Training loss by epoch, mean over seeds, a line per preset; the target dotted."""
    for preset, runs in setting.runs.items():
        colour, ls = COLOURS.get(preset, ("#1b1f27", "-."))
        loss_E = np.mean([run.row["train_loss"] for run in runs.values()], axis=0)
        axes.plot(np.arange(len(loss_E)) + 0.5, loss_E, color=colour, ls=ls, lw=1.5)
    if setting.target_loss is not None:
        axes.axhline(setting.target_loss, color="#1b1f27", lw=1, ls=":")
    axes.set_title(_said(setting), fontsize=10, loc="left")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.2g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("epochs")
    axes.set_ylabel("training loss")


def _differences(axes, found: Sequence[Comparison]) -> None:
    """One row per comparison: Kaiming − Xavier normal."""
    names = [f"{one.second.removeprefix('kaiming_')}, {_said(one.setting)}" for one in found]
    plots.dots(axes, [(name, one.test.estimate, SHOWN[one.second][0]) for name, one in zip(names, found, strict=True)])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("Kaiming − Xavier normal")


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def _said(setting: Setting) -> str:
    return f"{setting.target}, {OPTIMIZERS.get(setting.optimizer, setting.optimizer)}"


def _caption(settings: Sequence[Setting], rows: Sequence[Mapping]) -> str:
    run = next(iter(next(iter(settings[0].runs.values())).values()))
    config, seeds = run.cell.config(), {len(of) for setting in settings for of in setting.runs.values()}
    tested = [row for row in rows if row["quantity"] == "difference" and row["p"] is not None]
    survive = sum(row["p_holm"] < 0.05 for row in tested)
    return (
        f"A net of {'-'.join(map(str, config.model.widths))} with {config.model.activation} ({run.row['source']}), "
        f"{min(seeds)}{f' to {max(seeds)}' if len(seeds) > 1 else ''} seeds; a seed has its own split of the wines (a fifth tests), "
        f"standardized inputs, batches of {config.batch.examples}, {config.train.epochs} epochs, biases 0. Label: red or white (colour), "
        "quality of at least 6 (quality). Above: training loss, mean over seeds; dotted, the target, where Xavier normal has made nine "
        "tenths of its way from ln 2. Below: Kaiming minus Xavier normal, paired by seed, with 95 % t-intervals, filled where they exclude "
        f"zero. Of {len(tested)} comparisons in all, {sum(row['p'] < 0.05 for row in tested)} have p < .05 and {survive} after Holm's "
        "correction for their number. Optimizers, rates, batch, epochs and split are ours; the source does not give them."
    )


def _found(setting: Setting, rows: Sequence[Mapping]) -> str:
    """What Kaiming normal does against Xavier normal in this setting."""
    parts = []
    for row in rows:
        of = {"quantity": "difference", **setting.labels, "first": REFERENCE, "second": "kaiming_normal"}
        if of.items() <= row.items() and row["p"] is not None:
            parts.append(f"{row['measure']} {row['value']:+.3g} [{row['low']:.3g}, {row['high']:.3g}], d_z {row['effect']:.2g}, "
                         f"p {row['p']:.2g}, corrected {row['p_holm']:.2g}")  # fmt: skip
    return f"{_said(setting)}, Kaiming normal minus Xavier normal: {'; '.join(parts) or 'nothing to compare'}.".replace("-", "−")


FIGURES = {
    "han-e2": Figure("han-e2", "Xavier against Kaiming", "E2", ("cpu",), lambda grid: list(grid.cells), _draw, "grids/han_e2"),
}
