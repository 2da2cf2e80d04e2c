"""`gammalm analyze KIND`: what a model does, measured. Each kind is a module in gammalm/cli/analyses that parses, calls, prints."""

import argparse
import functools
import importlib

# Kind -> its line in `gammalm analyze --help`; gammalm.cli.analyses.<kind> has `add_options(parser)`, `run(args)` and an EXAMPLE.
KINDS = {
    "sink": "how much attention goes to the first token",
    "flow": "what each branch adds to the residual stream, next to the embedding",
    "norm": "where the norms' eps hides the scale of what they normalise",
    "condensation": "how far a matrix's neurons point the same way: stable rank, cosines, clusters",
    "weights": "std, effective gamma, kurtosis and sparsity of every matrix",
    "tokens": "in which tokens one model gains over another, by difficulty",
    "composition": "whether two functions are composed that were never shown together, of a run or a grid",
    "coordinates": "how activations and their changes grow with the width: does a learning rate carry over?",
    "scaling": "the scaling law of a grid's sizes, and the gain in effective size",
}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "analyze",
        help="measure what a model does: attention sinks, residual flow, norms and more",
        description="Measure one property of a trained model, or of one that is only initialized. docs/analysis.md defines each figure.",
        epilog="Example: gammalm analyze sink --checkpoint runs/tiny",
    )
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="KIND", parser_class=functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    )
    for name, line in KINDS.items():
        module = importlib.import_module(f"gammalm.cli.analyses.{name}")
        kind = kinds.add_parser(name, help=line, description=module.__doc__, epilog=f"Example: {module.EXAMPLE}")
        module.add_options(kind)


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(f"gammalm.cli.analyses.{args.kind}").run(args)
