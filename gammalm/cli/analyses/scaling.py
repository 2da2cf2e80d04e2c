"""The scaling law of a grid's sizes: what the loss tends to, and how much larger a model with the standard γ must be to do as well."""

import argparse
import dataclasses
from pathlib import Path

from gammalm.cli.subject import add_output, deliver, finite, table
from gammalm.errors import ConfigError
from gammalm.experiments.sizes import COUNTS, at_rates, losses_by_size

EXAMPLE = "gammalm analyze scaling --workdir runs/paper-dense --json"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=Path, required=True, metavar="GRID", help="folder of a grid that has run, with several sizes")
    parser.add_argument("--size", default="body", choices=tuple(COUNTS), help="; ".join(f"{k}: {v}" for k, v in COUNTS.items()))
    parser.add_argument("--label", default="size", metavar="NAME", help="label of the grid whose values are the sizes. Default: size")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.scaling import fit_scaling
    from gammalm.experiments.results import read_study
    from gammalm.experiments.statistics import gamma_pair

    study = read_study(args.workdir)
    fits, refused = [], []
    for family, by_gamma in losses_by_size(study.done(), args.label, args.size).items():
        pair = gamma_pair(by_gamma)
        if pair is None:
            refused.append(f"{family}: one γ alone.")
            continue
        for gamma in sorted(set(by_gamma) - {pair[0]}):
            for rates, arms in at_rates(by_gamma[pair[0]], by_gamma[gamma]):
                about = {"group": family, "standard_gamma": pair[0], "small_gamma": gamma, "rates": rates}
                try:
                    fits.append(about | finite(dataclasses.asdict(fit_scaling(*arms))))
                except ConfigError as error:
                    refused.append(f"{family}, γ = {gamma:g}, {rates}: {error}")
    if not fits:
        why = " ".join(refused) or "No cell has finished."
        raise ConfigError(f"{args.workdir}: nothing to fit, its sizes being what --label {args.label} names. {why}")
    result = {"analysis": "scaling", "workdir": str(args.workdir), "size": COUNTS[args.size], "fits": fits, "left_out": refused}
    deliver(args, result, "\n\n".join([_text(fit) for fit in fits] + [f"N: {result['size']}", *refused]))
    return 0


def _text(fit: dict) -> str:
    def number(value, interval=None):
        text = "-" if value is None else f"{value:.4g}"
        return text if interval is None else f"{text} ({interval[0]:.4g} to {interval[1]:.4g})"

    lines = [f"{fit['group']}: γ = {fit['small_gamma']:g} against {fit['standard_gamma']:g}, at {fit['rates']}"]
    if law := fit["law"]:
        said = [f"{name} {number(law[name], fit['intervals'].get(name))}" for name in ("E", "alpha", "A_standard", "A_small")]
        lines.append(f"L = E + A N^-alpha: {', '.join(said)}; off by at most {100 * law['residual']:.2g} %")
        lines.append(f"effective size: gain {number(law['gain'], fit['intervals'].get('gain'))}")
    rows = [
        (
            f"{one['N']:,.0f}", one["seeds"], number(one["standard"]), number(one["small"]),
            number(one["difference"], one["difference_interval"]), number(one["gain"], one["gain_interval"]) + " *" * one["extrapolated"],
        )
        for one in fit["sizes"]
    ]  # fmt: skip
    lines.append(table([("N", "seeds", "standard", "small", "small - standard", "gain, interpolated"), *rows]))
    return "\n".join(lines + ["* extrapolated"] * any(one["extrapolated"] for one in fit["sizes"]) + fit["notes"])
