"""Draws a whole parameter tree from its specs, the init config and a seed.

The key of a parameter is fold_in(fold_in(key(seed), hash of its path), layer). So its values depend on nothing but seed, path, layer and
rule: not on which other parameters exist (a gate or none), nor on γ beyond a constant factor, nor on the mesh. Runs that share a seed
are paired.
Shapes: a stacked parameter is (L, …), drawn by a loop over its layers: one draw in the graph whatever L, one layer's temporaries in memory.
"""

import functools
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.initializers.specs import ParamSpec
from gammalm.initializers.table import Choice, resolve
from gammalm.initializers.zoo import Draw
from gammalm.trees import nested


def path_hash(path: str) -> int:
    """A 32-bit number that is the same in every process and version (CRC-32 of the UTF-8 path)."""
    return zlib.crc32(path.encode())


def init_params(specs: Mapping[str, ParamSpec], init_config, seed: int, *, d_model: int, n_layers: int, dtype=jnp.float32) -> dict:
    """Nested dict of arrays by the '/'-separated paths of `specs`; `seed` is an int or an integer array.

    Pure: call it under `jax.jit` with `out_shardings` and each device makes only its shard (`jax_threefry_partitionable`, JAX's default).
    Called eagerly it compiles once per distinct shape and distribution, shared by every γ. Drawn in fp32, cast to `dtype` last.
    Raises ConfigError as `table.resolve` does. Source: σ, science 1; common draws across arms, [R].
    """
    root = jax.random.key(seed, impl="threefry2x32")  # named, so that a global default cannot change the parameters
    return nested({
        path: _parameter(jax.random.fold_in(root, path_hash(path)), specs[path], choices, dtype)
        for path, choices in resolve(specs, init_config, d_model=d_model, n_layers=n_layers).items()
    })  # fmt: skip


def _parameter(key: jax.Array, spec: ParamSpec, choices: tuple[Choice, ...], dtype) -> jax.Array:
    """One parameter: layers that share a distribution are drawn together, each scaled by its own σ, then put in order."""
    by_draw: dict[Draw, list[int]] = {}
    for layer, choice in enumerate(choices):
        by_draw.setdefault(choice.initializer.draw, []).append(layer)
    out_dims = tuple(i for i, axis in enumerate(spec.layer_axes) if axis in spec.fan_out)
    batch_dims = tuple(i for i, axis in enumerate(spec.layer_axes) if axis not in spec.fan_in + spec.fan_out)
    parts = [
        _draw_layers(key, np.array(layers), np.array([choices[i].sigma for i in layers], np.float32), draw, spec.layer_shape, batch_dims,
                     out_dims, dtype)
        for draw, layers in by_draw.items()
    ]
    if len(parts) > 1:
        order = np.argsort(np.concatenate(list(by_draw.values())))
        parts = [jnp.concatenate(parts)[order]]
    return parts[0] if spec.layers else parts[0][0]


@functools.partial(jax.jit, static_argnames=("draw", "shape", "batch_dims", "out_dims", "dtype"))
def _draw_layers(key, layers, sigmas, draw: Draw, shape: tuple[int, ...], batch_dims: tuple[int, ...], out_dims: tuple[int, ...], dtype):
    """(len(layers), *shape) in `dtype`."""

    def one(layer_and_sigma):
        layer, sigma = layer_and_sigma
        sample = draw.sample(jax.random.fold_in(key, layer), shape, batch_dims, out_dims)
        return (sample if draw.distribution == "constant" else sample * sigma).astype(dtype)

    return jax.lax.map(one, (layers, sigmas))
