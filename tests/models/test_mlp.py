"""The fully connected net and its losses against NumPy in float64; initializers and rules on its declared weights."""

import math

import jax
import numpy as np
import pytest
from scipy.special import erf, expit

from gammalm.config import load_config
from gammalm.initializers import equivalent_gamma
from gammalm.models.mlp import Net, loss_and_hits
from gammalm.training.nets import draw

PHI = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * (1 + erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * expit(z),
    "tanh": np.tanh,
    "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
}


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("activation", PHI)
def test_outputs(activation, biases):
    config = load_config("mlp:", [("model.widths", (5, 7, 4)), ("model.activation", activation), ("model.biases", biases)])
    net, rng = Net(config.model), np.random.default_rng(0)
    assert list(net.specs) == [f"layer{n}/{part}" for n in (1, 2) for part in ("kernel", "bias")[: 1 + biases]]
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), draw(config))
    x = rng.normal(size=(3, 5)).astype(np.float32)
    one, two = ({"bias": np.zeros(1)} | params[name] for name in ("layer1", "layer2"))
    expected = PHI[activation](np.float64(x) @ one["kernel"] + one["bias"]) @ two["kernel"] + two["bias"]
    np.testing.assert_allclose(net(params, x), expected, rtol=2e-5, atol=2e-5)


def test_losses_are_cross_entropies():
    rng = np.random.default_rng(1)
    several, y = rng.normal(0, 4, (9, 5)).astype(np.float32), rng.integers(0, 5, 9)
    loss, hit = loss_and_hits(several, y)
    p = np.exp(np.float64(several)) / np.exp(np.float64(several)).sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(p[np.arange(9), y]), rtol=1e-5)
    np.testing.assert_array_equal(hit, several.argmax(1) == y)
    logit, y = np.float32([[-3.0], [2.0], [90.0], [-90.0]]), np.array([0, 1, 0, 1])
    loss, hit = loss_and_hits(logit, y)
    np.testing.assert_allclose(loss, [math.log1p(math.exp(-3)), math.log1p(math.exp(-2)), 90, 90], rtol=1e-5)
    assert hit.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("preset", "sigma"),
    [
        ("xavier_normal", math.sqrt(2 / 848)), ("xavier_uniform", math.sqrt(2 / 848)), ("kaiming_normal", math.sqrt(2 / 784)),
        ("kaiming_uniform", math.sqrt(2 / 784)), ("lecun_normal", 1 / 28), ("torch_linear", 1 / 28 / math.sqrt(3)), ("fan_in", 1 / 784),
        ("fixed_std", 0.02),
    ],
)  # fmt: skip
def test_initializers_of_the_zoo(preset, sigma):
    """The first kernel of the digits' net; biases are 0 under all of them."""
    params = draw(load_config(f"mlp:preset={preset}"))
    kernel = np.asarray(params["layer1"]["kernel"])
    assert kernel.std() == pytest.approx(sigma, rel=0.015) and not any(layer["bias"].any() for layer in params.values())
    uniform = np.abs(kernel).max() <= sigma * math.sqrt(3) * 1.0001
    assert uniform == (preset.endswith("uniform") or preset == "torch_linear")


def test_one_std_for_all_and_rules_for_some():
    params = draw(load_config("mlp:std=0.3"))
    alike = [np.asarray(layer["kernel"]) for layer in params.values()]
    assert [round(float(kernel.std() / 0.3), 1) for kernel in alike] == [1.0] * 4
    again = draw(load_config("mlp:std=0.003"))  # the same draw, scaled: sweeps are paired
    np.testing.assert_allclose(alike[1], 100 * np.asarray(again["layer2"]["kernel"]), rtol=1e-5)
    ruled = draw(load_config("mlp:preset=fan_in,gamma=0.5", [("init.rules", ("layer4/kernel=zeros",))]))
    assert not ruled["layer4"]["kernel"].any()
    assert equivalent_gamma(float(np.std(ruled["layer1"]["kernel"])), 784) == pytest.approx(0.5, abs=0.01)
