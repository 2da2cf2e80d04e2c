"""Causal self-attention: the module of ordinary and grouped-query attention; the output gates and the softmax sinks of every kind of it.

The kernel is chosen in kernels.py. Shape legend: parts.py.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.models.cache import attend_kept, keep
from gammalm.models.kernels import attend
from gammalm.models.parts import RMSNorm, biased, declare, declare_fixup, product, rotate


def declare_gate(module, kind: str, embed: int, heads: int, size: int) -> None:
    """Gives `module` the weights of its output gate: one number per head ("headwise"), per head and channel ("elementwise"), or "none"."""
    module.gate_kind = kind
    if kind == "elementwise":
        module.gate = declare(
            (embed, heads, size), ("embed", "heads", "head_dim"), fan_in=("embed",), fan_out=("heads", "head_dim"), role="gate"
        )
    elif kind == "headwise":
        module.gate = declare((embed, heads), ("embed", "heads"), fan_in=("embed",), fan_out=("heads",), role="gate")


def gated(module, y_BTHK, x_BTD):
    """Y ⊙ sigmoid(X·W_g) on each head's output before the output projection; X is the normed input that q, k and v see.

    Source: Qiu et al. 2025 (arXiv:2505.06708).
    """
    if module.gate_kind == "none":
        return y_BTHK
    gate = jax.nn.sigmoid(product(x_BTD, module.gate[...]))
    return y_BTHK * (gate[..., None] if module.gate_kind == "headwise" else gate)


def declare_sink(module, kind: str, heads: int) -> None:
    """Gives `module` its softmax sink, `config.model.softmax_sink`: exp(s) more in the softmax's denominator, with no value to it.

    "one": s = 0 (Miller 2023, "Attention is off by one"); "learned": one s per head, from 0 on (Agarwal et al. 2025, arXiv:2508.10925;
    with Gu et al. 2025, arXiv:2410.10781, a key bias without a value bias); "none".
    """
    module.sink_kind = kind
    if kind == "learned":
        module.sink = declare((heads,), ("heads",), role="sink")


def sink_logits(module, groups: int, repeats: int):
    """fp32 s of each head [G, R], None without a softmax sink."""
    if module.sink_kind == "none":
        return None
    return module.sink[...].reshape(groups, repeats) if module.sink_kind == "learned" else jnp.zeros((groups, repeats), jnp.float32)


class Attention(nnx.Module):
    """Multi-head or grouped-query attention, optionally with rotary positions, QK-norm, biases, an output gate and a softmax sink."""

    def __init__(self, c):
        embed, heads, groups, size = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        project = functools.partial(declare, fan_in=("embed",))
        self.q = project((embed, heads, size), ("embed", "heads", "head_dim"), fan_out=("heads", "head_dim"), role="qk")
        self.k = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="qk")
        self.v = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="vo")
        declare_gate(self, c.gate, embed, heads, size)
        declare_sink(self, c.softmax_sink, heads)
        self.out = declare(
            (heads, size, embed), ("heads", "head_dim", "embed"),
            fan_in=("heads", "head_dim"), fan_out=("embed",), role="vo", residual_out=True,
        )  # fmt: skip
        biases = c.ffn == "mlp" and c.biases
        shapes = {"q": (heads, "heads"), "k": (groups, "kv_heads"), "v": (groups, "kv_heads")}
        for name, (count, axis) in shapes.items():
            setattr(self, f"{name}_bias", declare((count, size), (axis, "head_dim"), role="bias") if biases else None)
        self.out_bias = declare((embed,), ("embed",), role="bias") if biases else None
        declare_fixup(self, c.norm == "fixup", "out")
        self.kernel = c.attention_kernel
        self.normed = c.qk_norm
        if c.qk_norm:
            self.q_norm = RMSNorm(size, "head_dim")
            self.k_norm = RMSNorm(size, "head_dim")

    def queries_keys(self, x_BTD, angles, eps):
        """Rotated queries [B, T, H, K] and keys [B, T, G, K]; measurements of attention use it too."""
        q = biased(product(x_BTD, self.q[...]), self.q_bias)
        k = biased(product(x_BTD, self.k[...]), self.k_bias)
        if self.normed:
            q, k = self.q_norm(q, eps), self.k_norm(k, eps)
        return rotate(q, angles), rotate(k, angles)

    def norm_inputs(self, x_BTD):
        """What its own norms normalise, by their names: measurements use it."""
        weights = {"q_norm": (self.q, self.q_bias), "k_norm": (self.k, self.k_bias)} if self.normed else {}
        return {name: biased(product(x_BTD, w[...]), bias) for name, (w, bias) in weights.items()}

    def __call__(self, x_BTD, angles, segments_BT, eps):
        return self.attended(x_BTD, angles, segments_BT, eps)[0]

    def attended(self, x_BTD, angles, segments_BT, eps):
        """The layer's output [B, T, D]; and what a cache keeps of these tokens: keys and values [B, G, T, K]."""
        q_BTGRK, k_BTGK, v_BTGK, sink_GR = self._parts(x_BTD, angles, eps)
        y = attend(q_BTGRK, k_BTGK, v_BTGK, segments_BT, self.kernel, sink_GR)
        return self._output(y, x_BTD), (jnp.swapaxes(k_BTGK, 1, 2), jnp.swapaxes(v_BTGK, 1, 2))

    def extended(self, x_BTD, angles, eps, kept, lengths_B):
        """The same of tokens that follow those of a cache, and the cache with them: `kept` is keys and values [B, G, S, K], of which
        lengths_B [B] count."""
        q_BTGRK, k_BTGK, v_BTGK, sink_GR = self._parts(x_BTD, angles, eps)
        kept = keep(kept, (k_BTGK, v_BTGK), lengths_B)
        y = attend_kept(q_BTGRK, *kept, lengths_B, q_BTGRK.shape[-1] ** -0.5, sink_GR)
        return self._output(y, x_BTD), kept

    def _parts(self, x_BTD, angles, eps):
        """Queries [B, T, G, R, K], keys and values [B, T, G, K], softmax sinks [G, R] or None."""
        q_BTHK, k_BTGK = self.queries_keys(x_BTD, angles, eps)
        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        v_BTGK = biased(product(x_BTD, self.v[...]), self.v_bias)
        return q_BTHK.reshape(B, T, G, H // G, K), k_BTGK, v_BTGK, sink_logits(self, G, H // G)

    def _output(self, y_BTGRK, x_BTD):
        B, T, G, R, K = y_BTGRK.shape
        y_BTHK = self.out_shift(gated(self, y_BTGRK.reshape(B, T, G * R, K), x_BTD))
        return self.scale(biased(product(y_BTHK.reshape(B, T, G * R * K), self.out[...].reshape(G * R * K, -1)), self.out_bias))
