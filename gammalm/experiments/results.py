"""What a grid leaves on disk, written safely and read back: results.jsonl, and each cell's config, metrics and tables.

    workdir/grid.json  results.jsonl  cells/<name>/{config.json, versions.json, metrics.jsonl, init_table.json}

A process can die in the middle of a line. Such a line is left out when read, and a notice says so; the next append cuts it off.
The same results read the same way whatever order the cells finished in: a cell's last row counts, and cells come in the grid's order.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gammalm.errors import ConfigError
from gammalm.experiments.grid import Cell, Grid
from gammalm.files import append_jsonl, make_folder, write_json_atomic

AXES = ("gamma", "lr", "seed")  # labels the statistics treat as numbers; all the others name a group of cells


def record_grid(grid: Grid, workdir: Path) -> None:
    """Writes grid.json into `workdir`, which is made. Raises ConfigError where it cannot be written or holds another grid."""
    make_folder(workdir)
    file, data = workdir / "grid.json", json.loads(json.dumps(grid.to_json()))
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != data:
        raise ConfigError(f"{file} is of another grid, or of this one with other arguments. Choose another --workdir.")
    write_json_atomic(file, data)


def append_result(workdir: str | os.PathLike, row: Mapping) -> None:
    """Adds the row of a cell to `workdir`/results.jsonl. Raises OSError where it cannot be written."""
    append_jsonl(Path(workdir) / "results.jsonl", dict(row))


def read_rows(path: str | os.PathLike) -> tuple[list[dict], list[str]]:
    """The rows of a JSON-lines file in file order, and notices about lines that are torn or damaged. A missing file has no rows."""
    path = Path(path)
    if not path.exists():
        return [], []
    rows, notices = [], []
    *lines, tail = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except ValueError:  # JSON and UTF-8 errors alike
            notices.append(f"{path.name}, line {number}: damaged, left out.")
    if tail:
        notices.append(f"{path.name}, line {len(lines) + 1}: cut off while it was written, left out.")
    return rows, notices


def read_results(workdir: str | os.PathLike) -> tuple[dict[str, dict], list[str]]:
    """The last row of every cell in `workdir`/results.jsonl by cell name, sorted by name, and notices about damaged lines."""
    rows, notices = read_rows(Path(workdir) / "results.jsonl")
    last = {row["cell"]: row for row in rows if "cell" in row}
    return dict(sorted(last.items())), notices


@dataclasses.dataclass(frozen=True)
class Run:
    """One cell of a grid and what is known of it.

    group: its labels other than γ, rate and seed, as text. gamma, rate, seed: from its labels, else from its saved config, else None.
    status: done | failed | unfinished. row: its last line in results.jsonl, empty while there is none.
    """

    cell: Cell
    folder: Path
    group: str
    gamma: float | None
    rate: float | None
    seed: int
    status: str
    row: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def loss(self) -> float | None:
        """Final validation loss (nats per token); None unless the cell is done and the loss a finite number."""
        loss = self.row.get("loss") if self.status == "done" else None
        return loss if loss is not None and math.isfinite(loss) else None

    @cached_property
    def metrics(self) -> dict[str, list[dict]]:
        """{"train": rows, "validation": rows} by step. Steps that a resumed run took twice count once, as taken last."""
        return {"train": [], "validation": []} | {
            kind: rows for kind, rows in by_kind(self.folder / "metrics.jsonl").items() if kind in ("train", "validation")
        }

    @cached_property
    def monitors(self) -> dict[str, list[dict]]:
        """What was measured while it trained, {kind: rows by step}; nothing where config.monitor.kinds is empty."""
        return by_kind(self.folder / "monitors.jsonl")

    def file(self, name: str) -> Any:
        """The parsed JSON file `name` of the cell's folder; None when missing or damaged."""
        return read_json(self.folder / name)


def by_kind(path: Path) -> dict[str, list[dict]]:
    """The rows of a JSON-lines file by kind, in the order of their steps; of those of one kind and step the last."""
    last = {(row["kind"], row["step"]): row for row in read_rows(path)[0] if "kind" in row and "step" in row}
    found: dict[str, list[dict]] = {}
    for (kind, _), row in sorted(last.items(), key=lambda one: one[0]):
        found.setdefault(kind, []).append(row)
    return found


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid's workdir: its runs in the order of the grid, and notices about what could not be read."""

    workdir: Path
    grid: Grid
    runs: tuple[Run, ...]
    notices: tuple[str, ...]

    def done(self) -> list[Run]:
        """The runs to be compared: with a final validation loss, a γ and a learning rate."""
        return [run for run in self.runs if None not in (run.loss, run.gamma, run.rate)]


def read_study(workdir: str | os.PathLike) -> Study:
    """Everything the report needs from a grid's workdir. Raises ConfigError when there is no readable grid.json in it."""
    workdir = Path(workdir)
    data = read_json(workdir / "grid.json")
    if data is None:
        raise ConfigError(f"{workdir}: no readable grid.json, so no grid was run here. Give the --workdir of `gammalm grid`.")
    grid = Grid.from_json(data)
    rows, notices = read_results(workdir)
    runs = tuple(_run(workdir, cell, rows.get(cell.name, {})) for cell in grid.cells)
    if strangers := sorted(set(rows) - {cell.name for cell in grid.cells}):
        notices.append(f"results.jsonl: rows of cells that are not in this grid, left out: {', '.join(strangers)}.")
    for run in runs:
        notices += [f"{run.cell.name}: {notice}" for notice in read_rows(run.folder / "metrics.jsonl")[1]]
        if run.status == "done" and None in (run.loss, run.gamma, run.rate):
            notices.append(f"{run.cell.name}: done, but its validation loss, γ or learning rate is not known; left out of the comparisons.")
    return Study(workdir, grid, runs, tuple(notices))


def _run(workdir: Path, cell: Cell, row: Mapping) -> Run:
    folder = workdir / "cells" / cell.name
    config = read_json(folder / "config.json") or {}
    labels = dict(cell.labels)
    gamma = labels.get("gamma", config.get("init", {}).get("gamma"))
    rate = labels.get("lr", config.get("optimizer", {}).get("learning_rate"))
    seed = labels.get("seed", config.get("seed", 0))
    status = row.get("status", "unfinished")
    return Run(cell, folder, group_name(labels), gamma, rate, seed, status, row, config)


def group_name(labels: Mapping, nothing: str = "all runs") -> str:
    """The labels other than γ, rate and seed as one text: `plain`, `125m · adjusted`, `headwise · eps 1e-08`; else `nothing`."""
    parts = [v if isinstance(v, str) else f"{k} {v:g}" for k, v in labels.items() if k not in AXES]
    return " · ".join(parts) or nothing


def read_json(path: Path) -> Any:
    """The parsed file; None where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
