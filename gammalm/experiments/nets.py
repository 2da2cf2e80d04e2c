"""Runs a grid of small supervised nets: cells of one shape as one program, a program's rows written when it has ended.

    <workdir>/grid.json  results.jsonl      one row per cell: its labels, and the record of `training.nets.train_nets`

In a row, a number that is not finite is the text "inf", "-inf" or "nan", which `float` reads. Interrupted, programs that have ended are
not run again.
"""

import math
from collections.abc import Callable
from pathlib import Path

from gammalm.data.examples import load_examples
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.results import append_result, read_results, record_grid
from gammalm.sharding import processes
from gammalm.training.nets import net_signature, train_nets
from gammalm.training.preemption import Notice


def run_nets(
    grid: Grid, workdir: Path, *, mode: str | None = None, only: Callable[[Cell], bool] | None = None, notice: Notice | None = None
) -> list[dict]:
    """Trains what is not done yet and returns the rows of results.jsonl, one per cell, in the grid's order; `only` as in `run_grid`.

    A run that diverged is done: it has `diverged_at`. Raises ConfigError where `workdir` holds another grid, where a mode is asked for
    (there is one) and over several processes; DataError where the examples cannot be had; Preempted where `notice` was given to stop.
    """
    if mode:
        raise ConfigError(f"--mode {mode}: nets of one shape always train in one program. Leave it out.")
    if processes.count() > 1:
        raise ConfigError(f"grid {grid.name} is of small nets, which one process trains with all its devices. Start one.")
    record_grid(grid, workdir)
    rows, notices = read_results(workdir)
    for notice in notices:
        _say(notice)
    cells = [cell for cell in grid.cells if only is None or only(cell)]
    programs: dict[str, list[Cell]] = {}
    for cell in cells:
        programs.setdefault(net_signature(cell.config()), []).append(cell)
    for number, group in enumerate(programs.values(), start=1):
        if all(cell.name in rows for cell in group):
            _say(f"program {number} of {len(programs)}: its {len(group)} cells are done already")
            continue
        configs = [cell.config() for cell in group]
        of = configs[0].data
        examples = load_examples(of.name, of.path, note=_say)
        _say(f"program {number} of {len(programs)}: {len(group)} cells from {group[0].name} on; {of.name} from {examples.source}")
        for cell, record in zip(group, train_nets(configs, examples, notice=notice, say=_say), strict=True):
            rows[cell.name] = _row(cell, record) | {"source": examples.source}
            append_result(workdir, rows[cell.name])
    return [rows[cell.name] for cell in cells]


def _row(cell: Cell, record: dict) -> dict:
    loss = record["test_loss"][-1]
    found = {"cell": cell.name, "status": "done", "labels": dict(cell.labels), "loss": loss if math.isfinite(loss) else None}
    return found | {name: _plain(value) for name, value in record.items()}


def _plain(value):
    """`value` with text for numbers that JSON has no word for."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _say(message: str) -> None:
    processes.say(f"nets: {message}")
