"""`gammalm advise`: what initialization to use for a net of given sizes, why, and what to expect of it, before anything is built."""

import argparse
import json

EXAMPLES = """examples:
  gammalm advise --arch mlp --widths 784 64 32 32 10 --activation relu
  gammalm advise --arch mlp --widths 784 256 10 --layers 6 --activation gelu --input-moment 0.11
  gammalm advise --arch decoder --widths 768 --layers 12
  gammalm advise --arch decoder --widths 1024 4096 --layers 24 --activation gelu --eps 1e-5 --gate none --json
"""
ONLY = {"mlp": ("input_moment",), "decoder": ("eps", "gate", "vocab", "context")}  # options of one architecture


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "advise",
        help="what initialization to use for given sizes, why, and what to expect",
        description="Standard deviations for a net of these sizes, with reasons and with the size of signals and gradients that they "
        "predict, beside the usual schemes. Nothing is built or trained.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", required=True, choices=tuple(ONLY))
    parser.add_argument(
        "--widths", required=True, nargs="+", type=int, metavar="N",
        help="mlp: of the input, the hidden layers and the output; decoder: d_model, a multiple of 64, and the feed-forward layer's width, "
        "if it is not 8/3 of that (swiglu) or 4 times that",
    )  # fmt: skip
    parser.add_argument("--activation", help="relu, gelu, gelu_tanh, silu, tanh, elu; decoder: swiglu too. Default: relu; decoder: swiglu")
    parser.add_argument("--layers", type=int, metavar="L", help="decoder: blocks; mlp: matrices, where three widths give one hidden width")
    parser.add_argument("--input-moment", type=float, metavar="X", help="mlp: mean square of an input's entries. Default: 1, standardized")
    parser.add_argument("--eps", type=float, metavar="X", help="decoder: of the norms. Default: 1e-12")
    parser.add_argument("--gate", choices=("none", "headwise", "elementwise"), help="decoder: of attention. Default: elementwise")
    parser.add_argument("--vocab", type=int, metavar="V", help="decoder. Default: 50304")
    parser.add_argument("--context", type=int, metavar="T", help="decoder: tokens of a sequence. Default: 256")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from gammalm.errors import ConfigError

    given = {name: getattr(args, name) for names in ONLY.values() for name in names if getattr(args, name) is not None}
    foreign = [name for name in given if name not in ONLY[args.arch]]
    if foreign:
        raise ConfigError(f"--{foreign[0].replace('_', '-')} says nothing to --arch {args.arch}. Leave it out.")
    if min(args.widths) < 1 or (args.layers is not None and args.layers < 1):
        raise ConfigError(f"--widths {args.widths} --layers {args.layers}: each is at least 1.")
    if any(value <= 0 for name, value in given.items() if name != "gate"):
        raise ConfigError("--input-moment, --eps, --vocab and --context are above 0.")
    found = _mlp(args, given) if args.arch == "mlp" else _decoder(args, given)
    print(json.dumps(found) if args.json else "\n".join(_mlp_text(found) if args.arch == "mlp" else _decoder_text(found)))
    return 0


def _mlp(args, given) -> dict:
    from gammalm.errors import ConfigError

    widths = args.widths
    if args.layers is not None:
        if len(widths) != 3:
            raise ConfigError(f"--layers repeats the hidden one of three widths, input, hidden and output; there are {len(widths)}.")
        widths = [widths[0], *[widths[1]] * (args.layers - 1), widths[2]]
    from gammalm.analysis.advice import advise_mlp

    return advise_mlp(tuple(widths), args.activation or "relu", given.get("input_moment", 1.0))


def _decoder(args, given) -> dict:
    from gammalm.errors import ConfigError

    if len(args.widths) > 2 or args.layers is None:
        raise ConfigError("--arch decoder takes --widths D or D F, and --layers L.")
    from gammalm.analysis.advice import advise_decoder

    return advise_decoder(args.widths[0], args.layers, d_ff=(args.widths + [0])[1], activation=args.activation or "swiglu", **given)


def _mlp_text(found) -> list[str]:
    from gammalm.cli.subject import table

    one = found["one_std"]
    band = "{:.3g} to {:.3g}".format(*one["band"]) if one["band"] else "nowhere"
    head = ("layer", "shape", "forward", "backward", "compromise", "use", "signal", "gradient")
    rows = [(row["layer"], "x".join(map(str, row["shape"])), *(row[name] for name in head[2:])) for row in found["layers"]]
    schemes = [(row["scheme"], row["signal_gain"], row["gradient_gain"], row["verdict"]) for row in found["schemes"]]
    return [
        f"{'-'.join(map(str, found['widths']))}, {found['activation']}, inputs of mean square {found['input_moment']:g}: use the "
        f"{found['use']} stds.",
        *(f"  - {reason}" for reason in found["reasons"]),
        "",
        "standard deviations; with those of `use` the signal before each activation and the gradient by it, outputs' 1 (root mean square)",
        table([head, *rows]),
        "",
        "as rules of a config: " + " ".join(f"'{rule}'" for rule in found["rules"]),
        "",
        f"one std for all layers: signals keep their size from end to end at {one['forward']:.3g}, gradients at {one['backward']:.3g}; "
        f"both stay within a factor of {one['factor']:g} {'from ' * bool(one['band'])}{band}",
        "",
        "the usual schemes: size of the outputs over that of the inputs, of the first layer's gradient over that of the outputs",
        table([("scheme", "signals", "gradients", ""), *schemes]),
    ]


def _decoder_text(found) -> list[str]:
    from gammalm.cli.subject import table

    inits = [tuple(row.values()) for row in found["inits"]]
    layers = [tuple(row.values()) for row in found["layers"]]
    return [
        f"decoder of width {found['d_model']}, {found['n_layers']} layers, {found['activation']} of {found['d_ff']}, gate {found['gate']}: "
        f"use gamma {found['use']['gamma']:g} with eps {found['use']['eps']:g}.",
        *(f"  - {reason}" for reason in found["reasons"]),
        "",
        f"before training, on {found['context']} tokens of {found['vocab']:,} (root mean squares; branches as a share of the stream that "
        "they enter, first layer; flow: all branches together over the embedding; gradient: by the embedding over by the last stream)",
        table([("init", "norm factor", "logit std", "flow", "attention", "ffn", "gradient"), *inits]),
        "",
        "gamma 1 by layer: the stream over the embedding, branches over the stream, the gradient over that by the last stream",
        table([("layer", "stream", "attention", "ffn", "gradient"), *layers]),
    ]
