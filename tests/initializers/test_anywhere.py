"""Trees of other libraries: every parameter gets the std that its layer's arithmetic asks for, worked out here by hand from the sizes.

Real layers of Flax (linen and NNX); trees with the names and shapes of Haiku 0.0.17 and Equinox 0.13.8, which the suite does not install.
Sampling error of a standard deviation from n values: 1/√(2n); the tolerance is 5 times that.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gammalm.errors import ConfigError
from gammalm.initializers import gamma_normal, init_weights, kaiming_normal, ones, weight_table, zeros
from gammalm.trees import flat, nested

from .any_recipe import recipe

KEY = jax.random.key(3)


def shapes(**sizes):
    """{path: shape} as a nested dict of fp32 shapes; '__' in a name is '/'."""
    return nested({name.replace("__", "/"): jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()})


def check(values, fan_ins, gamma):
    """Each array of {path: array} against {path: fan-in, or a constant as text}; no path more or less."""
    assert values.keys() == fan_ins.keys()
    for path, fan_in in fan_ins.items():
        array = np.asarray(values[path], np.float64)
        if isinstance(fan_in, str):
            assert (array == float(fan_in)).all(), path
        else:
            assert array.std() == pytest.approx(fan_in**-gamma, rel=5 / (2 * array.size) ** 0.5), path
            assert abs(array.mean()) < 5 * fan_in**-gamma / array.size**0.5, path


class LinenModel(linen.Module):
    """Each kind of layer once: V=50, D=12, two heads of size 8, a window of 5."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(50, 12)(tokens)
        x = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=16)(x)
        x = linen.LayerNorm()(linen.Conv(24, (5,))(x))
        x = linen.Conv(24, (3,), feature_group_count=24, name="depthwise_conv")(x)
        return linen.Dense(40)(x)


def test_linen():
    params = jax.eval_shape(LinenModel().init, KEY, jnp.zeros((1, 6), jnp.int32))["params"]
    params["LayerNorm_0"] = {"scale": np.full(24, 3.0, np.float32), "bias": np.full(24, 3.0, np.float32)}
    attention = {f"MultiHeadDotProductAttention_0/{name}": fan for name, fan in (("query", 12), ("key", 12), ("value", 12), ("out", 16))}
    expected = {"Embed_0/embedding": 12, "Conv_0/kernel": 60, "Conv_0/bias": "0", "depthwise_conv/kernel": 3, "depthwise_conv/bias": "0",
                "LayerNorm_0/scale": "3", "LayerNorm_0/bias": "0", "Dense_0/kernel": 24, "Dense_0/bias": "0"}
    expected |= {f"{path}/kernel": fan for path, fan in attention.items()} | {f"{path}/bias": "0" for path in attention}
    drawn = {gamma: flat(init_weights(params, KEY, gamma)) for gamma in (0.5, 1.0)}
    for gamma, values in drawn.items():
        check(values, expected, gamma)
    for path, fan_in in expected.items():  # the draws of two γ differ by d^(½), and by nothing else
        if not isinstance(fan_in, str):
            np.testing.assert_allclose(drawn[0.5][path], drawn[1.0][path] * fan_in**0.5, rtol=1e-5)
    first, second = (drawn[1.0][f"MultiHeadDotProductAttention_0/{name}/kernel"] for name in ("query", "key"))
    assert first.shape == second.shape and (first != second).all()
    less = {name: value for name, value in params.items() if name != "Embed_0"}
    assert (init_weights(less, KEY, 1.0)["Dense_0"]["kernel"] == drawn[1.0]["Dense_0/kernel"]).all()
    rows = {row["path"]: row for row in weight_table(params, 0.5)}
    assert {path: row["fan_in"] for path, row in rows.items()} == {p: None if isinstance(f, str) else f for p, f in expected.items()}
    assert rows["Conv_0/kernel"]["sigma"] == pytest.approx(60**-0.5) and rows["LayerNorm_0/scale"]["initializer"] == "kept"


def test_nnx_and_back():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(50, 12, rngs=rngs)
            self.mix = nnx.MultiHeadAttention(2, 12, qkv_features=16, decode=False, rngs=rngs)
            self.norm = nnx.RMSNorm(12, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)  # holds keys and counts, no parameters
            self.out = nnx.Linear(12, 40, rngs=rngs)

    net = Net(nnx.Rngs(0))
    state = nnx.state(net, nnx.Param)
    nnx.update(net, init_weights(state, KEY, 1.0))
    assert net.out.kernel[...].std() == pytest.approx(1 / 12, rel=5 / (2 * 480) ** 0.5)
    assert net.mix.out.kernel[...].std() == pytest.approx(1 / 16, rel=5 / (2 * 192) ** 0.5)
    assert [row["fan_in"] for row in weight_table(state) if row["path"] == "mix/query/kernel"] == [12]
    assert (net.norm.scale[...] == 1).all()
    whole = init_weights(nnx.state(net), KEY, 1.0)  # with the keys of Dropout, which stay
    assert jax.tree.structure(whole) == jax.tree.structure(nnx.state(net))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As an Equinox layer is seen by JAX: attributes, some of them no arrays."""

    weight: object
    bias: object
    activation: object = None


def test_equinox_and_haiku_names():
    struct = jax.ShapeDtypeStruct
    layers = {"linear": Layer(jnp.zeros((40, 12)), jnp.ones(40), jax.nn.relu), "embedding": Layer(jnp.zeros((50, 12)), None),
              "conv": Layer(jnp.zeros((24, 6, 3, 3)), jnp.ones((24, 1, 1))), "norm": Layer(jnp.full(12, 2.0), None)}
    drawn = init_weights(layers, KEY, 1.0)
    assert drawn["linear"].activation is jax.nn.relu and drawn["embedding"].bias is None
    weights = {name: layer.weight for name, layer in drawn.items()}
    check(weights, {"linear": 12, "embedding": 12, "conv": 54, "norm": "2"}, 1.0)
    haiku = {"mlp/~/linear_0": {"w": (12, 40), "b": (40,)}, "embed": {"embeddings": (50, 12)}, "conv2_d": {"w": (3, 3, 6, 24), "b": (24,)},
             "layer_norm": {"scale": (12,), "offset": (12,)}}
    haiku = jax.tree.map(lambda size: struct(size, jnp.bfloat16), haiku, is_leaf=lambda x: isinstance(x, tuple))
    drawn = init_weights(haiku, KEY, 0.75)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(drawn))
    check(flat(drawn), {"mlp/~/linear_0/w": 12, "mlp/~/linear_0/b": "0", "embed/embeddings": 12, "conv2_d/w": 54, "conv2_d/b": "0",
                        "layer_norm/scale": "1", "layer_norm/offset": "0"}, 0.75)  # fmt: skip


def test_stacked_copies_and_rules():
    tree = shapes(layers__router__kernel=(3, 12, 8), layers__experts__w=(3, 8, 12, 40), layers__norm__weight=(3, 12), read=(4, 6, 30),
                  layers__conv__kernel=(3, 5, 12, 6), temperature=(), head__kernel=(12, 300))
    rules = {"read": gamma_normal(0.75, in_axis=(-3, -2)), "head/kernel": kaiming_normal(), "temperature": ones(), "router": zeros()}
    drawn = flat(init_weights(tree, KEY, 1.0, rules=rules, stacked=("layers", "experts")))
    head = drawn.pop("head/kernel")
    read = drawn.pop("read")
    check(drawn, {"layers/router/kernel": "0", "layers/experts/w": 12, "layers/norm/weight": "1", "layers/conv/kernel": 60,
                  "temperature": "1"}, 1.0)  # fmt: skip
    check({"read": read}, {"read": 24}, 0.75)
    assert head.std() == pytest.approx((2 / 12) ** 0.5, rel=5 / (2 * head.size) ** 0.5)
    kept = init_weights(nested(drawn | {"odd": jnp.full((2, 2), 7.0)}), KEY, rules={"odd|temperature": None}, stacked=("layers", "experts"))
    assert (kept["odd"] == 7).all() and kept["temperature"] == 1


def test_each_device_draws_its_shard_of_the_same_weights():
    tree = shapes(dense__kernel=(16, 64), embed__embedding=(64, 16))
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    sharded = jax.jit(functools.partial(init_weights, tree), out_shardings=sharding)(KEY)
    alone = init_weights(tree, KEY)
    for path, array in flat(sharded).items():
        assert array.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(array, flat(alone)[path])


REFUSED = {
    "kernel of three axes": (dict(tree=shapes(dense__kernel=(3, 12, 40))), r"dense/kernel \(3, 12, 40\)"),
    "gain that is stacked unsaid": (dict(tree=shapes(norm__weight=(3, 12))), r"norm/weight \(3, 12\)"),
    "another name": (dict(tree=shapes(mean=(12,))), "without statistics"),
    "gain of another name, stacked unsaid": (dict(tree=shapes(ln_1__weight=(3, 12))), r"ln_1/weight \(3, 12\)"),
    "Flax's ConvLocal": (dict(tree=shapes(ConvLocal_0__kernel=(10, 24, 5))), r"ConvLocal_0/kernel \(10, 24, 5\)"),
    "rule for a vector": (dict(tree=shapes(a__kernel=(3, 4), b__t=(7,)), rules={"t": gamma_normal()}), r"b/t \(7,\): .* needs a fan-in"),
    "rule for other axes": (dict(tree=shapes(a__kernel=(3, 4)), rules={"a": gamma_normal(in_axis=-3)}), r"a/kernel \(3, 4\): .* outside"),
    "Haiku's transposed convolution": (dict(tree=shapes(conv2_d_transpose__w=(3, 3, 24, 6))), "conv2_d_transpose/w"),
    "idle rule": (dict(tree=shapes(a__kernel=(3, 4)), rules={"b": None}), "'b' decides nothing"),
    "idle stack": (dict(tree=shapes(a__kernel=(3, 4)), stacked=("layers",)), "'layers' decides nothing"),
    "stack without axes": (dict(tree=shapes(a__bias=()), stacked=("a",)), "no axis for each"),
    "one text as stack": (dict(tree=shapes(a__kernel=(3, 4)), stacked="a"), r"write \('a',\)"),
    "rule that draws nothing": (dict(tree=shapes(a__kernel=(3, 4)), rules={"a": 0.5}), "must be an initializer"),
    "bad pattern": (dict(tree=shapes(a__kernel=(3, 4)), rules={"(": None}), "no regular expression"),
    "negative gamma": (dict(tree=shapes(a__kernel=(3, 4)), gamma=-1), "gamma must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    arguments, message = REFUSED[name]
    arguments = dict(arguments)
    tree = arguments.pop("tree")
    for function in (lambda: init_weights(tree, KEY, **arguments), lambda: weight_table(tree, **arguments)):
        with pytest.raises(ConfigError, match=message):
            function()


def test_the_recipes_for_jax(capsys):
    params = flat(recipe("jax")["params"])
    assert capsys.readouterr().out.count("'sigma'") == len(params) == 7
    check({p: a for p, a in params.items() if p.endswith(("kernel", "embedding"))},
          {"layers_0/embedding": 256, "layers_1/kernel": 256, "layers_3/kernel": 512}, 1.0)  # fmt: skip
    params = flat(recipe("jax, stacked")["params"])
    check({"head": params.pop("head/kernel")}, {"head": 64}, 0.75)
    layers = {"layers/mixture/router/kernel": 64, "layers/mixture/experts/w": 64, "layers/read": 96}
    check(params, layers | {"head/temperature": "1"}, 1.0)


def test_the_recipe_for_maxtext():
    """On what MaxText passes: dense, heads, attention output, routed experts with the axes of one, groups, plain ints."""
    names = recipe("maxtext")
    init = names["nd_dense_init"](1.0, "fan_in", "truncated_normal")
    for shape, ins, outs, fan_in in (
        ((12, 300), np.arange(1), np.arange(1, 2), 12),
        ((12, 4, 60), np.arange(1), np.arange(1, 3), 12),
        ((4, 6, 120), np.arange(2), np.arange(2, 3), 24),
        ((8, 12, 40), np.arange(1), np.arange(1, 2), 12),
        ((8, 12, 40), (1,), (2,), 12),
        ((12, 300), 0, 1, 12),
    ):
        weights = init(KEY, shape, jnp.float32, in_axis=ins, out_axis=outs)
        assert weights.std() == pytest.approx(1 / fan_in, rel=5 / (2 * weights.size) ** 0.5)
    assert names["default_embed_init"](KEY, (300, 12), jnp.float32).std() == pytest.approx(1 / 12, rel=5 / 7200**0.5)
