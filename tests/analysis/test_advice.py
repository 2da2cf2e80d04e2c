"""Advice: its numbers are those of the theory and of the known schemes, its choices follow its rules, the command refuses what it must."""

import json
import math

import numpy as np
import pytest

from gammalm.analysis.advice import FACTOR, advise_decoder, advise_mlp
from gammalm.cli.main import main
from gammalm.initializers import ParamSpec, init_table
from gammalm.theory import Dense, Heads, gamma_decoder, predict

E1 = (784, 64, 32, 32, 10)


def test_a_relu_net_gets_kaimings_stds():
    found = advise_mlp(E1)
    assert found["use"] == "forward" and found["closest"] == "kaiming_normal"
    assert [row["use"] for row in found["layers"]] == pytest.approx([784**-0.5, *((2 / n) ** 0.5 for n in (64, 32, 32))])
    assert [row["signal"] for row in found["layers"]] == pytest.approx([1.0] * 4)
    assert found["one_std"]["forward"] == pytest.approx(0.141, abs=5e-4)
    gains = {row["scheme"]: row for row in found["schemes"]}
    # √2 of the first layer, after which every layer keeps: Kaiming's gives the first layer's input a factor 2 too.
    assert gains["kaiming_normal"]["signal_gain"] == pytest.approx(math.sqrt(2))
    assert gains["fixed_std 0.02"]["verdict"] == "signals shrink, gradients shrink"
    assert gains["lecun_normal"]["signal_gain"] == pytest.approx(8**-0.5)


def test_the_rules_set_the_stds_that_are_advised(mlp_specs):
    found = advise_mlp(E1, "tanh", 0.1)

    class Init:
        preset, gamma, rules, truncate, depth_scale = "fan_in", 1.0, tuple(found["rules"]), 0.0, False

    rows = {row["path"]: row for row in init_table(mlp_specs, Init, d_model=64, n_layers=4)}
    for row in found["layers"]:
        assert rows[f"layer{row['layer']}/kernel"]["sigma"] == pytest.approx(row["use"], rel=1e-3)
    assert found["layers"][0]["use"] == pytest.approx((784 * 0.1) ** -0.5)


@pytest.fixture
def mlp_specs():
    shapes = zip(E1, E1[1:], strict=False)
    return {f"layer{n + 1}/kernel": ParamSpec(shape, ("in", "out"), ("in",), ("out",), "ffn") for n, shape in enumerate(shapes)}


def test_gradients_that_drift_make_it_compromise():
    widths = (10, 500, 10, 500, 10, 500, 10)
    found = advise_mlp(widths)
    assert found["use"] == "forward"  # unequal, but they come back
    widths = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2)
    found = advise_mlp(widths)
    assert found["use"] == "compromise"
    drift = [np.ptp(np.log([row["gradient"] for row in advise_mlp(w)["layers"]])) for w in (E1, widths)]
    assert drift[0] < math.log(FACTOR) and "more than 10" in found["reasons"][1]


SMALL = dict(context=24, vocab=512)


def test_a_decoder():
    found = advise_decoder(128, 2, gate="none", **SMALL)
    assert found["use"] == {"gamma": 1.0, "eps": 1e-12} and found["d_ff"] == 336
    rows = {row["init"]: row for row in found["inits"]}
    flows = [rows[f"gamma {gamma}"]["flow"] for gamma in ("0.5", "0.75", "1", "1.25")]
    assert flows == sorted(flows, reverse=True)
    assert rows["gamma 1, ffn 0.833"]["ffn"] > rows["gamma 1"]["ffn"]
    p = 1 / (np.arange(512) + 3.7)
    tokens = np.random.default_rng(0).choice(512, 25, p=p / p.sum())[:-1]
    sizes = dict(d_model=128, vocab_size=512, n_layers=2, attention=Heads(2, 64), ffn=Dense(336), gamma=1.0, eps=1e-12)
    assert rows["gamma 1"]["flow"] == pytest.approx(predict(gamma_decoder(**sizes), tokens).flow)
    gradients = [row["gradient"] for row in found["layers"]]
    assert gradients == sorted(gradients, reverse=True) and gradients[-1] > 1
    assert gradients[0] == pytest.approx(rows["gamma 1"]["gradient_gain"])


def test_an_eps_that_hides_the_scale_is_told(capsys):
    arguments = ["advise", "--arch", "decoder", "--widths", "128", "256", "--layers", "2", "--activation", "gelu", "--eps", "1e-4",
                 "--gate", "none", "--vocab", "512", "--context", "24"]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["use"]["eps"] == 1e-6 and "hides the scale" in found["reasons"][1]
    r = (1 + found["use"]["eps"] * 128**2) ** -0.5
    assert r > 0.99
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "use gamma 1 with eps 1e-06" in text and "Depth scaling" in text and "SwiGLU" not in text


def test_the_command_for_a_net(capsys):
    assert main(["advise", "--arch", "mlp", "--widths", "784", "256", "10", "--layers", "4", "--activation", "gelu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["widths"] == [784, 256, 256, 256, 10] and round(found["c_phi"], 6) == 0.425221
    assert main(["advise", "--arch", "mlp", "--widths", *map(str, E1)]) == 0
    text = capsys.readouterr().out
    assert "'layer2/kernel=fixed_std(std=0.1768)'" in text and "0.137 to 0.251" in text


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--arch mlp --widths 3 4 --eps 1e-5", "--eps says nothing to --arch mlp"),
        ("--arch decoder --widths 64 --layers 2 --input-moment 2", "--input-moment says nothing to --arch decoder"),
        ("--arch mlp --widths 3 4 5 6 --layers 2", "there are 4"),
        ("--arch mlp --widths 3 4 --activation swish", "none of linear"),
        ("--arch mlp --widths 7", "each at least 1, not"),
        ("--arch decoder --widths 100 --layers 2", "multiple of 64"),
        ("--arch decoder --widths 128", "--layers L"),
        ("--arch decoder --widths 128 --layers 0", "each is at least 1"),
        ("--arch decoder --widths 128 --layers 1 --activation swish --context 4 --vocab 9", "none of"),
        ("--arch mlp --widths 3 4 --input-moment -1", "above 0"),
    ],
)
def test_refusals(arguments, says, capsys):
    assert main(["advise", *arguments.split()]) == 2
    assert says in capsys.readouterr().err
