"""Every scheme against its published standard deviation, jax.nn.initializers and its moments; fans, orthogonality, errors, Flax modules.

Sampling error of a standard deviation from n values: 1/√(2n) for a normal (less for the flatter laws here); the tolerance is 5 times that.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gammalm import initializers as zoo
from gammalm.errors import ConfigError

SHAPE = (300, 500)  # fan_in 300, fan_out 500
KEY = jax.random.key(7)


def tolerance(n):
    return 5 / math.sqrt(2 * n)


# Standard deviations worked out from the published formulas.
STDS = {
    "gamma .5": (zoo.gamma_normal(0.5), 300**-0.5),
    "gamma default": (zoo.gamma_normal(), 1 / 300),
    "gamma int": (zoo.gamma_normal(2), 300**-2.0),
    "gamma 0": (zoo.gamma_normal(0.0), 1.0),
    "gamma base": (zoo.gamma_normal(0.75, base=64), 64**-0.75),
    "gamma truncated": (zoo.gamma_normal(1.0, truncate=2.0), 1 / 300),
    "gamma truncated at 1": (zoo.gamma_normal(1.0, truncate=1.0), 1 / 300),
    "lecun_normal": (zoo.lecun_normal(), math.sqrt(1 / 300)),
    "lecun_uniform": (zoo.lecun_uniform(), math.sqrt(1 / 300)),
    "xavier_normal": (zoo.xavier_normal(), math.sqrt(2 / 800)),
    "xavier_uniform": (zoo.xavier_uniform(), math.sqrt(2 / 800)),
    "kaiming_normal": (zoo.kaiming_normal(), math.sqrt(2 / 300)),
    "kaiming_normal fan_out": (zoo.kaiming_normal("fan_out"), math.sqrt(2 / 500)),
    "kaiming_uniform fan_avg": (zoo.kaiming_uniform("fan_avg"), math.sqrt(2 / 400)),
    "torch_linear": (zoo.torch_linear(), math.sqrt(1 / 900)),
    "fixed_std": (zoo.fixed_std(0.006), 0.006),
    "gpt2": (zoo.gpt2(), 0.02),
    "gpt2 output": (zoo.gpt2(n_layers=12), 0.02 / math.sqrt(24)),
    "orthogonal": (zoo.orthogonal(1.5), 1.5 / math.sqrt(500)),
}


@pytest.mark.parametrize("name", STDS)
def test_std_is_the_published_one(name):
    init, expected = STDS[name]
    weights = np.asarray(init(KEY, SHAPE), np.float64)
    assert weights.shape == SHAPE
    assert init.std(*SHAPE) == pytest.approx(expected, rel=1e-12)
    assert math.sqrt((weights**2).mean()) == pytest.approx(expected, rel=tolerance(weights.size))
    assert abs(weights.mean()) < 5 * expected / math.sqrt(weights.size)


# (ours, kurtosis, largest |value| in units of σ): from the laws themselves, not from our code.
TRUNCATED_STD = 0.87962566103423978
LAWS = {
    "normal": (zoo.gamma_normal(0.5), 3.0, None),
    "uniform": (zoo.xavier_uniform(), 1.8, math.sqrt(3)),
    "torch": (zoo.torch_linear(), 1.8, math.sqrt(3)),
    # E z⁴ of N(0,1) cut at ±2 is 3 − 2·(8 + 3·2)·φ(2)/P(|z|<2), divided by the squared variance
    "truncated": (zoo.gamma_normal(1.0, truncate=2.0), (3 - 28 * 0.053990966513 / 0.954499736104) / TRUNCATED_STD**4, 2 / TRUNCATED_STD),
}


@pytest.mark.parametrize("name", LAWS)
def test_law_has_its_kurtosis_and_bounds(name):
    init, kurtosis, bound = LAWS[name]
    z = np.asarray(init(KEY, (800, 1000)), np.float64) / init.std(800, 1000)
    assert (z**4).mean() == pytest.approx(kurtosis, rel=5 * math.sqrt(96 / z.size) / 1.8)  # var of z⁴ is 96 for a normal, less otherwise
    if bound is None:
        assert abs(z).max() > 4
    else:
        assert 0.99 * bound < abs(z).max() <= bound * (1 + 1e-6)


def test_truncated_std_at_two_sigma():
    assert zoo.truncated_std(2.0) == pytest.approx(TRUNCATED_STD, rel=1e-12)


SAME_AS_JAX = {
    "lecun_normal": (zoo.lecun_normal(), jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")),
    "lecun_normal truncated": (zoo.lecun_normal(truncate=2.0), jax.nn.initializers.lecun_normal()),
    "lecun_uniform": (zoo.lecun_uniform(), jax.nn.initializers.lecun_uniform()),
    "glorot_normal": (zoo.glorot_normal(truncate=2.0), jax.nn.initializers.glorot_normal()),
    "glorot_uniform": (zoo.glorot_uniform(), jax.nn.initializers.glorot_uniform()),
    "he_normal": (zoo.he_normal(truncate=2.0), jax.nn.initializers.he_normal()),
    "he_uniform": (zoo.he_uniform(), jax.nn.initializers.he_uniform()),
    "he fan_out": (zoo.he_normal("fan_out"), jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")),
    "he fan_avg": (zoo.he_uniform("fan_avg"), jax.nn.initializers.variance_scaling(2.0, "fan_avg", "uniform")),
    "normal": (zoo.normal(0.02), jax.nn.initializers.normal(0.02)),
    "torch": (zoo.torch_linear(), jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")),
    "orthogonal": (zoo.orthogonal(0.7), jax.nn.initializers.orthogonal(0.7)),
    "zeros": (zoo.zeros(), jax.nn.initializers.zeros),
    "ones": (zoo.ones(), jax.nn.initializers.ones),
    "gamma half is lecun": (zoo.gamma_normal(0.5), jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")),
}


def test_equals_jax_where_jax_has_it():
    shapes = ((6, 10), (3, 2, 3, 8))  # the second is a convolution: its window counts in both fans

    @jax.jit  # all in one program: compiling them one by one takes most of a minute
    def draw(key):
        cases = [(name, shape, *SAME_AS_JAX[name]) for name in SAME_AS_JAX for shape in shapes]
        return {(name, shape): (ours(key, shape), theirs(key, shape, jnp.float32)) for name, shape, ours, theirs in cases}

    for name, (got, want) in draw(KEY).items():
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7, err_msg=str(name))


def test_axes_decide_the_fans_as_in_jax():
    axes = dict(in_axis=(0, 2), out_axis=3, batch_axis=1)
    ours, theirs = zoo.kaiming_normal(**axes), jax.nn.initializers.variance_scaling(2.0, "fan_in", "normal", **axes)
    np.testing.assert_allclose(ours(KEY, (4, 5, 6, 7)), theirs(KEY, (4, 5, 6, 7), jnp.float32), rtol=3e-6)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (50, 50)])
def test_orthogonal_rows_or_columns(shape):
    w = np.asarray(zoo.orthogonal()(KEY, shape), np.float64)
    gram = w @ w.T if shape[0] <= shape[1] else w.T @ w
    np.testing.assert_allclose(gram, np.eye(min(shape)), atol=2e-6)


def test_orthogonal_per_batch_entry_and_over_several_axes():
    w = np.asarray(zoo.orthogonal(in_axis=(1, 2), out_axis=3, batch_axis=0)(KEY, (3, 4, 5, 8)), np.float64).reshape(3, 20, 8)
    for matrix in w:
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(8), atol=2e-6)
    assert abs(w[0] - w[1]).max() > 0.1


def test_draws_are_paired_across_gamma():
    ratio = np.asarray(zoo.gamma_normal(0.5)(KEY, SHAPE)) / np.asarray(zoo.gamma_normal(1.25)(KEY, SHAPE))
    np.testing.assert_allclose(ratio, 300**0.75, rtol=3e-7)


def test_bfloat16_is_the_fp32_draw_rounded_once():
    exact = zoo.gamma_normal(1.0)(KEY, SHAPE)
    rounded = zoo.gamma_normal(1.0)(KEY, SHAPE, jnp.bfloat16)
    assert exact.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("bad", [-1, -0.5, "1.0", "text", None, math.nan, math.inf, True, [1.0]])
def test_wrong_gamma_is_a_config_error(bad):
    with pytest.raises(ConfigError, match="gamma must be a finite number of at least 0"):
        zoo.gamma_normal(bad)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: zoo.fixed_std(0.0), "std must be"),
        (lambda: zoo.fixed_std(0.1, truncate=-2), "truncate must be"),
        (lambda: zoo.gamma_normal(base=0), "base must be"),
        (lambda: zoo.kaiming_normal("fan"), "mode 'fan' is none of fan_in, fan_out, fan_avg"),
        (lambda: zoo.gamma_normal()(KEY, (8,)), "needs a fan-in"),
        (lambda: zoo.gamma_normal()(KEY, (0, 8)), "needs a fan-in"),
        (lambda: zoo.gamma_normal(in_axis=-1)(KEY, (8, 8)), "overlap"),
        (lambda: zoo.gamma_normal(in_axis=2)(KEY, (8, 8)), "outside shape"),
        (lambda: zoo.gamma_normal()(KEY, (8, 8), jnp.int32), "int32"),
        (lambda: zoo.equivalent_gamma(0.0, 768), "std must be"),
        (lambda: zoo.equivalent_gamma(0.02, 1), "fan_in must be"),
    ],
)
def test_what_cannot_be_meant_is_a_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("std, d, gamma", [(0.02, 768, 0.589), (0.02, 2048, 0.513), (0.006, 2048, 0.671)])
def test_equivalent_gamma_of_the_usual_stds(std, d, gamma):
    assert zoo.equivalent_gamma(std, d) == pytest.approx(gamma, abs=5e-4)


def test_flax_modules_take_them_as_they_are():
    linear = nnx.Linear(256, 384, kernel_init=zoo.gamma_normal(0.75), bias_init=zoo.fixed_std(0.5), rngs=nnx.Rngs(0))
    assert float(jnp.std(linear.kernel[...])) == pytest.approx(256**-0.75, rel=tolerance(256 * 384))
    assert float(jnp.std(linear.bias[...])) == pytest.approx(0.5, rel=tolerance(384))
    embed = nnx.Embed(1000, 128, embedding_init=zoo.gamma_normal(1.0, in_axis=-1, out_axis=-2), rngs=nnx.Rngs(0))
    assert float(jnp.std(embed.embedding[...])) == pytest.approx(1 / 128, rel=tolerance(128_000))
    conv = nnx.Conv(16, 32, kernel_size=(3, 3), kernel_init=zoo.gamma_normal(1.0), rngs=nnx.Rngs(0))
    assert float(jnp.std(conv.kernel[...])) == pytest.approx(1 / 144, rel=tolerance(9 * 16 * 32))


def test_jit_and_vmap():
    init = zoo.gamma_normal(1.0)
    keys = jax.random.split(KEY, 3)
    stacked = jax.jit(jax.vmap(lambda key: init(key, (8, 16))))(keys)
    np.testing.assert_allclose(stacked, np.stack([init(key, (8, 16)) for key in keys]), rtol=3e-7)
