"""Muon: its direction against singular value decompositions in float64, who gets it, how large a step is; runs on meshes, saved, in cells.

Shapes: those of tests/models/reference.py; L layers, D width, H heads of K, F ffn, E experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.initializers import ParamSpec
from gammalm.models.decoder import Model
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.optimizer import MUON_RMS, direction
from gammalm.training.program import Program
from gammalm.training.step import scalars
from gammalm.trees import flat

from ..models.reference import random_params, small_config

TOKEN_BYTES = np.ones(50, np.int32)


def muon_config(**changes):
    return small_config(optimizer__kind="muon", optimizer__warmup_steps=0, **changes)


def first_direction(config, specs, gradients):
    transform = direction(config, specs)
    return transform.update(gradients, transform.init(jax.tree.map(jnp.zeros_like, gradients)))


def matrices(spec, array):
    """[copies, fan-in, fan-out] in float64, for specs whose copies come first, then the fan-in: what ours all are but the norms."""
    lead = len(spec.axes) - len(spec.fan_in) - len(spec.fan_out)
    return np.asarray(array, np.float64).reshape(int(np.prod(spec.shape[:lead])), *spec.fans())


@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_matrices_of_the_layers_become_orthogonal_one_by_one(ffn):
    """The direction has the singular vectors of the gradient, and singular values that are all alike; per layer, per expert."""
    c = muon_config(ffn=ffn, gate="elementwise", tie_embeddings=False)
    model = Model(c.model)
    gradients = random_params(model.specs)
    found, state = first_direction(c, model.specs, gradients)
    found, given = flat(found), flat(gradients)
    adams = {path for path, spec in model.specs.items() if spec.role in ("embed", "head", "norm", "gate", "router")}
    assert set(flat(state["adam"].mu)) == adams and set(flat(state["muon"].mu)) == set(model.specs) - adams
    assert {a.dtype for a in jax.tree.leaves((state["adam"].mu, state["adam"].nu, state["muon"].mu))} == {jnp.dtype("float32")}
    for path, spec in model.specs.items():
        if path in adams:
            np.testing.assert_allclose(found[path], np.sign(given[path]), atol=1e-3)
            continue
        scale = MUON_RMS * np.sqrt(max(spec.fans()))
        for gradient, step in zip(matrices(spec, given[path]), matrices(spec, found[path] / scale), strict=True):
            u, s, vt = np.linalg.svd(gradient, full_matrices=False)
            inside = u.T @ step @ vt.T  # diagonal where the singular vectors are the same
            large = s > 0.02 * s[0]
            assert large.sum() > 0.8 * len(s)
            assert np.all(np.diag(inside)[large] > 0.6) and np.all(np.diag(inside)[large] < 1.3), path
            np.testing.assert_allclose(inside - np.diag(np.diag(inside)), 0, atol=2e-3)
            np.testing.assert_allclose(step, u @ inside @ vt, atol=1e-4)


def test_an_entry_moves_by_a_fifth_of_the_rate_whatever_the_shape():
    specs = {
        name: ParamSpec(shape, axes, fan_in, fan_out, "ffn")
        for name, shape, axes, fan_in, fan_out in (
            ("square", (64, 64), ("embed", "ffn"), ("embed",), ("ffn",)),
            ("wide", (3, 16, 4, 64), ("layers", "embed", "heads", "head_dim"), ("embed",), ("heads", "head_dim")),
            ("tall", (256, 16), ("ffn", "embed"), ("ffn",), ("embed",)),
        )
    }
    rng = np.random.default_rng(0)
    gradients = {name: jnp.asarray(1e-9 * rng.normal(size=spec.shape), jnp.float32) for name, spec in specs.items()}
    found, _ = first_direction(muon_config(optimizer__eps=1e-20), specs, gradients)
    for name, step in found.items():
        assert float(jnp.sqrt(jnp.mean(jnp.square(step)))) == pytest.approx(0.2, rel=0.25), name


def test_momentum_is_nesterovs():
    """The direction of two gradients is that of β · m̂ + (1 − β) · ĝ₂, both corrected for their zero start; its size is taken out."""
    spec = ParamSpec((24, 16), ("embed", "ffn"), ("embed",), ("ffn",), "ffn")
    first, second = (jnp.asarray(np.random.default_rng(i).normal(size=(24, 16)), jnp.float32) for i in range(2))
    c = muon_config()
    transform = direction(c, {"w": spec})
    _, state = transform.update({"w": first}, transform.init({"w": first}))
    two, _ = transform.update({"w": second}, state)
    beta = 0.95
    mean = (beta * first + second) * (1 - beta)
    mixed = beta * mean / (1 - beta**3) + (1 - beta) * second / (1 - beta**2)
    one, _ = transform.update({"w": mixed}, transform.init({"w": first}))
    np.testing.assert_allclose(two["w"], one["w"], atol=2e-3)


def runs(**changes):
    """The config of the runs below."""
    return muon_config(d_model=16, d_ff=24, gate="elementwise", batch__sequences=8, optimizer__learning_rate=0.02,
                       optimizer__schedule="constant", **changes)  # fmt: skip


@pytest.fixture(scope="module")
def single():
    """The program of one run on one device."""
    return Program(runs(), TOKEN_BYTES, devices=jax.devices()[:1])


def batch(step):
    return {"tokens": np.random.default_rng(step).integers(0, 50, (8, 13)).astype(np.int32)}


def train(program, c, state, steps=4):
    """State and losses after `steps`; the state that is given stays as it is."""
    state, losses = jax.tree.map(lambda a, like: jax.device_put(np.asarray(a), like.sharding), state, program.abstract_state), []
    for step in range(steps):
        state, metrics = program.step(state, program.put([batch(step)]), scalars(c))
        losses.append(float(metrics["loss"]))
    return state, losses


def test_decay_reaches_every_role_but_those_left_out(single):
    """Two first steps that differ in decay alone differ by rate · decay · weight, whatever scales the direction."""
    state = single.init(runs())
    decayed, free = (train(single, runs(optimizer__weight_decay=decay), state, 1)[0]["params"] for decay in (0.5, 0.0))
    for path, spec in single.model.specs.items():
        share = 0.0 if spec.role == "norm" else 0.02 * 0.5
        np.testing.assert_allclose(flat(free)[path] - flat(decayed)[path], share * flat(state["params"])[path], atol=1e-6, err_msg=path)


def test_sharded_equals_one_device(single):
    start = single.init(runs())
    _, one = train(single, runs(), start)
    c = runs(mesh__data=1, mesh__fsdp=2, mesh__tensor=2)
    state, many = train(Program(c, TOKEN_BYTES, devices=jax.devices()[:4]), c, start)
    np.testing.assert_allclose(many, one, atol=1e-5)
    assert max(one) - min(one) > 0.01, "steps that moved"
    assert state["muon"].mu["layers"]["attn"]["q"].addressable_shards[0].data.shape == (2, 8, 2, 6)


def test_the_state_is_saved_and_restored_bit_for_bit(single, tmp_path):
    state, _ = train(single, runs(), single.init(runs()), 2)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state)
    with Checkpointer(tmp_path) as checkpoints:
        _, restored, _ = checkpoints.restore_latest(single.abstract_state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.any(state["muon"].mu["layers"]["attn"]["q"] != 0, axis=(1, 2, 3)))


@pytest.mark.parametrize("mode", ["vmap", pytest.param("map", marks=pytest.mark.full)])
def test_cells_equal_single_runs(single, mode):
    configs = [runs(seed=0), runs(seed=1)]
    together = Program(configs[0], TOKEN_BYTES, cells=2, mode=mode, devices=jax.devices()[:1])
    starts = [single.init(c) for c in configs]
    states, _ = together.step(together.stack(starts), together.put([batch(0), batch(0)]), together.scalars([scalars(c) for c in configs]))
    for i, c in enumerate(configs):
        state, _ = train(single, c, single.init(c), 1)
        for a, b in zip(jax.tree.leaves(together.pick(states, i)), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
