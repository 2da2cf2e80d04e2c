"""Chunked cross-entropy against a plain log-softmax in float64: values, log-sum-exps, gradients.

Shapes: B batch, T tokens, D width, V vocabulary. Tolerance 1e-5: fp32 roundings of sums over V = 37 and D = 5 terms of order one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models.loss import summed_loss, token_losses

from .reference import log_softmax

B, T, D, V = 3, 10, 5, 37
# Chunk of all tokens; 7 and 12 divide neither T nor B·T; 1 is less than one token of each row.
CASES = [(0, 0.0), (7, 0.0), (15, 2.0), (12, 2.0), (1, 0.0)]


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(x, w, targets, weights, cap, chunk):
    """(losses, log-sum-exps, 3 · sum without gradients, 3 · sum, its gradients), compiled together."""
    losses, lse = token_losses(x, w, targets, cap=cap, chunk=chunk)
    total = functools.partial(summed_loss, targets_BT=targets, weights_BT=weights, cap=cap, chunk=chunk)
    return losses, lse, 3 * total(x, w), *jax.value_and_grad(lambda x, w: 3 * total(x, w), argnums=(0, 1))(x, w)


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
    weights = rng.uniform(size=(B, T)).astype(np.float32) * (rng.uniform(size=(B, T)) > 0.3)
    return x, w, rng.integers(0, V, (B, T)), weights


def by_hand(x, w, targets, cap):
    """(losses, lse, derivative of each loss in its logits before the cap), float64."""
    raw = x.astype(np.float64) @ w.astype(np.float64).T
    z = cap * np.tanh(raw / cap) if cap else raw
    logp = log_softmax(z)
    onehot = np.eye(V)[targets]
    slope = 1 / np.cosh(raw / cap) ** 2 if cap else 1.0
    return -(logp * onehot).sum(-1), np.logaddexp.reduce(z, axis=-1), (np.exp(logp) - onehot) * slope


@pytest.mark.parametrize(("chunk", "cap"), CASES)
def test_values_and_gradients(drawn, chunk, cap):
    x, w, targets, weights = drawn
    losses, lse, d_logits = by_hand(x, w, targets, cap)
    ours, our_lse, alone, value, (d_x, d_w) = run(x, w, targets, weights, cap, chunk)
    np.testing.assert_allclose(ours, losses, atol=1e-5)
    np.testing.assert_allclose(our_lse, lse, atol=1e-5)
    assert float(value) == pytest.approx(3 * (losses * weights).sum(), rel=1e-5)
    assert float(alone) == pytest.approx(float(value), rel=1e-6)
    d_logits = 3 * d_logits * weights[..., None]
    np.testing.assert_allclose(d_x, d_logits @ w.astype(np.float64), atol=2e-5)
    np.testing.assert_allclose(d_w, np.einsum("btv,btd->vd", d_logits, x), atol=2e-5)


def test_more_sequences_than_a_chunk_has_tokens():
    """A chunk is at least one token of each sequence: 64 sequences of 2 tokens in chunks of 8 come to an end."""
    rng = np.random.default_rng(0)
    x, w, targets = rng.normal(size=(64, 2, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32), np.zeros((64, 2), int)
    ours, _ = token_losses(x, w, targets, chunk=8)
    np.testing.assert_allclose(ours, by_hand(x, w, targets, 0.0)[0], atol=1e-5)


def test_extreme_logits_stay_finite(drawn):
    """Logits of ±1e4: exp overflows, the loss is the distance to the largest."""
    x, w, targets, weights = drawn
    losses, _, _ = by_hand(1e4 * x, w, targets, 0.0)
    ours, _, _, _, gradients = run(1e4 * x, w, targets, weights, 0.0, 7)
    np.testing.assert_allclose(ours, losses, rtol=1e-6, atol=0.05)  # 0.05: fp32's spacing at 4e4 is .004
    assert all(np.isfinite(g).all() for g in gradients)


def test_bf16_hidden_states_have_an_fp32_loss(drawn):
    """x and w rounded to bf16 first, then everything in fp32: with its inputs rounded too, the reference agrees as in fp32."""
    x, w, targets, weights = drawn
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (x, w)]
    losses, _, _ = by_hand(*rounded, targets, 0.0)
    ours, our_lse, _, _, (d_x, d_w) = run(jnp.asarray(x, jnp.bfloat16), w, targets, weights, 0.0, 12)
    assert ours.dtype == our_lse.dtype == d_w.dtype == jnp.float32
    assert d_x.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours, losses, atol=1e-5)
