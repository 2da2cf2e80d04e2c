"""Variances of nets and stacks against real ones: our own net with drawn weights, differentiated; a NumPy net where it has no such part.

Means over many draws are within 2 %, and what their own standard error allows beside it.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.models.mlp import Net
from gammalm.theory.mlp import DIRECTIONS, Mlp, PreNorm, critical_std, critical_stds, signals, stable_band, stack_signals

TOLERANCE = 0.02
E1 = (784, 64, 32, 32, 10)
MOMENTS = np.array([0.4, 1.0, 2.5])  # of three inputs: images are not of one size
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "elu")


@dataclasses.dataclass
class Sizes:
    widths: tuple
    activation: str
    biases: bool = True


def measure(net: Mlp, draws: int, chunk: int = 100):
    """Name -> (mean, standard error) over draws of the net: mean squares by layer and input."""
    layers = len(net.widths) - 1
    prefixes = [Net(Sizes(net.widths[: n + 1], net.activation)) for n in range(1, layers + 1)]
    key = jax.random.key(0, impl="rbg")
    x_BI = jax.random.normal(key, (len(MOMENTS), net.widths[0]))
    x_BI *= jnp.sqrt(MOMENTS / jnp.mean(jnp.square(x_BI), axis=1))[:, None]

    def one(key):
        params = {}
        for n, (fan_in, fan_out) in enumerate(itertools.pairwise(net.widths)):
            weights, biases = jax.random.split(jax.random.fold_in(key, n))
            bias = jax.random.normal(biases, (fan_out,)) * (net.bias_stds[n] if net.bias_stds else 0.0)
            params[f"layer{n + 1}"] = {"kernel": jax.random.normal(weights, (fan_in, fan_out)) * net.stds[n], "bias": bias}
        out = jax.random.normal(jax.random.fold_in(key, layers), (net.widths[-1],))

        def input_of(x_I):
            by_params, by_input = jax.grad(lambda p, x: jnp.vdot(prefixes[-1](p, x[None])[0], out), (0, 1))(params, x_I)
            square = lambda name: jnp.stack([jnp.mean(jnp.square(by_params[f"layer{n}"][name])) for n in range(1, layers + 1)])  # noqa: E731
            z = jnp.stack([jnp.mean(jnp.square(prefix(params, x_I[None]))) for prefix in prefixes])
            return {"variance": z, "gradient": square("bias"), "weight_gradient": square("kernel"),
                    "input_gradient": jnp.mean(jnp.square(by_input))}  # fmt: skip

        return jax.vmap(input_of, out_axes=-1)(x_BI)

    found = jax.jit(lambda keys: jax.lax.map(jax.vmap(one), keys))(jax.random.split(key, (draws // chunk, chunk)))
    found = {name: np.asarray(value, np.float64).reshape(-1, *value.shape[2:]) for name, value in found.items()}
    return {name: (value.mean(axis=0), value.std(axis=0) / math.sqrt(draws)) for name, value in found.items()}


def check(net: Mlp, draws: int, errors: float):
    """The measured means agree within 2 %, and `errors` standard errors more."""
    predicted = signals(net, MOMENTS)
    for name, (mean, error) in measure(net, draws).items():
        away = np.abs(getattr(predicted, name) / mean - 1) - errors * error / mean
        assert away.max() < TOLERANCE, (name, (getattr(predicted, name) / mean - 1).round(4), (error / mean).round(4))


def test_a_narrow_relu_net():
    """The mean holds at any width."""
    widths = (30, 40, 24, 5)
    check(Mlp(widths, "relu", critical_stds(widths, "relu", "compromise")), 2000, errors=2)


@pytest.mark.full
@pytest.mark.parametrize("activation", [pytest.param(a, marks=[] if a in ("relu", "gelu_tanh") else pytest.mark.long) for a in ACTIVATIONS])
def test_wide_nets(activation):
    widths = (256, 192, 256, 32)
    check(Mlp(widths, activation, critical_stds(widths, activation), (0.3, 0.2, 0.5)), 2000, errors=1)


@pytest.mark.long
def test_the_net_of_the_std_sweep():
    """784-64-32-32-10: single draws scatter by a factor."""
    check(Mlp(E1, "relu", (0.1,) * 4), 6000, errors=1)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_a_pre_norm_stack(activation):
    """h ← h + W₂ φ(W₁ norm(h)) twice, and a branch of three matrices, in NumPy; gradients by a random tangent against the outputs."""
    d, eps = 160, 0.05
    shapes = [(d, 200, d)] * 2 + [(d, 100, 120, d)]
    branches = tuple(Mlp(w, activation, tuple(1.2 * n**-0.5 for n in w[:-1])) for w in shapes)

    def stack(weights, h_D):
        for matrices in weights:
            x = h_D * jax.lax.rsqrt(jnp.mean(h_D**2) + eps)
            for n, W in enumerate(matrices):
                x = (x if n == 0 else {"gelu": lambda z: jax.nn.gelu(z, False), "tanh": jnp.tanh}[activation](x)) @ W
            h_D = h_D + x
        return h_D

    def one(key):
        keys = iter(jax.random.split(key, 20))
        weights = [
            [jax.random.normal(next(keys), (i, o)) * s for i, o, s in zip(b.widths, b.widths[1:], b.stds, strict=False)] for b in branches
        ]
        h_D = jax.random.normal(next(keys), (d,))
        h_D *= 0.5 / jnp.sqrt(jnp.mean(h_D**2))
        out, back = jax.vjp(lambda h: stack(weights, h), h_D)
        return jnp.mean(out**2), jnp.mean(back(jax.random.normal(next(keys), (d,)))[0] ** 2)

    forward, backward = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(1, impl="rbg"), 200))
    predicted = stack_signals(PreNorm(branches, eps), 0.25)
    for value, measured in ((predicted.stream[-1], forward), (predicted.gradient[0], backward)):
        error = float(measured.std() / np.sqrt(len(measured)) / measured.mean())
        assert value == pytest.approx(float(measured.mean()), rel=TOLERANCE + 2 * error)
    assert predicted.gradient[0] > 1.4 and predicted.stream[-1] > 0.5  # branches matter
    assert predicted.stream == pytest.approx(0.25 + np.concatenate([[0], np.cumsum(predicted.added)]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_critical_stds_keep_what_they_promise(activation):
    widths = (50, 90, 40, 120, 7)
    for moment, signal in ((1.0, 1.0), (0.1, 4.0)):
        forward = signals(Mlp(widths, activation, critical_stds(widths, activation, "forward", moment, signal)), moment)
        assert forward.variance == pytest.approx(signal, rel=1e-9)
    backward = signals(Mlp(widths, activation, critical_stds(widths, activation, "backward")))
    assert backward.gradient == pytest.approx(1.0, rel=1e-9) and backward.input_gradient == pytest.approx(1.0)
    between = np.array([critical_stds(widths, activation, direction) for direction in DIRECTIONS])
    assert 1 / between[2, 0] ** 2 == pytest.approx((1 / between[:2, 0] ** 2).mean())
    for direction, gain in zip(DIRECTIONS, ("forward_gain", "input_gradient"), strict=False):
        std = critical_std(widths, activation, direction, 0.3, gain=2.0)
        assert getattr(signals(Mlp(widths, activation, (std,) * 4), 0.3), gain) == pytest.approx(2.0, rel=1e-6)


def test_known_schemes_are_special_cases():
    """He et al.: √(2/n) for ReLU, the first layer without the 2; Glorot & Bengio: √(2/(n_in + n_out)) for a linear net."""
    assert critical_stds(E1, "relu") == pytest.approx([784**-0.5, *((2 / n) ** 0.5 for n in (64, 32, 32))])
    assert critical_stds(E1, "relu", "backward") == pytest.approx([64**-0.5, *((2 / n) ** 0.5 for n in (32, 32, 10))])
    glorot = [(2 / (i + o)) ** 0.5 for i, o in itertools.pairwise(E1)]
    assert critical_stds(E1, "linear", "forward")[1:] == pytest.approx([n**-0.5 for n in E1[1:-1]])
    assert critical_stds((64, 64, 64), "linear", "compromise") == pytest.approx([(2 / 128) ** 0.5] * 2)
    assert critical_stds(E1, "linear", "compromise")[0] == pytest.approx(glorot[0])


def test_the_critical_std_of_the_sweep():
    assert critical_std(E1, "relu") == pytest.approx((784 / 2 * 64 / 2 * 32 / 2 * 32) ** (-1 / 8), rel=1e-9)  # science.md 10: .141
    assert critical_std(E1, "relu", "backward") == pytest.approx((64 * 32 / 2 * 32 / 2 * 10 / 2) ** (-1 / 8), rel=1e-9)
    low, high = stable_band(E1, "relu")
    assert low == pytest.approx(critical_std(E1, "relu", "backward") / 10**0.25)
    assert high == pytest.approx(critical_std(E1, "relu", "forward") * 10**0.25)
    assert stable_band((1000, 10, 1000, 10) * 5, "relu", factor=1.5) is None
    assert 0.11 < critical_std((100,) * 60, "tanh") < 0.2  # a deep net overflows nothing


def test_refusals():
    with pytest.raises(ConfigError, match="3 matrices need as many stds, not 2"):
        Mlp((1, 2, 3, 4), "relu", (1.0, 1.0))
    with pytest.raises(ConfigError, match="none of linear"):
        critical_stds((2, 3), "swish")
    with pytest.raises(ConfigError, match="none of forward"):
        critical_std((2, 3), "relu", "sideways")
    with pytest.raises(ConfigError, match="begin and end with one width"):
        PreNorm((Mlp((4, 8, 4), "relu", (1.0, 1.0)), Mlp((4, 8, 5), "relu", (1.0, 1.0))))
