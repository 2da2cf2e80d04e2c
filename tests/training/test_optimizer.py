"""Schedules against their closed forms, the decay mask, and AdamW against a float64 NumPy loop (Loshchilov & Hutter 2019, algorithm 2)."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.models.decoder import param_specs
from gammalm.training.optimizer import adam, apply_adamw, decay_mask, schedule_factor

from ..models.reference import small_config


def schedule(**changes):
    leaves = dict(schedule="cosine", warmup_steps=10, final_fraction=0.1, cooldown_share=0.2)
    c = SimpleNamespace(**(leaves | changes))
    return [float(schedule_factor(c, 100, jnp.int32(step))) for step in range(100)]


def test_cosine():
    factors = schedule()
    assert factors[0] == pytest.approx(0.1)  # the first of ten steps of warm-up
    assert factors[9] == pytest.approx(1.0)
    assert factors[54] == pytest.approx(0.55)  # half-way of the 90 steps that fall: (1 + .1) / 2
    assert factors[99] == pytest.approx(0.1)
    for step in (10, 30, 77):
        assert factors[step] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step + 1 - 10) / 90)), abs=1e-6)


def test_wsd():
    factors = schedule(schedule="wsd")
    np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(factors[9:80], 1.0)
    np.testing.assert_allclose(factors[80:], 0.1 + 0.9 * np.arange(19, -1, -1) / 20, rtol=1e-5)


def test_constant():
    factors = schedule(schedule="constant", warmup_steps=0)
    assert factors == [1.0] * 100
    assert schedule(schedule="constant")[4] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_as_long_as_the_run(name):
    """A run of trial length: linear up to the peak at the last step, nothing divides by zero."""
    factors = schedule(schedule=name, warmup_steps=100, cooldown_share=0.0, final_fraction=1.0)
    np.testing.assert_allclose(factors, np.arange(1, 101) / 100, rtol=1e-6)


def test_decay_reaches_roles_not_ranks():
    """Norm gains are stacked to rank 2 and still not decayed; roles are the config's."""
    specs = param_specs(small_config(gate="headwise", tie_embeddings=False).model)
    mask = decay_mask(specs, ("norm",))
    assert mask["layers"]["attn_norm"]["gain"] == mask["final_norm"]["gain"] == 0.0
    assert mask["embed"]["table"] == mask["head"]["kernel"] == mask["layers"]["attn"]["gate"] == mask["layers"]["ffn"]["down"] == 1.0
    mask = decay_mask(specs, ("embed", "gate"))
    assert mask["embed"]["table"] == mask["layers"]["attn"]["gate"] == 0.0
    assert mask["final_norm"]["gain"] == mask["layers"]["attn"]["q"] == 1.0
    with pytest.raises(ConfigError, match="'norms' is no role of a parameter. Did you mean 'norm'"):
        decay_mask(specs, ("norms",))


def test_adamw_against_a_loop_in_float64():
    """Six steps with gradients of very different sizes, ε large enough to matter for the small ones."""
    rng = np.random.default_rng(0)
    c = SimpleNamespace(b1=0.8, b2=0.9, eps=1e-3)
    rate, decay = 0.03, 0.4
    names = {"decayed": 1.0, "free": 0.0}
    params = {name: rng.normal(size=5) for name in names}
    ours = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    state = adam(c).init(ours)
    m = {name: np.zeros(5) for name in names}
    v = {name: np.zeros(5) for name in names}
    for t in range(1, 7):
        gradients = {name: rng.normal(size=5) * np.array([1e-4, 1e-2, 1, 10, 0]) for name in names}
        direction, state = adam(c).update({name: jnp.asarray(g, jnp.float32) for name, g in gradients.items()}, state)
        ours = apply_adamw(ours, direction, names, rate, decay)
        for name, g in gradients.items():
            m[name] = c.b1 * m[name] + (1 - c.b1) * g
            v[name] = c.b2 * v[name] + (1 - c.b2) * g**2
            step = m[name] / (1 - c.b1**t) / (np.sqrt(v[name] / (1 - c.b2**t)) + c.eps)
            params[name] = params[name] - rate * (step + decay * names[name] * params[name])
    for name in names:
        np.testing.assert_allclose(ours[name], params[name], rtol=2e-5, atol=1e-6)
