"""`gammalm inspect`: any model's initialization and weights, what to expect and what to change; and what a config of ours builds."""

import argparse
import json
from pathlib import Path

from gammalm.cli.options import add_config, config_from
from gammalm.cli.subject import finite, split_step, writing
from gammalm.config import to_dict
from gammalm.errors import ConfigError
from gammalm.files import write_text_atomic

EXAMPLES = """examples:
  gammalm inspect runs/tiny:300 --html tiny.html
  gammalm inspect models/llama-7b --ranks some --json
  gammalm inspect models/llama-7b/config.json
  gammalm inspect --config lm:size=125m,gamma=1.0 --init-table
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="what any model's files say of its initialization, its weights, and what to change",
        description="Per matrix and layer: fan-in, std, effective gamma (std = fan_in ** -gamma), stable rank, share near zero. Beside "
        "them the declared initialization, epsilon against the variance at each norm, predicted residual flow, risk of sinks, whether "
        "weights look fresh or trained, and advice. Weights are read matrix by matrix, nothing of the folder is run, and pickles are never "
        "opened.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a run (WORKDIR or WORKDIR:STEP), a folder of Hugging Face transformers or its config.json alone, a .safetensors file, or an "
        "Orbax folder",
    )  # fmt: skip
    add_config(parser, required=False)
    parser.add_argument("--init-table", action="store_true", help="of a --config: fan-in, gamma, sigma and initializer of every parameter")
    parser.add_argument("--matrices", action="store_true", help="a line for every matrix")
    parser.add_argument(
        "--ranks", choices=("auto", "all", "some", "none"),
        help="whose stable rank is computed; some: of five layers. Default: auto, all up to 10^9 weights, then some",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there too")


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.config is None):
        raise ConfigError("gammalm inspect takes a MODEL or a --config, one of them.")
    if args.config is None and (args.overrides or args.init_table):
        given = f"--config.{args.overrides[0][0]}" if args.overrides else "--init-table"
        raise ConfigError(f"{given} is of a --config, and {args.model} has its own.")
    if args.config is not None and (args.matrices or args.ranks):
        raise ConfigError(f"{'--matrices' if args.matrices else '--ranks'} is of a MODEL's weights, and a --config has none. Leave it out.")
    if args.html is not None and not args.html.parent.is_dir():  # before minutes of reading
        raise ConfigError(f"--html {args.html} cannot be written: {args.html.parent} is no folder. Name a file in a folder that exists.")
    lines = []
    if args.config is None:
        from gammalm.inspection import inspect_model

        path, step = (args.model, None) if Path(args.model).exists() else split_step(args.model)
        found = inspect_model(path, step=step, ranks=args.ranks or "auto", quiet=False)
    else:
        found, lines = _of_config(args)
    if args.html is not None:
        from gammalm.inspection import page_of

        with writing("--html", args.html):
            write_text_atomic(args.html, page_of(found))
    if args.json:
        print(json.dumps(finite(found)))
        return 0
    from gammalm.inspection import text_of

    print("\n".join([*lines, text_of(found, each=args.matrices)]))
    return 0


def _of_config(args: argparse.Namespace) -> tuple[dict, list[str]]:
    """(figures, lines on what is built and drawn) of a config of ours."""
    config = config_from(args)
    m = config.model

    from gammalm.initializers import format_table, init_table
    from gammalm.inspection import inspect_config
    from gammalm.models.decoder import Model

    model = Model(m)
    lines = [
        f"{describe_parameters(model)}: {m.n_layers} layers, width {m.d_model}, {_attention(m)}, {_ffn(m)}, "
        f"vocabulary {m.vocab_size} ({'tied' if m.tie_embeddings else 'untied'} head), gate {m.gate}, {_norms(m)}",
        f"{config.train.steps:,} steps of {config.batch.sequences} x {config.data.seq_len} tokens "
        f"= {config.train.steps * config.batch.sequences * config.data.seq_len:,} tokens; "
        f"init {config.init.preset}, gamma {config.init.gamma:g}, seed {config.seed}",
        "",
    ]
    found = inspect_config(config, args.config) | {"config": to_dict(config)}
    if args.init_table:
        found["init_table"] = init_table(model.specs, config.init, d_model=m.d_model, n_layers=m.n_layers)
        lines.append(format_table(found["init_table"]))
    return found, lines


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
