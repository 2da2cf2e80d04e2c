"""A mixture of many small experts: sigmoid affinities, top-K with a selection bias, shared experts (DeepSeek-V3, arXiv:2412.19437).

The bias decides who is chosen and never enters a gate; it is a buffer that the training step moves, once per step, against unequal load.
What the layer measures (loads, balance loss) is returned, never stored: it survives scan, remat and accumulation.
Shape legend: parts.py; E experts, A = top_k assignments per token.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.models.exchange import sharded_expert_ffn
from gammalm.models.experts import choose_backend, expert_ffn
from gammalm.models.parts import TOKEN_AXES, TOKENS, SwiGLU, counted, declare, mesh_pieces, platform


class Buffer(nnx.Variable):
    """State of a layer that no gradient reaches."""


class Experts(nnx.Module):
    """The routed experts' SwiGLU weights, stacked on axis E; a fan never counts experts."""

    def __init__(self, n_experts: int, d_model: int, d_expert: int):
        wide = functools.partial(
            declare, (n_experts, d_model, d_expert), ("experts", "embed", "ffn"), fan_in=("embed",), fan_out=("ffn",), role="ffn"
        )
        self.gate, self.up = wide(), wide()
        self.down = declare(
            (n_experts, d_expert, d_model), ("experts", "ffn", "embed"),
            fan_in=("ffn",), fan_out=("embed",), role="ffn", residual_out=True,
        )  # fmt: skip


class MoE(nnx.Module):
    """Routed and shared experts in place of an FFN. Dropless: every chosen expert runs on its token, and `dropped` counts what did not."""

    def __init__(self, c):
        m = c.moe
        self.top_k, self.score, self.route_scale, self.backend = m.top_k, m.score, m.route_scale, m.backend
        self.router = declare((c.d_model, m.n_experts), ("embed", "routes"), fan_in=("embed",), fan_out=("routes",), role="router")
        self.bias = Buffer(jnp.zeros((m.n_experts,), jnp.float32))
        self.experts = Experts(m.n_experts, c.d_model, m.d_expert)
        self.shares = m.n_shared > 0
        if self.shares:
            self.shared = SwiGLU(c.d_model, m.n_shared * m.d_expert)

    def route(self, x_BTD):
        """fp32 affinities [B, T, E], chosen experts [B, T, A] int32 and their gates [B, T, A] fp32."""
        # HIGHEST: a TPU would round fp32 factors to bf16, and near-ties would be decided by rounding.
        logits = jnp.einsum("btd,de->bte", x_BTD.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST)
        scores_BTE = jax.nn.sigmoid(logits) if self.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        ids_BTA = top_ids(scores_BTE + self.bias[...][None, None], self.top_k)
        chosen_BTA = jnp.take_along_axis(scores_BTE, ids_BTA, axis=-1)
        gates_BTA = self.route_scale * chosen_BTA / (jnp.sum(chosen_BTA, axis=-1, keepdims=True) + 1e-20)
        return scores_BTE, ids_BTA, gates_BTA

    def __call__(self, x_BTD, segments_BT):
        """The layer's output [B, T, D] and what it measured: see `measures`. Padding (segment 0) is sent to no expert."""
        n_experts = self.experts.gate.shape[0]
        scores_BTE, ids_BTA, gates_BTA = self.route(x_BTD)
        valid_BT = jnp.ones(x_BTD.shape[:2], bool) if segments_BT is None else counted(segments_BT)
        ids_BTA = jnp.where(valid_BT[..., None], ids_BTA, n_experts)
        weights = {name: getattr(self.experts, name)[...] for name in ("gate", "up", "down")}
        compute = functools.partial(expert_ffn, backend=choose_backend(self.backend, platform()))
        y_BTD, computed = sharded_expert_ffn(x_BTD, ids_BTA, gates_BTA, weights, compute)
        if self.shares:
            y_BTD += self.shared(x_BTD)
        return y_BTD, measures(scores_BTE, ids_BTA, top_ids(scores_BTE, self.top_k), valid_BT, computed)


def top_ids(values_BTE, k: int):
    """The k experts [B, T, k] int32 of the largest values of each token, without a gradient; every device ranks its own tokens.

    Left to the compiler, some backends gather the values of all tokens on every device and rank them there.
    """

    def pick(values_BTE):
        return jax.lax.top_k(values_BTE, k)[1]

    values_BTE = jax.lax.stop_gradient(values_BTE)
    if mesh_pieces(*TOKEN_AXES) == 1:
        return pick(values_BTE)
    return jax.shard_map(pick, in_specs=TOKENS, out_specs=TOKENS, axis_names=set(TOKEN_AXES), check_vma=False)(values_BTE)


def counts_by_row(ids_BTA, n_experts: int):
    """How often each row chose each expert: [B, E] int32. The sum over A comes first and in bytes: nothing is as large as B x T x A x E."""
    experts = jnp.arange(n_experts, dtype=ids_BTA.dtype)[None, None]
    hits_BTE = sum((ids_BTA[..., a, None] == experts).astype(jnp.int8) for a in range(ids_BTA.shape[-1]))
    return jnp.sum(hits_BTE, axis=1, dtype=jnp.int32)


def measures(scores_BTE, ids_BTA, preferred_BTA, valid_BT, computed) -> dict:
    """What a mixture layer reports of one batch: sums over its tokens, so that micro-batches and hosts add up.

    load [E] int32: tokens that chose each expert (`ids`; E for none). dropped [] int32: choices whose expert did not run. balance [] fp32:
    the sequence-wise balance loss Σ_i f_i·P_i summed over sequences, differentiable in the scores: f_i counts the tokens that would choose
    expert i by affinity alone (`preferred`, without the bias), P_i is its mean share of the affinity; 1 where all are alike
    (arXiv:2412.19437, eq. 17–20).
    """
    E = scores_BTE.shape[-1]
    tokens_B = jnp.maximum(jnp.sum(valid_BT, axis=1), 1).astype(jnp.float32)
    share_BTE = scores_BTE / (jnp.sum(scores_BTE, axis=-1, keepdims=True) + 1e-20) * valid_BT[..., None]
    mean_BE = jnp.sum(share_BTE, axis=1) / tokens_B[:, None]
    preferred_BE = counts_by_row(jnp.where(valid_BT[..., None], preferred_BTA, E), E)
    frequency_BE = preferred_BE * (E / ids_BTA.shape[-1]) / tokens_B[:, None]
    load_E = jnp.sum(counts_by_row(ids_BTA, E), axis=0)
    return {"load": load_E, "dropped": jnp.sum(load_E) - computed, "balance": jnp.sum(frequency_BE * mean_BE)}
