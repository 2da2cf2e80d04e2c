"""Losses by model size, as scaling fits take them: what counts as a model's size, and which rates the sizes are compared at."""

import math
from collections.abc import Iterable, Iterator, Mapping

from gammalm.experiments.results import Run, group_name
from gammalm.experiments.statistics import Losses, best_rate

COUNTS = {
    "body": "parameters that a token meets, without embedding and head",
    "active": "parameters that a token meets",
    "total": "all parameters",
}
ByRate = Mapping[int, Mapping[float, Losses]]  # size N -> rate -> seed -> loss


def losses_by_size(runs: Iterable[Run], label: str = "size", size: str = "body") -> dict[str, dict[float, ByRate]]:
    """group without its `label` -> γ -> N -> rate -> seed -> loss, of finished runs; N counts what COUNTS says of `size`."""
    counted: dict[str, int] = {}
    found: dict = {}
    for run in runs:
        config = run.cell.config().model
        key = config.to_json()
        if key not in counted:
            counted[key] = parameters(config, size)
        family = group_name({k: v for k, v in run.cell.labels.items() if k != label})
        rates = found.setdefault(family, {}).setdefault(run.gamma, {}).setdefault(counted[key], {})
        rates.setdefault(run.rate, {})[run.seed] = run.loss
    return found


def parameters(model_config, size: str) -> int:
    """The size N of a model, as COUNTS names it."""
    from gammalm.models.decoder import Model

    model = Model(model_config)
    if size == "total":
        return model.parameter_count
    ends = sum(math.prod(spec.shape) for spec in model.specs.values() if spec.role in ("embed", "position", "head"))
    return model.active_parameter_count - (ends if size == "body" else 0)


def at_rates(standard: ByRate, small: ByRate) -> Iterator[tuple[str, tuple[dict, dict]]]:
    """(which rates, (standard, small) as N -> seed -> loss): at each rate that all have, then at the best of each size and γ."""
    tables = [by_rate for arm in (standard, small) for by_rate in arm.values()]
    for rate in sorted(set.intersection(*map(set, tables))):
        yield f"rate {rate:g}", tuple({N: by_rate[rate] for N, by_rate in arm.items()} for arm in (standard, small))
    if len(set.union(*map(set, tables))) == 1:
        return
    one_each = all(len(by_rate) == 1 for by_rate in tables)
    best = tuple({N: by_rate[best_rate(by_rate).rate] for N, by_rate in arm.items()} for arm in (standard, small))
    yield "the rate of each size" if one_each else "the best rate of each size and γ", best
