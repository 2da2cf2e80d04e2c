"""The pure step: its arithmetic on a two-parameter model worked out in float64, its halting, and micro-batches on the real model.

The small model: loss of a token = ½ |a − token/10|² + g · token/10 + 1, so that every gradient is known in closed form.
Shapes: B sequences, T predicted tokens, a [3], g [1].
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gammalm.initializers import ParamSpec
from gammalm.models.decoder import Model
from gammalm.training.optimizer import adam
from gammalm.training.step import global_norm, init_state, loss_and_gradients, make_step, move_bias, scalars, split_batch

from ..models.reference import random_buffers, random_params, small_config

NAN_TOKEN, STEEP_TOKEN = 49, 48  # a loss that is no number; a finite loss whose gradient is infinite


class Toy:
    config = SimpleNamespace(ffn="dense")
    specs = {"a": ParamSpec((3,), ("embed",), (), (), "ffn"), "g": ParamSpec((1,), ("embed",), (), (), "norm")}

    @staticmethod
    def bind(params, buffers):
        def loss(tokens, targets, weights, segments, eps):
            x = targets[..., None] / 10
            values = 0.5 * jnp.square(params["a"][None, None] - x).sum(-1) + (params["g"][None, None] * x).sum(-1)
            values += jnp.where(targets == NAN_TOKEN, jnp.nan, 0.0)
            values += jnp.sqrt(jnp.where((targets == STEEP_TOKEN).any(), 0 * params["g"][0], 1.0))  # its slope at 0 is infinite
            return jnp.sum(values * weights), {}

        return SimpleNamespace(loss=loss)


CONFIG = small_config(
    optimizer__clip=0.5, optimizer__learning_rate=0.1, optimizer__weight_decay=0.3, optimizer__warmup_steps=2, optimizer__eps=1e-4
)


def fresh():
    params = {"a": jnp.array([1.0, -2.0, 0.5]), "g": jnp.array([0.7])}
    return {"step": jnp.int32(0), "params": params, "buffers": {}, "adam": adam(CONFIG.optimizer).init(params), "halted": jnp.bool_(False)}


@pytest.fixture(scope="module")
def toy_step():
    step = jax.jit(make_step(Toy, CONFIG))
    return lambda state, tokens: step(state, {"tokens": jnp.asarray(tokens, jnp.int32)}, scalars(CONFIG))


def draw(seed, high=40, rows=2):
    return np.random.default_rng(seed).integers(0, high, (rows, 13)).astype(np.int32)


def test_six_steps_against_float64(toy_step):
    """Loss, norm before the clip, clip, cosine with warm-up, AdamW, decay of `a` alone (g has the role of a norm)."""
    o, state = CONFIG.optimizer, fresh()
    p = {name: np.asarray(value, np.float64) for name, value in state["params"].items()}
    m, v = ({name: 0 * value for name, value in p.items()} for _ in range(2))
    for t in range(1, 7):
        tokens = draw(t, high=40 if t % 2 else 4)
        state, metrics = toy_step(state, tokens)
        x = tokens[:, 1:].reshape(-1, 1) / 10
        loss = (0.5 * ((p["a"] - x) ** 2).sum(1) + (p["g"] * x).sum(1)).mean() + 1
        gradients = {"a": (p["a"] - x).mean(0), "g": x.mean(0)}
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        share = 0 if t <= 2 else (t - 2) / (CONFIG.train.steps - 2)
        rate = o.learning_rate * min(1, t / 2) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        for name, g in gradients.items():
            g = g * min(1, 0.5 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            direction = m[name] / (1 - 0.9**t) / (np.sqrt(v[name] / (1 - 0.95**t)) + 1e-4)
            p[name] = p[name] - rate * (direction + (0.3 * p[name] if name == "a" else 0))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=1e-5)
        assert (float(metrics["tokens"]), int(state["step"])) == (24, t)
    for name in p:
        np.testing.assert_allclose(state["params"][name], p[name], rtol=2e-5)


@pytest.mark.parametrize("token", [NAN_TOKEN, STEEP_TOKEN], ids=["loss", "gradient"])
def test_non_finite_numbers_leave_the_state_and_halt_for_good(toy_step, token):
    state, _ = toy_step(fresh(), draw(1))
    bad = draw(2)
    bad[1, 5] = token
    for tokens in (bad, draw(3)):  # the second batch is sound: halted stays
        after, metrics = toy_step(state, tokens)
        assert bool(after["halted"]) and bool(metrics["halted"])
        for now, before in zip(*(jax.tree.leaves({k: s[k] for k in ("step", "params", "adam")}) for s in (after, state)), strict=True):
            np.testing.assert_array_equal(now, before)
        state = after
    assert np.isfinite(metrics["loss"])


def test_no_clip():
    c = small_config(optimizer__clip=0.0, optimizer__learning_rate=0.1)
    _, metrics = jax.jit(make_step(Toy, c))(fresh(), {"tokens": jnp.asarray(draw(1))}, scalars(c))
    assert float(metrics["grad_norm"]) > 1


def test_global_norm():
    assert float(global_norm({"a": jnp.full((2, 2), 2.0), "b": {"c": jnp.full(4, 3.0)}})) == pytest.approx(math.sqrt(16 + 36))


def test_targets_and_weights():
    """No target across documents, none in padding; segments of the inputs go to the model."""
    tokens, segments = np.arange(8)[None], np.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    inputs, targets, weights, of_inputs = split_batch({"tokens": tokens, "segments": segments})
    np.testing.assert_array_equal(inputs, [range(7)])
    np.testing.assert_array_equal(targets, [range(1, 8)])
    np.testing.assert_array_equal(weights, [[1, 1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(of_inputs, segments[:, :-1])
    _, _, weights, of_inputs = split_batch({"tokens": tokens})
    assert (weights == 1).all() and of_inputs is None


@pytest.fixture(scope="module")
def documents():
    """Eight rows with 12 … 0 counted tokens: an average of the micro-batches' averages would be wrong."""
    segments = np.zeros((8, 13), np.int32)
    for row, length in enumerate((13, 2, 9, 1, 5, 0, 12, 3)):
        segments[row, :length] = 1 + (np.arange(length) >= 4)
    return {"tokens": draw(0, rows=8), "segments": segments}


@pytest.mark.parametrize(
    "ffn, remat", [("dense", "none"), *(pytest.param("moe", remat, marks=pytest.mark.full) for remat in ("none", "full"))]
)
def test_micro_batches_equal_one_large_batch(documents, ffn, remat):
    """Loss and gradients to 1e-6 of their norms: sums in another order. Of mixtures the loads exactly: remat counts nothing twice."""
    how = {} if ffn == "dense" else {"model__moe__backend": "auto" if remat == "full" else "dense"}
    model = Model(small_config(gate="headwise", ffn=ffn, remat=remat, **how).model)
    params, buffers = jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model)))

    def differentiate(pieces):
        return jax.jit(lambda p: loss_and_gradients(model, p, buffers, documents, 1e-5, pieces))(params)

    loss, gradients, count, measured = differentiate(1)
    assert float(count) == ((documents["segments"][:, 1:] == documents["segments"][:, :-1]) & (documents["segments"][:, 1:] > 0)).sum() < 40
    if ffn == "moe":
        valid = (documents["segments"][:, :-1] > 0).sum()
        np.testing.assert_array_equal(measured["load"].sum(axis=1), [2 * valid] * 2)
        np.testing.assert_array_equal(measured["dropped"], [0, 0])
    for pieces in (2, 4):
        cut_loss, cut_gradients, cut_count, cut_measured = differentiate(pieces)
        assert float(cut_loss) == pytest.approx(float(loss), rel=1e-6)
        assert float(cut_count) == float(count)
        for ours, theirs in zip(jax.tree.leaves(cut_gradients), jax.tree.leaves(gradients), strict=True):
            assert ours.dtype == jnp.float32
            assert np.linalg.norm(ours - theirs) <= 2e-6 * np.linalg.norm(theirs)
        for name, values in measured.items():
            np.testing.assert_allclose(cut_measured[name], values, rtol=0 if values.dtype == jnp.int32 else 1e-6)


@pytest.mark.full
def test_the_bias_moves_against_the_load_once_per_step():
    """Up for less than the mean load, down for more, by bias_rate; not at all in a step that halted, nor at rate 0."""
    load = np.array([[4, 4, 0, 8], [5, 5, 5, 5]])
    np.testing.assert_allclose(move_bias(jnp.zeros((2, 4)), jnp.asarray(load), 0.5), [[0, 0, 0.5, -0.5], [0] * 4])
    for micro_batches in (1, 2):
        c = small_config(ffn="moe", model__moe__bias_rate=0.25, model__moe__backend="dense", batch__micro_batches=micro_batches)
        model = Model(c.model)
        state = init_state(model, c, 0)
        step = jax.jit(make_step(model, c))
        batch = {"tokens": jnp.asarray(draw(0))}
        *_, measured = loss_and_gradients(model, state["params"], state["buffers"], batch, c.model.norm_eps, 1)
        after, metrics = step(state, batch, scalars(c))
        bias = after["buffers"]["layers"]["ffn"]["bias"]
        mean = np.asarray(measured["load"]).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(bias, 0.25 * np.sign(mean - measured["load"]))
        share = np.asarray(measured["load"]) / np.asarray(measured["load"]).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(metrics["load_entropy"], stats.entropy(share, axis=1) / np.log(6), rtol=1e-5)
        np.testing.assert_allclose(metrics["load_max"], share.max(axis=1) * 6, rtol=1e-5)
        np.testing.assert_allclose(metrics["load_min"], share.min(axis=1) * 6, rtol=1e-5)
        sick = after | {"halted": jnp.bool_(True)}
        np.testing.assert_array_equal(step(sick, batch, scalars(c))[0]["buffers"]["layers"]["ffn"]["bias"], bias)


@pytest.mark.full
def test_the_bias_evens_the_load_out():
    """Repeated steps at learning rate 0 from a lopsided router: the largest load falls towards the mean. Without the bias it stays."""
    loads = {}
    for rate in (0.0, 0.02):
        how = dict(model__moe__bias_rate=rate, model__moe__backend="dense", optimizer__learning_rate=0.0)
        c = small_config(ffn="moe", batch__sequences=16, **how)
        model = Model(c.model)
        state = init_state(model, c, 0)
        state["params"]["layers"]["ffn"]["router"] *= 3.0
        step = jax.jit(make_step(model, c))
        batch = {"tokens": jnp.asarray(draw(0, rows=16))}
        for _ in range(60):
            state, metrics = step(state, batch, scalars(c))
            loads.setdefault(rate, []).append(np.asarray(metrics["load_max"]).max())
    assert loads[0.0][0] == loads[0.0][-1] == loads[0.02][0] > 1.5
    assert loads[0.02][-1] < 1.25


def test_a_batch_of_padding_changes_nothing_but_decay():
    """No counted token: loss 0, gradients 0, nothing divides by zero."""
    _, metrics = jax.jit(make_step(Toy, CONFIG))(
        fresh(), {"tokens": jnp.asarray(draw(0)), "segments": jnp.zeros((2, 13), jnp.int32)}, scalars(CONFIG)
    )
    assert (float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["tokens"]), bool(metrics["halted"])) == (0, 0, 0, False)


def test_a_fresh_state():
    c = small_config()
    model = Model(c.model)
    state = jax.eval_shape(lambda: init_state(model, c, 0))
    assert jax.tree.structure(state["adam"].mu) == jax.tree.structure(state["params"]) == jax.tree.structure(state["adam"].nu)
    assert {leaf.dtype for leaf in jax.tree.leaves((state["params"], state["adam"].mu, state["adam"].nu))} == {jnp.dtype("float32")}
