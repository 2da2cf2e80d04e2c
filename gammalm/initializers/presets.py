"""Named conventions: which initializer a parameter gets when no rule of the config names it. The name is part of a run's identity.

A preset is a function (path, spec, layer) -> Initializer made from the config; `layer` counts from 0 over the model, and means nothing for
a parameter that no stack has. Under every preset norm gains are 1 (but for the final one under `mup`), biases and the logits of softmax
sinks 0. Sources: science 1 and 5; the choices that the papers leave open are marked [R] here and in
docs/initializers.md.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

from gammalm.errors import ConfigError
from gammalm.initializers.deep import SCALARS, Choose, deepnorm, depth_scaled, ffn_matrices, fixup, is_scalar
from gammalm.initializers.rules import build, nearest
from gammalm.initializers.specs import ParamSpec
from gammalm.initializers.zoo import Draw, Initializer, gamma_normal, number, ones, zeros

# Index into init.group_gammas. [R]: the gate sets coefficients as q·k does, so it goes with them; the router goes with the FFN it feeds.
GROUPS = {"embed": 0, "position": 0, "head": 0, "qk": 1, "gate": 1, "vo": 2, "ffn": 3, "router": 3}
SCHEMES = ("lecun_normal", "lecun_uniform", "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform", "gpt2", "fixed_std",
           "torch_linear", "orthogonal")


def _fan_in(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Every matrix uses its own fan-in; the embedding table uses d (science 1.1 [R], [C])."""
    return lambda path, spec, layer: gamma_normal(init_config.gamma, truncate=init_config.truncate)


def _d_model(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Base d for every matrix, residual outputs divided by √(2L) (science 1.2)."""
    initializer = gamma_normal(init_config.gamma, base=d_model, truncate=init_config.truncate)
    return lambda path, spec, layer: dataclasses.replace(initializer, divide_outputs=True)


def _groups(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Four exponents: embedding + head, qk, vo, ffn (science 1.3); each matrix its own fan-in [R]."""
    gammas = init_config.group_gammas
    if isinstance(gammas, str) or len(gammas) != 4:
        raise ConfigError(f"init.group_gammas must be four numbers (embedding + head, qk, vo, ffn), not {gammas!r}.")
    gammas = [number(f"init.group_gammas[{i}]", gamma) for i, gamma in enumerate(gammas)]
    return lambda path, spec, layer: gamma_normal(gammas[GROUPS[spec.role]], truncate=init_config.truncate)


def _branch_balanced(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """γ* = k/(2(k−1)) for a branch that multiplies k matrices: attention 1 (V, O), SwiGLU ¾, a two-matrix MLP 1 (science 5 [C]).

    k of an FFN is the number of its matrices, those of role 'ffn' below one parent. Embedding, head and router keep init.gamma [R].
    """

    def choose(path: str, spec: ParamSpec, layer: int) -> Initializer:
        gamma = init_config.gamma
        if spec.role in ("qk", "vo", "gate"):
            gamma = _balance_gamma(2)
        elif spec.role == "ffn":
            gamma = _balance_gamma(ffn_matrices(path, specs))
        return gamma_normal(gamma, truncate=init_config.truncate)

    return choose


FINAL_GAIN, FINAL_BIAS = "final_norm/gain", "final_norm/bias"


def _mup(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Maximal update parametrization: `fan_in` at width init.base_width, and from there on what keeps the updates of activations as large.

    With m = d_model / base_width: σ of the embedding and of an untied head stays that of the base width, σ of matrices falls as 1/√m,
    of a router, whose outputs do not grow, as 1/m. Logits get 1/m as the final norm's gain, so no model needs a factor of its own [R].
    Source: Yang et al. 2022 (arXiv:2203.03466), table 8. Heads keep their size and grow in number [R]: the scale of the scores stays.
    """
    m = d_model / init_config.base_width
    at_base = gamma_normal(init_config.gamma, truncate=init_config.truncate)
    power = {"embed": 0.0, "position": 0.0, "head": 0.0, "router": 1.0}
    text = f"mup(gamma={init_config.gamma!r}, base_width={init_config.base_width})"

    def choose(path: str, spec: ParamSpec, layer: int) -> Initializer:
        if path == FINAL_GAIN:
            return dataclasses.replace(ones(), text=text, draw=Draw("constant", value=1 / m))
        factor = m ** -power.get(spec.role, 0.5)
        return dataclasses.replace(
            at_base, text=text, gamma=None, std=lambda fan_in, fan_out: at_base.std(fan_in and fan_in / m, fan_out) * factor
        )

    return choose


def _balance_gamma(k: int) -> float:
    return k / (2 * (k - 1))


def _scheme(name: str) -> Callable[..., Choose]:
    """One scheme of the zoo for every matrix, the embedding table included."""

    def preset(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
        initializer = build(name, (), {}, init_config, f"init.preset={name}")
        if init_config.truncate and initializer.draw.distribution != "normal":
            raise ConfigError(f"init.truncate={init_config.truncate:g}: preset {name} draws no normal values to truncate; set it to 0.")
        return lambda path, spec, layer: initializer

    return preset


PRESETS = {"fan_in": _fan_in, "d_model": _d_model, "groups": _groups, "branch_balanced": _branch_balanced, "mup": _mup,
           "fixup": fixup, "deepnorm": deepnorm, "depth_scaled": depth_scaled}
PRESETS |= {name: _scheme(name) for name in SCHEMES}


# Presets that also set learning rates, so that a training step differs: the leaves by which it does.
STEP_PRESETS = {"mup": ("init.preset", "init.base_width"), "fixup": ("init.preset",)}


def rate_factors(init_config, specs: Mapping[str, ParamSpec], d_model: int, orthogonal: Collection[str] = ()) -> dict[str, float]:
    """What multiplies the learning rate of each parameter by path: 1 under every preset but those of STEP_PRESETS.

    μP with Adam, m = d_model / init.base_width: 1/m for matrices that read the width, and for the final norm's gain and bias, which hold
    the factor 1/m of the logits; 1 for tables, head, other gains and biases (Yang et al. 2022, arXiv:2203.03466, table 8). `orthogonal` are
    the matrices whose update has singular values of ∝ √width (Muon at a fixed size of an entry), not ∝ width as Adam's: 1/√m [R].
    Fixup: a tenth for its scalars (Zhang et al. 2019, arXiv:1901.09321).
    """
    if init_config.preset == "fixup":
        return {path: SCALARS if is_scalar(spec) else 1.0 for path, spec in specs.items()}
    if init_config.preset not in STEP_PRESETS:
        return dict.fromkeys(specs, 1.0)
    m = d_model / init_config.base_width
    steady = ("norm", "bias", "sink", "embed", "position", "head")
    slow = {path: path in (FINAL_GAIN, FINAL_BIAS) or spec.role not in steady for path, spec in specs.items()}
    return {path: (m**-0.5 if path in orthogonal else 1 / m) if slow[path] else 1.0 for path in specs}


def preset_rules(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """(path, spec, layer) -> Initializer of `init_config.preset`; norm gains get ones, biases and sinks' logits zeros. ConfigError: nearest
    preset."""
    if init_config.preset not in PRESETS:
        raise ConfigError(f"init.preset: unknown preset {init_config.preset!r}.{nearest(str(init_config.preset), PRESETS)}")
    choose = PRESETS[init_config.preset](init_config, specs, d_model)
    constant = {"norm": ones(), "sink": zeros(), "bias": zeros()}
    own = {FINAL_GAIN} if init_config.preset == "mup" else set()
    return lambda path, spec, layer: choose(path, spec, layer) if path in own or spec.role not in constant else constant[spec.role]
