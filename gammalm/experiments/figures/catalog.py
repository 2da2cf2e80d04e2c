"""Every figure of the papers by its id (docs/figures.md lists them), and what a figure is.

A family of figures is a module of this package with a table `FIGURES`, id -> Figure; `load` imports the modules that it needs. Nothing
here imports Matplotlib or JAX, so that `--help` can list the ids. What one point or quantity of a figure is, as a flat dict:

    {"figure": id, "quantity": what the value is, labels (size, arm, gamma, ...), "x": if it has one, "value": number or None,
     "low", "high": its 95 % interval or None, "seeds": how many}

Differences follow `gammalm.experiments.statistics`: paired by seed, second - first.
"""

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gammalm.config import did_you_mean
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.results import Run
from gammalm.experiments.statistics import Estimate

# Module of this package -> the figures it draws.
FAMILIES = {
    "curves": ("fig1a", "fig1d", "fig1e", "fig1h", "fig2b", "fig2c"),
    "losses": ("fig1b", "fig2a", "fig3b"),
    "init": ("fig1c", "fig3a"),
    "sinks": ("fig1f", "fig1g"),
    "tokens": ("fig4a", "fig4b", "fig4c"),
    "condense": ("fig4d", "fig4e", "fig4f", "fig4g", "fig5", "fig6", "fig7", "fig8"),
}
# Experiments of the second source (docs/second_source.md), each with a grid of its own.
SECOND = {"han_sweep": ("han-e1",), "han_compare": ("han-e2",), "han_track": ("han-e3",)}
FAMILIES |= SECOND
IDS = tuple(sorted(id_ for ids in FAMILIES.values() for id_ in ids))
TRAINED = ("cpu", "gpu", "paper")  # scales of configs/grids/figures.py
UNTRAINED = ("init",)
ALL = "all"  # in place of an id: every figure of the first paper there is at a scale
GRID = "grids/figures"  # that the first paper's figures share


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A drawn figure: a Matplotlib figure, its numbers as rows (see above), a caption in plain words, optionally a page's inner HTML
    that shows it in text, and notes on what is missing or limits it, in sentences."""

    figure: Any  # matplotlib.figure.Figure
    rows: list[dict]
    caption: str
    html: str | None = None
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure.

    section: of the paper, or the experiment of the second source. grid: the config of the grid that it reads, which takes `scale=`;
    runs of another grid than GRID lie in a folder of their own, see `home`.
    reads: the cells of the grid that it reads, which are trained first; None where it needs no training.
    draw: (study, scale) -> Drawing, from whatever the study has so far. `study` is an `experiments.results.Study` of the whole grid, and
    None for a figure that needs no training. Raises ConfigError where there is nothing yet to draw.
    """

    id: str
    title: str
    section: str
    scales: tuple[str, ...]
    reads: Callable[[Grid], list[Cell]] | None
    draw: Callable[[Any, str], Drawing]
    grid: str = GRID

    def home(self, workdir: Path) -> Path:
        """Where the runs that it reads lie below the workdir of all figures."""
        return workdir if self.grid == GRID else workdir / Path(self.grid).name


def load(ids: Iterable[str] = IDS) -> dict[str, Figure]:
    """The figures of `ids`, in the order of `IDS`. Raises ConfigError for an id that is none."""
    wanted = set(ids)
    for unknown in sorted(wanted - set(IDS)):
        raise ConfigError(f"figure {unknown!r} is none{did_you_mean(unknown, IDS)} Figures: {', '.join(IDS)}.")
    found = {}
    for module, of in FAMILIES.items():
        if wanted & set(of):
            found |= importlib.import_module(f"gammalm.experiments.figures.{module}").FIGURES
    return {id_: found[id_] for id_ in IDS if id_ in wanted}


def dense_sizes(grid: Grid) -> list[str]:
    """The labels `size` of the grid's dense models, from small to large as the grid has them."""
    return _sizes(grid, "dense")


def mixture_sizes(grid: Grid) -> list[str]:
    """The same of its mixtures of experts."""
    return _sizes(grid, "moe")


def _sizes(grid: Grid, ffn: str) -> list[str]:
    first = {cell.labels["size"]: cell for cell in reversed(grid.cells)}
    return [size for size in dict.fromkeys(c.labels["size"] for c in grid.cells) if first[size].config().model.ffn == ffn]


def largest(grid: Grid) -> str:
    """The largest dense size of the grid: that of the ablations and of the monitored cells."""
    return dense_sizes(grid)[-1]


def about(runs: Sequence[Run], scale: str) -> str:
    """The sentence of a caption that says what `runs` are: scale, sizes, parameters, tokens, seeds, learning rates."""
    done = [run for run in runs if run.status == "done"]
    if not done:
        return f"Scale {scale}: no run has finished."
    sizes = list(dict.fromkeys(run.cell.labels["size"] for run in sorted(done, key=lambda run: run.row["parameters"])))
    seeds = Counter((run.group, run.gamma, run.rate) for run in done)
    own = "that of its size" if len(sizes) == 1 else "that of each size"
    own = f"among them {own}" if any("lr" in run.cell.labels for run in done) else own
    return (
        f"Scale {scale}: {', '.join(sizes)} ({_range(run.row['parameters'] for run in done)} parameters), "
        f"{_range(run.row['tokens'] for run in done)} tokens a run, {_range(seeds.values())} seed{'s' * (max(seeds.values()) > 1)}, "
        f"peak learning rate {_range((run.rate for run in done), '{:g}'.format)}"
        f", {own}."
    )


def _range(values: Iterable[float], say: Callable[[float], str] | None = None) -> str:
    from gammalm.experiments.plots import compact

    values, say = set(values), say or compact
    return say(min(values)) if len(values) == 1 else f"{say(min(values))} to {say(max(values))}"


def point(figure: str, quantity: str, estimate: Estimate, **labels) -> dict:
    """One row of a figure's numbers from a mean with its interval; `labels` (and `x`) as they are to stand in it."""
    value = {"value": estimate.mean, "low": estimate.low, "high": estimate.high, "seeds": estimate.n}
    return {"figure": figure, "quantity": quantity, **labels, **value}
