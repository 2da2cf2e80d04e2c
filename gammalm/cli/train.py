"""`gammalm train`: one model, from its newest checkpoint or from γ-initialization, to its last step and validation."""

import argparse
import json
import sys
from pathlib import Path

from gammalm.cli.inspect import describe_parameters
from gammalm.cli.options import add_config, config_from
from gammalm.cli.together import add_processes, together
from gammalm.memory import keep_freed_memory


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train one model",
        description="Train one model. A workdir that holds the same run already is taken up where it stopped.",
        epilog="Example: gammalm train --config lm:size=tiny,gamma=1.0,steps=200 --workdir runs/tiny",
    )
    add_config(parser)
    parser.add_argument("--workdir", required=True, type=Path, help="folder for checkpoints, metrics and the config")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    keep_freed_memory()
    config = config_from(args)
    with together(args) as notice:
        return _train(args, config, notice)


def _train(args: argparse.Namespace, config, notice) -> int:
    import jax

    from gammalm.models.decoder import Model
    from gammalm.models.kernels import describe
    from gammalm.sharding import processes
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
    (outcome,) = train([Run(config, args.workdir)], Programs(), notice=notice)
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
    if outcome.error:
        print(f"gammalm: {args.workdir}: {outcome.error}", file=sys.stderr)
    return 1 if outcome.error else 0
