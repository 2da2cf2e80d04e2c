"""Presets for deep stacks: Fixup, DeepNorm and depth-scaled initialization. Each says what else belongs to it.

A preset is a function (path, spec, layer) -> Initializer, see presets.py. The papers give σ for the matrices of branches; for what a
decoder has beside them, the choices are ours [R] (docs/initializers.md).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from gammalm.errors import ConfigError
from gammalm.initializers.rules import build
from gammalm.initializers.specs import ParamSpec
from gammalm.initializers.zoo import Initializer, fixed_std, zeros

Choose = Callable[[str, ParamSpec, int], Initializer]
SCALARS = 0.1  # learning rate of Fixup's scalars over that of the matrices, as in its authors' runs


def n_layers(specs: Mapping[str, ParamSpec]) -> int:
    """Layers of the model, over all its stacks; at least 1."""
    return max(1, *(spec.first_layer + spec.layers for spec in specs.values()))


def ffn_matrices(path: str, specs: Mapping[str, ParamSpec]) -> int:
    """How many matrices the branch of the feed-forward matrix `path` multiplies: those of its role below the same parent. ConfigError
    where it is not two or three."""
    parent = path.rpartition("/")[0]
    count = sum(other.role == "ffn" and name.rpartition("/")[0] == parent for name, other in specs.items())
    if count not in (2, 3):
        raise ConfigError(f"{path}: this init.preset needs the two or three matrices of an FFN side by side; found {count}.")
    return count


def is_scalar(spec: ParamSpec) -> bool:
    """Whether the parameter is one of Fixup's biases and multipliers."""
    return spec.axes[-1:] == ("scalar",)


def scaled(initializer: Initializer, factor: float, text: str) -> Initializer:
    """`initializer` with `factor` times its σ, called `text`."""
    return dataclasses.replace(
        initializer, text=text, gamma=None, base=None, std=lambda fan_in, fan_out: initializer.std(fan_in, fan_out) * factor
    )


def fixup(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Deep networks without norms (Zhang et al. 2019, arXiv:1901.09321, section 3), for `model.norm=fixup`.

    The head and the last matrix of each branch are 0. The others of a branch that multiplies m matrices, of B = 2 · n_layers branches, are
    B^(−1/(2m−2)) times a standard initialization: He's before an activation, LeCun's elsewhere [R]. The matrices of scores and gates
    (q, k, gate) multiply nothing and stay unscaled [R]. The stream starts at unit size: embeddings have σ = 1 [R].
    """
    branches = 2 * n_layers(specs)
    he, lecun = (build(name, (), {}, init_config, "init.preset=fixup") for name in ("kaiming_normal", "lecun_normal"))

    def choose(path: str, spec: ParamSpec, layer: int) -> Initializer:
        if spec.role in ("embed", "position"):
            return fixed_std(1.0, truncate=init_config.truncate)
        if spec.role == "head" or spec.residual_out:
            return zeros()
        if spec.role not in ("ffn", "vo"):
            return lecun
        m, base = (ffn_matrices(path, specs), he) if spec.role == "ffn" else (2, lecun)
        return scaled(base, branches ** (-1 / (2 * m - 2)), f"fixup({base.text}, branches={branches}, m={m})")

    return choose


def deepnorm(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Deep post-norm decoders (Wang et al. 2022, arXiv:2203.00555, figure 2), for `model.residual=deepnorm`, which has their α.

    Xavier's initialization; feed-forward, value and output matrices times β = (8 · n_layers)^(−¼). Gates have no β, as queries and keys;
    embeddings and head have LeCun's σ = d^(−½) [R].
    """
    depth = n_layers(specs)
    xavier, lecun = (build(name, (), {}, init_config, "init.preset=deepnorm") for name in ("xavier_normal", "lecun_normal"))
    branch = scaled(xavier, (8 * depth) ** -0.25, f"deepnorm({xavier.text}, layers={depth})")

    def choose(path: str, spec: ParamSpec, layer: int) -> Initializer:
        return lecun if spec.role in ("embed", "position", "head") else branch if spec.role in ("ffn", "vo") else xavier

    return choose


def depth_scaled(init_config, specs: Mapping[str, ParamSpec], d_model: int) -> Choose:
    """Every matrix of the l-th layer, l from 1, is 1/√l times Xavier's (Zhang, Titov & Sennrich 2019, arXiv:1908.11365, DS-Init at α = 1).

    Normal draws instead of its uniform ones, and LeCun's σ outside the layers [R].
    """
    xavier, lecun = (build(name, (), {}, init_config, "init.preset=depth_scaled") for name in ("xavier_normal", "lecun_normal"))

    def choose(path: str, spec: ParamSpec, layer: int) -> Initializer:
        return scaled(xavier, 1 / math.sqrt(layer + 1), f"depth_scaled({xavier.text})") if spec.layers else lecun

    return choose
