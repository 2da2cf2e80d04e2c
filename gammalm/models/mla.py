"""Multi-head latent attention: keys and values of all heads come from one narrow latent per token (DeepSeek-V2, arXiv:2405.04434).

Position enters through a separate part of each query and of one key that all heads share ("decoupled RoPE"). Each latent has an RMSNorm
with the model's ε, so that its branch loses one factor of γ (science.md, section 9). Shape legend: parts.py; C rank of the key-value
latent, N size of a head's part without position, P of its rotated part, W of a head's value.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from gammalm.models.attention import declare_gate, declare_sink, gated, sink_logits
from gammalm.models.cache import attend_kept, keep
from gammalm.models.kernels import attend
from gammalm.models.parts import RMSNorm, declare, product, rotate


class LatentAttention(nnx.Module):
    """Causal attention over expanded latents, with the same output gates and softmax sinks as `Attention`.

    Without query compression (q_rank 0) queries are read from the input. A head's query is [N | P]: the part without position first.
    """

    def __init__(self, c):
        m, embed, heads = c.mla, c.d_model, c.n_heads
        self.kernel = c.attention_kernel
        self.nope_dim = m.nope_dim
        qk_dim = m.nope_dim + m.rope_dim
        read = functools.partial(declare, fan_in=("embed",))
        expand = functools.partial(declare, fan_in=("rank",), fan_out=("heads", "head_dim"))
        per_head = ("rank", "heads", "head_dim")
        self.compressed = m.q_rank > 0
        if self.compressed:
            self.q_down = read((embed, m.q_rank), ("embed", "rank"), fan_out=("rank",), role="qk")
            self.q_norm = RMSNorm(m.q_rank, "rank")
            self.q_up = expand((m.q_rank, heads, qk_dim), per_head, role="qk")
        else:
            self.q = read((embed, heads, qk_dim), ("embed", "heads", "head_dim"), fan_out=("heads", "head_dim"), role="qk")
        self.kv_down = read((embed, m.kv_rank), ("embed", "rank"), fan_out=("rank",), role="vo")
        self.k_rope = read((embed, m.rope_dim), ("embed", "head_dim"), fan_out=("head_dim",), role="qk")
        self.kv_norm = RMSNorm(m.kv_rank, "rank")
        self.k_up = expand((m.kv_rank, heads, m.nope_dim), per_head, role="qk")
        self.v_up = expand((m.kv_rank, heads, m.v_dim), per_head, role="vo")
        self.out = declare(
            (heads, m.v_dim, embed), ("heads", "head_dim", "embed"),
            fan_in=("heads", "head_dim"), fan_out=("embed",), role="vo", residual_out=True,
        )  # fmt: skip
        declare_gate(self, c.gate, embed, heads, m.v_dim)
        declare_sink(self, c.softmax_sink, heads)

    def queries(self, x_BTD, angles, eps):
        """[B, T, H, N+P], the last P channels rotated."""
        if self.compressed:
            q_BTHK = product(self.q_norm(product(x_BTD, self.q_down[...]), eps), self.q_up[...])
        else:
            q_BTHK = product(x_BTD, self.q[...])
        return jnp.concatenate([q_BTHK[..., : self.nope_dim], rotate(q_BTHK[..., self.nope_dim :], angles)], axis=-1)

    def latents(self, x_BTD, angles, eps):
        """The normed latent [B, T, C], and the rotated part [B, T, P] of the keys of all heads."""
        latent_BTC = self.kv_norm(product(x_BTD, self.kv_down[...]), eps)
        return latent_BTC, rotate(product(x_BTD, self.k_rope[...])[:, :, None], angles)[:, :, 0]

    def keys(self, latent_BTC, rope_BTP):
        """Of all heads [B, T, H, N+P]."""
        k_BTHN = product(latent_BTC, self.k_up[...])
        k_BTHP = jnp.broadcast_to(rope_BTP[:, :, None], (*k_BTHN.shape[:3], rope_BTP.shape[-1]))
        return jnp.concatenate([k_BTHN, k_BTHP], axis=-1)

    def queries_keys(self, x_BTD, angles, eps):
        """Queries and keys [B, T, H, N+P]; measurements of attention use them."""
        return self.queries(x_BTD, angles, eps), self.keys(*self.latents(x_BTD, angles, eps))

    def norm_inputs(self, x_BTD):
        """What its own norms normalise, by their names: measurements use it."""
        latents = {"kv_norm": product(x_BTD, self.kv_down[...])}
        return latents | ({"q_norm": product(x_BTD, self.q_down[...])} if self.compressed else {})

    def __call__(self, x_BTD, angles, segments_BT, eps):
        return self.attended(x_BTD, angles, segments_BT, eps)[0]

    def attended(self, x_BTD, angles, segments_BT, eps):
        """The layer's output [B, T, D]; and what a cache keeps of these tokens: latent and rotated part, [B, 1, T, C+P]."""
        q_BTHK = self.queries(x_BTD, angles, eps)
        latent_BTC, rope_BTP = self.latents(x_BTD, angles, eps)
        k_BTHK, v_BTHW = self.keys(latent_BTC, rope_BTP), product(latent_BTC, self.v_up[...])
        sink_H1 = sink_logits(self, q_BTHK.shape[2], 1)
        y_BTH1W = attend(q_BTHK[:, :, :, None], k_BTHK, v_BTHW, segments_BT, self.kernel, sink_H1)
        return self._output(y_BTH1W[:, :, :, 0], x_BTD), jnp.concatenate([latent_BTC, rope_BTP], axis=-1)[:, None]

    def extended(self, x_BTD, angles, eps, kept_B1SX, lengths_B):
        """The same of tokens that follow those of a cache, `kept` [B, 1, S, C+P], of which lengths_B [B] count; and the cache with them.

        No key or value of a head is expanded: the latents are one key, and one value, that all heads share. q·(W_k c) = (W_kᵀ q)·c, and the
        mean of W_v c is W_v of the mean (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
        """
        q_BTHK = self.queries(x_BTD, angles, eps)
        kept_B1SX = keep(kept_B1SX, jnp.concatenate(self.latents(x_BTD, angles, eps), axis=-1)[:, :, None], lengths_B)
        k_up_CHN, v_up_CHW = (up[...].astype(x_BTD.dtype) for up in (self.k_up, self.v_up))
        q_BTHC = jnp.einsum("bthn,chn->bthc", q_BTHK[..., : self.nope_dim], k_up_CHN)
        q_BT1HX = jnp.concatenate([q_BTHC, q_BTHK[..., self.nope_dim :]], axis=-1)[:, :, None]
        sink = sink_logits(self, 1, q_BTHK.shape[2])
        y_BT1HX = attend_kept(q_BT1HX, kept_B1SX, kept_B1SX, lengths_B, q_BTHK.shape[-1] ** -0.5, sink)
        y_BTHW = jnp.einsum("bthc,chw->bthw", y_BT1HX[:, :, 0, :, : k_up_CHN.shape[0]], v_up_CHW)
        return self._output(y_BTHW, x_BTD), kept_B1SX

    def _output(self, y_BTHW, x_BTD):
        B, T, H, W = y_BTHW.shape
        return product(gated(self, y_BTHW, x_BTD).reshape(B, T, H * W), self.out[...].reshape(H * W, -1))
