"""E1 and E2 of the second source: the rule for bands, what is compared against SciPy, resuming, drawing, and their claims."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import scipy.stats

from gammalm.cli.main import main
from gammalm.config import call
from gammalm.data.examples import Examples
from gammalm.errors import ConfigError
from gammalm.experiments import nets
from gammalm.experiments.claims import NOT_RESOLVED, OPPOSITE, REPRODUCED, judge
from gammalm.experiments.claims_second import SECOND_CLAIMS
from gammalm.experiments.figures import catalog, han_bands, han_compare, han_sweep, run
from gammalm.experiments.grid import Cell, Grid, arms, product, values
from gammalm.experiments.paired_tests import holm, paired_test
from gammalm.experiments.results import append_result, read_results, read_study
from gammalm.experiments.runner import run_grid
from gammalm.theory.mlp import critical_std
from gammalm.training.preemption import Preempted

GUESS = math.log(10)

# ---- the rule --------------------------------------------------------------------------------------------------------------------------


def seed_of(*losses, hits=0.9, diverged_at=None):
    return SimpleNamespace(row={"train_loss": list(losses), "test_accuracy": [0.1, hits], "diverged_at": diverged_at})


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([seed_of(1.0, 0.3)] * 3, "stable"),
        ([seed_of(1.0, 0.3, hits=0.885)] * 3, "stable"),
        ([seed_of(1.0, 0.3, hits=0.87)] * 3, "degraded"),
        ([seed_of(2.31, 2.3, hits=0.1)] * 3, "vanishing"),
        ([seed_of(2.31, 2.3, hits=0.1)] * 2 + [seed_of(1.0, 0.3)], "vanishing"),
        ([seed_of(2.31, 2.3, hits=0.1)] + [seed_of(1.0, 0.3)] * 2, "degraded"),
        ([seed_of(1.0, 0.3)] * 2 + [seed_of(2.6, 0.3)], "exploding"),
        ([seed_of(1.0, 0.3)] * 2 + [seed_of(1.0, 0.3, diverged_at=7)], "exploding"),
        ([seed_of("nan", "inf")], "exploding"),
    ],
)  # fmt: skip
def test_bands(seeds, expected):
    assert han_bands.judge(seeds, best=0.9, guess=GUESS) == expected


def test_the_grids_are_the_sources():
    e1, e2 = (call(f"grids/{name}", "get_grid") for name in ("han_e1", "han_e2"))
    stds = sorted({cell.labels["std"] for cell in e1.cells})
    np.testing.assert_allclose(stds, np.logspace(-4, 1, 25), rtol=1e-3)
    assert len(e1.cells) == 2 * 25 * 3 and e1.cells[0].config().model.widths == (784, 64, 32, 32, 10)
    assert len(e2.cells) == 2 * 2 * 6 * 10 and {cell.config().model.widths for cell in e2.cells[::10]} == {(11, 16, 32, 32, 1)}
    assert critical_std((784, 64, 32, 32, 10), "relu", "forward") == pytest.approx(0.141, abs=5e-4)  # science 10
    with pytest.raises(ConfigError, match="it has one scale, cpu"):
        call("grids/han_e1:scale=paper", "get_grid")


# ---- a small sweep, trained ------------------------------------------------------------------------------------------------------------

STDS = (1e-3, 0.2, 30.0)


@pytest.fixture(scope="module")
def wines():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 11)).astype(np.float32)
    return Examples(x, (x[:, 0] + x[:, 1] > 0).astype(np.int32), source="made up")


def small_grid():
    optimizers = arms("optimizer", sgd={"optimizer": "sgd"}, adam={"optimizer": "adam", "lr": 0.02})
    shape = "mlp:data=wine-red,epochs=8"
    return Grid("han-e1", shape, product(optimizers, values("std", STDS), values("seed", range(2))))


@pytest.fixture(scope="module")
def sweep(wines, tmp_path_factory):
    """A sweep that was told to stop in its second program, taken up again, and drawn: (workdir, its figure's rows, programs trained)."""
    workdir, programs, train = tmp_path_factory.mktemp("han"), [], nets.train_nets
    figures = list(catalog.load(["han-e1"]).values())
    notice = SimpleNamespace(due=iter([False] * 8 + [True]).__next__)  # asked before each of a program's 8 epochs

    def noted(configs, *args, **how):
        programs.append(configs[0].optimizer.kind)
        return train(configs, *args, devices=jax.devices()[:1], **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nets, "load_examples", lambda name, path, note: wines)
        patch.setattr(nets, "train_nets", noted)
        with pytest.raises(Preempted, match="after 0 of 8 epochs"):
            run.train(figures, small_grid(), workdir, notice=notice)
        assert len(read_results(workdir / "han_e1")[0]) == 6
        rows = run.train(figures, small_grid(), workdir)
    assert [row["cell"] for row in rows] == [cell.name for cell in small_grid().cells]
    (made,) = run.draw(figures, workdir, "cpu")
    assert made.error is None
    return workdir, made.rows, programs


def pick(rows, quantity, **labels):
    return [row for row in rows if row["quantity"] == quantity and labels.items() <= row.items()]


def test_a_sweep_is_resumed_by_program_and_drawn(sweep):
    workdir, rows, programs = sweep
    assert programs == ["sgd", "adam", "adam"]
    assert {path.name for path in (workdir / "figures/han-e1").iterdir()} == {
        "han-e1.png", "han-e1.svg", "numbers.jsonl", "caption.txt"}  # fmt: skip
    band = {(row["optimizer"], row["std"]): row["band"] for row in pick(rows, "share of seeds") if row["is"]}
    assert band["sgd", 1e-3] == "vanishing" and band["sgd", 30.0] == "exploding" and band["adam", 0.2] == "stable"
    caption = (workdir / "figures/han-e1/caption.txt").read_text("utf-8")
    assert "Partial" not in caption and "SGD, rate 0.05: vanishing 0.001" in caption  # what diverged is a result
    page = (workdir / "figures/index.html").read_text("utf-8")
    assert "Experiment E1 of the second source" in page
    lines = (workdir / "han_e1/results.jsonl").read_text().splitlines()
    assert not any(word in line for line in lines for word in ("NaN", "Infinity"))  # JSON has no such words


def test_the_sweeps_numbers_are_those_of_its_runs(sweep):
    workdir, rows, _ = sweep
    runs, _ = read_results(workdir / "han_e1")
    hits = {std: [runs[f"adam-std{std:g}-seed{seed}"]["test_accuracy"][-1] for seed in range(2)] for std in STDS}
    for std in STDS:
        (row,) = pick(rows, "test accuracy", optimizer="adam", std=std)
        assert row["value"] == pytest.approx(np.mean(hits[std])) and row["seeds"] == 2
    best = max(hits, key=lambda std: np.mean(hits[std]))
    for std in STDS:
        (row,) = pick(rows, "accuracy below best", optimizer="adam", std=std)
        assert row["value"] == pytest.approx(np.mean(np.subtract(hits[std], hits[best])))
    norms = [[float(v) for v in runs[f"sgd-std0.2-seed{seed}"]["gradient_norm"][0]] for seed in range(2)]
    for layer in range(4):
        (row,) = pick(rows, "gradient norm", optimizer="sgd", std=0.2, layer=layer + 1, at="first step")
        assert row["value"] == pytest.approx(np.mean([math.log10(norm[layer]) for norm in norms]))
    (share,) = pick(rows, "share", optimizer="sgd", band="exploding")
    assert share["value"] == 1 and share["range"] == "1 to inf"


def test_bands_are_told_stretch_by_stretch(sweep):
    """One that another interrupts is not told as if it were whole."""
    runs = read_study(sweep[0] / "han_e1").runs
    found = han_sweep.Sweep("adam", [run for run in runs if run.cell.labels["optimizer"] == "adam"])
    found.stds, found.bands = [0.1, 0.2, 0.3, 0.4], dict(zip([0.1, 0.2, 0.3, 0.4], ["stable", "degraded", "stable", "stable"], strict=True))
    assert "stable 0.1; degraded 0.2; stable 0.3 to 0.4 (2 values);" in han_sweep._found(found)


@pytest.mark.full
def test_a_sweep_is_drawn_again_by_the_command(sweep, capsys):
    workdir, rows, _ = sweep
    assert main(["figure", "han-e1", "--no-training", "--workdir", str(workdir), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_commands_on_nets(sweep, tmp_path, capsys):
    workdir, _, _ = sweep
    assert main(["train", "--config", "mlp:", "--workdir", str(tmp_path)]) == 2
    assert main(["grid", "--config", "grids/han_e1:seeds=1", "--workdir", str(tmp_path)]) == 2
    assert main(["figure", "han-e1", "--mode", "map", "--grid-args", "seeds=1", "--workdir", str(tmp_path)]) == 2
    assert main(["plan", "--grid", "grids/han_e1:seeds=1", "--topology", "cpu", "--analytic"]) == 2
    told = capsys.readouterr().err
    assert told.count("of a small net and no decoder") == 3 and "always train in one program" in told
    with pytest.raises(ConfigError, match="of another grid"):
        run_grid(Grid("other", "mlp:", [Cell("one", {}, {}, {})]), workdir / "han_e1")


# ---- comparisons -----------------------------------------------------------------------------------------------------------------------


def test_paired_tests_are_scipys():
    rng = np.random.default_rng(2)
    first, second = rng.normal(1, 0.3, 10), rng.normal(0.8, 0.3, 10)
    found = paired_test(dict(enumerate(first)), dict(enumerate(second)) | {99: 5.0})
    expected = scipy.stats.ttest_rel(second, first)
    assert found.p == pytest.approx(expected.pvalue) and found.estimate.n == 10
    assert (found.estimate.low, found.estimate.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    d = np.mean(second - first) / np.std(second - first, ddof=1)
    assert found.effect.mean == pytest.approx(d) and found.effect.low < d < found.effect.high
    # At the ends of the interval, what was seen is as far out as 2.5 % go.
    for bound, share in ((found.effect.low, 0.975), (found.effect.high, 0.025)):
        assert scipy.stats.nct.cdf(expected.statistic, 9, bound * math.sqrt(10)) == pytest.approx(share, abs=1e-6)
    same = paired_test({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5})
    assert same.p is None and same.estimate.mean == same.estimate.low == 0.5
    assert paired_test({0: 1.0}, {1: 1.0}) is None and paired_test({0: 1.0}, {0: 2.0}).estimate.low is None


def test_holm():
    """By the definition: the smallest p-value times 4, the next times 3 and no less than the one before, and so on."""
    assert holm([0.04, 0.01, None, 0.03, 0.5]) == pytest.approx([0.09, 0.04, None, 0.09, 0.5], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_epochs_to_a_loss():
    row = {"test_loss": [0.7], "train_loss": [0.5, 0.3, 0.2]}
    assert han_compare.epochs_to(row, 0.4) == (pytest.approx(1.0), True)
    assert han_compare.epochs_to(row, 0.6) == (pytest.approx(0.25), True)
    assert han_compare.epochs_to(row, 0.1) == (3.0, False)
    assert han_compare.epochs_to(row, 0.8) == (0.0, True)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """E2 from made-up records, in which Kaiming's loss is .02 lower and its accuracy .01 lower: (workdir, rows, losses by arm)."""
    workdir, rng, losses = tmp_path_factory.mktemp("e2"), np.random.default_rng(3), {}
    grid = call("grids/han_e2:seeds=4", "get_grid")
    home = workdir / "han_e2"
    home.mkdir()
    (home / "grid.json").write_text(json.dumps(grid.to_json()))
    for cell in grid.cells:
        kaiming = cell.labels["preset"].startswith("kaiming")
        last = 0.3 + rng.normal(0, 0.004) - 0.02 * kaiming
        losses.setdefault((cell.labels["target"], cell.labels["optimizer"], cell.labels["preset"]), []).append(last)
        accuracy = 0.8 + rng.normal(0, 1e-4) - 0.01 * kaiming
        record = {"test_loss": [0.75, 0.5, 0.4], "train_loss": [0.5, last], "train_accuracy": [0.7, 0.8]}
        record["test_accuracy"] = [0.5, 0.7, accuracy]
        gone = {"diverged_at": 3 if cell.name == "adam-quality-lecun_normal-seed0" else None, "loss": 0.4, "source": "made up"}
        append_result(home, {"cell": cell.name, "status": "done", "labels": dict(cell.labels), **record, **gone})
    (made,) = run.draw(list(catalog.load(["han-e2"]).values()), workdir, "cpu")
    assert made.error is None
    return workdir, made.rows, losses


def test_comparisons_of_a_figure(compared):
    workdir, rows, losses = compared
    of = {"target": "colour", "optimizer": "sgd", "first": "xavier_normal", "second": "kaiming_uniform"}
    (row,) = pick(rows, "difference", measure="final loss", **of)
    first, second = (losses["colour", "sgd", preset] for preset in ("xavier_normal", "kaiming_uniform"))
    expected = scipy.stats.ttest_rel(second, first)
    assert (row["value"], row["p"]) == pytest.approx((np.mean(second) - np.mean(first), expected.pvalue))
    tested = pick(rows, "difference")
    assert len(tested) == 2 * 2 * 4 * 6 and all(row["p"] is None or row["p_holm"] >= row["p"] for row in tested)
    (goal,) = pick(rows, "target loss", target="colour", optimizer="sgd")
    assert goal["value"] == pytest.approx(math.log(2) - 0.9 * (math.log(2) - np.mean(first)))
    (mean,) = pick(rows, "mean", measure="epochs to target", preset="kaiming_uniform", target="colour", optimizer="sgd")
    by_hand = [0.5 + (0.5 - goal["value"]) / (0.5 - last) for last in second]
    assert mean["value"] == pytest.approx(np.mean(by_hand)) and mean["missed"] == 0
    (spread,) = pick(rows, "log spread ratio", second="kaiming_uniform", target="colour", optimizer="sgd")
    assert spread["value"] == pytest.approx(math.log(np.std(second, ddof=1) / np.std(first, ddof=1)))
    assert spread["low"] < spread["value"] < spread["high"]
    caption = (workdir / "figures/han-e2/caption.txt").read_text("utf-8")
    assert "1 runs with numbers that are not finite are left out." in caption and "Of 72 comparisons" in caption


# ---- claims ----------------------------------------------------------------------------------------------------------------------------


def verdicts(rows):
    return {claim.id: judge(claim, rows)["verdict"] for claim in SECOND_CLAIMS}


def test_claims_of_closed_forms(sweep):
    found = {claim.id: judge(claim, sweep[1]) for claim in SECOND_CLAIMS}
    assert found["constants-relu"]["verdict"] == REPRODUCED
    assert found["constants-gelu"]["verdict"] == OPPOSITE and found["constants-gelu"]["value"] == pytest.approx(0.425221, abs=1e-6)


def test_claims_of_a_comparison(compared):
    found = verdicts(compared[1])
    for optimizer in ("sgd", "adam"):
        assert found[f"kaiming-loss-{optimizer}"] == found[f"kaiming-faster-{optimizer}"] == REPRODUCED
        assert found[f"kaiming-test-accuracy-{optimizer}"] == OPPOSITE
        assert found[f"kaiming-spread-{optimizer}"] == NOT_RESOLVED


def test_claims_of_a_sweep():
    """A sweep that does what the source says, and one that does not."""

    def rows(below, best, ends, shares):
        made = [
            {"quantity": "accuracy below best", "std": std, "value": value, "low": value - 1e-3, "high": value + 1e-3}
            for std, value in below.items()
        ]
        numbers = {"log10 best std": best, "log10 stable from": ends[0], "log10 stable to": ends[1]}
        made += [{"quantity": name, "value": value, "low": value - 0.1, "high": value + 0.1} for name, value in numbers.items()]
        for quantity, value in zip(("share", "share diverged"), shares, strict=True):
            made.append({"quantity": quantity, "band": "exploding", "value": value, "low": value, "high": value})
        return [{"figure": "han-e1", "optimizer": "sgd", "seeds": 3, **row} for row in made]

    names = [f"std-{name}-sgd" for name in ("stable-band", "best", "band-ends", "vanishing", "exploding")]
    good = verdicts(rows({1e-4: -0.8, 0.012: -0.01, 0.08: 0.0, 3.0: -0.8}, -1.3, (-2.1, -0.8), (1.0, 0.4)))
    assert [good[name] for name in names] == [REPRODUCED] * 5
    bad = verdicts(rows({1e-4: -0.01, 0.012: -0.3, 0.08: 0.0}, -0.8, (-1.3, -0.8), (0.2, 0.0)))
    assert [bad[name] for name in names] == [OPPOSITE] * 5
    assert verdicts([])["std-best-adam"] == "needs scale"
