"""Small parts of a decoder: declared weights, norms and what stands in their place, rotary positions, feed-forward layers.

Shape legend of the whole package: B batch, T query tokens, S key tokens, D d_model, H query heads, G key/value heads,
R = H/G queries per key head, K head size, F FFN width, V vocabulary, L layers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from gammalm.initializers import ParamSpec

BATCH_AXES = ("data", "fsdp", "expert")  # mesh axes that share out the rows of a batch
TOKEN_AXES = (*BATCH_AXES, "context")  # mesh axes that share out its tokens
TOKENS = PartitionSpec(BATCH_AXES, "context")  # how [B, T, ...] lies


def declare(shape, axes, *, fan_in=(), fan_out=(), role, residual_out=False) -> nnx.Param:
    """An fp32 parameter of zeros that carries its `ParamSpec`; values come from `gammalm.initializers.init_params`."""
    spec = ParamSpec(tuple(shape), tuple(axes), tuple(fan_in), tuple(fan_out), role, residual_out)
    return nnx.Param(jnp.zeros(shape, jnp.float32), spec=spec)


def platform() -> str:
    """What a function is being traced for: the platform of the mesh in use, which may be of absent devices, else JAX's default."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() if mesh.empty or mesh.abstract_device is None else mesh.abstract_device.platform


def mesh_pieces(*axes: str) -> int:
    """Into how many pieces these axes of the mesh in use cut something."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


class Tree(NamedTuple):
    """In the place of segments: sequences side by side in a row, of which what several begin with lies there once.

    So a row is a tree, each branch after all of what it goes on from. `until_BT` [B, T] int32: the place in the row from which on a token
    is not seen any more, where the last branch that goes on from it ends; 0 for padding.
    """

    until_BT: jax.Array

    def positions(self):
        """Position of each token in its sequence [B, T]: how many tokens before it in the row it still sees."""
        places_1T = jnp.arange(self.until_BT.shape[1])[None]
        until_BT = jnp.maximum(self.until_BT, places_1T + 1)  # padding sees itself
        return places_1T - jnp.sum(until_BT[:, None, :] <= places_1T[:, :, None], axis=-1, dtype=jnp.int32)


def counted(segments_BT):
    """[B, T] bool: which tokens are no padding, of segments or of a `Tree`."""
    return (segments_BT.until_BT if isinstance(segments_BT, Tree) else segments_BT) > 0


def shard_tokens(x_BTD):
    """Keeps tokens where the mesh in use puts them, so that the compiler does not move activations to where weights lie."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return x_BTD
    return jax.lax.with_sharding_constraint(x_BTD, TOKENS)


def whole_width(table_VD, rows="tensor"):
    """A table at full width on every device, its rows cut up over the mesh axis `rows` (None: whole): look-ups then move no activations."""
    if "tensor" not in jax.sharding.get_abstract_mesh().axis_names:
        return table_VD
    return jax.lax.with_sharding_constraint(table_VD, PartitionSpec(rows, None))


@jax.custom_vjp
def product(x_BTI, w):
    """x · w in the dtype of x, w [I, ...] fp32: [B, T, ...]. One product of two matrices, whose gradient with respect to w is fp32.

    The backward pass is written out because XLA:CPU has fast bf16 kernels for [n, m] · [m, p] alone, and because where it
    transposes an operand it also recomputes it in the transposed order: let that be x, which exists, not the gradient.
    """
    return _product_forward(x_BTI, w)[0]


def _product_forward(x_BTI, w):
    B, T, inputs = x_BTI.shape
    matrix = w.reshape(inputs, -1).astype(x_BTI.dtype)
    # Where T is cut up over devices, B·T is no axis that could be: the compiler would gather T first.
    y = x_BTI @ matrix if mesh_pieces("context") > 1 else x_BTI.reshape(B * T, inputs) @ matrix
    return y.reshape(B, T, *w.shape[1:]), (x_BTI, w)


def _product_backward(saved, d_y):
    x_BTI, w = saved
    B, T, inputs = x_BTI.shape
    d_y_BTO = d_y.reshape(B, T, -1)
    d_x = jnp.einsum("bto,io->bti", d_y_BTO, w.reshape(inputs, -1).astype(d_y.dtype))  # with `.T` it would be an fp32 product
    d_w = jnp.einsum("bti,bto->io", x_BTI, d_y_BTO, preferred_element_type=jnp.float32)
    return d_x, d_w.reshape(w.shape)


product.defvjp(_product_forward, _product_backward)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + ε) · gain over the last axis, statistics in fp32 (Zhang & Sennrich 2019, arXiv:1910.07467).

    ε is an argument of the call, not of the module, so that cells of a grid with different ε share one program.
    """

    def __init__(self, size: int, axis: str = "embed"):
        self.gain = declare((size,), (axis,), role="norm")

    def __call__(self, x, eps):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        gain = self.gain[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * jax.lax.rsqrt(variance + eps) * gain).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x − mean) / sqrt(variance + ε) · gain + bias over the last axis, statistics in fp32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, axis: str = "embed"):
        self.gain = declare((size,), (axis,), role="norm")
        self.bias = declare((size,), (axis,), role="bias")

    def __call__(self, x, eps):
        x32 = x.astype(jnp.float32)
        away = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(away), axis=-1, keepdims=True)
        gain, bias = (a[...].reshape((1,) * (x.ndim - 1) + (-1,)) for a in (self.gain, self.bias))
        return (away * jax.lax.rsqrt(variance + eps) * gain + bias).astype(x.dtype)


class NoNorm(nnx.Module):
    """Nothing in the place of a norm."""

    def __call__(self, x, eps):
        return x


class Shift(nnx.Module):
    """One bias for all channels, which Fixup puts before a linear layer or an activation (Zhang et al. 2019, arXiv:1901.09321).

    Callable in the place of a norm, whose ε it does not read.
    """

    def __init__(self):
        self.bias = declare((1,), ("scalar",), role="bias")

    def __call__(self, x, eps=None):
        return x + self.bias[...].astype(x.dtype).reshape((1,) * x.ndim)


class Scale(nnx.Module):
    """One multiplier for all channels: how a branch of Fixup ends."""

    def __init__(self):
        self.gain = declare((1,), ("scalar",), role="norm")

    def __call__(self, x):
        return x * self.gain[...].astype(x.dtype).reshape((1,) * x.ndim)


NORMS = {"rms": RMSNorm, "layer": LayerNorm, "none": lambda size: NoNorm(), "fixup": lambda size: Shift()}


def rope_angles(positions_BT, head_dim: int, theta: float):
    """cos and sin [B, T, 1, K/2] in fp32 of the rotary embedding (Su et al. 2021, arXiv:2104.09864)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHK, angles):
    """Rotates the pairs (x[k], x[k + K/2]), the half-split form that Llama checkpoints use. Without angles (None) x stays as it is."""
    if angles is None:
        return x_BTHK
    cos, sin = angles
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


def softcap(x, cap: float):
    """cap · tanh(x / cap); the identity for cap = 0 (Gemma 2, arXiv:2408.00118)."""
    return x if cap == 0.0 else cap * jnp.tanh(x / cap)


def biased(y, bias):
    """y + bias, the bias [...] along the last axes of y; y itself where there is none (None)."""
    return y if bias is None else y + bias[...].astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


class SwiGLU(nnx.Module):
    """down(silu(gate x) · up x), no biases (Shazeer 2020, arXiv:2002.05202); with the scalars of Fixup where `fixup`."""

    def __init__(self, d_model: int, d_ff: int, fixup: bool = False):
        self.gate = declare((d_model, d_ff), ("embed", "ffn"), fan_in=("embed",), fan_out=("ffn",), role="ffn")
        self.up = declare((d_model, d_ff), ("embed", "ffn"), fan_in=("embed",), fan_out=("ffn",), role="ffn")
        self.down = declare((d_ff, d_model), ("ffn", "embed"), fan_in=("ffn",), fan_out=("embed",), role="ffn", residual_out=True)
        declare_fixup(self, fixup, "act", "down")

    def __call__(self, x_BTD):
        gate_BTF = jax.nn.silu(self.act_shift(product(x_BTD, self.gate[...])))
        return self.scale(product(self.down_shift(gate_BTF * product(x_BTD, self.up[...])), self.down[...]))


ACTIVATIONS = {
    "relu": jax.nn.relu, "gelu": functools.partial(jax.nn.gelu, approximate=False), "gelu_tanh": jax.nn.gelu, "silu": jax.nn.silu,
    "tanh": jnp.tanh, "elu": jax.nn.elu,
}  # fmt: skip


class MLP(nnx.Module):
    """down(φ(up x)), with biases where `biases`; with the scalars of Fixup where `fixup`."""

    def __init__(self, d_model: int, d_ff: int, activation: str, biases: bool, fixup: bool = False):
        self.activation = activation
        self.up = declare((d_model, d_ff), ("embed", "ffn"), fan_in=("embed",), fan_out=("ffn",), role="ffn")
        self.down = declare((d_ff, d_model), ("ffn", "embed"), fan_in=("ffn",), fan_out=("embed",), role="ffn", residual_out=True)
        self.up_bias = declare((d_ff,), ("ffn",), role="bias") if biases else None
        self.down_bias = declare((d_model,), ("embed",), role="bias") if biases else None
        declare_fixup(self, fixup, "act", "down")

    def __call__(self, x_BTD):
        up_BTF = biased(product(x_BTD, self.up[...]), self.up_bias)
        hidden_BTF = self.down_shift(ACTIVATIONS[self.activation](self.act_shift(up_BTF)))
        return self.scale(biased(product(hidden_BTF, self.down[...]), self.down_bias))


def declare_fixup(module, fixup: bool, *before: str) -> None:
    """Gives a branch the scalars of Fixup: a `Shift` for each name of `before`, a `Scale` at its end. Without: what does nothing."""
    for name in before:
        setattr(module, f"{name}_shift", Shift() if fixup else _same)
    module.scale = Scale() if fixup else _same


def _same(x):
    return x
