"""Causal self-attention: the blockwise kernel that XLA compiles well everywhere, and the module with its gates.

The kernel walks over blocks of queries; a block sees only the keys up to its own end, so half of the T×T work is never
done and no T×T matrix exists. Its backward pass recomputes the weights from the log-sum-exp (Dao et al. 2022,
arXiv:2205.14135). Shape legend: parts.py; t and s run over one block of queries and the keys before its end.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.models.parts import RMSNorm, declare, rotate

BLOCK = 128  # queries per block: the scores of one block stay in a core's cache
MAX_BLOCKS = 16  # blocks are unrolled in the program; longer sequences get longer blocks


def block_bounds(length: int) -> list[tuple[int, int]]:
    """Start and end of each block of queries."""
    size = max(BLOCK, -(-length // MAX_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(q_BtGRK, k_BsGK, start: int, segments_BT):
    """fp32 scores [B, G, R, t, s] of queries start… against all keys up to the block's end; -inf where masked."""
    t, s = q_BtGRK.shape[1], k_BsGK.shape[1]
    scale = q_BtGRK.shape[-1] ** -0.5
    scores = jnp.einsum("btgrk,bsgk->bgrts", q_BtGRK, k_BsGK, preferred_element_type=jnp.float32) * scale
    visible = (start + jnp.arange(t))[:, None] >= jnp.arange(s)[None, :]
    visible = visible[None, None, None]
    if segments_BT is not None:
        same = segments_BT[:, start : start + t, None] == segments_BT[:, None, :s]
        visible = visible & same[:, None, None]
    return jnp.where(visible, scores, -jnp.inf)


@jax.custom_vjp
def causal_attention(q_BTGRK, k_BSGK, v_BSGK, segments_BT=None):
    """Softmax attention. Returns the output [B, T, G, R, K] and the fp32 log-sum-exp [B, G, R, T] of the scaled scores.

    `segments_BT`, where given, confines attention to tokens of one segment. The gradient of the log-sum-exp is not
    propagated: it is there for measurements.
    """
    return _attend(q_BTGRK, k_BSGK, v_BSGK, segments_BT)


def _attend(q, k, v, segments):
    outputs, lses = [], []
    for start, end in block_bounds(q.shape[1]):
        scores = _scores(q[:, start:end], k[:, :end], start, segments)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum("bgrts,bsgk->btgrk", (weights / total).astype(v.dtype), v[:, :end])
        outputs.append(out)
        lses.append((top + jnp.log(total))[..., 0])
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=-1)


def _attend_forward(q, k, v, segments):
    out, lse = _attend(q, k, v, segments)
    return (out, lse), (q, k, v, segments, out, lse)


def _attend_backward(saved, gradients):
    q, k, v, segments, out, lse = saved
    d_out = gradients[0]
    scale = q.shape[-1] ** -0.5
    # Σ_s p·dp of each query equals out·d_out: the softmax's own correction term, in fp32.
    correction = jnp.einsum("btgrk,btgrk->bgrt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    d_qs = []
    d_k = jnp.zeros(k.shape, jnp.float32)
    d_v = jnp.zeros(v.shape, jnp.float32)
    for start, end in block_bounds(q.shape[1]):
        q_b, do_b = q[:, start:end], d_out[:, start:end]
        weights = jnp.exp(_scores(q_b, k[:, :end], start, segments) - lse[..., start:end, None])
        d_weights = jnp.einsum("btgrk,bsgk->bgrts", do_b, v[:, :end], preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - correction[..., start:end, None]) * scale).astype(q.dtype)
        d_qs.append(jnp.einsum("bgrts,bsgk->btgrk", d_scores, k[:, :end]))
        d_k = d_k.at[:, :end].add(jnp.einsum("bgrts,btgrk->bsgk", d_scores, q_b, preferred_element_type=jnp.float32))
        d_v = d_v.at[:, :end].add(
            jnp.einsum("bgrts,btgrk->bsgk", weights.astype(v.dtype), do_b, preferred_element_type=jnp.float32)
        )
    return jnp.concatenate(d_qs, axis=1), d_k.astype(k.dtype), d_v.astype(v.dtype), None


causal_attention.defvjp(_attend_forward, _attend_backward)


class Attention(nnx.Module):
    """Multi-head or grouped-query attention with rotary positions, optional QK-norm, and an output gate.

    The gate is Y ⊙ sigmoid(X·W_g) on each head's output before the output projection, X being the normed input that
    q, k and v see (Qiu et al. 2025, arXiv:2505.06708): one number per head ("headwise") or per head and channel
    ("elementwise").
    """

    def __init__(self, c, dtype):
        embed, heads, groups, size = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        project = functools.partial(declare, fan_in=("embed",))
        self.dtype = dtype
        self.gated = c.gate
        self.q = project((embed, heads, size), ("embed", "heads", "head_dim"), fan_out=("heads", "head_dim"), role="qk")
        self.k = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="qk")
        self.v = project((embed, groups, size), ("embed", "kv_heads", "head_dim"), fan_out=("kv_heads", "head_dim"), role="vo")
        if c.gate == "elementwise":
            self.gate = project((embed, heads, size), ("embed", "heads", "head_dim"), fan_out=("heads", "head_dim"), role="gate")
        elif c.gate == "headwise":
            self.gate = project((embed, heads), ("embed", "heads"), fan_out=("heads",), role="gate")
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
        q = jnp.einsum("btd,dhk->bthk", x_BTD, self.q[...].astype(self.dtype))
        k = jnp.einsum("btd,dgk->btgk", x_BTD, self.k[...].astype(self.dtype))
        if self.normed:
            q, k = self.q_norm(q, eps), self.k_norm(k, eps)
        return rotate(q, angles), rotate(k, angles)

    def __call__(self, x_BTD, angles, segments_BT, eps):
        q_BTHK, k_BTGK = self.queries_keys(x_BTD, angles, eps)
        v_BTGK = jnp.einsum("btd,dgk->btgk", x_BTD, self.v[...].astype(self.dtype))
        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        y, _ = causal_attention(q_BTHK.reshape(B, T, G, H // G, K), k_BTGK, v_BTGK, segments_BT)
        y_BTHK = y.reshape(B, T, H, K)
        if self.gated == "elementwise":
            y_BTHK *= jax.nn.sigmoid(jnp.einsum("btd,dhk->bthk", x_BTD, self.gate[...].astype(self.dtype)))
        elif self.gated == "headwise":
            y_BTHK *= jax.nn.sigmoid(jnp.einsum("btd,dh->bth", x_BTD, self.gate[...].astype(self.dtype)))[..., None]
        return jnp.einsum("bthk,hkd->btd", y_BTHK, self.out[...].astype(self.dtype))
