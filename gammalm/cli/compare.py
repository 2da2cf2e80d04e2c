"""`gammalm compare`: two or more runs side by side, from their folders, finished or not."""

import argparse
from pathlib import Path

from gammalm.cli.subject import add_output, deliver, table, writing
from gammalm.files import write_text_atomic


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="runs side by side: losses at equal tokens, what differs in their configs, speed",
        description="Compare runs of `gammalm train`, or cells of a grid: losses after the same tokens, last validations, differences of "
        "their configs and versions, tokens per second. Nothing is computed anew, and a run may still be going.",
        epilog="Example: gammalm compare runs/plain runs/tiny --html compared.html",
    )
    parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR", help="folders of runs, two or more")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves there")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from gammalm.experiments.compare import compare, read_runs

    runs = read_runs(args.workdirs)
    found = compare(runs)
    if args.html is not None:
        from gammalm.experiments.compare_page import write_page

        with writing("--html", args.html):
            write_text_atomic(args.html, write_page(runs, found))
    deliver(args, found, _text(found))
    return 0


def _text(found: dict) -> str:
    """As text; runs are A, B, ..., so that columns stay narrow."""
    from gammalm.experiments.compare import by_domain, differences, letters, losses, standing

    said = found["runs"]
    names = letters(said)
    head, losses_head = ("", *names), ("tokens", *names, *differences(names))
    after = [(f"{row['tokens']:,}", *losses(row["loss"])) for row in found["at_equal_tokens"]]
    validated = [(f"{row['tokens']:,}", *losses(row["loss"])) for row in found["validation_at_equal_tokens"]]
    domains = [(name, *losses(values)) for name, values in by_domain(said)]
    differ = [(name, *map(_value, values)) for part in ("config", "versions") for name, values in found[part].items()]
    blocks = [
        "\n".join(f"{name}  {run['workdir']}" for name, run in zip(names, said, strict=True)),
        table([head, *standing(said)]),
        _block("training loss after the same tokens (mean over the tenth of them before), nats per token", losses_head, after),
        _block("validation loss after the same tokens", losses_head, validated),
        _block("last validation by domain", ("domain", *losses_head[1:]), domains),
        _block("what differs", head, differ) or "config and versions are the same",
        "\n".join(f"- {note}" for note in found["notes"]),
    ]
    return "\n\n".join(block for block in blocks if block)


def _block(title: str, head: tuple, rows: list[tuple]) -> str:
    return f"{title}\n{table([head, *rows])}" if rows else ""


def _value(value) -> str:
    return "–" if value is None else str(value)
