"""Which matrices a model has and how their weights lie, against NumPy and SciPy in float64, an einsum over named axes, closed forms."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gammalm.analysis.weights import SPARSE, copies_of, matrix_paths, matrix_stack, moments, outputs_first, weight_rows
from gammalm.cli.main import main
from gammalm.initializers import ParamSpec, init_params
from gammalm.models.decoder import Model
from gammalm.trees import flat

from ..models.reference import random_params, small_config

MODELS = {
    "plain": {"gate": "elementwise"},
    "untied, grouped": {"tie_embeddings": False, "gate": "headwise", "qk_norm": True},
    "mixture": {"attention": "mla", "ffn": "moe", "n_layers": 3, "model__moe__first_k_dense": 1, "gate": "elementwise"},
}


def matrix_spec(rows, columns):
    return ParamSpec((rows, columns), ("embed", "ffn"), ("embed",), ("ffn",), "ffn")


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_fans_in_order(name):
    """Every parameter but norm gains; inputs on one side, outputs on the other, as an einsum over the named axes has them."""
    specs = Model(small_config(**MODELS[name]).model).specs
    arrays = flat(random_params(specs))
    paths = matrix_paths(specs)
    assert {path for path in specs if path not in paths} == {path for path in specs if path.endswith("/gain")}
    axes = ("layers", "experts", "vocab", "embed", "heads", "kv_heads", "head_dim", "rank", "ffn", "routes")
    letters = dict(zip(axes, "abcdefghij", strict=True))
    for path in paths:
        spec, w = specs[path], arrays[path]
        copies = [axis for axis in ("layers", "experts") if axis in spec.axes]
        stored, wanted = ("".join(letters[axis] for axis in axes) for axes in (spec.axes, [*copies, *spec.fan_out, *spec.fan_in]))
        rows = np.einsum(f"{stored}->{wanted}", w)
        fan_in, fan_out = spec.fans()
        rows = rows.reshape(*rows.shape[: len(copies)], fan_out, fan_in)
        stack = np.asarray(matrix_stack(jnp.asarray(w), spec))
        np.testing.assert_array_equal(stack if outputs_first(spec) else np.swapaxes(stack, -1, -2), rows)
    assert outputs_first(specs["embed/table"])


def test_copies_are_named_as_in_the_model():
    specs = Model(small_config(**MODELS["mixture"]).model).specs
    named = {path: [(index, names["layer"], names["expert"]) for index, names in copies_of(specs[path])] for path in matrix_paths(specs)}
    assert named["embed/table"] == [((), None, None)]
    assert named["dense_layers/ffn/up"] == [((0,), 0, None)]
    assert named["layers/attn/out"] == [((0,), 1, None), ((1,), 2, None)]
    assert named["layers/ffn/experts/up"] == [((i, e), 1 + i, e) for i in range(2) for e in range(6)]


def test_moments_of_every_matrix():
    """Layers and experts of different scale, mean and tails."""
    spec = ParamSpec((2, 3, 40, 50), ("layers", "experts", "embed", "ffn"), ("embed",), ("ffn",), "ffn")
    rng = np.random.default_rng(0)
    w = rng.standard_t(5, spec.shape) * rng.uniform(1e-6, 10, (2, 3, 1, 1)) + rng.uniform(-1e-6, 1e-6, (2, 3, 1, 1))
    w[1, 1] = rng.uniform(3, 4, (40, 50))
    w = w.astype(np.float32)
    found = jax.device_get(moments(jnp.asarray(w), spec))
    each = w.astype(np.float64).reshape(2, 3, -1)
    np.testing.assert_allclose(found.std, each.std(-1), rtol=1e-5)
    np.testing.assert_allclose(found.kurtosis, stats.kurtosis(each, axis=-1, fisher=False), rtol=1e-4)
    np.testing.assert_allclose(found.sparsity, (np.abs(each) < SPARSE * each.std(-1, keepdims=True)).mean(-1), atol=1.5 / 2000)
    assert found.sparsity[1, 1] == 0 and found.sparsity[0, 0] > 0.05


def test_matrices_of_one_value():
    zeros = moments(jnp.zeros((4, 5)), matrix_spec(4, 5))
    assert float(zeros.std) == 0 and float(zeros.sparsity) == 1 and math.isnan(float(zeros.kurtosis))
    specs = {"up": matrix_spec(4, 5), "one": matrix_spec(1, 5)}
    rows = weight_rows(specs, {"up": jnp.zeros((4, 5)), "one": jnp.arange(5.0)[None]})
    found = [(row["path"], row["std"] > 0, row["kurtosis"] is None, row["gamma"]) for row in rows]
    assert found == [("up", False, True, None), ("one", True, False, None)]


@pytest.mark.full
def test_a_hundred_million_weights():
    """The token table of a large model: sums over 10⁸ fp32 numbers keep six digits."""
    rng = np.random.default_rng(0)
    w = np.tile(rng.standard_normal((1024, 1000)).astype(np.float32) + 2, (100, 1))
    found = moments(jnp.asarray(w), matrix_spec(*w.shape))
    once = w[:1024].astype(np.float64)
    assert float(found.std) == pytest.approx(once.std(), rel=2e-6)
    assert float(found.kurtosis) == pytest.approx(stats.kurtosis(once, axis=None, fisher=False), rel=1e-5)


@pytest.mark.parametrize("name", ["plain", pytest.param("mixture", marks=pytest.mark.full)])
def test_fresh_weights_have_the_gamma_of_the_config(name):
    """Normal weights of std fan_in^(−γ) within four standard errors: γ, kurtosis 3, share within a tenth of a std erf(.1/√2)."""
    config = small_config(**MODELS[name], d_model=64, init__gamma=0.8)
    specs = Model(config.model).specs
    rows = weight_rows(specs, init_params(specs, config.init, 0, d_model=64, n_layers=config.model.n_layers))
    assert len(rows) == sum(math.prod(specs[path].shape) // math.prod(specs[path].fans()) for path in matrix_paths(specs))
    for row in rows:
        spec = specs[row["path"]]
        count = math.prod(spec.fans())
        assert row["gamma"] == pytest.approx(0.8, abs=4 / math.sqrt(2 * count) / math.log(row["fan_in"]))
        assert row["kurtosis"] == pytest.approx(3, abs=6 * math.sqrt(24 / count))
        share = math.erf(SPARSE / math.sqrt(2))
        assert row["sparsity"] == pytest.approx(share, abs=5 * math.sqrt(share / count))


def test_the_command(capsys):
    """The library's rows of the matrices that are asked for, as JSON and as a table; a pattern that matches none is refused."""
    argv = ["analyze", "weights", "--config", "lm:size=tiny,gamma=0.7", "--config.model.d_ff=48"]
    assert main([*argv, "--matrices", "layers/ffn/*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["analysis"], found["gamma"], found["near_zero"]) == ("weights", 0.7, SPARSE)
    assert [(row["path"], row["layer"], row["fan_in"]) for row in found["matrices"]] == [
        (f"layers/ffn/{name}", layer, fan_in) for name, fan_in in (("down", 48), ("gate", 64), ("up", 64)) for layer in (0, 1)
    ]
    assert main([*argv, "--matrices", "layers/ffn/*"]) == 0
    head, *lines, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["matrix", "layer", "std", "gamma", "kurtosis", "near", "zero"] and len(lines) == 6 and "8.0%" in note
    assert float(lines[0].split()[2]) == pytest.approx(found["matrices"][0]["std"], rel=1e-3)
    assert main([*argv, "--matrices", "attn"]) == 2
    assert "--matrices attn matches none of embed/table, layers/attn/gate" in capsys.readouterr().err
