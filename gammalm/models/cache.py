"""Keys and values of the tokens read so far, kept so that each further token costs one pass of its own: what generation runs on.

A cache has S slots per row, and the token at position p of its row lies in slot p: rows of unequal length begin together and are
padded on the right. So a row has the positions, the mask and the numbers that it has alone, and no kernel needs to know of padding.
What is kept of a token, in the compute dtype: of ordinary attention its keys, normed and rotated, and its values [L, B, G, S, K]; of
latent attention the latent and beside it the rotated key that all heads share, [L, B, 1, S, C + P]. Slots come after heads because the
other order is transposed at every token. Shape legend: parts.py; S slots, T new tokens, W size of a value, X what is kept of a token by
one head, C and P as in mla.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gammalm.errors import ConfigError
from gammalm.models.blockwise import visible_keys
from gammalm.models.parts import BATCH_AXES, mesh_pieces, shard_tokens


class Cache(NamedTuple):
    """What each stack of layers keeps, by its name; and how many tokens of each row are in it, int32. Later slots hold anything finite."""

    kept: dict
    lengths_B: jax.Array


def prefill(decoder, tokens_BT, lengths_B, slots: int, eps):
    """The normed last hidden state [B, T, D], as of `Decoder.hidden`, and the cache of `slots` >= T tokens a row.

    Row b is its first lengths_B[b] tokens; what comes out of the others means nothing. Raises ConfigError on a mesh with a context axis,
    and for more slots than learned positions.
    """
    refuse_context()
    decoder.require_positions(slots)

    def attention(attn, x_BTD, angles, _):
        return attn.attended(x_BTD, angles, None, eps)

    x_BTD, new = _through_layers(decoder, tokens_BT, jnp.zeros_like(lengths_B), lengths_B, eps, attention, dict.fromkeys(decoder.depths))
    room = slots - tokens_BT.shape[1]
    kept = jax.tree.map(lambda a: _placed(jnp.pad(a, [(0, 0)] * 3 + [(0, room), (0, 0)])), new)
    return x_BTD, Cache(kept, lengths_B)


def extend(decoder, tokens_BT, counts_B, cache: Cache, eps):
    """The same of tokens that come after those of `cache`: row b goes on with its first counts_B[b] tokens, 0 for a row that rests.

    Equal to `prefill` of the whole rows but for rounding. A token beyond the last slot is seen by the tokens beside it and then lost: give
    the cache the slots that its rows will need. Errors as of `prefill`.
    """
    refuse_context()

    def attention(attn, x_BTD, angles, kept):
        return attn.extended(x_BTD, angles, eps, kept, cache.lengths_B)

    x_BTD, new = _through_layers(decoder, tokens_BT, cache.lengths_B, counts_B, eps, attention, cache.kept)
    B, T = tokens_BT.shape
    rows_B1 = jnp.arange(B)[:, None]
    slots_BT = cache.lengths_B[:, None] + jnp.arange(T)[None]

    def written(a_LBGSX, new_LBGTX):
        new_BTLGX = jnp.moveaxis(new_LBGTX, (1, 3), (0, 1))  # as indexing orders it
        return _placed(a_LBGSX.at[:, rows_B1, :, slots_BT].set(new_BTLGX, unique_indices=True))

    kept = jax.tree.map(written, cache.kept, new)
    return x_BTD, Cache(kept, cache.lengths_B + counts_B)


def attend_kept(q_BTGRK, kept, new, lengths_B, scale: float, sink_GR=None):
    """Softmax attention [B, T, G, R, W] of tokens to those of their row's cache and, causally, to each other.

    `kept`: keys [B, G, S, K] and values [B, G, S, W], of which lengths_B count; `new`: the same of the T tokens themselves. Scores are
    scaled by `scale`; they and the softmax are fp32. `sink_GR` as in kernels.attend.
    """
    S, T = kept[0].shape[2], q_BTGRK.shape[1]
    q_BGRTK = jnp.moveaxis(q_BTGRK, 1, 3)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    filled_BS = jnp.arange(S)[None] < lengths_B[:, None]
    before = jnp.where(filled_BS[:, None, None, None], dot("bgrtk,bgsk->bgrts", q_BGRTK, kept[0]) * scale, -jnp.inf)
    causal = visible_keys(T, T, 0, None, None)[:, None, None]
    beside = jnp.where(causal, dot("bgrtk,bgsk->bgrts", q_BGRTK, new[0]) * scale, -jnp.inf)
    scores = jnp.concatenate([before, beside], axis=-1)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sink_GR is None else sink_GR[None, :, :, None, None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    weights = weights.astype(new[1].dtype)
    y = dot("bgrts,bgsw->bgrtw", weights[..., :S], kept[1]) + dot("bgrts,bgsw->bgrtw", weights[..., S:], new[1])
    return jnp.moveaxis(y / total, 3, 1).astype(new[1].dtype)


def _through_layers(decoder, tokens_BT, first_B, counts_B, eps, attention, kept):
    """The normed last hidden state of tokens at positions from `first_B` on, and what each stack keeps of them [L, B, G, T, X].

    attention(layer's attention, its input, angles, what the layer keeps) -> (output, what it keeps of the tokens). Tokens that do not
    count go to no expert.
    """
    places = jnp.arange(tokens_BT.shape[1])[None]
    positions_BT = first_B[:, None] + places
    angles = decoder.angles(positions_BT)
    segments_BT = (places < counts_B[:, None]).astype(jnp.int32)

    def layer(x_BTD, given):
        block, kept = given
        y_BTD, new = attention(block.attn, block.attention_input(x_BTD, eps), angles, kept)
        x_BTD = block.after_attention(x_BTD, y_BTD, eps)
        y_BTD, _ = block.ffn_branch(x_BTD, segments_BT, eps)
        return shard_tokens(block.after_ffn(x_BTD, y_BTD, eps)), new

    x_BTD, new = shard_tokens(decoder.embed_tokens(tokens_BT, positions_BT)), {}
    for name in decoder.depths:
        x_BTD, new[name] = jax.lax.scan(layer, x_BTD, (getattr(decoder, name), kept[name]), unroll=decoder.unroll)
    return decoder.final_norm(x_BTD, eps).astype(decoder.dtype), new


def _placed(a_LBGSX):
    """Rows where the batch axes of the mesh in use put them, key heads where `tensor` does; what all heads share is whole on each."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return a_LBGSX
    heads = "tensor" if a_LBGSX.shape[2] > 1 else None
    return jax.lax.with_sharding_constraint(a_LBGSX, PartitionSpec(None, BATCH_AXES, heads))


def refuse_context() -> None:
    """Raises ConfigError where the mesh in use cuts sequences up."""
    if mesh_pieces("context") > 1:
        raise ConfigError("A mesh with context > 1 cuts sequences up, and no cache is. Share the devices out over data, fsdp or tensor.")
