"""Moments of activations under a Gaussian, and the covariance that an activation makes of two correlated Gaussians.

c_φ and d_φ are float64 NumPy, at any variance. Kernels are fp32 JAX, on one set of evenly spaced nodes, weighted by the Gaussian: on
smooth functions as exact as Gauss–Hermite, and better where an activation is steep or has a kink at 0. Legend: T tokens, Q nodes, N terms
of an expansion.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from gammalm.errors import ConfigError

NODES = 241
REACH = 9.0  # standard deviations to either side
TERMS = 12  # Hermite terms of a kernel; what they leave out is given to one more term, so that variances are exact
PANELS, POINTS = 48, 12  # of the float64 moments: panels on either side of 0, and Gauss–Legendre nodes in each
SMALLEST = 1e-20  # variance below which moments are those of the limit, to ten digits

_TANH, _CUBE = np.sqrt(2 / np.pi), 0.044715  # GELU's approximation by tanh (Hendrycks & Gimpel 2016)

# Name -> φ(z, m), m being _FLOAT64 or _JAX; the second one differentiates and compiles it.
ACTIVATIONS = {
    "linear": lambda z, m: z,
    "relu": lambda z, m: m.maximum(z, 0.0),
    "gelu": lambda z, m: z * m.ndtr(z),
    "gelu_tanh": lambda z, m: z * m.expit(2 * _TANH * (z + _CUBE * z**3)),
    "silu": lambda z, m: z * m.expit(z),
    "tanh": lambda z, m: m.tanh(z),
    "elu": lambda z, m: m.where(z > 0, z, m.expm1(m.minimum(z, 0.0))),
    "sigmoid": lambda z, m: m.expit(z),
}


class _FLOAT64:
    maximum, minimum, where, tanh, expm1, expit, ndtr = np.maximum, np.minimum, np.where, np.tanh, np.expm1, special.expit, special.ndtr


class _JAX:
    maximum, minimum, where, tanh, expm1 = jnp.maximum, jnp.minimum, jnp.where, jnp.tanh, jnp.expm1
    expit, ndtr = jax.scipy.special.expit, jax.scipy.special.ndtr


def _gelu_tanh_slope(z):
    gate = special.expit(2 * _TANH * (z + _CUBE * z**3))
    return gate + z * gate * (1 - gate) * 2 * _TANH * (1 + 3 * _CUBE * z**2)


# Name -> φ'(z), float64.
SLOPES = {
    "linear": np.ones_like,
    "relu": lambda z: np.where(z > 0, 1.0, 0.0),
    "gelu": lambda z: special.ndtr(z) + z * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi),
    "gelu_tanh": _gelu_tanh_slope,
    "silu": lambda z: special.expit(z) * (1 + z * special.expit(-z)),
    "tanh": lambda z: 1 / np.cosh(np.minimum(np.abs(z), 300.0)) ** 2,
    "elu": lambda z: np.exp(np.minimum(z, 0.0)),
    "sigmoid": lambda z: special.expit(z) * special.expit(-z),
}


def c_phi(name: str, variance):
    """E[φ(z)²]/variance for z ~ N(0, variance), any shape, float64: how a layer's variance shrinks on its way through φ.

    At variance 0 its limit, φ'(0)², for ReLU ½; sigmoid, whose φ(0) is not 0, has none. Source: science 10; He et al. 2015
    (arXiv:1502.01852).
    """
    phi = _known(name)
    return _moment(lambda z, std: phi(z, _FLOAT64) / std, variance)


def d_phi(name: str, variance):
    """E[φ'(z)²] for z ~ N(0, variance), any shape, float64: what the slope makes of a gradient's variance. Source: as `c_phi`."""
    _known(name)
    return _moment(lambda z, std: SLOPES[name](z), variance)


_LEGENDRE = np.polynomial.legendre.leggauss(POINTS)


def _moment(function, variance):
    """E[function(z, std)²]. Panels grow with the distance from 0 and start below both scales, the activation's (1) and the std's."""
    std = np.sqrt(np.maximum(np.asarray(variance, np.float64), SMALLEST))[..., None]
    first = np.minimum(std, 1.0) / 4
    edges = np.concatenate([np.zeros_like(std), first * (14 * std / first) ** np.linspace(0, 1, PANELS)], axis=-1)
    half = np.diff(edges)[..., None] / 2
    z = (edges[..., :-1, None] + half * (1 + _LEGENDRE[0])).reshape(*std.shape[:-1], -1)
    weights = (half * _LEGENDRE[1]).reshape(z.shape) * np.exp(-((z / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    return np.sum(weights * (function(z, std) ** 2 + function(-z, std) ** 2), axis=-1)


def _known(name: str):
    if name not in ACTIVATIONS:
        raise ConfigError(f"theory: activation {name!r} is none of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def activation(name: str):
    """The function of that name, for JAX. ConfigError for another name."""
    phi = _known(name)
    return lambda z: phi(z, _JAX)


def _quadrature(terms: int):
    """Nodes [Q], weights [Q] of N(0, 1), and the orthonormal Hermite polynomials at the nodes [Q, N]. float64."""
    x_Q = np.linspace(-REACH, REACH, NODES)
    w_Q = np.exp(-(x_Q**2) / 2)
    h_NQ = [np.ones_like(x_Q), x_Q]
    for n in range(1, terms - 1):
        h_NQ.append((x_Q * h_NQ[n] - np.sqrt(n) * h_NQ[n - 1]) / np.sqrt(n + 1))
    return x_Q, w_Q / w_Q.sum(), np.stack(h_NQ, axis=-1)


_X_Q, _W_Q, _H_QN = _quadrature(TERMS)


def second_moment(name: str, variance):
    """E[φ(z)²] for z ~ N(0, variance), any shape, fp32 and traceable."""
    variance = jnp.asarray(variance, jnp.float32)
    z = jnp.sqrt(variance)[..., None] * _X_Q.astype(np.float32).reshape((1,) * variance.ndim + (-1,))
    return jnp.square(activation(name)(z)) @ _W_Q.astype(np.float32)


def hermite_amplitudes(name: str, variance_T):
    """b [T, N+1] such that E[φ(z_i) φ(z_j)] = Σ_n b_in b_jn ρ_ij^n for Gaussians of these variances and correlation ρ_ij (Mehler).

    The last term carries what the first N leave of E[φ(z)²].
    """
    return _amplitudes(activation(name), variance_T)


def _amplitudes(phi, variance_T):
    values_TQ = phi(jnp.sqrt(variance_T)[:, None] * _X_Q.astype(np.float32)[None])
    b_TN = values_TQ @ (_W_Q[:, None] * _H_QN).astype(np.float32)
    rest_T = jnp.maximum(jnp.square(values_TQ) @ _W_Q.astype(np.float32) - jnp.sum(jnp.square(b_TN), axis=1), 0)
    return jnp.concatenate([b_TN, jnp.sqrt(rest_T)[:, None]], axis=1)


def power_kernel(b_TN, rho_TT, width=None):
    """Σ_n b_in b_jn ρ_ij^n as [T, T]. With `width`: its mean where ρ is measured over that many channels.

    A correlation measured over d channels scatters around ρ with variance (1−ρ²)²/d, which adds half the second derivative times that.
    For distinct tokens it is all there is of ρ², and every pair has it: over long sequences it is not small.
    """
    value = slope = bend = jnp.zeros_like(rho_TT)
    for n in range(b_TN.shape[1] - 1, -1, -1):  # Horner's rule for the polynomial and its derivatives
        bend = bend * rho_TT + 2 * slope
        slope = slope * rho_TT + value
        value = value * rho_TT + b_TN[:, n, None] * b_TN[None, :, n]
    return value if width is None else value + 0.5 * bend * jnp.square(1 - jnp.square(rho_TT)) / width


def covariance_kernel(name: str, covariance_TT, width=None):
    """E[φ(z_i) φ(z_j)] as [T, T] for z ~ N(0, covariance); `width` as in `power_kernel`.

    ReLU has the closed arc-cosine form (Cho & Saul 2009); the others are expanded.
    """
    variance_T = jnp.diagonal(covariance_TT)
    std_T = jnp.sqrt(variance_T)
    rho_TT = correlation(covariance_TT)
    if name == "relu":
        sine_TT = jnp.sqrt(1 - jnp.square(rho_TT))
        kernel_TT = (sine_TT + rho_TT * (np.pi - jnp.arccos(rho_TT))) / (2 * np.pi)
        if width is not None:
            kernel_TT += sine_TT**3 / (4 * np.pi * width)  # half the second derivative, 1/(2π·sine), times sine⁴/width
        return std_T[:, None] * std_T[None, :] * kernel_TT
    return power_kernel(hermite_amplitudes(name, variance_T), rho_TT, width)


def slope_kernel(name: str, covariance_TT):
    """E[φ'(z_i) φ'(z_j)] as [T, T] for z ~ N(0, covariance). ReLU has the closed arc-cosine form of order 0 (Cho & Saul 2009)."""
    rho_TT = correlation(covariance_TT)
    if name == "relu":
        return (np.pi - jnp.arccos(rho_TT)) / (2 * np.pi)
    phi = activation(name)
    return power_kernel(_amplitudes(lambda z: jax.jvp(phi, (z,), (jnp.ones_like(z),))[1], jnp.diagonal(covariance_TT)), rho_TT)


def correlation(covariance_TT):
    """Covariances divided by the standard deviations, within [−1, 1]."""
    scale_T = jax.lax.rsqrt(jnp.diagonal(covariance_TT))
    return jnp.clip(covariance_TT * scale_T[:, None] * scale_T[None, :], -1.0, 1.0)
