"""Multi-head latent attention: keys and values of all heads come from one narrow latent per token (DeepSeek-V2, arXiv:2405.04434).

Position enters through a separate part of each query and of one key that all heads share ("decoupled RoPE"). Each latent has an RMSNorm
with the model's ε, so that its branch loses one factor of γ (science.md, section 9). Shape legend: parts.py; C rank of the key-value
latent, N size of a head's part without position, P of its rotated part, W of a head's value.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from gammalm.models.attention import declare_gate, declare_sink, gated, sink_logits
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

    def queries_keys(self, x_BTD, angles, eps):
        """Queries and keys [B, T, H, N+P] with their last P channels rotated, and the normed latent [B, T, C] that values come from."""
        if self.compressed:
            q_BTHK = product(self.q_norm(product(x_BTD, self.q_down[...]), eps), self.q_up[...])
        else:
            q_BTHK = product(x_BTD, self.q[...])
        latent_BTC = self.kv_norm(product(x_BTD, self.kv_down[...]), eps)
        k_BTHN = product(latent_BTC, self.k_up[...])
        k_BT1P = rotate(product(x_BTD, self.k_rope[...])[:, :, None], angles)
        q_BTHP = rotate(q_BTHK[..., self.nope_dim :], angles)
        k_BTHP = jnp.broadcast_to(k_BT1P, q_BTHP.shape)
        q_BTHK = jnp.concatenate([q_BTHK[..., : self.nope_dim], q_BTHP], axis=-1)
        return q_BTHK, jnp.concatenate([k_BTHN, k_BTHP], axis=-1), latent_BTC

    def norm_inputs(self, x_BTD):
        """What its own norms normalise, by their names: measurements use it."""
        latents = {"kv_norm": product(x_BTD, self.kv_down[...])}
        return latents | ({"q_norm": product(x_BTD, self.q_down[...])} if self.compressed else {})

    def __call__(self, x_BTD, angles, segments_BT, eps):
        q_BTHK, k_BTHK, latent_BTC = self.queries_keys(x_BTD, angles, eps)
        v_BTHW = product(latent_BTC, self.v_up[...])
        sink_H1 = sink_logits(self, q_BTHK.shape[2], 1)
        y_BTH1W = attend(q_BTHK[:, :, :, None], k_BTHK, v_BTHW, segments_BT, self.kernel, sink_H1)
        y_BTHW = gated(self, y_BTH1W[:, :, :, 0], x_BTD)
        B, T, H, W = y_BTHW.shape
        return product(y_BTHW.reshape(B, T, H * W), self.out[...].reshape(H * W, -1))
