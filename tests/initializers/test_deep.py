"""Presets for deep stacks: σ worked out by hand, what of a preset is refused alone, and the rate of Fixup's scalars.

What they are for, a deep model that trains, is tests/training/test_deep.py.
"""

import math

import pytest

from gammalm.config import load_config, validate
from gammalm.errors import ConfigError
from gammalm.initializers import init_table, rate_factors
from gammalm.models.decoder import Model

L, D, H, K, F, V = 6, 24, 2, 12, 40, 50
SHAPE = [("model.n_layers", L), ("model.d_model", D), ("model.n_heads", H), ("model.n_kv_heads", H), ("model.head_dim", K),
         ("model.d_ff", F), ("model.vocab_size", V)]  # fmt: skip


def config(spec):
    return validate(load_config(f"lm:size=tiny,{spec}", SHAPE))


def sigmas(c):
    return {row["path"]: row["sigma"] for row in init_table(Model(c.model).specs, c.init, d_model=D, n_layers=L)}


@pytest.mark.parametrize("style, m", [("gamma", 3), ("gpt2", 2)])
def test_fixup(style, m):
    found = sigmas(config(f"preset=fixup,style={style},gate=elementwise"))
    zero = {"head/kernel", "layers/attn/out", "layers/ffn/down"}
    assert all(found[path] == 0 for path in zero)
    assert found["layers/ffn/up"] == pytest.approx(math.sqrt(2 / D) * (2 * L) ** (-1 / (2 * m - 2)))
    assert found["layers/attn/v"] == pytest.approx(D**-0.5 * (2 * L) ** -0.5)
    assert found["layers/attn/q"] == found["layers/attn/gate"] == pytest.approx(D**-0.5)
    assert found["embed/table"] == 1
    assert {path for path in found if path.endswith("scale/gain")} == {"layers/attn/scale/gain", "layers/ffn/scale/gain"}


def test_deepnorm():
    found = sigmas(config("preset=deepnorm,style=gpt2"))
    beta, xavier = (8 * L) ** -0.25, lambda fans: math.sqrt(2 / fans)
    assert found["layers/attn/q"] == found["layers/attn/k"] == pytest.approx(xavier(D + H * K))
    assert found["layers/attn/v"] == found["layers/attn/out"] == pytest.approx(beta * xavier(D + H * K))
    assert found["layers/ffn/up"] == found["layers/ffn/down"] == pytest.approx(beta * xavier(D + F))
    assert found["embed/table"] == found["embed/positions"] == pytest.approx(D**-0.5)


def test_depth_scaled():
    """Layers of a mixture count from the first of the model, dense ones before it too."""
    found = sigmas(config("preset=depth_scaled"))
    assert found["layers/attn/q"] == pytest.approx([math.sqrt(2 / (D + H * K)) / math.sqrt(n) for n in range(1, L + 1)])
    assert found["embed/table"] == pytest.approx(D**-0.5)
    c = load_config("lm:size=tiny-moe,preset=depth_scaled", [("model.n_layers", 3), ("model.moe.first_k_dense", 1)])
    rows = {row["path"]: row for row in init_table(Model(c.model).specs, c.init, d_model=64, n_layers=3)}
    assert rows["dense_layers/ffn/up"]["sigma"] == pytest.approx(math.sqrt(2 / (64 + 160)))
    assert rows["layers/ffn/experts/up"]["sigma"] == pytest.approx([math.sqrt(2 / (64 + 32) / n) for n in (2, 3)])


def test_only_fixups_scalars_have_a_rate_of_their_own():
    c = config("preset=fixup,style=gpt2")
    factors = rate_factors(c.init, Model(c.model).specs, D)
    scalars = {path for path in factors if "shift" in path or "scale" in path or path.endswith("norm/bias")}
    assert len(scalars) == 8 and factors == {path: 0.1 if path in scalars else 1.0 for path in factors}
    c = config("preset=deepnorm")
    assert set(rate_factors(c.init, Model(c.model).specs, D).values()) == {1.0}


def test_mup_slows_what_the_factor_of_the_logits_reaches():
    """The final LayerNorm's bias sums over the width on its way to the logits, as its gain does; other biases and the positions do not."""
    c = config("preset=mup,style=gpt2")
    factors = rate_factors(c.init, Model(c.model).specs, D)
    ends = {path for path in factors if path.startswith("final_norm/")}
    steady = {path for path, factor in factors.items() if factor == 1} - {"embed/table", "embed/positions"}
    assert {factors[path] for path in ends} == {c.init.base_width / D} and ends == {"final_norm/gain", "final_norm/bias"}
    assert steady == {path for path in factors if path.endswith(("norm/gain", "bias"))} - ends


@pytest.mark.parametrize(
    "spec, changes, told",
    [
        ("", {"init.preset": "fixup"}, "init.preset='fixup' belongs to model.norm='fixup'"),
        ("preset=fixup", {"model.tie_embeddings": True}, "untied head"),
        ("", {"init.preset": "deepnorm"}, "init.preset='deepnorm' belongs to model.residual='deepnorm'"),
        ("preset=deepnorm,attention=mla", {}, "init.preset='deepnorm' belongs to"),
        ("", {"model.residual": "post", "model.norm": "none"}, "model.residual='post' normalises"),
        ("preset=fixup,attention=mla", {}, "model.norm='fixup' has scalars for"),
        ("", {"model.norm": "none", "monitor.kinds": ("norm",)}, "there is no norm to measure"),
        ("style=gpt2", {"model.max_positions": 5}, "data.seq_len=128 is more than model.max_positions=5"),
        ("preset=mup", {"model.residual": "post"}, "init.preset='mup' sets the final norm's gain"),
    ],
)
def test_half_of_a_preset_and_parts_that_do_not_fit_are_refused(spec, changes, told):
    with pytest.raises(ConfigError, match=told):
        validate(load_config(f"lm:size=tiny,{spec}", list(changes.items())))


@pytest.mark.parametrize("spec, told", [("style=gpt3", "none of gamma, gpt2"), ("style=gpt2,attention=mla", "multi-head attention")])
def test_styles_that_are_none(spec, told):
    with pytest.raises(ConfigError, match=told):
        load_config(f"lm:size=tiny,{spec}")
