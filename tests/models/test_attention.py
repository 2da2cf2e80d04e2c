"""The blockwise attention kernel against a full softmax in float64: output, log-sum-exp and every gradient.

Shapes: B batch, T tokens, G key heads, R queries per key head, K head size. Blocks are made 4 long.
Tolerance 5e-6: fp32 roundings of sums over at most 19 terms of order one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models import blockwise as module
from gammalm.models.blockwise import block_bounds, causal_attention
from gammalm.models.kernels import attend
from gammalm.models.parts import Tree

from . import reference

B, G, R, K = 2, 2, 3, 4


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)


@jax.jit
def run(q, k, v, segments, g):
    """(output, log-sum-exp, gradients of Σ output·g): one compilation for all of them."""
    out, vjp, lse = jax.vjp(lambda *a: causal_attention(*a, segments), q, k, v, has_aux=True)
    return out, lse, vjp(g)


def draw(T, groups=G, repeats=R, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, groups, repeats, K), (B, T, groups, K), (B, T, groups, K))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def segments_of(T):
    """Documents that end inside blocks, at their edges, and padding at the end."""
    cuts = np.array([[0, 3], [1, T // 2]])
    segments = 1 + sum((np.arange(T)[None] >= cut[:, None]).astype(np.int32) for cut in cuts.T)
    segments[1, T - 1 :] = 0
    return segments


def naive(q, k, v, segments):
    """As causal_attention, from the reference of one sequence."""
    T = q.shape[1]
    each = [
        reference.attention(*(a[b].reshape(T, -1, K).astype(np.float64) for a in (q, k, v)), None if segments is None else segments[b])
        for b in range(len(q))
    ]
    return np.stack([o for o, _ in each]).reshape(q.shape), np.stack([lse for _, lse in each]).reshape(len(q), *q.shape[2:4], T)


def gradients_by_hand(q, k, v, g, segments):
    """Softmax's derivative written out in float64, one head at a time."""
    q, k, v, g = (a.astype(np.float64) for a in (q, k, v, g))
    T = q.shape[1]
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, group, r in np.ndindex(q.shape[0], q.shape[2], q.shape[3]):
        visible = np.tril(np.ones((T, T), bool))
        if segments is not None:
            visible &= segments[b][:, None] == segments[b][None]
        scores = np.where(visible, q[b, :, group, r] @ k[b, :, group].T / np.sqrt(K), -np.inf)
        p = np.exp(reference.log_softmax(scores))
        d_p = g[b, :, group, r] @ v[b, :, group].T
        d_s = p * (d_p - (p * d_p).sum(1, keepdims=True)) / np.sqrt(K)
        d_q[b, :, group, r] = d_s @ k[b, :, group]
        d_k[b, :, group] += d_s.T @ q[b, :, group, r]
        d_v[b, :, group] += p.T @ g[b, :, group, r]
    return d_q, d_k, d_v


CASES = [  # tokens below, at, above one block of 4, whole blocks and ragged ones; one head, MHA, GQA, MQA
    (1, False, 2, 3), (3, True, 1, 1), (4, False, 2, 1), (5, True, 2, 3), (8, False, 2, 3), (19, False, 1, 4), (19, True, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(("T", "packed", "groups", "repeats"), CASES)
def test_output_log_sum_exp_and_gradients(T, packed, groups, repeats):
    q, k, v = draw(T, groups, repeats)
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    segments = segments_of(T) if packed else None
    out, lse, gradients = run(q, k, v, segments, g)
    expected_out, expected_lse = naive(q, k, v, segments)
    np.testing.assert_allclose(out, expected_out, atol=5e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6)
    for ours, expected in zip(gradients, gradients_by_hand(q, k, v, g, segments), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_tree_is_each_of_its_sequences_alone():
    """A beginning of 5 that goes on in two ways, one of them in two ways again, another sequence of 3, and padding; blocks of 4."""
    until = np.array([[14] * 5 + [8] * 3 + [14] * 2 + [12] * 2 + [14] * 2 + [17] * 3 + [0, 0]], np.int32)
    sequences = [[*range(8)], [*range(5), 8, 9, 10, 11], [*range(5), 8, 9, 12, 13], [14, 15, 16]]
    q, k, v = (a[:1] for a in draw(19))
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    out, vjp = jax.vjp(jax.jit(lambda *a: causal_attention(*a, until_BS=until)[0]), q, k, v)
    assert np.isfinite(out).all()
    seen, expected = np.zeros(19), [np.zeros(a.shape) for a in (q, k, v)]
    for places in sequences:
        alone = [a[:, places] for a in (q, k, v)]
        np.testing.assert_allclose(out[:, places], naive(*alone, None)[0], atol=5e-6)
        new = [i for i, place in enumerate(places) if not seen[place]]
        seen[places] = 1
        only_new = np.zeros_like(g[:, places])
        only_new[:, new] = g[:, places][:, new]
        for total, part in zip(expected, gradients_by_hand(*alone, only_new, None), strict=True):
            total[:, places] += part
    for ours, wanted in zip(vjp(g * seen[None, :, None, None, None].astype(np.float32)), expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
    np.testing.assert_allclose(attend(q, k, v, Tree(until), "cudnn"), out, atol=1e-6)  # this kernel, whichever is named
    assert Tree(until).positions().tolist() == [[*range(8), *range(5, 9), 7, 8, *range(3), 0, 0]]


def test_large_scores_do_not_overflow():
    """Scores of ±4000, where exp alone is infinite: the weights are one-hot, the gradients finite."""
    q, k, v = draw(8)
    out, lse, gradients = run(2000 * q, k, v, None, np.ones_like(q))
    expected_out, expected_lse = naive(2000 * q, k, v, None)
    np.testing.assert_allclose(out, expected_out, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    assert all(np.isfinite(a).all() for a in gradients)


def test_bf16_is_near_fp32():
    """Outputs are means of values of order one and gradients sums of a few; bf16 rounds each product to 2^-8."""
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in draw(8)]
    q, k, v = (np.asarray(a, np.float32) for a in rounded)
    g = np.ones_like(q)
    out, lse, gradients = run(*rounded, None, jnp.asarray(g, jnp.bfloat16))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    expected_out, expected_lse = naive(q, k, v, None)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected_out, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6)  # scores and softmax are fp32
    for ours, expected in zip(gradients, gradients_by_hand(q, k, v, g, None), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float32), expected, atol=0.1)


@pytest.mark.parametrize("length", [1, 4, 5, 63, 64, 65, 1000])
def test_blocks_cover_every_query_once_and_are_few(length):
    bounds = block_bounds(length)
    assert [t for start, end in bounds for t in range(start, end)] == list(range(length))
    assert len(bounds) <= module.MAX_BLOCKS
