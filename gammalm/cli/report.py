"""`gammalm report`: the report of a grid, finished or not, or the claims ledger, from what lies in the workdir; nothing is trained."""

import argparse
import json
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write the report of a grid that has run, or the claims ledger",
        description="Write report/index.html (one page without links to anything outside it), its figures as PNG files and its numbers "
        "as summary.json into the workdir of a grid. A grid that has not finished gives a report of what there is. With --claims: write "
        "report/claims.html and claims.json instead, the verdict on each statement of the paper from the figures in the workdir.",
        epilog="Example: gammalm report --workdir runs/quickstart",
    )
    parser.add_argument("--workdir", required=True, type=Path, help="the --workdir of `gammalm grid` or `gammalm figure`")
    parser.add_argument("--claims", action="store_true", help="the claims ledger, from the figures in the workdir")
    parser.add_argument("--json", action="store_true", help="print the contents of summary.json or claims.json instead of a table")


def run(args: argparse.Namespace) -> int:
    return _claims(args) if args.claims else _report(args)


def _report(args: argparse.Namespace) -> int:
    from gammalm.experiments.report import print_table, write_report
    from gammalm.experiments.results import read_study

    index = write_report(args.workdir)
    if args.json:
        print(json.dumps(json.loads((index.parent / "summary.json").read_text(encoding="utf-8"))))
        return 0
    study = read_study(args.workdir)
    print_table(run.row for run in study.runs if run.row)
    for notice in study.notices:
        print(notice)
    print(f"report: {index}")
    return 0


def _claims(args: argparse.Namespace) -> int:
    from gammalm.experiments.claims_report import text_ledger, write_claims

    found, path = write_claims(args.workdir)
    if args.json:
        print(json.dumps(found))
        return 0
    print(text_ledger(found))
    print(f"claims: {path}")
    return 0
