"""`gammalm grid`: every cell of a grid, resumable, then its report."""

import argparse
import json
from pathlib import Path

from gammalm.cli.options import add_config, refuse_net
from gammalm.cli.together import add_processes, together
from gammalm.errors import ConfigError
from gammalm.memory import keep_freed_memory


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "grid",
        help="train every cell of a grid, resumable, then write its report",
        description="Train every cell of a grid, then write the report. Interrupted, it goes on where it stopped when run again.",
        epilog="Example: gammalm grid --config grids/quickstart --workdir runs/quickstart",
    )
    add_config(parser)
    parser.add_argument("--workdir", type=Path, help="folder for the cells, results.jsonl and the report")
    parser.add_argument("--mode", help="single: one cell after another; map, vmap: cells of one shape in one program")
    parser.add_argument("--retry-failed", action="store_true", help="train cells again that are recorded as failed")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of a table")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    keep_freed_memory()
    from gammalm.experiments.grid import load_grid

    grid = load_grid(args.config, args.overrides)
    if args.list:
        for cell in grid.cells:
            print(json.dumps({"cell": cell.name, "labels": dict(cell.labels)}) if args.json else cell.name)
        return 0
    refuse_net(grid.cells[0].config(), args.config)
    if args.workdir is None:
        raise ConfigError("gammalm grid needs --workdir W, the folder for its cells and report (or --list).")
    with together(args) as notice:
        return _run(args, grid, notice)


def _run(args: argparse.Namespace, grid, notice) -> int:
    from gammalm.experiments.report import print_table, write_report
    from gammalm.experiments.runner import run_grid
    from gammalm.sharding import processes

    rows = run_grid(grid, args.workdir, mode=args.mode, retry_failed=args.retry_failed, notice=notice)
    index = write_report(args.workdir) if processes.leads() else None
    if args.json and processes.leads():
        for row in rows:
            print(json.dumps(row))
    elif processes.leads():
        print_table(rows)
        print(f"report: {index}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0
