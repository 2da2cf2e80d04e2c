"""Moments and kernels against SciPy's quadrature and direct simulation."""

import itertools

import jax
import numpy as np
import pytest
from scipy import integrate, special

from gammalm.errors import ConfigError
from gammalm.theory.activations import SLOPES, activation, c_phi, covariance_kernel, d_phi, second_moment

SCIPY = {
    "relu": lambda z: np.maximum(z, 0), "gelu": lambda z: z * special.ndtr(z), "silu": lambda z: z * special.expit(z), "tanh": np.tanh,
    "sigmoid": special.expit, "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}  # fmt: skip
AT_ONE = {"relu": (0.5, 0.5), "gelu": (0.425221, 0.455851), "silu": (0.355776, 0.379482), "tanh": (0.394294, 0.464403)}  # science.md 10
AT_ZERO = {"relu": 0.5, "gelu": 0.25, "gelu_tanh": 0.25, "silu": 0.25, "tanh": 1.0, "elu": 1.0, "linear": 1.0}


@pytest.mark.parametrize("name", AT_ONE)
def test_moments_at_unit_variance(name):
    assert (round(float(c_phi(name, 1.0)), 6), round(float(d_phi(name, 1.0)), 6)) == AT_ONE[name]


@pytest.mark.parametrize("name", AT_ZERO)
def test_small_signals(name):
    assert c_phi(name, [0.0, 1e-300, 1e-18]) == pytest.approx(AT_ZERO[name], abs=1e-8)
    assert d_phi(name, [0.0, 1e-300, 1e-18]) == pytest.approx(AT_ZERO[name], abs=1e-8)


def quadrature(function, variance):
    """E[function(z)] by an adaptive rule with the places told where it bends."""
    std = np.sqrt(variance)
    sides = {sign * cut for cut in (min(std, 1), std, min(6, 30 * std), min(40, 35 * std), 40 * std) for sign in (-1, 1)}

    def density(z):
        return function(z) * np.exp(-(z**2) / 2 / variance) / std / np.sqrt(2 * np.pi)

    return sum(integrate.quad(density, a, b, epsabs=1e-15, epsrel=1e-11)[0] for a, b in itertools.pairwise(sorted(sides | {0.0})))


@pytest.mark.parametrize("name", SCIPY)
def test_moments_at_any_variance(name):
    variances = np.array([1e-10, 1e-3, 0.3, 1.0, 25.0, 1e8])
    expected = [quadrature(lambda z: SCIPY[name](z) ** 2, v) / v for v in variances]
    assert c_phi(name, variances) == pytest.approx(expected, rel=1e-9)
    slopes = [quadrature(lambda z: SLOPES[name](z) ** 2, v) for v in variances]
    assert d_phi(name, variances.reshape(2, 3)).ravel() == pytest.approx(slopes, rel=1e-9)


@pytest.mark.parametrize("name", SCIPY)
def test_slopes_and_values_are_of_one_function(name):
    z = np.array([-30.0, -4.0, -1.5, -0.2, 0.3, 2.0, 5.0, 40.0])
    value, slope = jax.jvp(activation(name), (z.astype(np.float32),), (np.ones(len(z), np.float32),))
    assert np.asarray(value) == pytest.approx(SCIPY[name](z), rel=1e-5, abs=1e-6)
    assert np.asarray(slope) == pytest.approx(SLOPES[name](z), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("variance", [0.01, 1.0, 9.0])
@pytest.mark.parametrize("name", SCIPY)
def test_second_moment(name, variance):
    def weighted(x):
        return SCIPY[name](np.sqrt(variance) * x) ** 2 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)

    assert float(second_moment(name, variance)) == pytest.approx(integrate.quad(weighted, -12, 12)[0], rel=1e-4)


COVARIANCE = np.array([[1.0, 0.6, -0.7, 0.0], [0.6, 2.0, 0.1, 0.3], [-0.7, 0.1, 0.5, 0.2], [0.0, 0.3, 0.2, 4.0]])


@pytest.mark.parametrize("name", SCIPY)
def test_covariance_kernel(name):
    """Every pair by quadrature in two dimensions, which knows nothing of correlations' powers."""
    x = np.linspace(-8, 8, 401)
    w = np.exp(-(x**2) / 2)
    w /= w.sum()
    found = np.asarray(covariance_kernel(name, COVARIANCE.astype(np.float32)))
    for i in range(4):
        for j in range(4):
            a, b, c = COVARIANCE[i, i], COVARIANCE[j, j], COVARIANCE[i, j]
            first = np.sqrt(a) * x[:, None]
            second = c / np.sqrt(a) * x[:, None] + np.sqrt(max(b - c**2 / a, 0)) * x[None, :]
            expected = np.einsum("i,j,ij->", w, w, SCIPY[name](first) * SCIPY[name](second))
            assert found[i, j] == pytest.approx(expected, rel=1e-3, abs=1e-4), (i, j)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_kernel_over_few_channels(name):
    """Correlations that were measured over 32 channels: the mean over draws of the kernel is what `width` gives, not what ρ gives."""
    width, rng = 32, np.random.default_rng(0)
    rho = np.array([[1.0, 0.3], [0.3, 1.0]])
    x = rng.normal(size=(20000, 2, width))
    x[:, 1] = 0.3 * x[:, 0] + np.sqrt(1 - 0.09) * x[:, 1]
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosines = np.sum(unit[:, 0] * unit[:, 1], axis=-1)
    grid = np.linspace(-0.9, 0.95, 75)
    values = [float(covariance_kernel(name, np.array([[1, c], [c, 1]], np.float32))[0, 1]) for c in grid]
    expected = np.interp(cosines, grid, values).mean()
    with_width = float(covariance_kernel(name, rho.astype(np.float32), width)[0, 1])
    without = float(covariance_kernel(name, rho.astype(np.float32))[0, 1])
    # The mean cosine is a little below ρ, which is no matter of the bend.
    shifted = float(covariance_kernel(name, np.array([[1, cosines.mean()], [cosines.mean(), 1]], np.float32))[0, 1])
    expected_bend = expected - shifted
    assert with_width - without == pytest.approx(expected_bend, rel=0.15)
    assert expected_bend > 1e-3


def test_an_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match="none of linear, relu"):
        second_moment("swish", 1.0)
    with pytest.raises(ConfigError, match="none of linear, relu"):
        d_phi("swish", 1.0)
