"""A real model before its first step, γ-initialized: the scale of its logits and of each parameter (science 1).

At ε = 1e-12 the final norm makes the hidden state's RMS 1, and a row of the head has std d^(-γ): logits have std d^(½-γ) and the mean
log-sum-exp exceeds ln V by half their variance, ½·d^(1-2γ). Tied or untied: a token's own row is one of V.
"""

import math

import jax
import numpy as np
import pytest

from gammalm.initializers import init_params
from gammalm.models.decoder import Model
from gammalm.training.step import init_state

from .reference import small_config

D, V, L, B, T = 256, 8192, 4, 8, 64
GAMMAS = (0.5, 0.75, 1.0)


def config(tied):
    return small_config(
        d_model=D, vocab_size=V, n_layers=L, n_heads=4, n_kv_heads=4, head_dim=64, d_ff=512, gate="elementwise", norm_eps=1e-12,
        tie_embeddings=tied, loss_chunk=128, residual_dtype="float32", data__seq_len=T, init__gamma=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def measured(request):
    """γ -> (logit std, mean log-sum-exp − ln V, parameters); one program serves the three γ."""
    c = config(request.param)
    model = Model(c.model)
    zipf = 1 / np.arange(1, V + 1)
    tokens = np.random.default_rng(0).choice(V, (B, T), p=zipf / zipf.sum()).astype(np.int32)

    @jax.jit
    def measure(params):
        decoder = model.bind(params)
        _, lse = decoder.token_losses(tokens, tokens, None, 1e-12)
        return decoder.logits(tokens, None, 1e-12).std(), lse.mean() - math.log(V)

    found = {}
    for gamma in GAMMAS:
        with c.unlocked():
            c.init.gamma = gamma
        params = init_state(model, c, 0)["params"]
        std, excess = measure(params)
        found[gamma] = float(std), float(excess), params
    return found


@pytest.mark.parametrize("gamma", GAMMAS)
def test_logit_std(measured, gamma):
    assert measured[gamma][0] == pytest.approx(D ** (0.5 - gamma), rel=0.02)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_log_sum_exp(measured, gamma):
    assert measured[gamma][1] == pytest.approx(0.5 * D ** (1 - 2 * gamma), abs=0.005)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_std_of_every_parameter(measured, gamma):
    """Within five standard errors σ/√(2n); the mean within five σ/√n. Fan-in: d, but H·h = 256 for out and F = 512 for down."""
    params = measured[gamma][2]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, values = "/".join(key.key for key in path), np.asarray(leaf, np.float64)
        if name.endswith("gain"):
            assert (values == 1).all()
            continue
        sigma = {"layers/ffn/down": 512}.get(name, 256) ** -gamma
        assert values.std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * values.size)), name
        assert abs(values.mean()) < 5 * sigma / math.sqrt(values.size), name


def test_heads_and_wide_heads_are_a_fan_in_of_out_alone():
    """H·h = 96 ≠ d = 64: out has σ = 96^(-γ), q, k, v and the gate 64^(-γ) whatever the number of heads."""
    c = small_config(d_model=64, n_heads=12, n_kv_heads=4, head_dim=8, gate="headwise", d_ff=80, n_layers=4)
    params = init_params(Model(c.model).specs, c.init, 0, d_model=64, n_layers=4)["layers"]["attn"]
    for name, fan_in in {"q": 64, "k": 64, "v": 64, "gate": 64, "out": 96}.items():
        assert params[name].std() == pytest.approx(fan_in**-0.5, rel=5 / math.sqrt(2 * params[name].size)), name
