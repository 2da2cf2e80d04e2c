"""Causal self-attention as a blockwise kernel that XLA compiles well everywhere.

The kernel walks over blocks of queries; a block sees only the keys up to its own end, so half of the T×T work is never
done and no T×T matrix exists. Its backward pass recomputes the weights from the log-sum-exp (Dao et al. 2022,
arXiv:2205.14135). Shape legend: parts.py; t and s run over one block of queries and the keys that it may see, W size of a value.
"""

import jax
import jax.numpy as jnp

BLOCK = 128  # queries per block: the scores of one block stay in a core's cache
MAX_BLOCKS = 16  # blocks are unrolled in the program; longer sequences get longer blocks


def block_bounds(length: int) -> list[tuple[int, int]]:
    """Start and end of each block of queries."""
    size = max(BLOCK, -(-length // MAX_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def visible_keys(t: int, s: int, start, query_segments_Bt, key_segments_Bs, until_Bs=None):
    """Which of s keys each of t queries sees, as [1 or B, t, s] bool: those before it and itself, of its own segment where there are any,
    or of a `Tree` (parts.py), those seen until later.

    `start` is the position of the first query among the keys, an int or a traced int32.
    """
    queries_1t1, keys_11s = (start + jnp.arange(t))[None, :, None], jnp.arange(s)[None, None, :]
    visible = queries_1t1 >= keys_11s
    if until_Bs is not None:
        return visible & ((queries_1t1 < until_Bs[:, None, :]) | (queries_1t1 == keys_11s))
    return visible if query_segments_Bt is None else visible & (query_segments_Bt[:, :, None] == key_segments_Bs[:, None, :])


def _scores(q_BGRtK, k_BGsK, start: int, segments):
    """fp32 scores [B, G, R, t, s] of the queries from `start` on against the keys given; -inf where masked."""
    t, s = q_BGRtK.shape[3], k_BGsK.shape[2]
    scale = q_BGRtK.shape[-1] ** -0.5
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRtK, k_BGsK, preferred_element_type=jnp.float32) * scale
    queries, keys, first, until = segments
    ids = (None, None) if queries is None else (queries[:, start : start + t], keys[:, :s])
    visible = visible_keys(t, s, start if first is None else first + start, *ids, None if until is None else until[:, :s])
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


@jax.custom_vjp
def causal_attention(q_BTGRK, k_BSGK, v_BSGW, segments_BT=None, key_segments_BS=None, first=None, sink_GR=None, until_BS=None):
    """Softmax attention. Returns the output [B, T, G, R, W] and the fp32 log-sum-exp [B, G, R, T] of the scaled scores.

    `segments_BT`, where given, confines attention to tokens of one segment. The gradient of the log-sum-exp is not propagated: it is
    there for measurements. Where the queries are only a part of the sequence, `first` (traced int32) is the position of the first of
    them among the S keys, and `key_segments_BS` go with `segments_BT`; each block of queries is then held against all keys.
    `sink_GR`, where given, is for each head the fp32 score of one more key that every query sees and whose value is zero: it counts in
    the softmax's denominator and in the log-sum-exp. `until_BS`, in the place of segments, is that of a `Tree` (parts.py).
    """
    return _attend_forward(q_BTGRK, k_BSGK, v_BSGW, segments_BT, key_segments_BS, first, sink_GR, until_BS)[0]


def _heads_first(q, k, v):
    """[B, T, G, …, K] -> [B, G, …, T, K]: one transpose here instead of one in every product."""
    return jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)


def _attend_forward(q_BTGRK, k_BSGK, v_BSGW, segments_BT, key_segments_BS, first, sink_GR, until_BS):
    q, k, v = _heads_first(q_BTGRK, k_BSGK, v_BSGW)
    segments = segments_BT, segments_BT if first is None else key_segments_BS, first, until_BS
    sink = None if sink_GR is None else sink_GR[None, :, :, None, None]
    outputs, lses = [], []
    for start, end in block_bounds(q.shape[3]):
        seen = end if first is None else k.shape[2]
        scores = _scores(q[:, :, :, start:end], k[:, :, :seen], start, segments)
        top = jnp.max(scores, axis=-1, keepdims=True)
        if sink is not None:
            top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sink is not None:
            total += jnp.exp(sink - top)
        out = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v[:, :, :seen], preferred_element_type=jnp.float32) / total
        outputs.append(out.astype(v.dtype))
        lses.append((top + jnp.log(total))[..., 0])
    out, lse = jnp.concatenate(outputs, axis=3), jnp.concatenate(lses, axis=-1)
    return (jnp.moveaxis(out, 3, 1), lse), (q, k, v, segments, sink_GR, out, lse)


def _attend_backward(saved, gradients):
    q, k, v, segments, sink_GR, out, lse = saved
    d_out = jnp.moveaxis(gradients[0], 1, 3)
    scale = q.shape[-1] ** -0.5
    # Σ_s p·dp of each query equals out·d_out: the softmax's own correction term, in fp32.
    correction = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    d_qs = []
    d_k = jnp.zeros(k.shape, jnp.float32)
    d_v = jnp.zeros(v.shape, jnp.float32)
    for start, end in block_bounds(q.shape[3]):
        seen = end if segments[2] is None else k.shape[2]
        q_b, do_b, k_b, v_b = q[:, :, :, start:end], d_out[:, :, :, start:end], k[:, :, :seen], v[:, :, :seen]
        weights = jnp.exp(_scores(q_b, k_b, start, segments) - lse[..., start:end, None])
        d_weights = jnp.einsum("bgrtk,bgsk->bgrts", do_b, v_b, preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - correction[..., start:end, None]) * scale).astype(q.dtype)
        d_qs.append(jnp.einsum("bgrts,bgsk->bgrtk", d_scores, k_b))
        d_k = d_k.at[:, :, :seen].add(jnp.einsum("bgrts,bgrtk->bgsk", d_scores, q_b, preferred_element_type=jnp.float32))
        d_v = d_v.at[:, :, :seen].add(jnp.einsum("bgrts,bgrtk->bgsk", weights.astype(v.dtype), do_b, preferred_element_type=jnp.float32))
    d_q = jnp.moveaxis(jnp.concatenate(d_qs, axis=3), 3, 1)
    # Like any other score's, with a value of zero: -weight · correction.
    d_sink = None if sink_GR is None else -jnp.sum(jnp.exp(sink_GR[None, :, :, None] - lse) * correction, axis=(0, 3))
    return d_q, jnp.moveaxis(d_k, 2, 1).astype(k.dtype), jnp.moveaxis(d_v, 2, 1).astype(v.dtype), None, None, None, d_sink, None


causal_attention.defvjp(_attend_forward, _attend_backward)
