"""The resolved rule table: for every parameter and layer the initializer and its σ. The drawing and the printed table both read it.

Pure Python: nothing is drawn here, so the table of a model that fits no machine is as quick as any.
"""

import dataclasses
import math
from collections.abc import Mapping

from gammalm.errors import ConfigError
from gammalm.initializers.presets import preset_rules
from gammalm.initializers.rules import Rule, nearest, parse_rule
from gammalm.initializers.specs import ParamSpec
from gammalm.initializers.zoo import Initializer, equivalent_gamma, number


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one layer of one parameter gets: the initializer, its σ, and whether σ includes the division by √(2L)."""

    initializer: Initializer
    sigma: float
    text: str


def resolve(specs: Mapping[str, ParamSpec], init_config, *, d_model: int, n_layers: int) -> dict[str, tuple[Choice, ...]]:
    """Path -> one Choice per stacked layer (a single one for a parameter that is not stacked).

    `init_config` holds preset, gamma, group_gammas, depth_scale, truncate, rules. Raises ConfigError for a bad value, an unknown name,
    a rule that decides nothing and a parameter without the fan its initializer needs.
    """
    number("init.gamma", init_config.gamma)
    number("init.truncate", init_config.truncate)
    if not isinstance(init_config.depth_scale, bool):
        raise ConfigError(f"init.depth_scale must be True or False, not {init_config.depth_scale!r}.")
    if isinstance(init_config.rules, str):
        raise ConfigError(f"init.rules must be a tuple of texts, not the text {init_config.rules!r}; write ({init_config.rules!r},).")
    number("d_model", d_model, 1)
    depth = math.sqrt(2 * number("n_layers", n_layers, 1))
    rules = [parse_rule(text, init_config, f"init.rules[{i}]") for i, text in enumerate(init_config.rules)]
    preset = preset_rules(init_config, specs, d_model)
    decided = set()

    def choose(path: str, spec: ParamSpec, layer: int) -> Choice:
        rule = next((i for i, rule in enumerate(rules) if rule.matches(path) and rule.covers(spec, layer, n_layers)), None)
        decided.add(rule)
        initializer = preset(path, spec, spec.first_layer + layer) if rule is None else rules[rule].initializer
        try:
            sigma = initializer.std(*spec.fans())
        except ConfigError as error:
            raise ConfigError(f"{path}: {initializer.text}: {error}") from None
        divide = spec.residual_out and (init_config.depth_scale or initializer.divide_outputs)
        return Choice(initializer, sigma / depth if divide else sigma, initializer.text + (f" / sqrt(2*{n_layers})" if divide else ""))

    choices = {path: tuple(choose(path, spec, layer) for layer in range(max(1, spec.layers))) for path, spec in specs.items()}
    for i, rule in enumerate(rules):
        if i not in decided:
            raise ConfigError(f"init.rules[{i}] ({rule.text}): {_why_unused(rule, specs, n_layers)}")
    return choices


def _why_unused(rule: Rule, specs: Mapping[str, ParamSpec], n_layers: int) -> str:
    paths = [path for path in specs if rule.matches(path)]
    if not paths:
        return f"no parameter matches.{nearest(rule.text.partition('=')[0].partition('[')[0], specs)}"
    if rule.layers is not None and not any(rule.covers(specs[path], i, n_layers) for path in paths for i in range(specs[path].layers)):
        spans = sorted({(specs[path].first_layer, specs[path].layers) for path in paths})
        spans = " or ".join(f"{first} to {first + n - 1}" if n else "none" for first, n in spans)
        return f"{', '.join(paths)} has layers {spans} of {n_layers}, and none of them is meant."
    return "it decides nothing, because rules before it match everything that it matches. Move it up or remove it."


def init_table(specs: Mapping[str, ParamSpec], init_config, *, d_model: int, n_layers: int) -> list[dict]:
    """One JSON-ready row per parameter, in the order of `specs`: path, shape, axes, role, initializer, fan_in, base, gamma, sigma, layers.

    `gamma` is the exponent where the initializer has one (σ = base^(−γ), before any depth scaling), else the equivalent ln(1/σ)/ln(base)
    with base = fan_in; base and gamma are None where they mean nothing (constants, no fan-in). `sigma` is the standard deviation that
    `init_params` draws with. initializer, base, gamma and sigma are lists, one entry per layer, where any of them differs by layer.
    `layers` is the number of stacked layers, 0 for none, and `first_layer` the number of the first of them in the model. Raises
    ConfigError as `resolve` does.
    """
    rows = []
    for path, choices in resolve(specs, init_config, d_model=d_model, n_layers=n_layers).items():
        spec = specs[path]
        fan_in = spec.fans()[0]
        per_layer = [_cells(choice, fan_in) for choice in choices]
        same = all(cells == per_layer[0] for cells in per_layer)
        merged = per_layer[0] if same else {key: [cells[key] for cells in per_layer] for key in per_layer[0]}
        rows.append({"path": path, "shape": list(spec.shape), "axes": list(spec.axes), "role": spec.role, "fan_in": fan_in} | merged
                    | {"layers": spec.layers, "first_layer": spec.first_layer})
    return rows


def _cells(choice: Choice, fan_in: int | None) -> dict:
    initializer = choice.initializer
    base = initializer.base or fan_in
    gamma = initializer.gamma
    if gamma is None and choice.sigma > 0 and base is not None and base > 1:
        gamma = equivalent_gamma(choice.sigma, base)
    if gamma is None:
        base = None
    return {"initializer": choice.text, "base": base, "gamma": gamma, "sigma": choice.sigma}


def format_table(rows: list[dict]) -> str:
    """The rows as aligned text; a parameter whose layers differ gets one line per run of equal layers, marked path[start:stop]."""
    lines = [("path", "shape", "axes", "role", "fan_in", "base", "gamma", "sigma", "initializer")]
    for row in rows:
        columns = [row[name] if isinstance(row["sigma"], list) else [row[name]] for name in ("base", "gamma", "sigma", "initializer")]
        per_layer = list(zip(*columns, strict=True))
        starts = [i for i in range(len(per_layer)) if i == 0 or per_layer[i] != per_layer[i - 1]]
        for start, stop in zip(starts, [*starts[1:], len(per_layer)], strict=True):
            first = row["first_layer"]
            path = row["path"] + (f"[{first + start}:{first + stop}]" if len(per_layer) > 1 else "")
            *numbers, initializer = per_layer[start]
            cells = (_show(value) for value in (row["fan_in"], *numbers))
            lines.append((path, "x".join(map(str, row["shape"])), ",".join(row["axes"]), row["role"], *cells, initializer))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines) + "\n"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
