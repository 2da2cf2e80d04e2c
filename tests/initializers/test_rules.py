"""The rule table: what a rule selects, what the presets give (σ worked out here by hand), the table and its goldens, and the errors."""

import json
import math
import os
from pathlib import Path

import pytest

from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.initializers import PRESETS, ParamSpec, format_table, init_params, init_table, rate_factors
from gammalm.models.decoder import param_specs

D, L, F, V, HEADS = 64, 4, 160, 256, 96  # width, layers, ffn, vocabulary, heads × head size
SIZES = dict(d_model=D, n_layers=L)


@pytest.fixture
def rows(decoder_specs, init_config):
    """Function: config changes -> {path: row} of a four-layer decoder."""

    def make(specs=None, **changes):
        specs = decoder_specs(L=L, tied=False) if specs is None else specs
        return {row["path"]: row for row in init_table(specs, init_config(**changes), **SIZES)}

    return make


def sigmas(rows):
    return {path: row["sigma"] for path, row in rows.items() if row["role"] != "norm"}


INPUTS = ("embed/table", *(f"layers/attn/{name}" for name in ("q", "k", "v", "gate")), "layers/ffn/gate", "layers/ffn/up", "head/kernel")


def expect(inputs, out, down, **others):
    """σ of the matrices that read d, of attn/out and of ffn/down."""
    named = {name.replace("__", "/"): value for name, value in others.items()}
    return dict.fromkeys(INPUTS, inputs) | {"layers/attn/out": out, "layers/ffn/down": down} | named


def test_fan_in_is_each_matrix_own_fan_in(rows):
    assert sigmas(rows(gamma=0.75)) == pytest.approx(expect(D**-0.75, HEADS**-0.75, F**-0.75))


def test_depth_scale_divides_the_two_residual_outputs_alone(rows):
    assert sigmas(rows(depth_scale=True)) == pytest.approx(expect(1 / D, 1 / HEADS / math.sqrt(2 * L), 1 / F / math.sqrt(2 * L)))


@pytest.mark.parametrize("depth_scale", [False, True])
def test_d_model_uses_one_base_and_divides_once(rows, depth_scale):
    divided = 1 / D / math.sqrt(2 * L)
    assert sigmas(rows(preset="d_model", depth_scale=depth_scale)) == pytest.approx(expect(1 / D, divided, divided))


def test_groups_are_embedding_and_head_qk_vo_ffn(rows):
    got = sigmas(rows(preset="groups", group_gammas=(0.5, 0.75, 1.0, 1.25), gamma=3.0))
    want = expect(D**-0.75, 1 / HEADS, F**-1.25, embed__table=D**-0.5, head__kernel=D**-0.5, layers__attn__v=1 / D,
                  layers__ffn__gate=D**-1.25, layers__ffn__up=D**-1.25)
    assert got == pytest.approx(want)


def test_branch_balanced_is_one_for_attention_and_three_quarters_for_swiglu(rows, decoder_specs):
    got = sigmas(rows(preset="branch_balanced", gamma=0.5))
    ends, ffn = D**-0.5, D**-0.75
    want = expect(1 / D, 1 / HEADS, F**-0.75, embed__table=ends, head__kernel=ends, layers__ffn__gate=ffn, layers__ffn__up=ffn)
    assert got == pytest.approx(want)
    two = sigmas(rows(decoder_specs(L=L, two_matrix_ffn=True), preset="branch_balanced"))
    assert (two["layers/ffn/up"], two["layers/ffn/down"]) == pytest.approx((1 / D, 1 / F))


def test_gpt2_is_two_hundredths_and_divides_outputs(rows):
    assert sigmas(rows(preset="gpt2")) == pytest.approx(expect(0.02, 0.02 / math.sqrt(8), 0.02 / math.sqrt(8)))


@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_variance_preserving_presets(rows, law):
    for name, scale in (("lecun", 1), ("kaiming", 2)):
        want = expect(math.sqrt(scale / D), math.sqrt(scale / HEADS), math.sqrt(scale / F))
        assert sigmas(rows(preset=f"{name}_{law}")) == pytest.approx(want)
    x = [math.sqrt(2 / (D + n)) for n in (HEADS, F, V)]
    want = expect(x[0], x[0], x[1], layers__ffn__gate=x[1], layers__ffn__up=x[1], embed__table=x[2], head__kernel=x[2])
    assert sigmas(rows(preset=f"xavier_{law}")) == pytest.approx(want)


def test_fixed_torch_and_orthogonal_presets(rows):
    assert sigmas(rows(preset="fixed_std")) == pytest.approx(expect(0.02, 0.02, 0.02))
    assert sigmas(rows(preset="torch_linear")) == pytest.approx({p: s / math.sqrt(3) for p, s in sigmas(rows(gamma=0.5)).items()})
    assert rows(preset="orthogonal")["layers/attn/q"]["sigma"] == pytest.approx(HEADS**-0.5)
    assert rows(preset="orthogonal")["head/kernel"]["sigma"] == pytest.approx(V**-0.5)


def test_mup_is_fan_in_at_its_base_width(rows):
    assert sigmas(rows(preset="mup", gamma=0.75, base_width=D)) == pytest.approx(sigmas(rows(gamma=0.75)))


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_mup_away_from_its_base_width(rows, decoder_specs, init_config, gamma):
    """A model 4 times as wide as the base: embedding and head as there, matrices half, logits a quarter by the final gain."""
    base = D // 4
    at = {name: (size / 4) ** -gamma for name, size in (("d", D), ("out", HEADS), ("down", F))}
    want = expect(at["d"] / 2, at["out"] / 2, at["down"] / 2, embed__table=at["d"], head__kernel=at["d"])
    assert sigmas(rows(preset="mup", gamma=gamma, base_width=base)) == pytest.approx(want)
    params = init_params(decoder_specs(), init_config(preset="mup", base_width=base), 0, d_model=D, n_layers=2)
    assert float(params["final_norm"]["gain"][0]) == 0.25 and float(params["layers"]["attn_norm"]["gain"][0, 0]) == 1.0


def test_mup_sets_learning_rates_and_no_other_preset_does(decoder_specs, init_config):
    specs = decoder_specs(tied=False)
    assert set(rate_factors(init_config(), specs, D).values()) == {1.0}
    found = rate_factors(init_config(preset="mup", base_width=D // 4), specs, D, orthogonal=("layers/ffn/up",))
    same = {"embed/table", "head/kernel", "layers/attn_norm/gain", "layers/ffn_norm/gain"}
    assert found == {path: 1.0 if path in same else 0.5 if path == "layers/ffn/up" else 0.25 for path in specs}


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "mup"])
def test_norm_gains_are_one(rows, preset):
    gains = [row for row in rows(preset=preset).values() if row["role"] == "norm"]
    assert len(gains) == 3 and all(row["initializer"] == "ones" and row["sigma"] == 0 and row["gamma"] is None for row in gains)


def test_experts_and_layers_are_never_a_fan(init_config):
    expert = ParamSpec((L, 8, D, 32), ("layers", "experts", "embed", "ffn"), ("embed",), ("ffn",), "ffn")
    (row,) = init_table({"layers/moe/up": expert}, init_config(), **SIZES)
    assert row["fan_in"] == D and row["sigma"] == 1 / D
    for axis in ("experts", "layers"):
        with pytest.raises(ConfigError, match="never a fan"):
            ParamSpec(expert.shape, expert.axes, (axis, "embed"), ("ffn",), "ffn")


@pytest.mark.parametrize(
    "pattern, selected",
    [
        ("layers/attn/q", ["q"]),  # and not q_norm
        ("q", ["q"]),
        ("attn", ["q", "k", "v", "gate", "out"]),
        ("layers/attn/(q|k)", ["q", "k"]),
        ("attn/[qk]", ["q", "k"]),
        ("attn/(?=q|out).*", ["q", "out"]),
        ("attn/(?!gate).*", ["q", "k", "v", "out"]),
    ],
)
def test_pattern_covers_whole_components(rows, pattern, selected):
    table = rows(rules=(f"{pattern}=fixed_std(std=0.5)",))
    changed = [path for path, row in table.items() if row["sigma"] == 0.5]
    assert changed == [f"layers/attn/{name}" for name in selected]


@pytest.mark.parametrize("layers, hit", [("0:2", [0, 1]), ("2:", [2, 3]), (":-1", [0, 1, 2]), ("-1", [3]), ("1", [1]), ("::2", [0, 2])])
def test_rule_for_some_layers(rows, layers, hit):
    sigma = rows(rules=(f"ffn/down[{layers}]=fixed_std(std=0.5)",))["layers/ffn/down"]["sigma"]
    assert sigma == [0.5 if layer in hit else 1 / F for layer in range(L)]


def test_first_rule_wins_then_the_preset(rows):
    table = rows(rules=("q[0]=gpt2", "attn/q=fixed_std(0.5)", "attn=gamma_normal(gamma=2)"))
    assert table["layers/attn/q"]["sigma"] == [0.02, 0.5, 0.5, 0.5]
    assert table["layers/attn/k"]["sigma"] == D**-2.0
    assert table["layers/ffn/up"]["sigma"] == 1 / D


def test_rule_takes_gamma_and_truncate_it_leaves_out_from_the_config(rows):
    table = rows(preset="gpt2", gamma=0.75, truncate=2.0, rules=("q=gamma_normal", "k=gamma_normal(0.5, truncate=0)", "out=gpt2"))
    assert table["layers/attn/q"]["initializer"] == "gamma_normal(gamma=0.75, truncate=2.0)"
    assert table["layers/attn/k"]["initializer"] == "gamma_normal(gamma=0.5)"
    assert table["layers/attn/out"]["sigma"] == pytest.approx(0.02 / math.sqrt(2 * L))


def test_rule_may_set_a_norm_gain(rows):
    assert rows(rules=("final_norm/gain=zeros",))["final_norm/gain"]["initializer"] == "zeros"


BAD = {
    "layers/attn/qq=ones": r"init.rules\[0\].*no parameter matches. Did you mean 'layers/attn/q'",
    "q=gama_normal": "unknown initializer 'gama_normal'. Did you mean 'gamma_normal'",
    "q=gamma_normal(gama=1)": "no argument 'gama'. Did you mean 'gamma'",
    "q=gamma_normal(gamma=-1)": "gamma must be a finite number of at least 0",
    "q=gamma_normal(gamma='1')": "gamma must be",
    "q=gamma_normal(1, gamma=1)": "twice",
    "q=gamma_normal(1, 2)": "by name",
    "q=gamma_normal(gamma=__import__('os').getpid())": "literal",
    "q=gamma_normal(**{'gamma': 1})": "literal",
    "q=gamma_normal(in_axis=0)": "no argument 'in_axis'",
    "q=ones(3)": "by name",
    "q=ones(value=3)": "It takes none",
    "q": "is no rule",
    "q=": "is no rule",
    "(q=ones": "no regular expression",
    "ffn/down[7:]=ones": "has layers 0 to 3 of 4, and none of them",
    "embed/table[0]=ones": "has layers none of 4, and none of them",
    "final_norm/gain=gamma_normal": "final_norm/gain: .*needs a fan-in",
    3: "is no rule",
}


@pytest.mark.parametrize("rule", BAD)
def test_bad_rule_is_named(rows, rule):
    with pytest.raises(ConfigError, match=BAD[rule]):
        rows(rules=(rule,))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(preset="fanin"), "unknown preset 'fanin'. Did you mean 'fan_in'"),
        (dict(gamma=-1), "init.gamma must be"),
        (dict(gamma="one", preset="gpt2"), "init.gamma must be"),
        (dict(truncate=-2.0), "init.truncate must be"),
        (dict(truncate=2.0, preset="xavier_uniform"), "no normal values to truncate"),
        (dict(depth_scale=1), "init.depth_scale must be"),
        (dict(rules="q=ones"), "tuple of texts"),
        (dict(rules=("attn=ones", "q=zeros")), r"init.rules\[1\] .*decides nothing"),
        (dict(preset="groups", group_gammas=(1.0, 1.0)), "four numbers"),
        (dict(preset="groups", group_gammas=(1.0, 1.0, -1.0, 1.0)), r"group_gammas\[2\] must be"),
    ],
)
def test_bad_config_is_named(rows, changes, message):
    with pytest.raises(ConfigError, match=message):
        rows(**changes)


def test_spec_that_does_not_describe_its_shape():
    for axes, fan_in, role, message in [
        (("embed",), (), "ffn", "must name each"),
        (("embed", "layers"), (), "ffn", "axis 0"),
        (("embed", "ffn"), ("heads",), "ffn", "none of the axes"),
        (("embed", "ffn"), ("embed",), "mlp", "role 'mlp'"),
        (("embed", "ffn"), ("ffn",), "ffn", "not both"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ParamSpec((2, 3), axes, fan_in, ("ffn",) if role == "ffn" and "ffn" in axes else (), role)


def test_rows_say_what_the_initializer_is(rows):
    table = rows(rules=("ffn/up[1:]=fixed_std(std=0.02)",))
    out = table["layers/attn/out"]
    assert (out["shape"], out["axes"]) == ([L, 3, 32, D], ["layers", "heads", "head_dim", "embed"])
    assert (out["role"], out["fan_in"], out["base"], out["gamma"], out["layers"]) == ("vo", HEADS, HEADS, 1.0, L)
    assert table["embed/table"]["layers"] == 0
    assert table["layers/ffn/up"]["gamma"] == pytest.approx([1.0] + [math.log(50) / math.log(D)] * 3)
    assert rows(preset="d_model")["layers/ffn/down"]["base"] == D
    assert json.loads(json.dumps(list(table.values()))) == list(table.values())


def test_text_has_one_line_per_run_of_layers(decoder_specs, init_config):
    text = format_table(init_table(decoder_specs(L=L), init_config(rules=("ffn/up[1:3]=gpt2",)), **SIZES))
    lines = [line.split() for line in text.splitlines() if line.startswith("layers/ffn/up")]
    assert [(line[0], line[7]) for line in lines] == [(f"layers/ffn/up[{a}:{b}]", s) for a, b, s in
                                                      ((0, 1, "0.015625"), (1, 3, "0.02"), (3, 4, "0.015625"))]


@pytest.mark.parametrize("preset", PRESETS)
def test_golden_table_of_the_125m_model(decoder_specs, init_config, preset):
    """GAMMALM_UPDATE_GOLDEN=1 rewrites the files; look at the difference before keeping it."""
    specs = decoder_specs(L=12, D=768, H=12, G=12, K=64, F=1792, V=50304)
    config = init_config(preset=preset, group_gammas=(0.5, 0.75, 1.0, 1.25))  # distinct, so that the groups show
    text = format_table(init_table(specs, config, d_model=768, n_layers=12))
    golden = Path(__file__).parent / "golden" / f"{preset}.txt"
    if os.environ.get("GAMMALM_UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_layers_are_those_of_the_model_where_there_are_two_stacks():
    """Four layers, the first one dense: the rule's numbers go over both stacks, and so do those of the printed table."""
    c = load_config("lm:size=tiny-moe", [("model.n_layers", 4), ("model.moe.first_k_dense", 1)])
    with c.unlocked():
        c.init.rules = ("attn/q[0]=zeros", "attn/k[-1]=zeros", "attn/v[1:3]=zeros")
    rows = {row["path"]: row for row in init_table(param_specs(c.model), c.init, d_model=64, n_layers=4)}

    def zeroed(name):
        found = []
        for stack in ("dense_layers", "layers"):
            row = rows[f"{stack}/attn/{name}"]
            sigmas = row["sigma"] if isinstance(row["sigma"], list) else [row["sigma"]] * row["layers"]
            found += [row["first_layer"] + i for i, sigma in enumerate(sigmas) if sigma == 0]
        return found

    assert [zeroed(name) for name in ("q", "k", "v")] == [[0], [3], [1, 2]]
    assert "layers/attn/k[1:3]" in format_table(list(rows.values())) and "layers/attn/k[3:4]" in format_table(list(rows.values()))
    with c.unlocked():
        c.init.rules = ("attn/q[4]=zeros",)
    with pytest.raises(ConfigError, match="layers 0 to 0 or 1 to 3 of 4"):
        init_table(param_specs(c.model), c.init, d_model=64, n_layers=4)
