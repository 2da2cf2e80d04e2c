"""`gammalm plan`: what a run would take on hardware that need not be there: memory, arithmetic, traffic, time, price."""

import argparse
import json

from gammalm.cli.options import config_from, refuse_net


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what a run would take on hardware that is not there: memory, time, price",
        description="Compile the training step for a TPU topology that need not be there (with `pip install 'gammalm[plan]'`), or model "
        "it for GPUs and CPUs: whether it fits, what it moves, how long a run takes. Validation and checkpoints are not counted.",
        epilog="Example: gammalm plan --config lm:size=1.5b --config.mesh.fsdp=-1 --config.mesh.data=1 --topology v5e:16x16",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    # Neither is set unless given: who asks whether a command has a config (`hasattr`) is told.
    what.add_argument("--config", default=argparse.SUPPRESS, metavar="SPEC", help="a config, with --config.NAME=VALUE")
    what.add_argument("--grid", default=argparse.SUPPRESS, metavar="SPEC", help="a grid, as of `gammalm grid`: every cell and their sum")
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e:16x16, v5p:4x4x8, tpu7x:4x4x4, h100:8, cpu")
    parser.add_argument("--search", action="store_true", help="the best five of all meshes, remat policies and micro-batches")
    parser.add_argument("--analytic", action="store_true", help="compile nothing: a model of the step, in seconds")
    parser.add_argument("--price", type=float, metavar="X", help="of one chip for one hour, in any currency")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    from gammalm.errors import ConfigError
    from gammalm.plan.topology import load, quiet_environment

    if args.price is not None and not args.price > 0:
        raise ConfigError(f"--price {args.price}: must be above 0.")
    if hasattr(args, "grid") and args.search:
        raise ConfigError("--search takes a --config, not a --grid: its cells keep the mesh that they have.")
    config = config_from(args) if hasattr(args, "config") else None
    quiet_environment(args.topology)
    topology = load(args.topology, compile_step=not args.analytic)
    from gammalm.plan import text
    from gammalm.plan.estimate import plan

    options = {"compile_step": not args.analytic, "price": args.price}
    if config is None:
        rows, totals = _grid(args, topology, options)
        if args.json:
            print(json.dumps({"cells": dict(rows), "total": totals}))
        else:
            print(text.heading(rows))
            print(text.table(rows, totals if totals["without_time"] < len(rows) else None))
            if totals["without_time"]:
                print(f"{totals['without_time']} cells have no time and are not in the sums")
        return 0 if all(found["memory"]["fits"] is not False for _, found in rows) else 1
    if args.search:
        from gammalm.plan.search import search

        found = search(config, topology, **options)
        rows = [(text.layout(p), p) for p in found]
        print(json.dumps(found) if args.json else f"{text.heading(rows)}\n{text.table(rows)}")
        return 0
    found = plan(config, topology, **options)
    print(json.dumps(found) if args.json else text.describe_plan(found))
    return 0 if found["memory"]["fits"] is not False else 1


def _grid(args, topology, options) -> tuple[list[tuple[str, dict]], dict]:
    """The plan of every cell by its name, one compile for each shape of program, and what all cells take together."""
    from gammalm.experiments.grid import load_grid
    from gammalm.plan.estimate import plan
    from gammalm.progress import Progress
    from gammalm.training.program import signature

    grid = load_grid(args.grid, args.overrides)
    configs = [(cell.name, cell.config()) for cell in grid.cells]
    refuse_net(configs[0][1], args.grid)
    made: dict[str, dict] = {}
    progress = Progress("plans", len({signature(config) for _, config in configs}), "programs")
    for _, config in configs:
        if signature(config) not in made:
            made[signature(config)] = plan(config, topology, **options)
            progress.advance(1)
    progress.close()
    rows = [(name, made[signature(config)]) for name, config in configs]
    totals = {key: sum(row.get(key) or 0.0 for _, row in rows) for key in ("hours", "chip_hours", "cost")}
    without_time = sum("hours" not in row for _, row in rows)
    return rows, totals | {"cost": totals["cost"] if options["price"] else None, "without_time": without_time}
