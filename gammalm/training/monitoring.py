"""Measuring models while they train, as the loop sees it: at which steps, of whose weights, where the rows go.

    <workdir>/monitors.jsonl   one row per kind and step

Kinds are those of config.monitor.kinds, and DOWNSTREAM where there are config.downstream.tasks. What is measured is built above this
room (gammalm/experiments/monitors.py) and given to `loop.train`. A measurement reads the state between two steps and gives nothing back
to training.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from gammalm.errors import ConfigError
from gammalm.training.lanes import Lane
from gammalm.training.program import Program
from gammalm.training.workdir import Metrics, Rows

DOWNSTREAM = "downstream"


class Monitor(Protocol):
    """What is measured of one run."""

    def due(self, step: int) -> Collection[str]:
        """The kinds that are measured after `step` (0: before the first step)."""

    def measure(self, kind: str, step: int, weights: dict, moved: Callable[[], None]) -> tuple[dict, dict[str, float]]:
        """The fields of the row of `kind`, and numbers for TensorBoard by name; may leave files in the run's folder. `weights`: "params"
        and "buffers", on the program's mesh, in which it is called, by every process alike. `moved` is called when a part of it is done,
        by every process alike; it may raise to end the run."""


Build = Callable[[Lane, Program], Monitor]


class Monitors:
    """The monitors of a group's lanes; a lane whose config asks for nothing has none.

    Rows past `step`, at which the lanes go on, are dropped; so a step that is made again is measured again. Raises ConfigError where kinds
    are asked for and there is no `build`.
    """

    def __init__(self, lanes: list[Lane], program: Program, build: Build | None, step: int):
        self.program, self._lanes = program, lanes
        self._of: dict[int, tuple[Monitor, Rows, set]] = {}  # by lane: the set is of (kind, step) with a row
        for i, lane in enumerate(lanes):
            if not (lane.config.monitor.kinds or lane.config.downstream.tasks):
                continue
            if build is None:
                raise ConfigError(
                    "monitor.kinds or downstream.tasks: nothing here measures. Give `train` monitor=gammalm.experiments.monitors.Monitor."
                )
            rows = Rows(lane.run.workdir / "monitors.jsonl", step)
            self._of[i] = build(lane, program), rows, {(row["kind"], row["step"]) for row in rows.rows()}

    def due(self, step: int) -> dict[int, list[str]]:
        """{lane: kinds} of what is to be measured after `step` and has no row, of the lanes that go on; no lane without kinds."""
        going_on = [(i, *of) for i, of in self._of.items() if not self._lanes[i].error]
        due = {i: [kind for kind in monitor.due(step) if (kind, step) not in done] for i, monitor, _, done in going_on}
        return {i: kinds for i, kinds in due.items() if kinds}

    def measure(self, i: int, kinds: list[str], step: int, state, metrics: Metrics, moved: Callable[[], None]) -> None:
        """Measures `kinds` of lane `i` in the group's `state` after `step`; `metrics` shows the numbers."""
        monitor, rows, done = self._of[i]
        weights = self.program.weights(state, i)
        for kind in kinds:
            with self.program.on_mesh():
                values, shown = monitor.measure(kind, step, weights, moved)
            rows.add({"kind": kind, "step": step, **values})
            metrics.show(step, {f"{kind}/{name}": value for name, value in shown.items()})
            done.add((kind, step))

    def rewind(self, step: int) -> None:
        """Back to `step`: what was measured after it will be measured again."""
        for _, rows, done in self._of.values():
            rows.rewind(step)
            done.difference_update([key for key in done if key[1] > step])
