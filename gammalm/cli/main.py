"""Entry point of `gammalm`: picks the subcommand, imports only its module, turns faults into one message and an exit status.

Exit status: 0 done, 1 a fault of data, files or training, 2 a command line or config that cannot be run, 75 told to
stop (saved), 76 stalled, 130 interrupted.
"""

import argparse
import contextlib
import errno
import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from gammalm import __version__
from gammalm.errors import GammalmError
from gammalm.files import DISK_FULL

# Subcommand -> its line in `gammalm --help`; its module is gammalm.cli.<name>, with _ for -, imported only when it is the one chosen.
COMMANDS = {
    "train": "train one model",
    "grid": "train every cell of a grid, resumable, then write its report",
    "report": "write the report of a grid that has run",
    "compare": "runs side by side: losses at equal tokens, what differs in their configs, speed",
    "figure": "one figure or table of the papers",
    "data": "prepare a corpus: tokenizer and token shards; look into one",
    "analyze": "measure what a model does: attention sinks, residual flow, norms and more",
    "sample": "what a trained model writes after a prompt",
    "eval": "score a trained model on benchmarks of lm-evaluation-harness",
    "lm-eval": "the command line of lm-evaluation-harness, with our models",
    "advise": "what initialization to use for given sizes, why, and what to expect",
    "inspect": "what any model's files say of its initialization, its weights, and what to change",
    "plan": "what a run would take on hardware that is not there: memory, time, price",
    "export": "write a trained model for Hugging Face transformers",
    "import": "read a model of Hugging Face transformers",
    "completion": "what makes a shell complete commands, options and values of configs",
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
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown[0], chosen)}")
    if hasattr(args, "overrides"):
        args.overrides = overrides
    elif overrides:
        parser.error(f"gammalm {chosen} takes no {PREFIX}{overrides[0][0]}: it has no --config.")
    return _module(chosen).run(args)


def _nearest(word: str, command: str) -> str:
    """`; did you mean --workdir?` for an option of `command`, or a value of its config, that is like `word`."""
    if not word.startswith("--"):
        return ""
    from gammalm.cli.completion import read_commands
    from gammalm.config import did_you_mean

    flags = [option.flag for known in read_commands() if known.path.split()[:1] == [command] for option in known.options]
    return did_you_mean(word.partition("=")[0], flags)


def _fail(status: int, message: str) -> int:
    print(f"gammalm: {message}", file=sys.stderr)
    return status


RESUMED = ("train", "grid", "figure", "eval")  # that go on where they stopped
# What to do where a file or folder cannot be used, by errno.
REMEDIES = {number: "Free some space, then run the same command again." for number in DISK_FULL} | {
    errno.EACCES: "Choose a place that you may read and write, or change its permissions.",
    errno.EPERM: "Choose a place that you may read and write, or change its permissions.",
    errno.EROFS: "Choose a place on a disk that can be written.",
    errno.ENOTDIR: "Something on this path is no folder: choose another one.",
    errno.EEXIST: "It is in the way: choose another path.",
    errno.EISDIR: "It is a folder: name a file.",
}


@contextlib.contextmanager
def _leaving_imports(message: str) -> Iterator[None]:
    """Ctrl-C within an import ends the process there and then; elsewhere it is a KeyboardInterrupt as ever.

    Libraries in C that are being imported swallow it, or turn it into errors of their own. Leaving so is safe: whatever is written
    survives a kill.
    """

    def leave(number, frame):
        at = frame
        while at is not None:
            if at.f_code.co_filename.startswith("<frozen importlib"):
                _fail(130, message)
                os._exit(130)
            at = at.f_back
        signal.default_int_handler(number, frame)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv: list[str] | None = None) -> int:
    """What the console script calls: the exit status of the subcommand, or of the fault that ended it."""
    argv = sys.argv[1:] if argv is None else argv
    interrupted = "interrupted." + (" The same command again goes on where it was." if argv[:1] and argv[0] in RESUMED else "")
    with _leaving_imports(interrupted):
        try:
            status = run(argv)
            sys.stdout.flush()
            return status
        except GammalmError as error:
            return _fail(error.exit_status, str(error))
        except KeyboardInterrupt:
            return _fail(130, interrupted)
        except BrokenPipeError:
            # The reader (`| head`) has gone; what is still buffered must not complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except Exception as error:
            if isinstance(error, OSError) and error.errno in REMEDIES:
                return _fail(1, f"{error.strerror}: {error.filename or 'while writing'}. {REMEDIES[error.errno]}")
            from gammalm.cli.environment import explain

            if told := explain(error):
                if isinstance(error, ImportError):
                    return _fail(1, f"{error}: {told}")
                error.add_note(f"gammalm: {told}")
            raise


if __name__ == "__main__":
    sys.exit(main())
