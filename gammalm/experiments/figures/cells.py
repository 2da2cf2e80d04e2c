"""What the figures of losses share: which cells they read, their losses, the gap between γ .5 and 1, colours and words for arms.

A cell without the label `lr` has the rate of its size (configs/grids/figures.py): the "fixed" rate. "tuned": the best of those tried.
"""

import dataclasses
from collections.abc import Sequence

from gammalm.errors import ConfigError
from gammalm.experiments import plots, statistics
from gammalm.experiments.figures.catalog import point
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import Estimate, Losses
from gammalm.experiments.summary import best_note

GAMMAS = (0.5, 1.0)
ARM_COLOURS = {"plain": "#475569", "eps": "#0e7490", "adjusted": plots.ACCENT}
ARM_MARKERS = {"plain": "o", "eps": "^", "adjusted": "s"}
ARM_WORDS = {"plain": "plain (ε 1e-5, no gate)", "eps": "ε 1e-12, no gate", "adjusted": "adjusted (ε 1e-12, gate)"}


def cells_of(grid: Grid, sizes: Sequence[str], arms: Sequence[str], gammas: Sequence[float] = GAMMAS, rates: bool = False) -> list[Cell]:
    """Cells of these sizes, arms and γ's (all γ's: none given); with `rates` also those at other rates than their size's own."""
    return [
        cell
        for cell in grid.cells
        if cell.labels["size"] in sizes
        and cell.labels["arm"] in arms
        and (not gammas or cell.labels["gamma"] in gammas)
        and (rates or "lr" not in cell.labels)
    ]


def finished(study: Study, cells: Sequence[Cell]) -> list[Run]:
    """The finished runs of `cells`. Raises ConfigError when there are none."""
    names = {cell.name for cell in cells}
    runs = [run for run in study.done() if run.cell.name in names]
    if not runs:
        raise ConfigError(f"{study.workdir}: none of the {len(names)} cells that this figure reads has finished. Train them first.")
    return runs


def losses_of(runs: Sequence[Run], **labels) -> dict[int, float]:
    """seed -> final loss of the runs with these labels."""
    return {run.seed: run.loss for run in runs if labels.items() <= run.cell.labels.items()}


@dataclasses.dataclass(frozen=True)
class Gap:
    """loss(γ = 1) − loss(γ = .5) of one size and arm; rate: fixed | tuned; note: what keeps the tuned rates from being the best."""

    size: str
    parameters: int
    arm: str
    rate: str
    estimate: Estimate
    by_seed: Losses
    note: str = ""

    def row(self, figure: str) -> dict:
        return point(figure, "gap", self.estimate, size=self.size, parameters=self.parameters, arm=self.arm, rate=self.rate)


def gaps_of(runs: Sequence[Run], study: Study) -> list[Gap]:
    """The gaps of all sizes and arms among `runs`, from small to large, at the fixed rate and where others were tried at the best."""
    groups = {run.group: run for run in sorted(runs, key=lambda run: run.row["parameters"])}
    own = {run.group: run.rate for run in runs if "lr" not in run.cell.labels}
    table = {key: losses for key, losses in statistics.losses(study).items() if key[0] in groups and key[1] in GAMMAS}
    planned: dict = {}
    for run in study.runs:
        if run.group in groups and run.rate is not None:
            planned.setdefault((run.group, run.gamma), set()).add(run.rate)
    best = statistics.best_rates(table, planned)
    found = statistics.gaps(table, best)
    gaps = []
    for group, run in groups.items():
        for item in found:
            if item.group != group or item.rate not in (own.get(group), None):
                continue
            notes = [f"γ {g:g}: {best_note(best[group, g])}" for g in GAMMAS if item.rate is None and best_note(best[group, g])]
            rate = "tuned" if item.rate is None else "fixed"
            labels = run.cell.labels
            gaps.append(
                Gap(labels["size"], run.row["parameters"], labels["arm"], rate, item.estimate, item.by_seed, "; ".join(notes))
            )
    return gaps


def tuned_notes(gaps: Sequence[Gap]) -> list[str]:
    """What limits the tuned rates, in sentences."""
    return [f"Tuned rates of {gap.size}, {gap.arm}: {gap.note}." for gap in gaps if gap.note]
