"""`gammalm inspect`: what a config builds, without training it: its parameters, and how each of them is initialized."""

import argparse
import json

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
    from gammalm.models.decoder import Model

    model = Model(m)
    specs, total, active = model.specs, model.parameter_count, model.active_parameter_count
    table = init_table(specs, config.init, d_model=m.d_model, n_layers=m.n_layers) if args.init_table else None
    if args.json:
        found = {"config": to_dict(config), "parameters": {"total": total, "active": active}}
        print(json.dumps(found | ({"init_table": table} if args.init_table else {})))
        return 0
    print(
        f"{describe_parameters(model)}: {m.n_layers} layers, width {m.d_model}, {_attention(m)}, {_ffn(m)}, "
        f"vocabulary {m.vocab_size} ({'tied' if m.tie_embeddings else 'untied'} head), gate {m.gate}, {_norms(m)}"
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


def describe_parameters(model) -> str:
    """The parameter count, and of a mixture also how many of them one token meets."""
    total, active = model.parameter_count, model.active_parameter_count
    return f"{total:,} parameters" + (f" ({active:,} active)" if active != total else "")


def _norms(m) -> str:
    """Of a default decoder its ε alone; else also what differs."""
    kinds = {"rms": "norm", "layer": "LayerNorm", "none": "no norm", "fixup": "scalars for norms"}
    eps = f" eps {m.norm_eps:g}" if m.norm in ("rms", "layer") else ""
    return kinds[m.norm] + eps + ("" if m.residual == "pre" else f", {m.residual} residuals")


def _attention(m) -> str:
    if m.attention == "mha":
        learned = f", {m.max_positions} learned positions" if m.positions == "learned" else ""
        return f"{m.n_heads} heads of {m.head_dim} ({m.n_kv_heads} key heads){learned}"
    latent = f", queries of rank {m.mla.q_rank}" if m.mla.q_rank else ""
    return (
        f"{m.n_heads} heads of {m.mla.nope_dim}+{m.mla.rope_dim} rotated, values of {m.mla.v_dim}, latent of rank {m.mla.kv_rank}{latent}"
    )


def _ffn(m) -> str:
    if m.ffn == "dense":
        return f"FFN {m.d_ff}"
    if m.ffn == "mlp":
        return f"two matrices of {m.d_ff} around {m.activation}{', biases' if m.biases else ''}"
    e = m.moe
    dense = f", after {e.first_k_dense} layers with FFN {m.d_ff}" if e.first_k_dense else ""
    return f"{e.n_experts} experts of {e.d_expert}, {e.top_k} a token and {e.n_shared} shared{dense}"
