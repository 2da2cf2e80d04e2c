"""The scaling law of a grid's sizes: what the loss tends to, and how much larger a model with the standard γ must be to do as well."""

import argparse
import dataclasses
import math
from pathlib import Path

from gammalm.cli.subject import add_output, deliver, table
from gammalm.errors import ConfigError

EXAMPLE = "gammalm analyze scaling --workdir runs/paper-dense --json"
COUNTS = {
    "body": "parameters that a token meets, without embedding and head",
    "active": "parameters that a token meets",
    "total": "all parameters",
}


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
    for family, by_gamma in _losses(study, args.label, args.size).items():
        pair = gamma_pair(by_gamma)
        if pair is None:
            refused.append(f"{family}: one γ alone.")
            continue
        for gamma in sorted(set(by_gamma) - {pair[0]}):
            for rates, arms in _at_rates(by_gamma[pair[0]], by_gamma[gamma]):
                about = {"group": family, "standard_gamma": pair[0], "small_gamma": gamma, "rates": rates}
                try:
                    fits.append(about | _finite(dataclasses.asdict(fit_scaling(*arms))))
                except ConfigError as error:
                    refused.append(f"{family}, γ = {gamma:g}, {rates}: {error}")
    if not fits:
        why = " ".join(refused) or "No cell has finished."
        raise ConfigError(f"{args.workdir}: nothing to fit, its sizes being what --label {args.label} names. {why}")
    result = {"analysis": "scaling", "workdir": str(args.workdir), "size": COUNTS[args.size], "fits": fits, "left_out": refused}
    deliver(args, result, "\n\n".join([_text(fit) for fit in fits] + [f"N: {result['size']}", *refused]))
    return 0


def _losses(study, label: str, size: str) -> dict:
    """group without its size -> γ -> N -> rate -> seed -> loss, of the cells that have finished."""
    from gammalm.experiments.results import group_name

    counted: dict[str, int] = {}
    found: dict = {}
    for run in study.done():
        config = run.cell.config().model
        key = config.to_json()
        if key not in counted:
            counted[key] = _count(config, size)
        family = group_name({k: v for k, v in run.cell.labels.items() if k != label}, "all runs")
        rates = found.setdefault(family, {}).setdefault(run.gamma, {}).setdefault(counted[key], {})
        rates.setdefault(run.rate, {})[run.seed] = run.loss
    return found


def _count(model_config, size: str) -> int:
    from gammalm.models.decoder import Model

    model = Model(model_config)
    if size == "total":
        return model.parameter_count
    ends = sum(math.prod(spec.shape) for spec in model.specs.values() if spec.role in ("embed", "head"))
    return model.active_parameter_count - (ends if size == "body" else 0)


def _at_rates(standard: dict, small: dict):
    """(which rates, (standard, small) as N -> seed -> loss): at each rate that all have, then at the best of each size and γ."""
    from gammalm.experiments.statistics import best_rate

    tables = [by_rate for arm in (standard, small) for by_rate in arm.values()]
    for rate in sorted(set.intersection(*map(set, tables))):
        yield f"rate {rate:g}", tuple({N: by_rate[rate] for N, by_rate in arm.items()} for arm in (standard, small))
    if len(set.union(*map(set, tables))) == 1:
        return
    one_each = all(len(by_rate) == 1 for by_rate in tables)
    best = tuple({N: by_rate[best_rate(by_rate).rate] for N, by_rate in arm.items()} for arm in (standard, small))
    yield "the rate of each size" if one_each else "the best rate of each size and γ", best


def _finite(value):
    """`value` with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
