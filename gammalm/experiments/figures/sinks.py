"""Figures of attention sinks in trained models, by layer: γ .5 against 1 (fig1f), gate off against on (fig1g).

Quantities of their rows; labels size, parameters, arm, gamma, definition, layer (number from 0, or "mean" over layers):

    sink score           `definition` later (the seed's: what is drawn), alpha, sinks, last: see analysis/sink.py
    uniform sink score   what even weights over all visible tokens would give, by definition
    sink difference      of "later", paired by seed: γ = 1 minus γ = .5 (fig1f), gate minus no gate (fig1g)
    other sink difference   the same of the other definitions

Read from the newest checkpoint of each run, over the first batches of every validation domain. Sections: the paper's 2.1; science 4.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gammalm.analysis.sink import SinkScores, sink_scores
from gammalm.errors import ConfigError, GammalmError
from gammalm.experiments import plots, statistics
from gammalm.experiments.figures.catalog import TRAINED, Drawing, Figure, about, largest, point
from gammalm.experiments.figures.cells import ARM_COLOURS, ARM_MARKERS, ARM_WORDS, GAMMAS, cells_of, finished
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import estimate
from gammalm.training.load import load_model, validation_batches, validation_split

BATCHES, SEQUENCES = 4, 8  # of each domain; in a batch
DRAWN = "later"
DEFINITIONS = (DRAWN, "alpha", "sinks", "last")


def scores_of(runs: Sequence[Run]) -> tuple[dict[str, SinkScores], list[str]]:
    """{name of the cell: its scores}, and what could not be read, in sentences. Runs that differ in γ or ε alone compile once."""
    found, notes, models = {}, [], {}
    for run in runs:
        try:
            loaded = load_model(run.folder)
            shape = {name: value for name, value in loaded.config.model.to_dict().items() if name != "norm_eps"}
            model = models.setdefault(json.dumps(shape, sort_keys=True), loaded.model)
            batches = validation_batches(validation_split(loaded, SEQUENCES), BATCHES)
            found[run.cell.name] = sink_scores(model, loaded.params, loaded.buffers, batches, loaded.config.model.norm_eps)
        except GammalmError as error:
            notes.append(f"{run.cell.name} is left out: {error}")
    if not found:
        raise ConfigError(f"No sink score can be measured. {' '.join(notes)}")
    return found, notes


def by_layer(scores: SinkScores) -> dict[str, dict]:
    """{definition: {layer or "mean": score}}, means over heads."""
    layers = scores.by_layer()
    return {name: dict(enumerate(layers[name].tolist())) | {"mean": float(layers[name].mean())} for name in DEFINITIONS}


class _Side:
    """One line of a panel: the runs of one arm and γ, {seed: by_layer}, and what its rows are labelled with."""

    def __init__(self, runs: Sequence[Run], scores: Mapping[str, SinkScores], arm: str, gamma: float):
        of = [run for run in runs if (run.cell.labels["arm"], run.gamma) == (arm, gamma) and run.cell.name in scores]
        self.seeds = {run.seed: by_layer(scores[run.cell.name]) for run in of}
        self.arm, self.gamma = arm, gamma

    def values(self, definition: str, layer) -> dict[int, float]:
        return {seed: found[definition][layer] for seed, found in self.seeds.items()}

    def layers(self, definition: str = DRAWN) -> list:
        """Numbers of the layers and "mean"; empty without runs."""
        return list(next(iter(self.seeds.values()))[definition]) if self.seeds else []

    def rows(self, figure: str, labels: Mapping) -> list[dict]:
        own = {**labels, "arm": self.arm, "gamma": self.gamma}
        return [
            point(figure, "sink score", estimate(self.values(name, layer).values()), **own, definition=name, layer=layer)
            for name in DEFINITIONS
            for layer in self.layers(name)
        ]


def _differences(figure: str, first: _Side, second: _Side, labels: Mapping) -> list[dict]:
    """Rows of second − first, paired by seed; none where they share no seed."""
    rows = []
    for name in DEFINITIONS:
        for layer in first.layers(name):
            found = statistics.paired(first.values(name, layer), second.values(name, layer))
            if found is not None:
                quantity = "sink difference" if name == DRAWN else "other sink difference"
                rows.append(point(figure, quantity, found, **labels, definition=name, layer=layer))
    return rows


def _panel(axes, sides: Sequence[tuple[_Side, dict]], floor: float) -> tuple[list[Line2D], float]:
    """A line for each side against the layer, its seeds as small marks, intervals as bars; the uniform floor dashed.

    Gives the legend and the highest score.
    """
    axes.set_xlabel("layer")
    axes.axhline(floor, color="#1b1f27", lw=1, ls="--")
    inside, handles = [floor], []
    for i, (side, look) in enumerate(sides):
        layers = [layer for layer in side.layers() if layer != "mean"]
        if not layers:
            continue
        shift = 0.06 * (i - (len(sides) - 1) / 2)  # so that bars stand side by side
        plots.estimates(axes, {x + shift: estimate(side.values(DRAWN, x).values()) for x in layers}, look)
        for x in layers:
            values = list(side.values(DRAWN, x).values())
            axes.plot([x + shift] * len(values), values, "_", ms=9, color=look["color"], alpha=0.7)
            inside += values
        handles.append(Line2D([], [], **look))
    handles.append(Line2D([], [], color="#1b1f27", lw=1, ls="--", label="even weights"))
    axes.margins(x=0.15)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return handles, max(inside)


CAPTION = (
    "Mean softmax weight that a token gives to the first token of its {unit}, by layer (mean over heads, queries from the second token on; "
    "before the gate), over {queries} queries of validation text. Marks: mean over seeds with 95 % intervals, cut off at the frame; "
    "small marks: single seeds. Dashed: what even weights over all visible tokens give. The numbers hold the other definitions as well."
)


def _draw(figure: str, title: str, study: Study, scale: str, arms: Sequence[str], panels: Callable) -> Drawing:
    """Measures the cells of `arms` at the largest dense size. `panels`: the sides by (arm, γ) -> [(title, [(side, look), (side, look)],
    labels of their difference)]."""
    size = largest(study.grid)
    runs = finished(study, cells_of(study.grid, [size], arms))
    scores, notes = scores_of(runs)
    labels = {"size": size, "parameters": runs[0].row["parameters"]}
    one = next(iter(scores.values()))
    title = f"{title}, {size}"
    found = panels({(arm, gamma): _Side(runs, scores, arm, gamma) for arm in arms for gamma in GAMMAS})
    canvas = Canvas(figsize=(4.4 if len(found) == 1 else 7.2, 3.3), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    even = {name: statistics.Estimate(one.uniform[name], 0, None, None) for name in DEFINITIONS}
    rows = [point(figure, "uniform sink score", value, definition=name) for name, value in even.items()]
    legend, tops = {}, []
    for axes, (name, sides, difference) in zip(canvas.subplots(1, len(found), sharey=True, squeeze=False)[0], found, strict=True):
        handles, top = _panel(axes, sides, one.uniform[DRAWN])
        legend |= {handle.get_label(): handle for handle in handles}
        tops.append(top)
        axes.set_title(name, fontsize=10, loc="left")
        for side, _ in sides:
            rows += side.rows(figure, labels)
        rows += _differences(figure, *(side for side, _ in sides), {**labels, **difference})
    canvas.axes[0].set_ylim(0, 1.2 * max(tops))  # of all panels, which share it; the wide intervals of two seeds are cut off
    canvas.axes[0].set_ylabel("sink score")
    canvas.legend(handles=list(legend.values()), loc="outside lower center", ncols=3, fontsize=9)
    caption = CAPTION.format(unit=one.unit, queries=f"{one.queries:,}")
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", notes=notes)


@plots.styled
def _by_gamma(study: Study, scale: str) -> Drawing:
    colour, marker = plots.colours(GAMMAS), plots.markers(GAMMAS)

    def panels(sides):
        looks = {g: {"color": colour[g], "marker": marker[g], "ms": 6, "lw": 1.5, "label": f"γ = {g:g}"} for g in GAMMAS}
        return [("plain (ε 1e-5, no gate)", [(sides["plain", g], looks[g]) for g in GAMMAS], {"arm": "plain"})]

    return _draw("fig1f", "Attention sink at γ = .5 and γ = 1", study, scale, ["plain"], panels)


@plots.styled
def _by_gate(study: Study, scale: str) -> Drawing:
    def panels(sides):
        looks = {arm: {"color": ARM_COLOURS[arm], "marker": ARM_MARKERS[arm], "ms": 6, "lw": 1.5, "label": ARM_WORDS[arm]} for arm in arms}
        return [(f"γ = {g:g}", [(sides[arm, g], looks[arm]) for arm in arms], {"gamma": g}) for g in reversed(GAMMAS)]

    arms = ["eps", "adjusted"]
    return _draw("fig1g", "Attention sink without and with the gate", study, scale, arms, panels)


FIGURES = {
    id_: Figure(id_, title, "2.1", TRAINED, lambda grid, arms=arms: cells_of(grid, [largest(grid)], arms), draw)
    for id_, title, arms, draw in (
        ("fig1f", "Attention sink by layer at γ .5 and 1", ["plain"], _by_gamma),
        ("fig1g", "Attention sink by layer, gate off and on", ["eps", "adjusted"], _by_gate),
    )
}
