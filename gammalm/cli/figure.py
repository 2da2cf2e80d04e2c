"""`gammalm figure`: one figure or table of the papers by its id."""

import argparse
import json


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "figure",
        help="one figure or table of the papers",
        description="Print a table of the papers by its id: table2 (dense models) and table3 (mixtures of experts) list the "
        "hyperparameters that the grids paper_dense and paper_moe train with.",
        epilog="Example: gammalm figure table3 --grid-args attention=mla",
    )
    parser.add_argument("id", metavar="ID", help="table2 or table3")
    parser.add_argument("--grid-args", default="", metavar="ARGS", help="arguments of the table's grid, such as attention=mla")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a Markdown table")


def run(args: argparse.Namespace) -> int:
    from gammalm.experiments.tables import format_hyperparameters, hyperparameters

    table = hyperparameters(args.id, args.grid_args)
    print(json.dumps(table) if args.json else format_hyperparameters(table), end="\n" if args.json else "")
    return 0
