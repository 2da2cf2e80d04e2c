"""Causal self-attention: the blockwise kernel that XLA compiles well everywhere, and the module with its gates.

The kernel walks over blocks of queries; a block sees only the keys up to its own end, so half of the T×T work is never
done and no T×T matrix exists. Its backward pass recomputes the weights from the log-sum-exp (Dao et al. 2022,
arXiv:2205.14135). Shape legend: parts.py; t and s run over one block of queries and the keys before its end.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.models.parts import RMSNorm, declare, product, rotate

BLOCK = 128  # queries per block: the scores of one block stay in a core's cache
MAX_BLOCKS = 16  # blocks are unrolled in the program; longer sequences get longer blocks


def block_bounds(length: int) -> list[tuple[int, int]]:
    """Start and end of each block of queries."""
    size = max(BLOCK, -(-length // MAX_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(q_BGRtK, k_BGsK, start: int, segments_BT):
    """fp32 scores [B, G, R, t, s] of queries start… against all keys up to the block's end; -inf where masked."""
    t, s = q_BGRtK.shape[3], k_BGsK.shape[2]
    scale = q_BGRtK.shape[-1] ** -0.5
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRtK, k_BGsK, preferred_element_type=jnp.float32) * scale
    visible = (start + jnp.arange(t))[:, None] >= jnp.arange(s)[None, :]
    visible = visible[None, None, None]
    if segments_BT is not None:
        same = segments_BT[:, start : start + t, None] == segments_BT[:, None, :s]
        visible = visible & same[:, None, None]
    return jnp.where(visible, scores, -jnp.inf)


@jax.custom_vjp
def causal_attention(q_BTGRK, k_BSGK, v_BSGK, segments_BT=None):
    """Softmax attention. Returns the output [B, T, G, R, K] and the fp32 log-sum-exp [B, G, R, T] of the scaled scores.

    Values may have another size than keys; the output has theirs. `segments_BT`, where given, confines attention to tokens of one
    segment. The gradient of the log-sum-exp is not propagated: it is there for measurements.
    """
    return _attend_forward(q_BTGRK, k_BSGK, v_BSGK, segments_BT)[0]


def _heads_first(q, k, v):
    """[B, T, G, …, K] -> [B, G, …, T, K]: one transpose here instead of one in every product."""
    return jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)


def _attend_forward(q_BTGRK, k_BSGK, v_BSGK, segments):
    q, k, v = _heads_first(q_BTGRK, k_BSGK, v_BSGK)
    outputs, lses = [], []
    for start, end in block_bounds(q.shape[3]):
        scores = _scores(q[:, :, :, start:end], k[:, :, :end], start, segments)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v[:, :, :end], preferred_element_type=jnp.float32) / total
        outputs.append(out.astype(v.dtype))
        lses.append((top + jnp.log(total))[..., 0])
    out, lse = jnp.concatenate(outputs, axis=3), jnp.concatenate(lses, axis=-1)
    return (jnp.moveaxis(out, 3, 1), lse), (q, k, v, segments, out, lse)


def _attend_backward(saved, gradients):
    q, k, v, segments, out, lse = saved
    d_out = jnp.moveaxis(gradients[0], 1, 3)
    scale = q.shape[-1] ** -0.5
    # Σ_s p·dp of each query equals out·d_out: the softmax's own correction term, in fp32.
    correction = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    d_qs = []
    d_k = jnp.zeros(k.shape, jnp.float32)
    d_v = jnp.zeros(v.shape, jnp.float32)
    for start, end in block_bounds(q.shape[3]):
        q_b, do_b, k_b, v_b = q[:, :, :, start:end], d_out[:, :, :, start:end], k[:, :, :end], v[:, :, :end]
        weights = jnp.exp(_scores(q_b, k_b, start, segments) - lse[..., start:end, None])
        d_weights = jnp.einsum("bgrtk,bgsk->bgrts", do_b, v_b, preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - correction[..., start:end, None]) * scale).astype(q.dtype)
        d_qs.append(jnp.einsum("bgrts,bgsk->bgrtk", d_scores, k_b))
        d_k = d_k.at[:, :, :end].add(jnp.einsum("bgrts,bgrtk->bgsk", d_scores, q_b, preferred_element_type=jnp.float32))
        d_v = d_v.at[:, :, :end].add(jnp.einsum("bgrts,bgrtk->bgsk", weights.astype(v.dtype), do_b, preferred_element_type=jnp.float32))
    d_q = jnp.moveaxis(jnp.concatenate(d_qs, axis=3), 3, 1)
    return d_q, jnp.moveaxis(d_k, 2, 1).astype(k.dtype), jnp.moveaxis(d_v, 2, 1).astype(v.dtype), None


causal_attention.defvjp(_attend_forward, _attend_backward)


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


class Attention(nnx.Module):
    """Multi-head or grouped-query attention with rotary positions, optional QK-norm, and an output gate."""

    def __init__(self, c):
        embed, heads, groups, size = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        project = functools.partial(declare, fan_in=("embed",))
        self.q = project((embed, heads, size), ("embed", "heads", "head_dim"), fan_out=("heads", "head_dim"), role="qk")
        self.k = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="qk")
        self.v = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="vo")
        declare_gate(self, c.gate, embed, heads, size)
        self.out = declare(
            (heads, size, embed), ("heads", "head_dim", "embed"),
            fan_in=("heads", "head_dim"), fan_out=("embed",), role="vo", residual_out=True,
        )  # fmt: skip
        self.normed = c.qk_norm
        if c.qk_norm:
            self.q_norm = RMSNorm(size, "head_dim")
            self.k_norm = RMSNorm(size, "head_dim")

    def queries_keys(self, x_BTD, angles, eps):
        """Rotated queries [B, T, H, K] and keys [B, T, G, K]; measurements of attention use it too."""
        q = product(x_BTD, self.q[...])
        k = product(x_BTD, self.k[...])
        if self.normed:
            q, k = self.q_norm(q, eps), self.k_norm(k, eps)
        return rotate(q, angles), rotate(k, angles)

    def __call__(self, x_BTD, angles, segments_BT, eps):
        q_BTHK, k_BTGK = self.queries_keys(x_BTD, angles, eps)
        v_BTGK = product(x_BTD, self.v[...])
        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        y, _ = causal_attention(q_BTHK.reshape(B, T, G, H // G, K), k_BTGK, v_BTGK, segments_BT)
        y_BTHK = gated(self, y.reshape(B, T, H, K), x_BTD)
        return product(y_BTHK.reshape(B, T, H * K), self.out[...].reshape(H * K, -1))
