"""The decoder: embedding, L stacked pre-norm blocks under one scan, final norm, head; and the bridge to plain parameters.

Parameters are a nested dict of fp32 arrays ("layers/attn/q" and so on). `Model` holds the structure; `Model.bind(params)`
gives the module to call inside a jitted function. Shape legend: parts.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.initializers import ParamSpec
from gammalm.models.attention import Attention
from gammalm.models.loss import summed_loss, token_losses
from gammalm.models.parts import RMSNorm, SwiGLU, declare, rope_angles, shard_rows, softcap, whole_width

# Modules are pytrees here; graph mode would wrap every call in its own tracing machinery.
nnx.set_graph_mode(False)

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep matrix products, recompute the rest
    "full": jax.checkpoint_policies.nothing_saveable,  # keep only what enters each layer
}


class Block(nnx.Module):
    """x + attention(norm x), then x + ffn(norm x); the residual stream has its own dtype."""

    def __init__(self, c):
        dtype = jnp.dtype(c.dtype)
        self.dtype = dtype
        self.attn_norm = RMSNorm(c.d_model)
        self.attn = Attention(c)
        self.ffn_norm = RMSNorm(c.d_model)
        self.ffn = SwiGLU(c.d_model, c.d_ff)

    def attend(self, x_BTD, angles, segments_BT, eps):
        """The stream after the attention branch."""
        normed = self.attn_norm(x_BTD, eps).astype(self.dtype)
        return x_BTD + self.attn(normed, angles, segments_BT, eps).astype(x_BTD.dtype)

    def feed(self, x_BTD, eps):
        """The stream after the feed-forward branch."""
        normed = self.ffn_norm(x_BTD, eps).astype(self.dtype)
        return x_BTD + self.ffn(normed).astype(x_BTD.dtype)

    def __call__(self, x_BTD, angles, segments_BT, eps):
        return self.feed(self.attend(x_BTD, angles, segments_BT, eps), eps)


class Head(nnx.Module):
    """An untied output matrix."""

    def __init__(self, c):
        self.kernel = declare((c.d_model, c.vocab_size), ("embed", "vocab"), fan_in=("embed",), fan_out=("vocab",), role="head")


class Embedding(nnx.Module):
    """The token table; tied to the head by default."""

    def __init__(self, c):
        self.table = declare((c.vocab_size, c.d_model), ("vocab", "embed"), fan_in=("embed",), fan_out=("vocab",), role="embed")


class Decoder(nnx.Module):
    """A dense decoder built from `config.model`."""

    def __init__(self, c):
        self.embed = Embedding(c)
        self.layers = jax.vmap(lambda _: Block(c))(jnp.arange(c.n_layers))
        self.final_norm = RMSNorm(c.d_model)
        if not c.tie_embeddings:
            self.head = Head(c)
        self.tied = c.tie_embeddings
        self.head_dim = c.head_dim
        self.rope_theta = c.rope_theta
        self.dtype = jnp.dtype(c.dtype)
        self.residual_dtype = jnp.dtype(c.residual_dtype)
        self.remat = c.remat
        self.unroll = c.scan_unroll
        # Layers outside a loop share its program with their backward pass, where merging equal expressions would undo remat.
        self.outside_loop = c.n_layers <= c.scan_unroll or c.n_layers % c.scan_unroll > 0
        self.softcap = c.logit_softcap
        self.loss_chunk = c.loss_chunk

    def embed_tokens(self, tokens_BT):
        """The residual stream's start, e in the papers: [B, T, D]."""
        return whole_width(self.embed.table[...])[tokens_BT].astype(self.residual_dtype)

    def angles(self, tokens_BT, segments_BT):
        """Rotary cos and sin; positions start again at each segment."""
        T = tokens_BT.shape[1]
        positions = jnp.arange(T)[None]
        if segments_BT is not None:
            new = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
            positions = positions - jax.lax.cummax(jnp.where(new, positions, 0), axis=1)
        return rope_angles(positions, self.head_dim, self.rope_theta)

    def hidden(self, tokens_BT, segments_BT, eps):
        """The normed last hidden state [B, T, D] in the compute dtype."""
        angles = self.angles(tokens_BT, segments_BT)

        def layer(x_BTD, block):
            return shard_rows(block(x_BTD, angles, segments_BT, eps)), None

        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=self.outside_loop)
        x_BTD, _ = jax.lax.scan(layer, shard_rows(self.embed_tokens(tokens_BT)), self.layers, unroll=self.unroll)
        return self.final_norm(x_BTD, eps).astype(self.dtype)

    def finite_by_layer(self, tokens_BT, segments_BT, eps):
        """Whether the stream is finite throughout: after the embedding [], after each attention [L] and each feed-forward branch [L]."""
        angles = self.angles(tokens_BT, segments_BT)

        def layer(x_BTD, block):
            attended = block.attend(x_BTD, angles, segments_BT, eps)
            fed = block.feed(attended, eps)
            return fed, (jnp.isfinite(attended).all(), jnp.isfinite(fed).all())

        x_BTD = self.embed_tokens(tokens_BT)
        _, (attended_L, fed_L) = jax.lax.scan(layer, x_BTD, self.layers)
        return jnp.isfinite(x_BTD).all(), attended_L, fed_L

    def head_matrix(self):
        """The output matrix as [V, D], fp32."""
        return self.embed.table[...] if self.tied else self.head.kernel[...].T

    def loss(self, tokens_BT, targets_BT, weights_BT, segments_BT, eps):
        """Σ weight · loss in nats (fp32 scalar)."""
        x_BTD = self.hidden(tokens_BT, segments_BT, eps)
        return summed_loss(x_BTD, self.head_matrix(), targets_BT, weights_BT, self.softcap, self.loss_chunk)

    def token_losses(self, tokens_BT, targets_BT, segments_BT, eps):
        """fp32 losses and log-sum-exps [B, T] of each token, without gradients."""
        x_BTD = self.hidden(tokens_BT, segments_BT, eps)
        return token_losses(x_BTD, self.head_matrix(), targets_BT, cap=self.softcap, chunk=self.loss_chunk)

    def logits(self, tokens_BT, segments_BT, eps):
        """All logits [B, T, V] in fp32: for short sequences and tests; training never holds them."""
        x_BTD = self.hidden(tokens_BT, segments_BT, eps)
        logits = jnp.einsum("btd,vd->btv", x_BTD, self.head_matrix().astype(x_BTD.dtype), preferred_element_type=jnp.float32)
        return softcap(logits, self.softcap)


class Model:
    """Structure of a decoder without its numbers: `specs` per path, and `bind` to join it with a nested dict of arrays."""

    def __init__(self, model_config):
        abstract = nnx.eval_shape(lambda: Decoder(model_config))
        self.graphdef, self.state = nnx.split(abstract)
        self.config = model_config
        self.specs: dict[str, ParamSpec] = {}
        for path, variable in nnx.to_flat_state(self.state):
            spec = variable.get_metadata()["spec"]
            if path[0] == "layers":
                spec = dataclasses.replace(spec, shape=(model_config.n_layers, *spec.shape), axes=("layers", *spec.axes))
            self.specs["/".join(path)] = spec

    def bind(self, params) -> Decoder:
        """The module over `params`, a nested dict of arrays with the structure of `specs`."""
        leaves = jax.tree.leaves(params)
        return nnx.merge(self.graphdef, jax.tree.unflatten(jax.tree.structure(self.state), leaves))

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs.values())


def param_specs(model_config) -> dict[str, ParamSpec]:
    """Path -> ParamSpec of every parameter that `config.model` declares; nothing is allocated."""
    return Model(model_config).specs
