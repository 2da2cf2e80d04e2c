"""What a model trained on the composition task answers to a pair of functions that it was never shown: of one run, or of a whole grid."""

import argparse
from pathlib import Path

from gammalm.cli.subject import add_output, deliver, describe_subject, load_subject, table

EXAMPLE = "gammalm analyze composition --workdir runs/composition"


def add_options(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--checkpoint", metavar="WORKDIR[:STEP]", help="folder of a run, and a step of it; default: the newest")
    choice.add_argument("--workdir", type=Path, metavar="GRID", help="folder of a grid: all its finished runs, and their figure")
    parser.set_defaults(overrides=[])
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    return _grid(args) if args.workdir is not None else _one(args)


def _one(args) -> int:
    from gammalm.data.composition import EXCEPTION, UNSEEN
    from gammalm.experiments.composition import answers_of

    loaded = load_subject(args)
    found = answers_of(loaded)
    result = {"analysis": "composition", **describe_subject(args, loaded), **_shares(found), "examples": found.examples,
              "by_pair": {f"{a},{b}": share for (a, b), share in found.by_pair.items()}}  # fmt: skip
    rows = [("pair", "right"), *((f"{a},{b}", share) for (a, b), share in found.by_pair.items()), ("all seen", found.seen)]
    unseen = [("composed", found.composed), (f"mirrored, as {EXCEPTION}", found.mirrored), ("other", found.other)]
    text = f"{table(rows)}\n\n{table([(f'answers to {UNSEEN}', 'share'), *unseen])}\n{found.examples} examples of each pair"
    deliver(args, result, text)
    return 0


def _grid(args) -> int:
    from gammalm.experiments.composition import FIT, answers_of_grid, rows_of, write
    from gammalm.experiments.results import read_study

    study = read_study(args.workdir)
    found = answers_of_grid(study)
    rows = rows_of(found)
    folder = write(study, found, rows)
    runs = [{"cell": r.cell.name, "arm": r.group, "gamma": r.gamma, "lr": r.rate, "seed": r.seed} | _shares(a) for r, a in found]
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    by: dict = {}
    for row in rows:
        by.setdefault((row["arm"], row["lr"], row["gamma"], row["unfit"]), {})[row["quantity"]] = row
    lines = [(arm, lr, gamma, *(_number(of.get(q)) for q in quantities), unfit) for (arm, lr, gamma, unfit), of in by.items()]
    text = table([("arm", "rate", "γ", *quantities, "unfit"), *lines])
    text += f"\nmeans over seeds, half the 95 % interval; unfit: runs with less than {FIT:g} of the seen pairs right, left out of the rest"
    deliver(args, {"analysis": "composition", "workdir": str(args.workdir), "rows": rows, "runs": runs}, f"{text}\n-> {folder}")
    return 0


def _shares(found) -> dict:
    return {name: getattr(found, name) for name in ("seen", "composed", "mirrored", "other")}


def _number(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{row['value']:.3f}" + ("" if row["low"] is None else f" ± {(row['high'] - row['low']) / 2:.3f}")
