"""Figures of a matrix read in blocks, against NumPy in float64 and SciPy; what looks fresh or trained; what is predicted and advised."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from gammalm.analysis import stored
from gammalm.analysis.freshness import is_moved, judge, signs
from gammalm.analysis.outlook import CONTEXT, _tokens, advice, at_gamma_one, outlook, sink_risk
from gammalm.analysis.stored import figures, lowest_random_stable_rank, random_stable_rank
from gammalm.theory import Dense, Heads, gamma_decoder, norm_factor, predict


def cut(w, *at):
    return lambda: iter(np.split(np.asarray(w, np.float32), at))


def direct(w, fan_in):
    w = np.asarray(w, np.float32).astype(np.float64)
    values = np.linalg.svd(w, compute_uv=False)
    return {"mean": w.mean(), "std": w.std(), "largest": np.abs(w).max(), "kurtosis": stats.kurtosis(w, axis=None, fisher=False),
            "near_zero": np.mean(np.abs(w) <= 0.1 * w.std()), "gamma": -np.log(w.std()) / np.log(fan_in),
            "stable_rank": (values**2).sum() / values[0] ** 2}  # fmt: skip


@pytest.mark.parametrize("scale, shift, at", [(1.0, 0.0, ()), (1e-12, 0.0, (3, 11)), (1e8, 0.0, (39,)), (0.01, 5.0, (7,))])
def test_figures_of_blocks(scale, shift, at):
    """Tiny, huge, far from 0; rows of other sizes in other blocks."""
    rng = np.random.default_rng(0)
    w = rng.standard_t(7, (40, 25)) * np.linspace(0.5, 2, 40)[:, None] * scale + shift
    found = figures(cut(w, *at), 40, 25, 25)
    for name, value in direct(w, 25).items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=2e-3 if name == "near_zero" else 1e-30), name
    assert (found["stable_rank_rows"], found["not_finite"]) == (40, 0)
    assert found["stable_rank_random"] == pytest.approx(40 * 25 / (40**0.5 + 5) ** 2)


def test_blocks_that_are_all_alike():
    w = np.zeros((9, 4), np.float32)
    assert figures(cut(w, 2), 9, 4, 4) | {"std": 0.0, "near_zero": 1.0, "gamma": None, "kurtosis": None, "stable_rank": 0.0} == figures(
        cut(w, 2), 9, 4, 4
    )
    w[5:] = 3.0  # each block has one number
    found = figures(cut(w, 5), 9, 4, 4)
    assert (found["mean"], found["std"]) == (pytest.approx(w.mean()), pytest.approx(w.std()))
    w[0, 0] = np.nan
    found = figures(cut(w, 5), 9, 4, 4)
    assert found["not_finite"] == 1 and found["std"] is None and found["gamma"] is None


def test_spaced_rows_of_a_matrix_that_is_too_large(monkeypatch):
    monkeypatch.setattr(stored, "SPECTRUM", 20 * 6)
    w = np.random.default_rng(0).normal(size=(50, 6))
    found = figures(cut(w, 1, 17, 33), 50, 6, 6)
    assert found["stable_rank"] == pytest.approx(direct(w[::3], 6)["stable_rank"]) and found["stable_rank_rows"] == 17
    assert found["std"] == pytest.approx(w.std(), rel=1e-5) and found["near_zero"] == pytest.approx(direct(w, 6)["near_zero"], abs=1e-9)
    assert figures(cut(w), 50, 6, 6, spectrum=False)["stable_rank"] is None


def test_the_devices_spectrum(monkeypatch):
    """Lanczos, which larger matrices get, on a small one."""
    monkeypatch.setattr(stored, "DIRECT", 8)
    w = np.random.default_rng(1).normal(size=(30, 70)) * 1e-5
    assert figures(cut(w), 30, 70, 70)["stable_rank"] == pytest.approx(direct(w, 70)["stable_rank"], rel=1e-3)


def row(w, declared=None):
    return figures(cut(w), *w.shape, w.shape[0]) | {"rows": w.shape[0], "columns": w.shape[1], "declared": declared}


DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape), "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "truncated": lambda rng, shape: stats.truncnorm.rvs(-2, 2, size=shape, random_state=rng),
    "orthogonal": lambda rng, shape: np.linalg.qr(rng.normal(size=(max(shape),) * 2))[0][: shape[0], : shape[1]],
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_no_draw_looks_trained(name):
    """Many matrices of each kind of draw, of several shapes: none shows a sign."""
    rng = np.random.default_rng(2)
    shapes = [(16, 16), (48, 100), (90, 24), (64, 64)]
    rows = [row(0.02 * DRAWS[name](rng, shapes[i % 4])) for i in range(12 if name == "orthogonal" else 80)]
    assert not [s for r in rows for s in [signs(r)] if s["directions"] or s["tails"]]
    assert judge(rows, [{"name": "a", "kind": "gain", "moved": False}])["verdict"] == "fresh"


def test_the_lowest_stable_rank_is_not_far_below_what_is_drawn():
    """A bound that nothing reached would see nothing: one added direction of three times the edge's size is seen, whatever the shape."""
    rng = np.random.default_rng(3)
    for m, n in ((32, 32), (64, 200), (300, 40)):
        drawn = [row(rng.normal(size=(m, n)))["stable_rank"] for _ in range(20)]
        assert 0.6 * random_stable_rank(m, n) < lowest_random_stable_rank(m, n) < min(drawn)
        u, v = (x / np.linalg.norm(x) for x in (rng.normal(size=m), rng.normal(size=n)))
        assert signs(row(rng.normal(size=(m, n)) + 1.5 * (m**0.5 + n**0.5) * np.outer(u, v)))["directions"]


def test_verdicts():
    rng = np.random.default_rng(4)
    fresh = [row(0.02 * rng.normal(size=(64, 64)), 0.02) for _ in range(8)]
    spiked = row(0.02 * (rng.normal(size=(64, 64)) + 30 * np.outer(np.ones(64), np.ones(64)) / 64))
    heavy = row(0.02 * rng.standard_t(4, (64, 64)))
    still, moved = ({"name": "n", "kind": "gain", "moved": m} for m in (False, True))
    assert judge(fresh, [still])["verdict"] == "fresh" and judge(fresh, [])["verdict"] == "fresh"
    assert judge(fresh, [still, moved])["verdict"] == "just begun" and judge([*fresh, spiked], [moved])["verdict"] == "trained"
    assert judge([*fresh, spiked], [still])["verdict"] == "unclear"
    assert judge([*fresh[:4], spiked, heavy], [still])["verdict"] == "trained"
    assert judge([], [])["verdict"] == "unclear" and judge([row(np.zeros((20, 20)))], [])["verdict"] == "unclear"
    other = judge([r | {"declared": 0.025} for r in fresh], [still])
    assert other["verdict"] == "fresh" and "another std than the declared one" in other["reasons"][-1]
    assert not any("another std than the declared" in reason for reason in judge(fresh, [still])["reasons"])
    assert [is_moved(*x) for x in ((1, 1, "gain"), (0, 0, "gain"), (0, 0, "bias"), (1, 1, "bias"), (1, 1.01, "gain"))] == [
        False, False, False, True, True,
    ]  # fmt: skip


SIZES = dict(d_model=128, vocab_size=300, n_layers=2, attention=Heads(2, 64), ffn=Dense(336))


def test_the_outlook_is_theorys():
    decoder = gamma_decoder(**SIZES, gamma=0.75, eps=1e-5)
    found = outlook(decoder)
    direct = predict(decoder, _tokens(300, False), heads=2)
    assert found["flow"] == pytest.approx(direct.flow) and found["embedding"] == pytest.approx(128**-0.75)
    norm = found["norms"]["attn_norm"]
    assert norm["ratio"][0] == pytest.approx(1e-5 * 128**1.5, rel=1e-5) and norm["factor"][0] == pytest.approx(norm_factor(0.75, 1e-5, 128))
    choices = {r["init"]: r for r in found["choices"]}
    one = gamma_decoder(**SIZES, gamma=1.0, eps=1e-12)
    assert list(choices) == ["as declared", "gamma 1, eps 1e-05", "gamma 1, eps 1e-12"]
    assert choices["gamma 1, eps 1e-12"]["flow"] == pytest.approx(predict(one, _tokens(300, False), heads=2).flow)
    assert at_gamma_one(decoder) == dataclasses.replace(one, eps=1e-5, stds=at_gamma_one(decoder).stds)
    assert dict(at_gamma_one(decoder).stds[0]) == pytest.approx(dict(one.stds[0]))
    assert len(set(_tokens(9, True))) == CONTEXT


FACTS = {"width": 2048, "ffn": 5440, "eps": 1e-6, "eps_key": "rms_norm_eps", "declared": 0.02, "declared_key": "initializer_range",
         "scale": 1.0, "norms": "pre", "gated": False, "sink": False, "verdict": None, "own": False, "gamma": 0.51}  # fmt: skip


def test_advice_follows_from_the_figures():
    said = "\n".join(advice(FACTS))
    assert "gamma=1 -> initializer_range 0.00049 (1/2048)" in said and "is gamma 0.513 at width 2048" in said
    assert "Set rms_norm_eps to 1e-12" in said and "variance of 2.4e-07" in said and "leaves 0.439" in said  # science 2: r at 1e-6
    assert "std 0.00018 at gamma 1" in said and "gate it" in said
    assert "negligible at gamma 1" in "\n".join(advice(FACTS | {"eps": 1e-12, "gated": True}))
    for gated in (True, None):
        assert "gate it" not in "\n".join(advice(FACTS | {"gated": gated}))
    assert "fixed in the model's code" in "\n".join(advice(FACTS | {"eps_key": None, "eps": 1e-5}))
    gemma = "\n".join(advice(FACTS | {"scale": 2048**0.5, "norms": "sandwich"}))
    assert "norm behind each branch" in gemma and "variance of 0.00049" in gemma and "negligible at gamma 1" in gemma
    assert "new start" in advice(FACTS | {"verdict": "just begun"})[0]
    assert "Without the model's width" in advice(FACTS | {"width": None})[0]


def test_the_risk_of_sinks():
    cases = ((1.0, False, False), (0.5, False, False), (1.0, True, False), (1.0, False, True), (None, False, False), (1.0, None, False))
    risks = [sink_risk(*case)["risk"] for case in cases]
    assert risks == ["raised", "usual", "low", "low", "unknown", "unknown"]


def test_biases_alone_decide_nothing():
    """torch's own Linears draw theirs, while gains begin as constants everywhere."""
    fresh = [row(0.02 * np.random.default_rng(5).normal(size=(64, 64)))]
    gain, bias = ({"name": "n", "kind": kind, "moved": kind == "bias"} for kind in ("gain", "bias"))
    assert judge(fresh, [gain, bias])["verdict"] == "fresh" and judge(fresh, [bias])["verdict"] == "unclear"
    assert judge(fresh, [bias | {"moved": False}])["verdict"] == "fresh"
    assert "torch's own Linears" in judge(fresh, [gain, bias])["reasons"][1]


def test_gamma_one_with_learned_positions():
    """Positions are as large as the table, before and at gamma 1: both rows have sqrt(2) of it."""
    declared = gamma_decoder(**SIZES, gamma=0.75, eps=1e-12)
    declared = dataclasses.replace(declared, embed=declared.embed * 2**0.5, head=declared.embed)
    choices = outlook(declared, distinct=True)["choices"]
    assert [c["embedding"] for c in choices] == pytest.approx([2**0.5 * 128**-0.75, 2**0.5 / 128])


def test_advice_for_presets_and_models_without_norms():
    own = FACTS | {"own": True, "eps_key": "model.norm_eps", "preset": "fan_in", "declared": 1.0}
    assert "every matrix has its own fan-in" in advice(own)[0] and "d_model" in advice(own | {"preset": "d_model"})[0]
    assert "own fan-in" not in advice(own | {"preset": "d_model"})[0]
    assert "gpt2 has no one gamma" in advice(own | {"preset": "gpt2", "declared": None})[0]
    assert not [line for line in advice(own | {"eps": None}) if "eps" in line]
