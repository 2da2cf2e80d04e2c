"""`gammalm inspect`: what a config builds, without training it: its parameters, and how each of them is initialized."""

import argparse
import json
import math

from gammalm.cli.options import add_config, config_from
from gammalm.config import to_dict


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="a config's parameters and how each is initialized",
        description="Print the size of the model that a config describes and, with --init-table, how every parameter is initialized: "
        "sigma = base ** -gamma is the standard deviation it is drawn with.",
        epilog="Example: gammalm inspect --config lm:size=125m,gamma=1.0 --init-table",
    )
    add_config(parser)
    parser.add_argument("--init-table", action="store_true", help="shape, fan-in, gamma, sigma and initializer of every parameter")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    m = config.model

    from gammalm.initializers import format_table, init_table
    from gammalm.models.decoder import param_specs

    specs = param_specs(m)
    total = sum(math.prod(spec.shape) for spec in specs.values())
    table = init_table(specs, config.init, d_model=m.d_model, n_layers=m.n_layers) if args.init_table else None
    if args.json:
        found = {"config": to_dict(config), "parameters": {"total": total}}
        print(json.dumps(found | ({"init_table": table} if args.init_table else {})))
        return 0
    print(
        f"{total:,} parameters: {m.n_layers} layers, width {m.d_model}, {m.n_heads} heads of {m.head_dim} ({m.n_kv_heads} key heads), "
        f"FFN {m.d_ff}, vocabulary {m.vocab_size} ({'tied' if m.tie_embeddings else 'untied'} head), gate {m.gate}, norm eps {m.norm_eps:g}"
    )
    print(
        f"{config.train.steps:,} steps of {config.batch.sequences} x {config.data.seq_len} tokens "
        f"= {config.train.steps * config.batch.sequences * config.data.seq_len:,} tokens; "
        f"init {config.init.preset}, gamma {config.init.gamma:g}, seed {config.seed}"
    )
    if args.init_table:
        print()
        print(format_table(table), end="")
    return 0
