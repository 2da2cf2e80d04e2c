"""`gammalm train`: one model, from its newest checkpoint or from γ-initialization, to its last step and validation."""

import argparse
import json
import re
import sys
from pathlib import Path

from gammalm.cli.inspect import describe_parameters
from gammalm.cli.options import PREFIX, add_config, config_from
from gammalm.cli.together import add_processes, together
from gammalm.config import leaves, to_dict
from gammalm.errors import ConfigError
from gammalm.memory import keep_freed_memory


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train one model",
        description="Train one model. A workdir that holds the same run already is taken up where it stopped.",
        epilog="Example: gammalm train --config lm:size=tiny,gamma=1.0,steps=200 --workdir runs/tiny",
    )
    add_config(parser)
    parser.add_argument("--workdir", type=Path, help="folder for checkpoints, metrics and the config")
    parser.add_argument(
        "--print-config", action="store_true",
        help="print every value of the config and end; with --json as a file that --config takes (save it as NAME.json)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--profile", metavar="A:B", help="trace steps A to B into the workdir's profile/, for XProf or TensorBoard")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    keep_freed_memory()
    config = config_from(args)
    if args.print_config:
        print(json.dumps(to_dict(config), indent=1, ensure_ascii=False) if args.json else describe_config(config, args))
        return 0
    if args.workdir is None:
        raise ConfigError("gammalm train needs --workdir W, the folder for its checkpoints and metrics (or --print-config).")
    profile = args.profile and parse_range(args.profile, config.train.steps)
    if config.downstream.tasks:
        from gammalm.experiments.downstream import check_tasks

        check_tasks([config])
    with together(args) as notice:
        return _train(args, config, notice, profile)


def describe_config(config, args: argparse.Namespace) -> str:
    """Every leaf as `name = value`, a group to a paragraph; those that the command line set singly say so."""
    given, lines, group = {name for name, _ in args.overrides}, [f"# {args.config}"], ""
    for name, value in leaves(config).items():
        if group not in ("", name.partition(".")[0]):
            lines.append("")
        group = name.partition(".")[0]
        lines.append(f"{name} = {value!r}" + (f"  # {PREFIX}{name}" if name in given else ""))
    return "\n".join(lines)


def parse_range(text: str, steps: int) -> tuple[int, int]:
    """"A:B" -> (A, B), the first and the last step to trace, counted from 1. Raises ConfigError unless 1 <= A <= B <= steps."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last <= steps:
        raise ConfigError(f"--profile {text}: it must be A:B, first and last step, 1 <= A <= B <= {steps} (train.steps), such as 10:14.")
    return first, last


def _train(args: argparse.Namespace, config, notice, profile) -> int:
    import jax

    from gammalm.experiments.monitors import Monitor
    from gammalm.models import flops
    from gammalm.models.decoder import Model
    from gammalm.models.kernels import describe
    from gammalm.sharding import devices, processes
    from gammalm.training import goodput
    from gammalm.training.loop import Run, train
    from gammalm.training.program import Programs

    model = Model(config.model)
    tokens = config.batch.sequences * config.data.seq_len
    processes.say(
        f"{describe_parameters(model)}, {config.train.steps:,} steps of {tokens:,} tokens; "
        f"gamma {config.init.gamma:g} ({config.init.preset}), eps {config.model.norm_eps:g}, gate {config.model.gate}"
        + (f"; {processes.count()} processes" if processes.count() > 1 else "")
    )
    processes.say(describe(config, jax.default_backend()))
    processes.say(f"{devices.describe(jax.devices())}; MFU: {flops.CONVENTION}")
    options = devices.compiler_options(count=jax.device_count())
    processes.say("compiler options: " + (", ".join(f"{name}={value}" for name, value in options.items()) or "XLA's defaults"))
    (outcome,) = train([Run(config, args.workdir)], Programs(), notice=notice, profile=profile, monitor=Monitor)
    if not processes.leads():
        return 1 if outcome.error else 0
    result = {"workdir": str(args.workdir), "parameters": model.parameter_count, **vars(outcome)}
    if args.json:
        print(json.dumps(result))
    elif outcome.validation:
        v = outcome.validation
        print(f"validation loss {v['loss']:.4f} nats per token, {v['bits_per_byte']:.4f} bits per byte, after {outcome.tokens:,} tokens")
        for domain, row in v["domains"].items():
            epochs = f", seen {v['epochs'][domain]:.2f} times" if domain in v["epochs"] else ""
            print(f"  {domain:20} {row['loss']:.4f}  {row['bits_per_byte']:.4f}{epochs}")
    if outcome.goodput:
        processes.say(goodput.describe(outcome.goodput))
    if outcome.error:
        print(f"gammalm: {args.workdir}: {outcome.error}", file=sys.stderr)
    return 1 if outcome.error else 0
