"""Closed forms against the science page's numbers, and the exponents that the recursion gives over widths 128 to 4096."""

import functools

import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.initializers.presets import _balance_gamma
from gammalm.theory import (
    Dense,
    Heads,
    Latent,
    attention_ratio,
    balance_gamma,
    branch_exponent,
    gamma_decoder,
    half_point,
    latent_attention_ratio,
    log_sum_exp_excess,
    logit_std,
    norm_factor,
    predict,
    swiglu_ratio,
    two_matrix_ratio,
)
from gammalm.theory.branches import BRANCHES, EXPONENTS, GAMMAS, WIDTHS, branch_ratio, fitted_exponent

T = 64


def test_norm_factor_and_half_point():
    eps = np.array([1e-5, 1e-6, 1e-8, 1e-12])
    assert norm_factor(1.0, eps, 2048) == pytest.approx([0.153, 0.439, 0.980, 1.000], abs=5e-4)
    assert half_point(eps, 2048) == pytest.approx([0.755, 0.906, 1.21, 1.81], rel=3e-3)
    assert norm_factor(half_point(eps, 768), eps, 768) ** 2 == pytest.approx(0.5)
    x = np.random.default_rng(0).normal(size=(100, 4096)) * 4096**-0.9
    rms = np.sqrt(np.mean((x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-7)) ** 2))
    assert norm_factor(0.9, 1e-7, 4096) == pytest.approx(rms, rel=2e-3)


def test_logits():
    assert logit_std(0.5, 64) == 1 and logit_std(1.0, 256) == 1 / 16
    assert log_sum_exp_excess(1.0, 256) == pytest.approx(0.5 / 256)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_balance(k):
    assert branch_exponent(k, balance_gamma(k)) == pytest.approx(0)
    assert branch_exponent(k, balance_gamma(k) / 2, saturated=True) == pytest.approx(0)
    assert balance_gamma(k, balance_gamma(k)) == pytest.approx(balance_gamma(k))  # an embedding of its own exponent, the same
    assert balance_gamma(k) == _balance_gamma(k)  # what the preset branch_balanced uses


def test_balance_of_the_page_and_refusal():
    assert (balance_gamma(2), balance_gamma(3), balance_gamma(3, 1.0)) == (1, 0.75, pytest.approx(5 / 6))
    with pytest.raises(ConfigError, match="at least 2"):
        balance_gamma(1)


def decoder(d, gamma, eps, attention=None, ffn=None):
    d = int(d)
    return gamma_decoder(d_model=d, vocab_size=T, n_layers=1, attention=attention or Heads(d // 64, 64), ffn=ffn or Dense(8 * d // 3),
                         gamma=gamma, eps=eps)  # fmt: skip


def branch(name, d, gamma, eps):
    """‖branch‖/‖e‖ of one branch on the embedding: the recursion's, on distinct tokens."""
    if name == "attention":
        found = predict(decoder(d, gamma, eps), np.arange(T))
        return np.sqrt(found.attn_added[0] / found.embed)
    # No attention before the feed-forward branch: its output matrix is zero.
    described = decoder(d, gamma, eps, ffn=Dense(int(d), "linear") if name == "two-linear" else None)
    described.stds[0]["attn/out"] = 0.0
    found = predict(described, np.arange(T))
    return np.sqrt(found.ffn_added[0] / found.embed)


@pytest.mark.parametrize("name, eps", EXPONENTS)
def test_exponents_of_the_closed_forms(name, eps):
    attention = functools.partial(attention_ratio, T=T)
    ratio = {"two-linear": two_matrix_ratio, "swiglu": swiglu_ratio, "attention": attention}[name]
    found = [fitted_exponent(WIDTHS, ratio(gamma, np.array(WIDTHS), eps=eps)) for gamma in GAMMAS]
    assert found == pytest.approx(EXPONENTS[name, eps], abs=0.02)


@pytest.mark.full
@pytest.mark.parametrize("name, eps", EXPONENTS)
def test_exponents_of_the_recursion(name, eps):
    found = [fitted_exponent(WIDTHS, [branch_ratio(name, d, gamma, eps, T) for d in WIDTHS]) for gamma in GAMMAS]
    assert found == pytest.approx(EXPONENTS[name, eps], abs=0.02)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_alone_is_that_of_the_whole_recursion(name):
    assert branch_ratio(name, 1024, 1.0, 1e-5, T) == pytest.approx(branch(name, 1024, 1.0, 1e-5), rel=1e-4)


def test_an_unknown_branch():
    with pytest.raises(ConfigError, match="none of two-linear"):
        branch_ratio("mlp", 256, 1.0, 1e-5)


@pytest.mark.parametrize("eps", [1e-20, 1e-8, 1e-5])
def test_ratios_are_what_the_recursion_gives_for_small_signals(eps):
    d, gamma = 1024, 1.0
    assert attention_ratio(gamma, d, T, eps=eps) == pytest.approx(branch("attention", d, gamma, eps), rel=2e-3)
    assert two_matrix_ratio(gamma, d, eps=eps) == pytest.approx(branch("two-linear", d, gamma, eps), rel=2e-3)
    kappa = (8 * d // 3) / d
    assert swiglu_ratio(gamma, d, eps=eps, kappa=kappa) == pytest.approx(branch("swiglu", d, gamma, eps), rel=5e-3)


def test_latent_ratio():
    d, rank, gamma = 1024, 128, 1.0
    found = predict(decoder(d, gamma, 1e-20, attention=Latent(16, 0, rank, 64, 32, 64)), np.arange(T))
    assert latent_attention_ratio(gamma, d, T, rank) == pytest.approx(np.sqrt(found.attn_added[0] / found.embed), rel=0.01)
