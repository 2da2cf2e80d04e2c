"""The matrices of a model, and how the weights of each are distributed: standard deviation, kurtosis, sparsity, effective γ.

What counts as a matrix follows from the specs: every parameter with fans, one matrix per layer and per expert, heads side by side; Q, K,
V and gate are parameters of their own and stay apart. Vectors (norm gains) are left out.
Shapes: stack [*copies, r, c], copies the axes (L, E) that count matrices, L layers and E experts, each there or not; r and c the fans
in the order in which they are stored.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gammalm.analysis.walk import fetch
from gammalm.initializers.specs import NEVER_FANS, ParamSpec
from gammalm.initializers.zoo import equivalent_gamma
from gammalm.trees import flat

SPARSE = 0.1  # of the standard deviation: a weight up to here counts as near zero


class Moments(NamedTuple):
    """Of each matrix [*copies]: std about the mean; kurtosis E(w−μ)⁴/std⁴, 3 for a normal distribution; share of |w| ≤ SPARSE · std."""

    std: jax.Array
    kurtosis: jax.Array
    sparsity: jax.Array


def matrix_paths(specs: Mapping[str, ParamSpec]) -> list[str]:
    """The parameters that are matrices, in the order of `specs`."""
    return [path for path, spec in specs.items() if spec.fan_in]


def matrix_stack(w, spec: ParamSpec):
    """`w` as [*copies, r, c] without moving anything: q [L, D, H, K] as [L, D, H·K], out [L, H, K, D] as [L, H·K, D]."""
    copies = sum(axis in NEVER_FANS for axis in spec.axes)
    first = spec.fan_out if outputs_first(spec) else spec.fan_in
    rows = math.prod(w.shape[copies : copies + len(first)])
    return w.reshape(*w.shape[:copies], rows, -1)


def outputs_first(spec: ParamSpec) -> bool:
    """Whether the rows of `matrix_stack` are output neurons, as of the token table [V, D]; else its columns are."""
    inner = [axis for axis in spec.axes if axis not in NEVER_FANS]
    return inner[0] in spec.fan_out


def copies_of(spec: ParamSpec) -> Iterator[tuple[tuple[int, ...], dict]]:
    """Index of each matrix in its stack, and {"layer": its number in the model, "expert": its number}, None where it has none."""
    axes = [axis for axis in spec.axes if axis in NEVER_FANS]
    sizes = [spec.shape[spec.axes.index(axis)] for axis in axes]
    for index in itertools.product(*map(range, sizes)):
        at = dict(zip(axes, index, strict=True))
        yield index, {"layer": at["layers"] + spec.first_layer if "layers" in at else None, "expert": at.get("experts")}


@functools.partial(jax.jit, static_argnames="spec")
def moments(w, spec: ParamSpec) -> Moments:
    """`Moments` of each matrix of one parameter, in fp32. A matrix of one value has std 0, kurtosis NaN."""
    w = matrix_stack(w, spec).astype(jnp.float32)

    def mean(x):  # by rows first: a single fp32 sum over 10⁸ weights would lose what it adds
        return jnp.mean(jnp.mean(x, axis=-1, keepdims=True), axis=-2, keepdims=True)

    away = w - mean(w)
    std = jnp.sqrt(mean(jnp.square(away)))
    found = Moments(std, mean((away / std) ** 4), mean(jnp.where(jnp.abs(w) <= SPARSE * std, 1.0, 0.0)))
    return jax.tree.map(lambda a: a[..., 0, 0], found)


def weight_rows(specs: Mapping[str, ParamSpec], params: Mapping, paths: list[str] | None = None) -> list[dict]:
    """One JSON-ready row per matrix of `paths` (None: all): path, layer, expert, fan_in, std, kurtosis, sparsity, gamma.

    `gamma` is the effective one, ln(1/std)/ln(fan_in) (science 1); it and the kurtosis are None where they mean nothing. `params` is the
    nested dict of arrays that `specs` describes.
    """
    rows, arrays = [], flat(params)
    for path in matrix_paths(specs) if paths is None else paths:
        spec = specs[path]
        fan_in = spec.fans()[0]
        found = fetch(moments(arrays[path], spec))
        for index, names in copies_of(spec):
            std, kurtosis, sparsity = (float(values[index]) for values in found)
            gamma = equivalent_gamma(std, fan_in) if 0 < std < math.inf and fan_in > 1 else None
            kurtosis = kurtosis if math.isfinite(kurtosis) else None
            rows.append({"path": path, **names, "fan_in": fan_in, "std": std, "kurtosis": kurtosis, "sparsity": sparsity, "gamma": gamma})
    return rows
