"""The claims ledger on made-up rows: each verdict, what is paired and what is not, missing and damaged figures, and the page."""

import json
import re

import numpy as np
import pytest
from scipy import stats

from gammalm.cli.main import main
from gammalm.experiments.claims import NEEDS_SCALE, NOT_RESOLVED, OPPOSITE, REPRODUCED, VERDICTS, across, judge
from gammalm.experiments.claims_report import ALL_CLAIMS as CLAIMS
from gammalm.experiments.figures.catalog import IDS
from gammalm.experiments.table1 import COLUMNS

from .study import Page

BY_ID = {claim.id: claim for claim in CLAIMS}


def row(figure, quantity, value, half=0.01, seeds=3, **labels):
    """A row whose interval reaches `half` to both sides; one seed has none."""
    low, high = (value - half, value + half) if seeds > 1 else (None, None)
    return {"figure": figure, "quantity": quantity, **labels, "value": value, "low": low, "high": high, "seeds": seeds}


def gaps(values, figure="fig1b", arm="plain", rate="fixed", **more):
    sizes = [("nano", 100_000), ("mid", 1_000_000), ("big", 4_000_000)]
    return [
        row(figure, "gap", value, size=size, parameters=n, arm=arm, rate=rate, **more)
        for (size, n), value in zip(sizes, values, strict=False)
    ]


SOME_TUNED = (("nano", 1e5, "fixed"), ("nano", 1e5, "tuned"), ("big", 4e6, "fixed"))


def verdict_of(id_, rows):
    return judge(BY_ID[id_], rows)["verdict"]


@pytest.mark.parametrize(
    ("value", "more", "expected"),
    [
        (-0.05, {}, REPRODUCED),
        (0.05, {}, OPPOSITE),
        (-0.005, {}, NOT_RESOLVED),
        (0.005, {}, NOT_RESOLVED),
        (-0.05, {"seeds": 1}, NOT_RESOLVED),
        (0.05, {"seeds": 1}, NOT_RESOLVED),
        (float("nan"), {}, NEEDS_SCALE),
        (None, {"seeds": 1}, NEEDS_SCALE),
    ],
)
def test_a_direction_is_judged_by_its_interval(value, more, expected):
    entry = judge(BY_ID["gain-small"], gaps([value], **more))
    assert entry["verdict"] == expected and entry["measured"] is (expected != NEEDS_SCALE)
    assert entry["verdict_tuned"] is None
    if entry["measured"]:
        assert (entry["value"], entry["seeds"], entry["sizes"]) == (value, more.get("seeds", 3), ["nano"])


def test_unchanged_is_a_region_and_not_a_failure_to_see_a_change():
    def of(value, half):
        return verdict_of("gate-at-standard", [row("fig1h", "gate effect", value, half, size="big", parameters=4e6, gamma=0.5)])

    assert of(-0.004, 0.003) == REPRODUCED
    assert of(-0.004, 0.03) == NOT_RESOLVED  # reaches zero, and much else
    assert of(-0.03, 0.01) == OPPOSITE


def test_a_claim_about_all_sizes_takes_all():
    assert verdict_of("lower-at-all-sizes", gaps([-0.05, -0.04, -0.03])) == REPRODUCED
    assert verdict_of("lower-at-all-sizes", gaps([-0.05, -0.04, -0.003])) == NOT_RESOLVED
    assert verdict_of("lower-at-all-sizes", gaps([-0.05, 0.003, 0.04])) == OPPOSITE
    assert verdict_of("lower-at-all-sizes", gaps([-0.05])) == NEEDS_SCALE


def test_both_rates_are_judged_apart_and_rows_of_other_figures_and_arms_do_not_count():
    rows = gaps([-0.05, -0.05]) + gaps([0.04], rate="tuned") + gaps([9.0], figure="fig2a") + gaps([9.0], arm="adjusted")
    entry = judge(BY_ID["gain-small"], rows)
    assert (entry["verdict"], entry["verdict_tuned"]) == (REPRODUCED, OPPOSITE)
    assert (entry["value"], entry["parts_tuned"][0]["value"]) == (-0.05, 0.04)
    # The size with tuned rates is neither all sizes nor the largest.
    for id_ in ("lower-at-all-sizes", "gain-shrinks", "gain-large"):
        entry = judge(BY_ID[id_], rows)
        assert entry["measured"] and entry["verdict_tuned"] is None
    contrasts = [row("fig2a", "gap contrast", -0.05, size=s, parameters=n, rate=r) for s, n, r in SOME_TUNED]
    own = [row("fig2a", "gap", -0.08, size=s, parameters=n, rate=r, arm="adjusted") for s, n, r in SOME_TUNED]
    entry = judge(BY_ID["adjusted-amplifies"], contrasts + own)
    assert (entry["verdict_tuned"], entry["sizes"], entry["sizes_tuned"]) == (REPRODUCED, ["nano", "big"], ["nano"])


def test_across_sizes_is_welchs_interval():
    """Against SciPy's own, from raw values whose means and t-intervals the rows hold."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(-0.1, 0.02, 5), rng.normal(-0.03, 0.05, 3)

    def as_row(values):
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        return row("fig1b", "gap", values.mean(), half, len(values))

    got = across(as_row(first), as_row(second))
    expected = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert (got.mean, got.n) == (pytest.approx(second.mean() - first.mean()), 3)
    alone = across(as_row(first), row("fig1b", "gap", -0.03, seeds=1))
    assert alone.low is None and alone.n == 1
    assert across(*gaps([-0.1, -0.02], seeds=3)).low > 0


def test_the_large_model_is_not_the_only_one():
    assert verdict_of("gain-large", gaps([-0.05])) == NEEDS_SCALE
    entry = judge(BY_ID["gain-large"], gaps([-0.05, -0.05, 0.05]))
    assert (entry["verdict"], entry["sizes"]) == (OPPOSITE, ["big"])


def test_an_effect_at_two_gammas_is_read_from_two_figures():
    at = {"size": "big", "parameters": 4e6}
    small = row("fig1d", "eps effect", -0.05, 0.005, gamma=1.0, **at)
    standard = row("fig1e", "eps effect", -0.01, 0.005, gamma=0.5, **at)
    assert verdict_of("eps-matters-more-at-small", [small, standard]) == REPRODUCED
    assert verdict_of("eps-matters-more-at-small", [small | {"value": 0.05, "low": 0.045, "high": 0.055}, standard]) == OPPOSITE
    assert verdict_of("eps-matters-more-at-small", [small]) == NEEDS_SCALE
    assert verdict_of("eps-matters-more-at-small", [small | {"size": "other"}, standard]) == NEEDS_SCALE


def test_what_is_no_gain_is_not_amplified():
    at = {"size": "big", "parameters": 4e6}
    contrast, own = row("fig2a", "gap contrast", -0.05, **at), row("fig2a", "gap", 0.2, arm="adjusted", **at)
    assert verdict_of("adjusted-amplifies", [contrast, own | {"value": -0.2, "low": -0.3, "high": -0.1}]) == REPRODUCED
    assert verdict_of("adjusted-amplifies", [contrast, own]) == OPPOSITE
    gate, effect = row("fig1h", "gate contrast", -0.05, **at), row("fig1h", "gate effect", 0.02, gamma=1.0, **at)
    assert verdict_of("gate-matters-more-at-small", [gate, effect]) == OPPOSITE
    assert verdict_of("gate-matters-more-at-small", [gate, effect | {"value": -0.02, "low": -0.03, "high": -0.01}]) == REPRODUCED


def task_rows(gains, half=1.0, parameters=1.4e9, at_chance=(), **more):
    """Rows of table1 as `table1.numbers` makes them."""
    areas = {c.title: c.area for c in COLUMNS}
    same = {"arm": "adjusted", "gamma": 1.0, "standard": 0.5, "parameters": parameters, "at_chance": list(at_chance)} | more
    rows = [row("table1", "gain", value, half, 2, benchmark=name, area=areas[name], **same) for name, value in gains.items()]
    return [r | {"seeds": 1} for r in rows]  # one pair of models; its interval is over items


def test_gains_on_benchmarks():
    four = dict.fromkeys(("TriviaQA", "HellaSwag", "GSM8K", "MATH500"), 6.0)
    assert verdict_of("tasks-better", task_rows(four)) == verdict_of("tasks-four-points", task_rows(four)) == REPRODUCED
    one_worse = task_rows(four | {"GSM8K": -6.0})
    assert verdict_of("tasks-better", one_worse) == verdict_of("tasks-four-points", one_worse) == OPPOSITE
    small = task_rows(dict.fromkeys(four, 2.0))
    assert (verdict_of("tasks-better", small), verdict_of("tasks-four-points", small)) == (REPRODUCED, OPPOSITE)
    assert verdict_of("tasks-better", task_rows(four, half=7.0)) == NOT_RESOLVED


def test_what_both_models_guess_resolves_nothing_and_sizes_of_gains_are_the_papers():
    gains = dict.fromkeys(("TriviaQA", "HellaSwag", "GSM8K", "MATH500"), -6.0)
    guessing = judge(BY_ID["tasks-better"], task_rows(gains, at_chance=("small", "standard")))
    assert guessing["verdict"] == NOT_RESOLVED and "HellaSwag, both guessing, points −6" in guessing["said"]
    assert verdict_of("tasks-better", task_rows(gains, at_chance=("small",))) == OPPOSITE  # the other knows something
    little = task_rows(gains, parameters=1e6)
    assert (verdict_of("tasks-better", little), verdict_of("tasks-four-points", little)) == (OPPOSITE, NOT_RESOLVED)


@pytest.mark.parametrize("other", [{"arm": "plain"}, {"arm": None}, {"gamma": 0.75}, {"standard": 1.0}])
def test_gains_of_another_pair_do_not_count(other):
    rows = task_rows(dict.fromkeys(("TriviaQA", "HellaSwag", "GSM8K", "MATH500"), 6.0), **other)
    assert verdict_of("tasks-better", rows) == NEEDS_SCALE


def test_an_area_without_a_benchmark_is_not_measured():
    assert verdict_of("tasks-better", task_rows({"TriviaQA": 6.0, "HellaSwag": 6.0})) == NEEDS_SCALE


def test_tokens():
    """A wide symmetric change is not one where most tokens change little; a peak among losses is not where a gain peaks."""
    most = row("fig4a", "share", 0.45, part="unchanged or slightly worsened")
    assert verdict_of("tokens-most", [most, row("fig4a", "share", 0.4, part="improved")]) == OPPOSITE
    assert verdict_of("tokens-most", [most | {"value": 0.8, "low": 0.7, "high": 0.9}]) == REPRODUCED
    peaks = [row("fig4b", "decile contrast", 0.1, of="gain", first=first, second="6-9") for first in ("10", "1-5")]
    assert verdict_of("tokens-difficulty", [*peaks, row("fig4a", "mean gain", 0.05)]) == REPRODUCED
    assert verdict_of("tokens-difficulty", [*peaks, row("fig4a", "mean gain", -0.05)]) == OPPOSITE


def test_a_gain_shrinks_only_where_there_is_one():
    assert verdict_of("gain-shrinks", gaps([-0.10, -0.05, -0.02])) == REPRODUCED
    assert verdict_of("gain-shrinks", gaps([-0.02, -0.05, -0.10])) == OPPOSITE
    assert verdict_of("gain-shrinks", gaps([-0.005, 0.0, 0.08])) == NOT_RESOLVED  # the smallest has no resolved gain to lose
    assert verdict_of("gain-shrinks", gaps([-0.10])) == NEEDS_SCALE


def test_the_size_of_an_effect_is_compared_at_the_papers_size_alone():
    rows = gaps([-0.1])
    assert "paper's −0.05 is for 125M parameters and this has 100k: only the direction" in judge(BY_ID["gain-small"], rows)["said"]
    rows[0]["parameters"] = 120e6
    assert "2 times the paper's −0.05" in judge(BY_ID["gain-small"], rows)["said"]


def test_exact_numbers_need_no_seeds():
    def exponents(branch, law):
        return [
            row("fig3a", "measured exponent", law(gamma), None, 0, branch=branch, gamma=gamma, eps=1e-12) | {"low": None, "high": None}
            for gamma in (0.5, 0.75, 1.0, 1.25)
        ]

    two, three = exponents("two-linear", lambda g: 1 - g + 0.005), exponents("swiglu", lambda g: 1.5 - 2 * g)
    assert verdict_of("flow-law", two + three) == REPRODUCED
    assert verdict_of("flow-law-swiglu", two + three) == OPPOSITE
    wide = [r | {"low": r["value"] - 0.1, "high": r["value"] + 0.1, "seeds": 3} for r in two]
    assert verdict_of("flow-law", wide) == NOT_RESOLVED
    entry = judge(BY_ID["flow-law"], two)
    assert entry["seeds"] == 0 and "seed" not in entry["parts"][0]["what"]


def test_the_flow_is_judged_at_the_largest_width():
    def flows(values):
        wide = [row("fig3a", "flow", v, 0.01, branch="two-linear", eps=1e-12, gamma=g, d=1024) for g, v in values.items()]
        return [*wide, row("fig3a", "flow", 90.0, 0.01, branch="two-linear", eps=1e-12, gamma=1.25, d=128)]

    assert verdict_of("flow-regimes", flows({0.5: 30.0, 1.0: 1.1, 1.25: 0.2})) == REPRODUCED
    assert verdict_of("flow-regimes", flows({0.5: 30.0, 1.0: 3.0, 1.25: 0.2})) == OPPOSITE
    assert verdict_of("flow-regimes", flows({0.5: 30.0, 1.0: 1.1, 1.25: 1.005})) == NOT_RESOLVED


def test_the_sweep_is_compared_with_one():
    def sweep(values, arm="adjusted"):
        return [
            row("fig3b", "difference from 1", v, size="nano", parameters=1e5, arm=arm, gamma=g, rate="fixed") for g, v in values.items()
        ]

    rows = sweep({0.5: 0.05, 0.75: -0.03, 1.25: 0.02, 1.5: -0.06})
    assert verdict_of("sweep-improves-adjusted", rows) == REPRODUCED
    assert verdict_of("sweep-deteriorates-adjusted", rows) == OPPOSITE
    assert verdict_of("sweep-deteriorates-adjusted", sweep({0.75: -0.03, 1.25: 0.02, 1.5: 0.06})) == REPRODUCED
    assert verdict_of("sweep-deteriorates-plain", rows) == NEEDS_SCALE
    best = row("fig3b", "best gamma", 0.75, 0.0, arm="adjusted")
    assert verdict_of("sweep-optimum-adjusted", [best]) == OPPOSITE
    assert verdict_of("sweep-optimum-adjusted", [best | {"high": 1.0}]) == NOT_RESOLVED
    assert verdict_of("sweep-optimum-adjusted", [best | {"value": 1.0, "low": 1.0, "high": 1.0}]) == REPRODUCED


def ranks(curves, figure="fig4f", seeds=(0, 1), matrix="q"):
    return [
        {"figure": figure, "quantity": "stable rank", "gamma": gamma, "seed": seed, "matrix": matrix, "layer": layer, "x": x}
        | {"value": value * (1 + 0.01 * seed), "low": None, "high": None, "seeds": 1}
        for gamma, curve in curves.items()
        for seed in seeds
        for layer in (0, 1)
        for x, value in curve.items()
    ]


DROPS = {1: 100.0, 10: 40.0, 100: 20.0, 1000: 50.0}
DECLINES = {1: 100.0, 10: 99.0, 100: 95.0, 1000: 80.0}


def jitter(rows):
    """Seeds and layers that differ a little, so that intervals have a width."""
    rng = np.random.default_rng(1)
    return [r | {"value": r["value"] * (1 + 0.005 * rng.standard_normal())} for r in rows]


def test_curves_of_the_stable_rank():
    rows = jitter(ranks({1.0: DROPS, 0.5: DECLINES}))
    entry = judge(BY_ID["rank-small"], rows)
    assert entry["verdict"] == REPRODUCED and entry["seeds"] == 2
    assert [part["value"] for part in entry["parts"]] == pytest.approx([20 / 100 - 1, 50 / 20 - 1], rel=0.03)
    assert verdict_of("rank-standard", rows) == REPRODUCED
    swapped = jitter(ranks({1.0: DECLINES, 0.5: DROPS}))
    assert verdict_of("rank-small", swapped) == OPPOSITE and verdict_of("rank-standard", swapped) == OPPOSITE
    assert verdict_of("rank-small", ranks({1.0: DROPS}, seeds=(0,))) == NOT_RESOLVED
    # Layers count alike: one that falls by .8 and one that falls by .01 fall by .405 in the mean.
    layers = [r for r in ranks({1.0: DROPS}) if r["layer"] == 0] + [r for r in ranks({1.0: {**DECLINES, 100: 99.0}}) if r["layer"] == 1]
    assert judge(BY_ID["rank-small"], layers)["value"] == pytest.approx(-0.405)
    # The same points in a second figure count once, and another kind of matrix is a part of its own.
    again = [r | {"figure": "fig5"} for r in rows]
    assert judge(BY_ID["rank-small"], rows + again)["parts"] == entry["parts"]
    kinds = judge(BY_ID["rank-all-matrices"], rows + jitter(ranks({1.0: DECLINES}, matrix="k")))
    assert [(p["what"].split()[0], p["verdict"]) for p in kinds["parts"]] == [
        ("q", REPRODUCED), ("q", REPRODUCED), ("k", REPRODUCED), ("k", OPPOSITE),
    ]  # fmt: skip


def test_the_start_is_compared_with_random_matrices():
    random = {"figure": "fig4f", "quantity": "random stable rank", "matrix": "q", "value": 100.0, "seeds": 0}
    rows = jitter(ranks({1.0: DROPS, 0.5: DECLINES}))
    entry = judge(BY_ID["rank-starts-high"], [*rows, random])
    assert entry["verdict"] == REPRODUCED and [p["value"] for p in entry["parts"]] == pytest.approx([1, 1], abs=0.02)
    assert verdict_of("rank-starts-high", [*rows, random | {"value": 400.0}]) == OPPOSITE
    assert verdict_of("rank-starts-high", rows) == NEEDS_SCALE


def test_rows_align_and_fade():
    def cosines(curves):
        return [r | {"figure": "fig4d", "quantity": "row cosine", "value": r["value"] / 1000} for r in jitter(ranks(curves))]

    rows = cosines({1.0: {1: 30.0, 10: 400.0, 100: 300.0, 1000: 90.0}, 0.5: {1: 30.0, 10: 31.0, 100: 40.0, 1000: 60.0}})
    assert verdict_of("rows-align", rows) == REPRODUCED and verdict_of("rows-fade", rows) == REPRODUCED
    late = cosines({1.0: {1: 30.0, 10: 20.0, 1000: 900.0}, 0.5: {1: 30.0, 10: 400.0, 1000: 60.0}})
    assert verdict_of("rows-align", late) == OPPOSITE, "the end is not early"
    assert verdict_of("rows-fade", cosines({1.0: {1: 30.0, 10: 40.0, 1000: 90.0}})) == OPPOSITE


# ---- the list ------------------------------------------------------------------------------------------------------------------------


def test_the_list_holds_together():
    assert len(BY_ID) == len(CLAIMS) > 40
    for claim in CLAIMS:
        assert set(claim.figures) <= {*IDS, "table1"}, claim.id
        assert bool(claim.figures) is (claim.measure is not None), claim.id
        assert claim.measure is not None or claim.limits, claim.id
        assert re.fullmatch(r"[\d., ]+(, Table 1)?|E\d|theory", claim.section) and claim.statement.endswith("."), claim.id
        assert judge(claim, [])["verdict"] == NEEDS_SCALE
        if claim.paper:
            assert claim.paper[1] in (125e6, 1.5e9)


def test_every_trained_figure_of_numbers_is_read():
    """fig1a shows what fig1b counts and fig4c is a text; all others feed a claim."""
    assert set(IDS) - {figure for claim in CLAIMS for figure in claim.figures} == {"fig1a", "fig4c"}


# ---- the command ---------------------------------------------------------------------------------------------------------------------


def write(workdir, rows):
    for figure in {r["figure"] for r in rows}:
        folder = workdir / "figures" / figure
        folder.mkdir(parents=True)
        lines = [json.dumps(r) + "\n" for r in rows if r["figure"] == figure]
        (folder / "numbers.jsonl").write_text("".join(lines), encoding="utf-8")


def test_the_command_writes_page_and_data_of_what_there_is(tmp_path, capsys):
    write(tmp_path, gaps([-0.05, 0.04], scale="cpu") + gaps([0.03, 0.03], rate="tuned"))
    (tmp_path / "figures/fig1b/caption.txt").write_text("Gain by size. Scale cpu: 1.02M tokens a run.\nPartial.\n")
    with open(tmp_path / "figures/fig1b/numbers.jsonl", "a") as file:
        file.write('{"figure": "fig1b", "quantity": "ga')
    assert main(["report", "--claims", "--workdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^gain-small +2\.1 +reproduced +opposite +nano −0\.05 \[−0\.06, −0\.04\], 3 seeds$", printed, re.MULTILINE)
    assert re.search(r"^lower-at-all-sizes +2\.1 +opposite +opposite +mid 0\.04 ", printed, re.MULTILINE), "the part that decides"
    assert "needs scale (not measured yet)" in printed and "cut off while it was written" in printed and "fig2a" in printed

    found = json.loads((tmp_path / "report/claims.json").read_text(encoding="utf-8"))
    assert sum(found["counts"]["fixed"].values()) == len(CLAIMS) == len(found["claims"])
    assert set(found["counts"]["fixed"]) == set(VERDICTS)
    assert "fig1b" not in found["missing_figures"] and "fig8" in found["missing_figures"]
    entry = next(e for e in found["claims"] if e["id"] == "lower-at-all-sizes")
    assert entry["verdict"] == OPPOSITE and entry["scale"] == ["cpu"] and entry["sizes"] == ["nano", "mid"]
    assert "nano −0.05" in entry["said"] and "(against)" in entry["said"]

    assert found["captions"] == {"fig1b": "Gain by size. Scale cpu: 1.02M tokens a run. Partial."}

    html = (tmp_path / "report/claims.html").read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.ids()) == len(set(page.ids())) and {claim.id for claim in CLAIMS} <= set(page.ids())
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert links and set(links) == {"../figures/index.html#fig1b"}
    assert "$" not in html and not [a for t, a in page.tags if t in ("script", "link", "img")]
    for claim in CLAIMS:
        assert claim.statement in page.text
    assert "1.02M tokens a run" in page.text

    assert main(["report", "--claims", "--workdir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_workdir_that_is_none_is_a_config_error(tmp_path, capsys):
    assert main(["report", "--claims", "--workdir", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
