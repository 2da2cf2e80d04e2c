"""γ-initialization of the parameters of any JAX library: a tree goes in, the same tree comes out, drawn.

What a leaf is follows from its name, as the libraries name them; a name that says too little is an error and no guess.

    library            matrix                          embedding (V, D)  bias            gain, kept
    Flax linen, NNX    kernel (in, out)                embedding         bias            scale
    Haiku              w (in, out)                     embeddings        b, offset       scale
    Equinox            weight, weight_ih (out, in)     weight            bias            weight (D,)

Kernels of convolutions (*window, in, out), in Equinox (out, in, *window), are those with 'conv' in the name above theirs. Those of
Flax's attention have heads: query, key, value (D, H, K) and out (H, K, D). Copies, of layers or experts, lie on leading axes, where
`stacked` says so.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gammalm.errors import ConfigError
from gammalm.initializers.params import path_hash
from gammalm.initializers.rules import nearest, path_pattern
from gammalm.initializers.zoo import Initializer, gamma_normal, ones, zeros

BIASES = ("bias", "b", "offset")
MATRICES = ("kernel", "w")  # input before output
TABLES = ("embedding", "embeddings")
OUT_IN = ("weight", "weight_ih", "weight_hh")  # output before input


def init_weights(params: Any, key: jax.Array, gamma: float = 1.0, *, rules: Mapping[str, Initializer | None] | None = None,
                 stacked: Sequence[str] = ()) -> Any:
    """`params` with its weights drawn from N(0, σ²), σ = fan_in^(−γ); biases are 0, gains of norms stay (1 where only shapes are given).

    `params`: a tree of arrays, or of shapes (`jax.eval_shape`, `nnx.eval_shape`), in which the parameters are: `variables["params"]` of
    linen, `nnx.state(model, nnx.Param)`, a Haiku dict, an Equinox module. Leaves keep dtype and shape; other than floats they stay.

    `rules`: {pattern: initializer of the zoo, or None to leave the parameter as it is}; the first pattern that covers whole components of
    the '/'-path decides, as in `init.rules`. The initializer's axes are those of one copy, counted from the end.
    `stacked`: patterns of the same kind; each one that matches a path says that one more leading axis counts copies.

    Pure: under `jax.jit` with `out_shardings` each device makes only its shard. The key of a parameter is `key` folded with its path, so
    two γ differ by a factor, and what else the tree holds changes nothing. Drawn in fp32, cast last.
    Raises ConfigError for parameters that neither their name nor a rule explains, and for a pattern that decides nothing.
    Source: σ, science 1; layouts, the libraries' own layers.
    """
    leaves, tree = jax.tree.flatten(params)
    chosen = _choose(params, gamma, rules or {}, stacked)

    def draw(leaf, path: str, initializer: Initializer | None):
        return leaf if initializer is None else initializer(jax.random.fold_in(key, path_hash(path)), leaf.shape, leaf.dtype)

    return jax.tree.unflatten(tree, [draw(leaf, *choice) for leaf, choice in zip(leaves, chosen, strict=True)])


def weight_table(params: Any, gamma: float = 1.0, *, rules: Mapping[str, Initializer | None] | None = None,
                 stacked: Sequence[str] = ()) -> list[dict]:
    """What `init_weights` draws with the same arguments, one row per array of floats: path, shape, initializer, fan_in, sigma.

    The last two are None where nothing is drawn; initializer is 'kept' for what stays. Nothing is drawn here.
    """
    rows = []
    for leaf, (path, initializer) in zip(jax.tree.leaves(params), _choose(params, gamma, rules or {}, stacked), strict=True):
        if not _is_float(leaf):
            continue
        row = {"path": path, "shape": tuple(leaf.shape), "initializer": initializer.text if initializer else "kept",
               "fan_in": None, "sigma": None}
        if initializer and initializer.draw.distribution != "constant":
            fans = initializer.fans(leaf.shape)
            row |= {"fan_in": fans[0], "sigma": initializer.std(*fans)}
        rows.append(row)
    return rows


def _is_float(leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _path(keys: tuple) -> str:
    """'/'-path of a leaf, without the attribute `value` in which NNX's variables and linen's boxed parameters hold theirs."""
    if keys[-1:] == (jax.tree_util.GetAttrKey("value"),) and len(keys) > 1:
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _choose(params, gamma: float, rules: Mapping[str, Initializer | None], stacked: Sequence[str]) -> list[tuple[str, Initializer | None]]:
    """(path, its initializer or None to keep it) for every leaf, in order."""
    if isinstance(stacked, str):
        raise ConfigError(f"init_weights: stacked must be a sequence of patterns, not the text {stacked!r}; write ({stacked!r},).")
    for text, initializer in rules.items():
        if not isinstance(initializer, Initializer | None):
            raise ConfigError(f"init_weights: rules[{text!r}] must be an initializer of gammalm.initializers or None, not {initializer!r}.")
    deciding = {text: path_pattern(text, f"init_weights: rules[{text!r}]") for text in rules}
    copying = {text: path_pattern(text, f"init_weights: stacked {text!r}") for text in stacked}
    used, chosen, unknown = set(), [], []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = _path(keys)
        if not _is_float(leaf):
            chosen.append((path, None))
            continue
        copies = [text for text, pattern in copying.items() if pattern.fullmatch(path)]
        rule = next((text for text, pattern in deciding.items() if pattern.fullmatch(path)), None)
        used |= {*copies, rule}
        shape = tuple(leaf.shape)
        if len(copies) > len(shape):
            raise ConfigError(f"init_weights: {path} {shape} has no axis for each of stacked={tuple(copies)}.")
        initializer = rules[rule] if rule is not None else _by_name(path, leaf, len(shape) - len(copies), gamma)
        if initializer == "unknown":
            unknown.append(f"  {path} {shape}")
        elif copies and initializer is not None and initializer.draw.distribution != "constant":
            initializer = dataclasses.replace(initializer, batch_axis=(*range(len(copies)), *_axes(initializer.batch_axis)))
        if isinstance(initializer, Initializer):
            try:
                initializer.std(*initializer.fans(shape))
            except ConfigError as error:
                raise ConfigError(f"init_weights: {path} {shape}: {error}") from None
        chosen.append((path, initializer))
    if unknown:
        listed = "\n".join(unknown)
        raise ConfigError(
            f"init_weights: the names do not say what these parameters are:\n{listed}\nSay it with rules={{pattern: initializer}}: "
            'gamma_normal(1.0, in_axis=-2, out_axis=-1), say, or None to leave one as it is. Say with stacked=("layers",) where a leading '
            "axis counts copies, and pass parameters alone, without statistics."
        )
    for text in [*rules, *stacked]:
        if text not in used:
            raise ConfigError(f"init_weights: {text!r} decides nothing.{nearest(text, [path for path, _ in chosen])}")
    return chosen


def _axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _by_name(path: str, leaf, ndim: int, gamma: float) -> Initializer | str | None:
    """The initializer of one copy, `ndim` axes of the leaf, None to keep it, or 'unknown'; axes counted from the end."""
    *above, name = path.split("/")
    parent = above[-1].lower() if above else ""
    other = "local" in parent or (name == "w" and "transpose" in parent)  # Flax's ConvLocal; Haiku's transposed: (*window, out, in)
    convolution = "conv" in parent and ndim >= 3 and not other
    gain = name == "scale" or (name == "weight" and ndim == 1)
    if gain:
        return ones() if isinstance(leaf, jax.ShapeDtypeStruct) else None
    if name in BIASES:
        return zeros()
    if name in TABLES and ndim == 2:
        return gamma_normal(gamma, in_axis=-1, out_axis=-2)
    if name in MATRICES:
        if ndim == 2 or convolution:
            return gamma_normal(gamma)
        if ndim == 3 and parent in ("query", "key", "value"):
            return gamma_normal(gamma, in_axis=-3, out_axis=(-2, -1))
        if ndim == 3 and parent == "out":
            return gamma_normal(gamma, in_axis=(-3, -2))
    norm = re.search(r"norm|(^|_)ln(\d|_|$)", parent)  # its gain with one axis too many is one that `stacked` does not name
    if name in OUT_IN and ndim == 2 and not norm:
        return gamma_normal(gamma, in_axis=-1, out_axis=-2)
    if name == "weight" and convolution:
        return gamma_normal(gamma, in_axis=1 - ndim, out_axis=-ndim)
    return "unknown"
