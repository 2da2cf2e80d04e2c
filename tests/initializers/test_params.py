"""The drawn tree against its table: measured std of every parameter, pairing across γ, independence of other parameters and of the mesh.

Tolerance of a measured std from n values: 5/√(2n), five standard errors of a normal's.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gammalm.initializers import PRESETS, ParamSpec, init_params, init_table, path_hash

SIZES = dict(d_model=64, n_layers=2)


def flat(tree):
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture
def draw(decoder_specs, init_config):
    """Function: (specs, seed, dtype, config changes) -> {path: array}."""

    def make(specs=None, seed=0, dtype=jnp.float32, **changes):
        specs = specs or decoder_specs()
        depth = max(spec.layers for spec in specs.values()) or SIZES["n_layers"]
        return flat(init_params(specs, init_config(**changes), seed, dtype=dtype, **(SIZES | {"n_layers": depth})))

    return make


@pytest.mark.parametrize("depth_scale", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_measured_std_of_every_parameter(decoder_specs, init_config, preset, depth_scale):
    specs = decoder_specs(tied=False)
    config = init_config(preset=preset, group_gammas=(0.5, 0.75, 1.0, 1.25), depth_scale=depth_scale)
    params = flat(init_params(specs, config, 0, **SIZES))
    assert params.keys() == specs.keys()
    base, d = config.base_width, SIZES["d_model"]
    for row in init_table(specs, config, **SIZES):
        weights = params[row["path"]].astype(np.float64)
        assert weights.shape == tuple(row["shape"])
        if row["role"] == "norm":
            assert (weights == (base / d if (preset, row["path"]) == ("mup", "final_norm/gain") else 1)).all()
            continue
        layers = weights if row["layers"] else [weights]
        for layer, sigma in zip(layers, np.broadcast_to(row["sigma"], len(layers)), strict=True):
            assert layer.std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * layer.size)), row["path"]


def test_truncated_parameters_keep_their_std(draw, decoder_specs):
    for path, weights in draw(truncate=2.0).items():
        if not path.endswith("gain"):
            sigma = 1 / {"layers/attn/out": 96, "layers/ffn/down": 160}.get(path, 64)
            assert weights.std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * weights.size)), path
            assert abs(weights).max() <= 2.0001 / 0.8796 * sigma


def test_gammas_share_every_draw(draw):
    half, one = draw(gamma=0.5), draw(gamma=1.0)
    for path in half:
        ratio = half[path] / one[path]
        fan_in = {"layers/attn/out": 96, "layers/ffn/down": 160}.get(path, 64)
        np.testing.assert_allclose(ratio, 1.0 if path.endswith("gain") else math.sqrt(fan_in), rtol=3e-7, err_msg=path)


def test_other_parameters_change_nothing(draw, decoder_specs):
    full = draw(decoder_specs(tied=False))
    for specs in (decoder_specs(gate="none"), dict(reversed(decoder_specs(tied=False).items()))):
        some = draw(specs)
        assert len(some) == len(specs)
        for path, weights in some.items():
            np.testing.assert_array_equal(weights, full[path])


def test_stack_equals_its_layers_drawn_alone(draw, decoder_specs):
    deep, shallow = draw(decoder_specs(L=5)), draw(decoder_specs(L=2))
    for path, weights in shallow.items():
        np.testing.assert_array_equal(weights, deep[path][:2] if path.startswith("layers") else deep[path])
    # The key written out: fold_in(fold_in(key(seed), crc32(path)), layer).
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), path_hash("layers/attn/out")), 3)
    np.testing.assert_allclose(deep["layers/attn/out"][3], jax.random.normal(key, (3, 32, 64)) / 96, rtol=3e-7)


def test_path_hash_never_changes():
    assert path_hash("123456789") == 0xCBF43926  # the check value in CRC-32's definition


def test_seeds_layers_and_paths_differ(draw):
    a, b = draw(seed=0), draw(seed=1)
    q, k = a["layers/attn/q"], a["layers/attn/k"]
    for x, y in ((q, b["layers/attn/q"]), (q, k), (q[0], q[1])):
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 5 / math.sqrt(x.size)


def test_layer_rule_changes_sigma_and_keeps_the_draws(draw):
    plain, ruled = draw(), draw(rules=("attn/q[1:]=gamma_normal(gamma=0.5)",))
    np.testing.assert_array_equal(ruled["layers/attn/q"][0], plain["layers/attn/q"][0])
    np.testing.assert_allclose(ruled["layers/attn/q"][1] / plain["layers/attn/q"][1], 8.0, rtol=3e-7)


def test_layers_may_differ_in_distribution(draw, decoder_specs):
    """Uniform, normal and zero layers in one stack: each in its place, the normal ones as without the rule."""
    specs = decoder_specs(L=4)
    plain, ruled = draw(specs), draw(specs, rules=("ffn/up[1]=zeros", "ffn/up[2]=torch_linear"))
    up = ruled["layers/ffn/up"]
    np.testing.assert_array_equal(up[[0, 3]], plain["layers/ffn/up"][[0, 3]])
    assert (up[1] == 0).all()
    assert 0.99 / math.sqrt(64) < abs(up[2]).max() <= 1 / math.sqrt(64)


def test_orthogonal_per_layer_and_expert(init_config):
    spec = ParamSpec((2, 3, 8, 4, 5), ("layers", "experts", "embed", "heads", "head_dim"), ("embed",), ("heads", "head_dim"), "qk")
    (weights,) = flat(init_params({"q": spec}, init_config(preset="orthogonal"), 0, d_model=8, n_layers=2)).values()
    for matrix in weights.reshape(6, 8, 20).astype(np.float64):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(8), atol=2e-6)


def test_dtype_is_a_cast_of_the_fp32_draw(draw):
    exact, rounded = draw(), draw(dtype=jnp.bfloat16)
    for path in exact:
        assert exact[path].dtype == jnp.float32
        np.testing.assert_array_equal(rounded[path], exact[path].astype(jnp.bfloat16))


@pytest.mark.parametrize("preset", ["fan_in", "orthogonal"])
def test_same_parameters_on_one_device_and_on_eight(decoder_specs, init_config, preset):
    specs = {path: spec for path, spec in decoder_specs().items() if path in ("embed/table", "layers/ffn/down")}
    assert jax.device_count() >= 8, "tests/conftest.py gives eight host devices"

    def make(seed):
        return init_params(specs, init_config(preset=preset), seed, **SIZES)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), devices=jax.devices()[:8], axis_types=(AxisType.Auto,) * 2)
    shard = {"embed": "fsdp", "ffn": "tensor", "head_dim": "tensor", "vocab": "tensor"}
    shardings = {path: NamedSharding(mesh, PartitionSpec(*(shard.get(axis) for axis in spec.axes))) for path, spec in specs.items()}
    structure = jax.eval_shape(make, 0)
    tree = jax.tree_util.tree_map_with_path(lambda path, _: shardings["/".join(key.key for key in path)], structure)
    eager, one = flat(make(3)), flat(jax.jit(make)(jnp.int32(3)))
    many = jax.jit(make, out_shardings=tree)(3)
    assert many["layers"]["ffn"]["down"].addressable_shards[0].data.shape == (2, 80, 16)
    for path, weights in flat(many).items():
        np.testing.assert_array_equal(weights, one[path], err_msg=path)
        np.testing.assert_array_equal(weights, eager[path], err_msg=path)


def test_deep_model_is_traced_with_one_draw_per_parameter(decoder_specs, init_config):
    """The program of 24 layers of the 1.5B model is no longer than that of two."""

    def lines(L):
        specs = decoder_specs(L=L, D=2048, H=24, G=24, K=128, F=4416, V=50304)
        return jax.jit(lambda seed: init_params(specs, init_config(), seed, d_model=2048, n_layers=L)).lower(0).as_text().count("\n")

    assert lines(24) == lines(2)
