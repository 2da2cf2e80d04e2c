"""`gammalm lm-eval ARGS…`: the command line of lm-evaluation-harness with every option it has, and `--model gammalm` in it."""

import argparse
import contextlib
import functools

from gammalm.errors import ConfigError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "lm-eval",
        help="the command line of lm-evaluation-harness, with our models",
        usage="gammalm lm-eval ARGS…",
        description="Hand all arguments over to the command line of lm-evaluation-harness (pip install 'gammalm[eval]'), in which `--model "
        "gammalm` is a checkpoint of ours. Its --model_args: checkpoint=WORKDIR[:STEP], and step, tokenizer, max_length, layout, mesh, "
        "tokens and rows, as docs/evaluation.md describes them. `gammalm lm-eval run --help` lists the harness's own options.",
        epilog="Example: gammalm lm-eval run --model gammalm --model_args checkpoint=runs/tiny --tasks arc_easy --limit 100",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of lm-evaluation-harness")


def run(args: argparse.Namespace) -> int:
    raise ConfigError("Give the arguments of lm-evaluation-harness, as in `gammalm lm-eval run --help` or `gammalm lm-eval ls tasks`.")


def hand_over(arguments: list[str]) -> int:
    """What `main` calls with everything after `lm-eval`."""
    from gammalm.evaluation import harness  # isort: skip  # first: it says where the harness is missing
    from gammalm.cli.harness import opened_lm
    from gammalm.cli.together import keep_compiled
    from gammalm.sharding import processes

    keep_compiled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.joined())
        if processes.count() > 1:
            stack.enter_context(harness.as_process(processes.index()))

        @functools.wraps(opened_lm)
        def opener(**given):
            return stack.enter_context(opened_lm(**given))

        harness.register(opener)
        harness.command_line(arguments)
    return 0
