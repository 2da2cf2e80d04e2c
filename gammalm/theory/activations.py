"""Moments of activations under a Gaussian, and the covariance that an activation makes of two correlated Gaussians.

Everything rests on one set of evenly spaced nodes, weighted by the Gaussian: on smooth functions as exact as Gauss–Hermite, and better
where an activation is steep or has a kink at 0. Legend: T tokens, Q nodes, N terms of an expansion.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from gammalm.errors import ConfigError

NODES = 241
REACH = 9.0  # standard deviations to either side
TERMS = 12  # Hermite terms of a kernel; what they leave out is given to one more term, so that variances are exact


def _gelu(z):
    return 0.5 * z * (1 + erf(z / np.sqrt(2)))


ACTIVATIONS = {
    "linear": lambda z: z, "relu": jax.nn.relu, "gelu": _gelu, "silu": jax.nn.silu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid,
}  # fmt: skip


def activation(name: str):
    """The function of that name. ConfigError for another name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"theory: activation {name!r} is none of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


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
    """E[φ(z)²] for z ~ N(0, variance), any shape, fp32."""
    return _second_moment(activation(name), variance)


def second_moment_of_slope(name: str, variance):
    """E[φ'(z)²] for z ~ N(0, variance), any shape, fp32: d_φ of the backward recursion. Source: He et al. 2015, arXiv:1502.01852."""
    slope = jax.grad(activation(name))
    return _second_moment(lambda z: jax.vmap(slope)(z.reshape(-1)).reshape(z.shape), variance)


def c_phi(name: str, variance):
    """E[φ(z)²]/variance: by how much a layer's variance shrinks on its way through φ. Source: science 5."""
    return second_moment(name, variance) / variance


def _second_moment(phi, variance):
    variance = jnp.asarray(variance, jnp.float32)
    z = jnp.sqrt(variance)[..., None] * _X_Q.astype(np.float32).reshape((1,) * variance.ndim + (-1,))
    return jnp.square(phi(z)) @ _W_Q.astype(np.float32)


def hermite_amplitudes(name: str, variance_T):
    """b [T, N+1] such that E[φ(z_i) φ(z_j)] = Σ_n b_in b_jn ρ_ij^n for Gaussians of these variances and correlation ρ_ij (Mehler).

    The last term carries what the first N leave of E[φ(z)²].
    """
    phi = activation(name)
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


def correlation(covariance_TT):
    """Covariances divided by the standard deviations, within [−1, 1]."""
    scale_T = jax.lax.rsqrt(jnp.diagonal(covariance_TT))
    return jnp.clip(covariance_TT * scale_T[:, None] * scale_T[None, :], -1.0, 1.0)
