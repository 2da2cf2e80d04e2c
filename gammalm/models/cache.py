"""Keys and values of the tokens read so far, kept so that each further token costs one pass of its own: what generation runs on.

A cache has S slots per row, and the token at position p of its row lies in slot p: rows of unequal length begin together and are
padded on the right. So a row has the positions, the mask and the numbers that it has alone, and no kernel needs to know of padding.
What is kept of a token, in the compute dtype: of ordinary attention its keys, normed and rotated, and its values [B, G, S, K]; of
latent attention the latent and beside it the rotated key that all heads share, [B, 1, S, C + P]. Slots come after heads because the
other order is transposed at every token. Each layer has arrays of its own, written first and then read: of an array that holds all
layers, or is written last, XLA copies what a layer reads, at every token. Shape legend: parts.py; S slots, T new tokens, W size of a
value, X what is kept of a token by one head, C and P as in mla.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gammalm.errors import ConfigError
from gammalm.models.parts import BATCH_AXES, mesh_pieces, shard_tokens


class Cache(NamedTuple):
    """What each layer keeps, in their order; and how many tokens of each row are in it, int32. Later slots hold anything finite."""

    kept: list
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

    x_BTD, layer = _start(decoder, tokens_BT, jnp.zeros_like(lengths_B), lengths_B, eps, attention)
    kept = []
    for name, depth in decoder.depths.items():
        x_BTD, stack = jax.lax.scan(lambda x_BTD, block: layer(x_BTD, block, None), x_BTD, getattr(decoder, name), unroll=decoder.unroll)
        kept += _apart(stack, depth)
    room = slots - tokens_BT.shape[1]
    kept = jax.tree.map(lambda a_BGTX: _placed(jnp.pad(a_BGTX, [(0, 0), (0, 0), (0, room), (0, 0)])), kept)
    return decoder.final_norm(x_BTD, eps).astype(decoder.dtype), Cache(kept, lengths_B)


def layers_of(decoder) -> list:
    """The decoder's blocks one by one. To cut them out of their stacks takes copies: once for many calls of `extend` in a loop."""
    return [block for name, depth in decoder.depths.items() for block in _apart(getattr(decoder, name), depth)]


def _apart(stack, depth: int) -> list:
    """The layers of a stack, one tree each."""
    return [jax.tree.map(lambda a, i=i: a[i], stack) for i in range(depth)]


def extend(decoder, layers, tokens_BT, counts_B, cache: Cache, eps):
    """The same of tokens that come after those of `cache`: row b goes on with its first counts_B[b] tokens, 0 for a row that rests.

    Equal to `prefill` of the whole rows but for rounding. `layers`: `layers_of(decoder)`. A token beyond the last slot is lost, and means
    nothing: give the cache the slots that its rows will need. Errors as of `prefill`.
    """
    refuse_context()

    def attention(attn, x_BTD, angles, kept):
        return attn.extended(x_BTD, angles, eps, kept, cache.lengths_B)

    x_BTD, layer = _start(decoder, tokens_BT, cache.lengths_B, counts_B, eps, attention)
    kept = []
    for block, before in zip(layers, cache.kept, strict=True):
        x_BTD, after = layer(x_BTD, block, before)
        kept.append(after)
    return decoder.final_norm(x_BTD, eps).astype(decoder.dtype), Cache(kept, cache.lengths_B + counts_B)


def keep(kept, new, lengths_B):
    """`kept` [B, G, S, X], which holds lengths_B tokens of each row, with those that follow: `new` [B, T, G, X]. Trees of such arrays.

    Row by row, as then the compiler knows that a device writes its own rows alone; otherwise each would get the new tokens of all.
    """

    def row(a_GSX, new_TGX, length):
        slots_T = length + jnp.arange(new_TGX.shape[0])
        return a_GSX.at[:, slots_T].set(jnp.swapaxes(new_TGX, 0, 1), unique_indices=True)

    return jax.tree.map(lambda a_BGSX, new_BTGX: _placed(jax.vmap(row)(a_BGSX, new_BTGX, lengths_B)), kept, new)


def attend_kept(q_BTGRK, k_BGSK, v_BGSW, lengths_B, scale: float, sink_GR=None):
    """Softmax attention [B, T, G, R, W] of tokens to those of their row's cache, in which they are themselves: lengths_B come before them.

    Scores are scaled by `scale`; they and the softmax are fp32. `sink_GR` as in kernels.attend.
    """
    S, T = k_BGSK.shape[2], q_BTGRK.shape[1]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    places_BT = lengths_B[:, None] + jnp.arange(T)[None]
    visible_BTS = jnp.arange(S)[None, None] <= places_BT[:, :, None]
    scores = dot("bgrtk,bgsk->bgrts", jnp.moveaxis(q_BTGRK, 1, 3), k_BGSK) * scale
    scores = jnp.where(visible_BTS[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sink_GR is None else sink_GR[None, :, :, None, None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    y = dot("bgrts,bgsw->bgrtw", weights.astype(v_BGSW.dtype), v_BGSW)
    return jnp.moveaxis(y / total, 3, 1).astype(v_BGSW.dtype)


def _start(decoder, tokens_BT, first_B, counts_B, eps, attention):
    """The stream that tokens at positions from `first_B` on start with, and a layer: (stream, block, what it keeps) -> (both, after it).

    attention(layer's attention, its input, angles, what it keeps) -> (output, what it keeps then). Tokens that do not count go to no
    expert.
    """
    places = jnp.arange(tokens_BT.shape[1])[None]
    positions_BT = first_B[:, None] + places
    angles = decoder.angles(positions_BT)
    segments_BT = (places < counts_B[:, None]).astype(jnp.int32)

    def layer(x_BTD, block, kept):
        y_BTD, kept = attention(block.attn, block.attention_input(x_BTD, eps), angles, kept)
        x_BTD = block.after_attention(x_BTD, y_BTD, eps)
        y_BTD, _ = block.ffn_branch(x_BTD, segments_BT, eps)
        return shard_tokens(block.after_ffn(x_BTD, y_BTD, eps)), kept

    return shard_tokens(decoder.embed_tokens(tokens_BT, positions_BT)), layer


def _placed(a_BGSX):
    """Rows where the batch axes of the mesh in use put them, key heads where `tensor` does; what all heads share is whole on each."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return a_BGSX
    heads = "tensor" if a_BGSX.shape[1] > 1 else None
    return jax.lax.with_sharding_constraint(a_BGSX, PartitionSpec(BATCH_AXES, heads))


def refuse_context() -> None:
    """Raises ConfigError where the mesh in use cuts sequences up."""
    if mesh_pieces("context") > 1:
        raise ConfigError("A mesh with context > 1 cuts sequences up, and no cache is. Share the devices out over data, fsdp or tensor.")
