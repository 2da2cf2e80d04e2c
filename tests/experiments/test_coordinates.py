"""The coordinate check: exponents of made-up sizes, the ladder of widths, and that μP is flat where the standard parametrization grows.

Shapes: S seeds, W widths, N + 1 steps; batches of B=8 sequences, T=8, V=32.
"""

import json

import numpy as np
import pytest

from gammalm.cli.main import main
from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.experiments.coordinates import MEASURES, QUANTITIES, Coordinates, at_width, check_coordinates, draw

WIDTHS = (16, 64, 256)
SMALL = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "d_ff": 32, "n_layers": 1}


def config(spec="lm:size=tiny,vocab=32,seq_len=8,batch=8,steps=50,gate=none,gamma=1", **changes):
    named = {f"model.{name}": value for name, value in SMALL.items()} | {k.replace("__", "."): v for k, v in changes.items()}
    return load_config(spec, named.items())


def made_up(exponents, steps=2):
    """Sizes that are powers of the width, with two seeds a factor of two apart; no change at step 0."""
    widths = np.array(WIDTHS, float)[None, :, None]
    sizes = {}
    for quantity in QUANTITIES:
        each = np.array([[[1.0]], [[2.0]]]) * widths ** exponents.get(quantity, 0.0) * np.ones(steps + 1)
        sizes[quantity] = {"mean": each, "rms": np.ones_like(each), "change": each * (np.arange(steps + 1) > 0)}
    return Coordinates(WIDTHS, steps, 0.15, sizes)


def test_exponents_and_verdicts_of_made_up_sizes():
    found = made_up({"attention": 0.1, "ffn": 0.5, "stream": -0.4})
    trends = {(t.quantity, t.measure): t for t in found.trends()}
    assert set(trends) == {(q, m) for q in QUANTITIES for m in MEASURES}
    assert trends["ffn", "change"].slopes == (None, pytest.approx(0.5), pytest.approx(0.5))
    said = {quantity: trends[quantity, "change"].verdict for quantity in QUANTITIES}
    assert said == {"attention": "stable", "ffn": "grows as d^0.50", "stream": "shrinks as d^-0.40", "logits": "stable"}
    assert found.verdict() == "grows with the width: ffn (change as d^0.50); changes less with the width: stream (d^-0.40)."
    assert made_up({}).verdict() == "stable over the widths, within ±0.15 in every slope."
    found.sizes["logits"]["rms"][1, 2, 1:] = np.inf
    assert found.diverged == [256] and "diverged at width 256" in found.verdict()
    assert found.row()["sizes"]["logits"]["rms"][1][2] == [1.0, None, None]


def test_a_wider_model_has_more_heads_of_the_same_size():
    c = at_width(config("lm:size=tiny-moe,attention=mha,gate=none", model__moe__d_expert=24), 64)
    assert (c.model.d_model, c.model.n_heads, c.model.n_kv_heads, c.model.head_dim) == (64, 8, 8, 8)
    assert (c.model.d_ff, c.model.moe.d_expert, c.model.moe.n_experts) == (128, 96, 16)
    assert (c.model.dtype, c.optimizer.schedule, c.optimizer.warmup_steps) == ("float32", "constant", 0)
    with pytest.raises(ConfigError, match="width 20: model.n_heads=2 at d_model=16 would be 2.5"):
        at_width(config(), 20)
    with pytest.raises(ConfigError, match="two widths"):
        check_coordinates(config(), (16,), None, {})


@pytest.mark.full
def test_mup_is_flat_and_the_standard_parametrization_grows():
    """Two steps at γ = 1 (at the base width 16 both are one model); tokens follow Zipf's law."""
    share = 1 / np.arange(1, 33)

    def batch(step, rows=8):
        return {"tokens": np.random.default_rng(step).choice(32, (rows, 9), p=share / share.sum()).astype(np.int32)}

    found = {}
    for preset in ("fan_in", "mup"):
        c = config(init__preset=preset, init__base_width=16)
        checked = check_coordinates(c, WIDTHS, batch, batch(99, 4), steps=2)
        found[preset] = {t.quantity: t.slopes[-1] for t in checked.trends() if t.measure == "change"}
        figure = draw(checked, preset)
        assert len(figure.axes) == 2 * len(QUANTITIES)
    assert all(slope > 0.4 for slope in found["fan_in"].values()), found
    assert all(abs(found["mup"][q]) < 0.15 for q in ("attention", "ffn", "stream")), found
    assert -0.3 < found["mup"]["logits"] < 0.1, found


@pytest.mark.full
def test_the_command_says_it_in_words_in_numbers_and_as_a_picture(corpus, capsys, tmp_path):
    argv = ["analyze", "coordinates", "--config", "lm:size=tiny,vocab=608,seq_len=16,batch=4,gate=none", "--data", str(corpus[0])]
    argv += [f"--config.model.{name}={value}" for name, value in SMALL.items()]
    argv += ["--widths", "16/32", "--steps", "1", "--sequences", "2", "--plot", str(tmp_path / "c.png"), "--out", str(tmp_path / "c.json")]
    assert main(argv) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["widths"] == [16, 32] and found["verdict"] in text and (tmp_path / "c.png").stat().st_size > 10_000
    assert len(found["trends"]) == len(QUANTITIES) * len(MEASURES) and "step 1" in text
    assert np.shape(found["sizes"]["stream"]["rms"]) == (1, 2, 2)
    assert main([*argv[:-4], "--widths", "16"]) == 2
