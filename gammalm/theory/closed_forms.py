"""Closed forms of γ-initialization at step 0: the factor of the first norm, the logits, and how much a branch adds to the embedding.

Everything is float64 NumPy and broadcasts over its arguments. Weights have std fan_in^(−γ), the embedding d^(−γ). Ratios are
‖branch‖ / ‖embedding‖ over the tokens of a sequence, to leading order: `recursion.predict` evaluates what they leave out (softmax, SiLU
and gate beyond small signals, several layers, repeated tokens). Source: science 1, 2, 5 and 9.
"""

import numpy as np

from gammalm.errors import ConfigError


def norm_factor(gamma, eps, d):
    """RMS of what leaves the first norm, r = (1 + ε·d^(2γ))^(−½): 1 where ε is negligible, 0 where it swamps the embedding. Science 2."""
    return (1 + np.asarray(eps) * np.asarray(d, float) ** (2 * np.asarray(gamma))) ** -0.5


def half_point(eps, d):
    """The γ at which ε equals the embedding's variance, r² = ½: ln(1/ε)/(2 ln d). Science 2."""
    return np.log(1 / np.asarray(eps)) / (2 * np.log(d))


def logit_std(gamma, d):
    """Std of the logits at step 0 as ε → 0: d^(½−γ). Science 1."""
    return np.asarray(d, float) ** (0.5 - np.asarray(gamma))


def log_sum_exp_excess(gamma, d):
    """Mean log-sum-exp of the logits − ln V in nats as ε → 0: ½·d^(1−2γ). The loss also has the target's logit in it. Science 1."""
    return 0.5 * logit_std(gamma, d) ** 2


def branch_exponent(k: int, gamma, saturated: bool = False):
    """Exponent of d in ‖branch‖/‖embedding‖ of a product of k matrices: k/2 − (k−1)γ; `saturated`: where ε swamps the embedding.

    There the norm multiplies by d^(−γ)/√ε, once for each of the k−1 factors that read it. Science 5.
    """
    _check_matrices(k)
    return k / 2 - (k - 1) * (2 if saturated else 1) * np.asarray(gamma)


def balance_gamma(k: int, embed_gamma: float | None = None) -> float:
    """The γ at which a branch of k matrices neither grows nor vanishes with d against the embedding: k/(2(k−1)).

    With an embedding of its own exponent `embed_gamma`: ½ + embed_gamma/k. A small ε is taken for granted. Science 5.
    """
    _check_matrices(k)
    return k / (2 * (k - 1)) if embed_gamma is None else 0.5 + embed_gamma / k


def _check_matrices(k: int) -> None:
    if k < 2:
        raise ConfigError(f"theory: a branch multiplies at least 2 matrices, not k={k}.")


def two_matrix_ratio(gamma, d, *, eps=0.0, kappa=1.0, c=1.0):
    """Two matrices with an activation between: √c·κ^(½−γ)·d^(1−γ)·r, κ = F/d, c = E[φ(z)²]/Var z (`activations.c_phi`; 1: linear)."""
    gamma, d = np.asarray(gamma), np.asarray(d, float)
    return np.sqrt(c) * kappa ** (0.5 - gamma) * d ** (1 - gamma) * norm_factor(gamma, eps, d)


def swiglu_ratio(gamma, d, *, eps=0.0, kappa=1.0):
    """SwiGLU: ½·κ^(½−γ)·d^(3/2−2γ)·r². Small-signal: at γ = ½ the pre-activation has std 1, and E[SiLU²] is .356 instead of ¼."""
    gamma, d = np.asarray(gamma), np.asarray(d, float)
    return 0.5 * kappa ** (0.5 - gamma) * d ** (1.5 - 2 * gamma) * norm_factor(gamma, eps, d) ** 2


def attention_ratio(gamma, d, T: int, *, eps=0.0, kappa=1.0, gated: bool = False):
    """Attention that averages T distinct tokens evenly, κ = H·h/d: g·κ^(½−γ)·d^(1−γ)·r·√(H_T/T), H_T the harmonic number, g ½ if gated."""
    position = np.sqrt(np.mean(1 / np.arange(1, T + 1)))  # position t averages t tokens: variance 1/t
    return (0.5 if gated else 1.0) * position * two_matrix_ratio(gamma, d, eps=eps, kappa=kappa)


def latent_attention_ratio(gamma, d, T: int, rank, *, kappa=1.0, gated: bool = False):
    """The same behind the norm of a latent of `rank`, which removes one factor: rank^(½−γ)·d^½ in place of d^(1−γ). ε → 0. Science 9."""
    gamma, d = np.asarray(gamma), np.asarray(d, float)
    return attention_ratio(gamma, d, T, kappa=kappa, gated=gated) * (np.asarray(rank, float) / d) ** (0.5 - gamma)
