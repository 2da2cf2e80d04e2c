"""Moments and kernels against SciPy's quadrature and direct simulation."""

import numpy as np
import pytest
from scipy import integrate, special

from gammalm.errors import ConfigError
from gammalm.theory.activations import c_phi, covariance_kernel, second_moment, second_moment_of_slope

SCIPY = {
    "relu": lambda z: np.maximum(z, 0), "gelu": lambda z: z * special.ndtr(z), "silu": lambda z: z * special.expit(z), "tanh": np.tanh,
    "sigmoid": special.expit,
}  # fmt: skip
AT_ONE = {"relu": (0.5, 0.5), "gelu": (0.425221, 0.455851), "silu": (0.355776, 0.379482), "tanh": (0.394294, 0.464403)}  # science.md 10


@pytest.mark.parametrize("name", AT_ONE)
def test_moments_at_unit_variance(name):
    assert float(c_phi(name, 1.0)) == pytest.approx(AT_ONE[name][0], abs=2e-6)
    # The slope of ReLU is 0 at the node 0: half of that node's weight is missing.
    assert float(second_moment_of_slope(name, 1.0)) == pytest.approx(AT_ONE[name][1], abs=0.016 if name == "relu" else 2e-6)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_small_signals_are_halved(name):
    assert float(c_phi(name, 1e-6)) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("variance", [0.01, 1.0, 9.0])
@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "sigmoid"])
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
