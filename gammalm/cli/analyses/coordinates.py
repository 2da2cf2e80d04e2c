"""How activations and their changes in the first steps of training grow with the width: does a learning rate carry over to other widths?

Trains the config at several widths, every step at its peak rate, and fits the slope of each size in the logarithm of the width.
"""

import argparse
from pathlib import Path

from gammalm.cli.options import add_config, config_from
from gammalm.cli.subject import add_output, deliver, table
from gammalm.errors import ConfigError

EXAMPLE = "gammalm analyze coordinates --config lm:size=nano,gamma=0.5 --widths 48/96/192/384 --plot coordinates.png"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--widths", metavar="D/D/…", help="of the models, a slash apart. Default: 1, 2, 4 and 8 times the config's")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of training at each width. Default: 5")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs at each width. Default: 1")
    parser.add_argument("--tolerance", type=float, default=0.15, metavar="S", help="a slope between -S and S is stable. Default: 0.15")
    parser.add_argument("--data", type=Path, metavar="PATH", help="prepared folder that is read; default: the config's")
    parser.add_argument("--sequences", type=int, default=4, metavar="N", help="on which sizes are measured. Default: 4")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the sizes against the width")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from gammalm.data.load import open_split
    from gammalm.experiments.coordinates import MEASURES, check_coordinates, draw
    from gammalm.experiments.grid import numbers

    config = config_from(args)
    d, c = config.model.d_model, config.data
    if args.sequences < 1 or args.tolerance <= 0:
        raise ConfigError(f"--sequences {args.sequences} --tolerance {args.tolerance:g}: both must be above 0.")
    widths = [int(width) for width in numbers(args.widths, "--widths")] if args.widths else [d, 2 * d, 4 * d, 8 * d]
    how = dict(seq_len=c.seq_len, packing=c.packing, mixture=c.mixture, seed=config.seed, loss=c.loss)
    train = open_split(args.data or c.path, "train", batch=config.batch.sequences, **how)
    validation = open_split(args.data or c.path, "validation", batch=args.sequences, **how)
    if train.vocab_size > config.model.vocab_size:
        raise ConfigError(f"{train.path} has {train.vocab_size:,} tokens, more than model.vocab_size={config.model.vocab_size:,}.")
    probe = next(iter(validation.validation(validation.domains[0])))
    found = check_coordinates(config, widths, train.batch, probe, steps=args.steps, seeds=args.seeds, tolerance=args.tolerance)
    optimizer = config.optimizer
    about = f"{args.config}: γ {config.init.gamma:g}, {config.init.preset}, {optimizer.kind}, rate {optimizer.learning_rate:g}"
    result = {
        "analysis": "coordinates", "config": args.config, "gamma": config.init.gamma, "preset": config.init.preset,
        "optimizer": optimizer.kind, "learning_rate": optimizer.learning_rate, **found.row(),
    }  # fmt: skip
    rows = [
        (t.quantity, {"mean": "mean |x|", "rms": "rms", "change": "change"}[t.measure],
         *("-" if s is None else f"{s:+.2f}" for s in t.slopes), t.verdict)
        for m in MEASURES for t in found.trends() if t.measure == m
    ]  # fmt: skip
    head = ("quantity", "size", *(f"step {n}" for n in range(found.steps + 1)), "at the last step")
    title = f"{about}; widths {', '.join(map(str, found.widths))}; slopes of ln size over ln width"
    deliver(args, result, f"{title}\n{table([head, *rows])}\n{found.verdict()}")
    if args.plot is not None:
        try:
            draw(found, about).savefig(args.plot, dpi=130)
        except (OSError, ValueError) as error:  # no such folder; an ending that is no format
            raise ConfigError(f"--plot {args.plot} cannot be written: {error}. Name a .png in a folder that exists.") from error
    return 0
