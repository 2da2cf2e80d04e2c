"""Runs a grid: every cell to its end, resumable by cell and by step, a failing cell recorded and passed over.

    <workdir>/grid.json  results.jsonl (one row per finished cell)  cells/<name>/ (see training/workdir.py)  report/
"""

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax

from gammalm.config import is_net
from gammalm.errors import ConfigError, GammalmError
from gammalm.experiments.downstream import check_tasks
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.monitors import Monitor
from gammalm.experiments.nets import run_nets
from gammalm.experiments.results import append_result, read_results, record_grid
from gammalm.models.decoder import Model
from gammalm.models.kernels import describe
from gammalm.sharding import processes
from gammalm.training.loop import Outcome, Run, train
from gammalm.training.preemption import Notice, Preempted
from gammalm.training.program import MODES, Programs, batchable, signature
from gammalm.training.trackers import require

CELLS_AT_ONCE = 16  # of one program: their states are in memory together


def default_mode() -> str:
    """How cells are trained unless told: on CPU measured (docs/benchmarks.md); on an accelerator one small cell leaves the chip idle."""
    return "map" if jax.default_backend() == "cpu" else "vmap"


def run_grid(
    grid: Grid,
    workdir: Path,
    *,
    mode: str | None = None,
    retry_failed: bool = False,
    devices=None,
    notice: Notice | None = None,
    only: Callable[[Cell], bool] | None = None,
) -> list[dict]:
    """Trains what is not done yet and returns the rows of results.jsonl, one per cell, in the grid's order.

    `only`: which cells to train and return, by default all; the others are left as they are, and grid.json is always of the whole grid.
    `mode`: see `gammalm.training.program.MODES`; `devices`: those to use, by default all. `retry_failed`: train failed cells again,
    from their beginning; `notice`: when to stop, see `train`. Every process calls it alike; process 0 writes.

    A grid of small nets is trained as `nets.run_nets` says. Raises ConfigError when `workdir` holds another grid, Preempted when told to
    stop; over several processes whatever stops a cell, as it may have met one of them alone.
    """
    if is_net(grid.cells[0].config()):
        return run_nets(grid, workdir, mode=mode, only=only, notice=notice)
    mode = mode or default_mode()
    if mode not in MODES:
        raise ConfigError(f"--mode {mode}: none of {', '.join(MODES)}.")
    check_tasks(cell.config() for cell in grid.cells)
    for tracker in {cell.config().train.tracker for cell in grid.cells}:
        require(tracker)  # before grid.json holds what could then not be changed
    processes.on_first("grid", lambda: record_grid(grid, workdir))
    rows, notices = read_results(workdir)
    processes.exchange("results read")
    for fault in notices:
        _say(fault)
    cells = [cell for cell in grid.cells if only is None or only(cell)]
    todo = [cell for cell in cells if not _settled(rows.get(cell.name, {}), retry_failed)]
    if len(todo) < len(cells):
        _say(f"{len(cells) - len(todo)} of {len(cells)} cells are done already")

    for cell in todo:
        if processes.leads() and rows.get(cell.name, {}).get("halted"):  # its last checkpoint is of the halted state
            shutil.rmtree(workdir / "cells" / cell.name / "checkpoints", ignore_errors=True)

    programs, began, finished, kernels = Programs(devices), time.monotonic(), 0, set()
    platform = (devices or jax.devices())[0].platform
    for group in _groups(todo, mode):
        how = mode if len(group) > 1 else "single"
        line = describe(batchable(group[0].config(), how, platform), platform)
        if line not in kernels:
            _say(line)
        kernels.add(line)
        number = f"{len(cells) - len(todo) + finished + 1}"
        title = f"cell {number} of {len(cells)}: {group[0].name}" + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        for cell, outcome in zip(group, _train(group, workdir, programs, how, title, notice), strict=True):
            rows[cell.name] = _row(cell, outcome)
            if processes.leads():
                append_result(workdir, rows[cell.name])
            if outcome.error:
                _say(f"cell {cell.name} failed: {outcome.error}")
        finished += len(group)
        left = (time.monotonic() - began) / finished * (len(todo) - finished)
        _say(f"{len(cells) - len(todo) + finished} of {len(cells)} cells done, about {left / 60:.1f} minutes left")
    return [rows[cell.name] for cell in cells]


def _settled(row: dict, retry_failed: bool) -> bool:
    """Whether a cell with this row is left alone: done, or its own numbers went wrong. Faults of data, disk or memory may have passed."""
    return row.get("status") == "done" or (row.get("halted", False) and not retry_failed)


def _groups(cells: list[Cell], mode: str) -> list[list[Cell]]:
    """Cells that train together, in the grid's order: alone, or with others of one program."""
    if mode == "single":
        return [[cell] for cell in cells]
    by_program: dict[str, list[Cell]] = {}
    for cell in cells:
        by_program.setdefault(signature(cell.config()), []).append(cell)
    groups = []
    for same in by_program.values():
        size = _cells_at_once(same[0].config())
        groups += [same[i : i + size] for i in range(0, len(same), size)]
    return groups


def _cells_at_once(config) -> int:
    """At most CELLS_AT_ONCE, and no more than fit into half of any host's device with their moments and gradients in fp32."""
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(processes.exchange("memory", memory))
    return max(1, min(CELLS_AT_ONCE, memory // 2 // (16 * Model(config.model).parameter_count)))


def _train(group: list[Cell], workdir: Path, programs: Programs, mode: str, title: str, notice: Notice | None) -> list[Outcome]:
    """The outcomes of a group's runs; a fault of the whole group is the outcome of each, but for a config that cannot run at all."""
    runs = [Run(cell.config(), workdir / "cells" / cell.name, cell.name) for cell in group]
    try:
        cell_devices = _cell_devices(runs, mode, len(programs.devices or jax.devices()))
        return train(runs, programs, mode=mode, cell_devices=cell_devices, title=title, notice=notice, monitor=Monitor)
    except (ConfigError, Preempted):
        raise
    except (GammalmError, jax.errors.JaxRuntimeError) as error:
        if processes.count() > 1:
            raise
        return [Outcome(steps=0, tokens=0, seconds=0.0, error=f"{type(error).__name__}: {error}") for _ in group]


def _cell_devices(runs: list[Run], mode: str, devices: int) -> int:
    """Devices that share the cells out between them: as many as divide both, unless the config's mesh takes all devices itself."""
    mesh = runs[0].config.mesh
    if mode == "single" or mesh.data != -1:
        return 1
    return math.gcd(len(runs), devices // (mesh.fsdp * mesh.expert * mesh.context * mesh.tensor))


def _row(cell: Cell, outcome: Outcome) -> dict:
    validation, model = outcome.validation or {}, Model(cell.config().model)
    return {
        "cell": cell.name,
        "status": "failed" if outcome.error else "done",
        "labels": dict(cell.labels),
        "loss": validation.get("loss"),
        "bits_per_byte": validation.get("bits_per_byte"),
        "domains": validation.get("domains", {}),
        "train_loss": outcome.train_loss,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "parameters": model.parameter_count,
        "active_parameters": model.active_parameter_count,
        "seconds": outcome.seconds,
        "error": outcome.error,
        "halted": outcome.halted,
    }


def _say(message: str) -> None:
    processes.say(f"grid: {message}")
