"""The decoder: embedding, L stacked blocks under one scan, final norm, head; and the bridge to plain parameters.

Parameters are a nested dict of fp32 arrays ("layers/attn/q" and so on); buffers (a mixture's selection bias) are another. `Model` holds
the structure; `Model.bind(params, buffers)` gives the module to call inside a jitted function. A mixture of experts whose first layers
are dense has two stacks, `dense_layers` and `layers`, scanned one after the other. Shape legend: parts.py; E experts.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gammalm.errors import ConfigError
from gammalm.initializers import ParamSpec
from gammalm.models.attention import Attention
from gammalm.models.loss import summed_loss, token_losses
from gammalm.models.mla import LatentAttention
from gammalm.models.moe import MoE
from gammalm.models.parts import MLP, NORMS, NoNorm, SwiGLU, Tree, declare, rope_angles, shard_tokens, softcap, whole_width

# Modules are pytrees here; graph mode would wrap every call in its own tracing machinery.
nnx.set_graph_mode(False)

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep matrix products, recompute the rest
    "full": jax.checkpoint_policies.nothing_saveable,  # keep only what enters each layer
}


class Block(nnx.Module):
    """Attention, then the feed-forward layer, each a branch of the residual stream, which has its own dtype. `ffn` is dense | mlp | moe.

    `config.model.residual` says how a branch f is tied in: "pre" x + f(norm x); "post" norm(x + f(x)); "deepnorm" norm(α x + f(x)) with
    α = (2L)^¼ (Wang et al. 2022, arXiv:2203.00555, for decoders).
    """

    def __init__(self, c, ffn: str):
        dtype = jnp.dtype(c.dtype)
        self.dtype = dtype
        self.pre = c.residual == "pre"
        self.skip = (2 * c.n_layers) ** 0.25 if c.residual == "deepnorm" else 1.0
        fixup = c.norm == "fixup"
        self.attn_norm = NORMS[c.norm](c.d_model)
        self.attn = LatentAttention(c) if c.attention == "mla" else Attention(c)
        self.ffn_norm = NORMS[c.norm](c.d_model)
        self.mixed = ffn == "moe"
        if ffn == "mlp":
            self.ffn = MLP(c.d_model, c.d_ff, c.activation, c.biases, fixup)
        else:
            self.ffn = MoE(c) if self.mixed else SwiGLU(c.d_model, c.d_ff, fixup)

    def attention_input(self, x_BTD, eps):
        """What attention reads of the stream, in the compute dtype."""
        return self._read(self.attn_norm, x_BTD, eps)

    def after_attention(self, x_BTD, y_BTD, eps):
        """The stream after attention has given y."""
        return self._tie_in(self.attn_norm, x_BTD, y_BTD, eps)

    def after_ffn(self, x_BTD, y_BTD, eps):
        """The stream after the feed-forward layer has given y."""
        return self._tie_in(self.ffn_norm, x_BTD, y_BTD, eps)

    def normalised(self, x_BTD, y_BTD):
        """What the norm of a branch takes in, of the stream before it and what it gave: measurements use it."""
        return x_BTD if self.pre else self.skip * x_BTD + y_BTD.astype(x_BTD.dtype)

    def _read(self, norm, x_BTD, eps):
        return (norm(x_BTD, eps) if self.pre else x_BTD).astype(self.dtype)

    def _tie_in(self, norm, x_BTD, y_BTD, eps):
        return x_BTD + y_BTD.astype(x_BTD.dtype) if self.pre else norm(self.normalised(x_BTD, y_BTD), eps)

    def attention_branch(self, x_BTD, angles, segments_BT, eps):
        """What attention adds to the stream, in the compute dtype."""
        return self.attn(self.attention_input(x_BTD, eps), angles, segments_BT, eps)

    def ffn_branch(self, x_BTD, segments_BT, eps):
        """What the feed-forward layer adds to the stream, in the compute dtype, and what a mixture measured on the way (moe.measures; empty
        without one)."""
        read_BTD = self._read(self.ffn_norm, x_BTD, eps)
        return self.ffn(read_BTD, segments_BT) if self.mixed else (self.ffn(read_BTD), {})

    def __call__(self, x_BTD, angles, segments_BT, eps):
        x_BTD = self.after_attention(x_BTD, self.attention_branch(x_BTD, angles, segments_BT, eps), eps)
        y_BTD, measured = self.ffn_branch(x_BTD, segments_BT, eps)
        return self.after_ffn(x_BTD, y_BTD, eps), measured


class Visit(NamedTuple):
    """One layer as `Decoder.walk` passes it: the block, the rotary angles, the stream before it, what attention adds, the stream between,
    what the feed-forward layer adds, the stream after it. Streams are in the residual dtype, what is added in the compute dtype."""

    block: Block
    angles: tuple
    before_BTD: jax.Array
    attention_BTD: jax.Array
    between_BTD: jax.Array
    ffn_BTD: jax.Array
    after_BTD: jax.Array


class Head(nnx.Module):
    """An untied output matrix."""

    def __init__(self, c):
        self.kernel = declare((c.d_model, c.vocab_size), ("embed", "vocab"), fan_in=("embed",), fan_out=("vocab",), role="head")


class Embedding(nnx.Module):
    """The token table, tied to the head by default; and with learned positions the table of those."""

    def __init__(self, c):
        self.table = declare((c.vocab_size, c.d_model), ("vocab", "embed"), fan_in=("embed",), fan_out=("vocab",), role="embed")
        self.length = c.max_positions if c.positions == "learned" else 0
        if self.length:
            self.positions = declare(
                (self.length, c.d_model), ("positions", "embed"), fan_in=("embed",), fan_out=("positions",), role="position"
            )


def positions_of(length: int, segments_BT):
    """Position from 0 of each token in its segment: [B, T] int32; [1, T] where all of a sequence is one (None)."""
    positions = jnp.arange(length)[None]
    if segments_BT is None:
        return positions
    if isinstance(segments_BT, Tree):
        return segments_BT.positions()
    new = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return positions - jax.lax.cummax(jnp.where(new, positions, 0), axis=1)


class Decoder(nnx.Module):
    """A decoder built from `config.model`."""

    def __init__(self, c):
        self.embed = Embedding(c)
        first = c.moe.first_k_dense if c.ffn == "moe" else 0
        self.depths = {"dense_layers": first} if first else {}
        self.depths["layers"] = c.n_layers - first
        if first:
            self.dense_layers = jax.vmap(lambda _: Block(c, "dense"))(jnp.arange(first))
        self.layers = jax.vmap(lambda _: Block(c, c.ffn))(jnp.arange(c.n_layers - first))
        self.final_norm = NORMS[c.norm](c.d_model) if c.residual == "pre" else NoNorm()  # else the last block ends with one
        if not c.tie_embeddings:
            self.head = Head(c)
        self.tied = c.tie_embeddings
        self.rope_dim = c.mla.rope_dim if c.attention == "mla" else c.head_dim
        self.rope_theta = c.rope_theta if c.positions == "rope" else None
        self.dtype = jnp.dtype(c.dtype)
        self.residual_dtype = jnp.dtype(c.residual_dtype)
        self.remat = c.remat
        self.unroll = c.scan_unroll
        self.softcap = c.logit_softcap
        self.loss_chunk = c.loss_chunk

    def embed_tokens(self, tokens_BT, positions_BT):
        """The residual stream's start, e in the papers: [B, T, D]. `positions_BT` as of `positions_of`."""
        x_BTD = whole_width(self.embed.table[...])[tokens_BT].astype(self.residual_dtype)
        if not self.embed.length:
            return x_BTD
        return x_BTD + whole_width(self.embed.positions[...], rows=None)[positions_BT].astype(self.residual_dtype)

    def angles(self, positions_BT):
        """Rotary cos and sin; None where positions are learned."""
        return None if self.rope_theta is None else rope_angles(positions_BT, self.rope_dim, self.rope_theta)

    def start(self, tokens_BT, segments_BT):
        """What the first layer is given: the stream, and the rotary angles. Raises ConfigError for more tokens than learned positions.

        The rows of a `Tree` may be longer, as no sequence in them begins but at 0: who lays them out knows how long those are.
        """
        if not isinstance(segments_BT, Tree):
            self.require_positions(tokens_BT.shape[1])
        positions_BT = positions_of(tokens_BT.shape[1], segments_BT)
        return shard_tokens(self.embed_tokens(tokens_BT, positions_BT)), self.angles(positions_BT)

    def require_positions(self, length: int) -> None:
        """Raises ConfigError where a sequence of `length` has more tokens than there are learned positions."""
        if 0 < self.embed.length < length:
            raise ConfigError(f"{length:,} tokens, but model.max_positions={self.embed.length:,} positions were learned. Read fewer.")

    def hidden(self, tokens_BT, segments_BT, eps):
        """The normed last hidden state [B, T, D] in the compute dtype, and what each mixture layer measured ({} without mixtures).

        `segments_BT`: None, segments of documents with 0 for padding, or a `Tree` (parts.py). Measures come out of the scan with a leading
        layer axis: see moe.measures.
        """
        x_BTD, angles = self.start(tokens_BT, segments_BT)

        def layer(x_BTD, block):
            x_BTD, measured = block(x_BTD, angles, segments_BT, eps)
            return shard_tokens(x_BTD), measured

        for name, depth in self.depths.items():
            step = layer
            if self.remat != "none":
                # Layers outside a loop share its program with their backward pass, where merging equal expressions would undo remat.
                outside_loop = depth <= self.unroll or depth % self.unroll > 0
                step = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=outside_loop)
            x_BTD, measured = jax.lax.scan(step, x_BTD, getattr(self, name), unroll=self.unroll)
        return self.final_norm(x_BTD, eps).astype(self.dtype), measured

    def walk(self, tokens_BT, segments_BT, eps, look):
        """The stream after the last block [B, T, D], before the final norm, and `look(visit)` of every layer, stacked along a first axis L.

        `look` turns a `Visit` into a tree of arrays that is alike for all layers; activations are not kept. Measurements use it.
        """
        x_BTD, angles = self.start(tokens_BT, segments_BT)

        def layer(x_BTD, block):
            attention = block.attention_branch(x_BTD, angles, segments_BT, eps)
            between = block.after_attention(x_BTD, attention, eps)
            ffn, _ = block.ffn_branch(between, segments_BT, eps)
            after = shard_tokens(block.after_ffn(between, ffn, eps))
            return after, look(Visit(block, angles, x_BTD, attention, between, ffn, after))

        stacks = []
        for name in self.depths:
            x_BTD, seen = jax.lax.scan(layer, x_BTD, getattr(self, name))
            stacks.append(seen)
        return x_BTD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)

    def finite_by_layer(self, tokens_BT, segments_BT, eps):
        """Whether the stream is finite throughout: after the embedding [], after each attention [L] and each feed-forward branch [L]."""

        def look(visit):
            return jnp.isfinite(visit.between_BTD).all(), jnp.isfinite(visit.after_BTD).all()

        embedded = jnp.isfinite(self.start(tokens_BT, segments_BT)[0]).all()
        return embedded, *self.walk(tokens_BT, segments_BT, eps, look)[1]

    def head_matrix(self):
        """The output matrix as [V, D], fp32."""
        return self.embed.table[...] if self.tied else self.head.kernel[...].T

    def loss(self, tokens_BT, targets_BT, weights_BT, segments_BT, eps):
        """Σ weight · loss in nats (fp32 scalar), and what the mixture layers measured."""
        x_BTD, measured = self.hidden(tokens_BT, segments_BT, eps)
        return summed_loss(x_BTD, self.head_matrix(), targets_BT, weights_BT, self.softcap, self.loss_chunk), measured

    def token_losses(self, tokens_BT, targets_BT, segments_BT, eps):
        """fp32 losses and log-sum-exps [B, T] of each token, without gradients."""
        x_BTD, _ = self.hidden(tokens_BT, segments_BT, eps)
        return token_losses(x_BTD, self.head_matrix(), targets_BT, cap=self.softcap, chunk=self.loss_chunk)

    def logits(self, tokens_BT, segments_BT, eps):
        """All logits [B, T, V] in fp32: for short sequences and tests; training never holds them."""
        return self.logits_of(self.hidden(tokens_BT, segments_BT, eps)[0])

    def logits_of(self, x_BTD):
        """fp32 logits [B, T, V] of normed last hidden states."""
        logits = jnp.einsum("btd,vd->btv", x_BTD, self.head_matrix().astype(x_BTD.dtype), preferred_element_type=jnp.float32)
        return softcap(logits, self.softcap)


class Model:
    """Structure of a decoder without its numbers: `specs` per path, `buffers`, and `bind` to join it with nested dicts of arrays."""

    def __init__(self, model_config):
        abstract = nnx.eval_shape(lambda: Decoder(model_config))
        self.graphdef, self.state, buffers = nnx.split(abstract, nnx.Param, ...)
        self.config = model_config
        self.specs: dict[str, ParamSpec] = {}
        for path, variable in nnx.to_flat_state(self.state):
            spec = variable.get_metadata()["spec"]
            if path[0] in abstract.depths:
                depth = abstract.depths[path[0]]
                first = abstract.depths["dense_layers"] if path[0] == "layers" and len(abstract.depths) > 1 else 0
                spec = dataclasses.replace(spec, shape=(depth, *spec.shape), axes=("layers", *spec.axes), first_layer=first)
            self.specs["/".join(path)] = spec
        self._buffers = buffers
        # Path -> ShapeDtypeStruct of the state that no gradient reaches, nested as the parameters are; {} for a dense model.
        self.buffers: dict = nnx.to_pure_dict(buffers)

    def bind(self, params, buffers=None) -> Decoder:
        """The module over `params` and `buffers`, nested dicts of arrays; buffers None: zeros, as in a fresh model."""
        if buffers is None:
            buffers = fresh_buffers(self)
        states = [
            jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(arrays))
            for state, arrays in ((self.state, params), (self._buffers, buffers))
        ]
        return nnx.merge(self.graphdef, *states)

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs.values())

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token meets: of the routed experts only the chosen ones. Equal to `parameter_count` without mixtures."""
        c = self.config
        share = c.moe.top_k / c.moe.n_experts if c.ffn == "moe" else 1.0
        return sum(round(math.prod(s.shape) * (share if "experts" in s.axes else 1)) for s in self.specs.values())


def fresh_buffers(model: Model) -> dict:
    """Zeros for every buffer of `model`."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), model.buffers)


def param_specs(model_config) -> dict[str, ParamSpec]:
    """Path -> ParamSpec of every parameter that `config.model` declares; nothing is allocated."""
    return Model(model_config).specs
