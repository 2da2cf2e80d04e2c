"""Entry point of `gammalm`: picks the subcommand, imports only its module, turns faults into one message and an exit status.

Exit status: 0 done, 1 a fault of data, files or training, 2 a command line or config that cannot be run, 75 told to
stop (saved), 76 stalled, 130 interrupted.
"""

import argparse
import functools
import importlib
import os
import sys

from gammalm import __version__
from gammalm.errors import GammalmError
from gammalm.files import DISK_FULL

# Subcommand -> its line in `gammalm --help`; its module is gammalm.cli.<name>, with _ for -, imported only when it is the one chosen.
COMMANDS = {
    "train": "train one model",
    "grid": "train every cell of a grid, resumable, then write its report",
    "report": "write the report of a grid that has run",
    "figure": "one figure or table of the papers",
    "data": "prepare a corpus: tokenizer and token shards; look into one",
    "analyze": "measure what a model does: attention sinks, residual flow, norms and more",
    "sample": "what a trained model writes after a prompt",
    "eval": "score a trained model on benchmarks of lm-evaluation-harness",
    "lm-eval": "the command line of lm-evaluation-harness, with our models",
    "advise": "what initialization to use for given sizes, why, and what to expect",
    "inspect": "a config's parameters and how each is initialized",
    "plan": "what a run would take on hardware that is not there: memory, time, price",
    "export": "write a trained model for Hugging Face transformers",
    "import": "read a model of Hugging Face transformers",
}


HANDED_OVER = "lm-eval"  # whose arguments are another program's, all of them


def _module(name: str):
    return importlib.import_module(f"gammalm.cli.{name.replace('-', '_')}")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser, in which only the subcommand `chosen` knows its own options."""
    parser = argparse.ArgumentParser(
        prog="gammalm",
        description="Language models with small initialization: train, compare, report.",
        epilog="Example: gammalm grid --config grids/quickstart --workdir runs/quickstart",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gammalm {__version__}")
    subparsers = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        parser_class=functools.partial(argparse.ArgumentParser, allow_abbrev=False),
    )
    for name, line in COMMANDS.items():
        if name == chosen:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def run(argv: list[str]) -> int:
    """Parse `argv` and run its subcommand; SystemExit for help and for what argparse refuses, GammalmError for any other fault."""
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    if chosen == HANDED_OVER and argv[1:] and argv[1] not in ("-h", "--help"):
        return _module(chosen).hand_over(argv[1:])
    parser = build_parser(chosen)
    if chosen is None:
        parser.parse_args(argv)  # help, the version, or an unknown command: ends here
    from gammalm.cli.options import PREFIX, split_overrides

    overrides, rest = split_overrides(argv)
    args = parser.parse_args(rest)
    if hasattr(args, "overrides"):
        args.overrides = overrides
    elif overrides:
        parser.error(f"gammalm {chosen} takes no {PREFIX}{overrides[0][0]}: it has no --config.")
    return _module(chosen).run(args)


def _fail(status: int, message: str) -> int:
    print(f"gammalm: {message}", file=sys.stderr)
    return status


def main(argv: list[str] | None = None) -> int:
    """What the console script calls: the exit status of the subcommand, or of the fault that ended it."""
    try:
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except GammalmError as error:
        return _fail(error.exit_status, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted.")
    except BrokenPipeError:
        # The reader (`| head`) has gone; what is still buffered must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return _fail(1, f"{error.strerror}: {error.filename or 'while writing'}. Free some space, then run the same command again.")


if __name__ == "__main__":
    sys.exit(main())
