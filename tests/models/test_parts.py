"""RMSNorm, rotary positions and the softcap against float64 arithmetic and their defining properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models.parts import RMSNorm, rope_angles, rotate, softcap

from .reference import rms_norm, rope


def norm_of(x, gain, eps):
    norm = RMSNorm(len(gain))
    norm.gain[...] = jnp.asarray(gain)
    return norm(jnp.asarray(x), eps)


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_rms_norm_over_the_scales_of_small_initialization(scale, eps):
    """Relative 1e-6: some ten fp32 roundings. 1e-8² is far below ε=1e-12, 1e-4² far above: both sides of the barrier."""
    rng = np.random.default_rng(0)
    x, gain = (scale * rng.normal(size=(3, 5, 64))).astype(np.float32), rng.normal(size=64).astype(np.float32)
    expected = rms_norm(x.astype(np.float64), gain.astype(np.float64), eps)
    np.testing.assert_allclose(norm_of(x, gain, eps), expected, rtol=1e-6)


def test_rms_norm_of_bf16_has_fp32_statistics():
    """4096 squares summed in bf16 would be off by far more than the one rounding of the output (2^-8)."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4096)) + 3, jnp.bfloat16)
    out = norm_of(x, np.ones(4096, np.float32), 1e-5)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), rms_norm(np.asarray(x, np.float64), 1.0, 1e-5), rtol=2**-8)


def test_rms_norm_gradient():
    """Against d/dx of the formula by hand: (g·gain − x̂·mean(g·gain·x̂)) / rms."""
    rng = np.random.default_rng(1)
    x, gain, g = rng.normal(size=(2, 3, 16)), rng.normal(size=16), rng.normal(size=(2, 3, 16))
    x, gain, g = (a.astype(np.float32) for a in (x, gain, g))
    _, vjp = jax.vjp(lambda x: norm_of(x, gain, 1e-5), x)
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    unit, weighted = x / rms, g.astype(np.float64) * gain
    expected = (weighted - unit * (weighted * unit).mean(-1, keepdims=True)) / rms
    np.testing.assert_allclose(vjp(jnp.asarray(g))[0], expected, atol=2e-6)


def test_rope_is_rotation_of_complex_pairs():
    """atol 2e-5: the fp32 angle itself has a relative error of 6e-8, times 300 radians."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 300, 2, 8)).astype(np.float32)
    out = rotate(jnp.asarray(x), rope_angles(jnp.arange(300)[None], 8, 10_000.0))
    np.testing.assert_allclose(out[0], rope(x[0].astype(np.float64), np.arange(300), 10_000.0), atol=5e-5)


def test_rope_scores_depend_on_distance_alone():
    """q·k of positions (m, n) equals that of (m + 70, n + 70), and differs from that of another distance."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(m, n):
        turned_q = rotate(jnp.asarray(q), rope_angles(jnp.array([[m]]), 16, 10_000.0))
        turned_k = rotate(jnp.asarray(k), rope_angles(jnp.array([[n]]), 16, 10_000.0))
        return float(jnp.sum(turned_q * turned_k))

    assert score(9, 4) == pytest.approx(score(79, 74), abs=2e-5)
    assert abs(score(9, 4) - score(9, 3)) > 1e-3
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-6)


def test_softcap():
    x = jnp.linspace(-100, 100, 11)
    assert softcap(x, 0.0) is x
    np.testing.assert_allclose(softcap(x, 20.0), 20 * np.tanh(np.linspace(-100, 100, 11) / 20), rtol=1e-5)
