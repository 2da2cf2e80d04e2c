"""Figures of the paper from grids: which cells they read, their numbers against sums known exactly, and what happens to parts of a grid."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import scipy.stats

from gammalm.cli.main import main
from gammalm.config import call, to_json
from gammalm.errors import ConfigError
from gammalm.experiments import runner
from gammalm.experiments.figures import catalog, losses, run
from gammalm.experiments.grid import ARMS, Grid, arms, chain, load_grid, product, values
from gammalm.experiments.tables import TABLES
from gammalm.sharding import processes
from gammalm.training.loop import Outcome
from tests.experiments.study import Page, write_study

OURS = catalog.FAMILIES["curves"] + catalog.FAMILIES["losses"]
SIZES = {"nano": 104_688, "nano-96": 319_968, "nano-192": 1_082_304, "tiny-moe": 310_000, "mini-moe": 1_100_000}
# The grid of the figures with three sizes, two seeds and three γ's.
GRID = """
'''A small grid of the figures.'''
from gammalm.experiments.grid import ARMS, Grid, arms, chain, product, values

def get_grid(arg):
    def runs(size, of, gammas, *more):
        return product(arms("size", **{size: {"size": size}}), arms(**of), values("gamma", gammas), *more, values("seed", range(2)))

    cells = [runs("nano", ARMS, [0.5, 0.75, 1.0])] + [runs(size, ARMS, [0.5, 1.0]) for size in ("nano-96", "nano-192")]
    cells += [runs("nano-192", {"eps": {"eps": 1e-12, "gate": "none"}}, [0.5, 1.0])]
    cells += [runs(size, ARMS, [0.5, 1.0]) for size in ("tiny-moe", "mini-moe")]
    cells += [runs("nano", ARMS, [0.5, 1.0], values("lr", [0.003, 0.03]))]
    return Grid("figures", "lm:steps=120,batch=4,seq_len=32,vocab=1024", chain(*cells))
"""
EPS, GATE = -0.03, -0.05  # of both, at γ = 1; a tenth of it at γ = .5


def loss_of(labels, noise=0.0):
    """Additive and exact: a law in size, a gap by arm, an effect of ε and gate, a bowl in γ, a rate's penalty, a seed's part."""
    size, arm, gamma, seed = (labels[key] for key in ("size", "arm", "gamma", "seed"))
    share = 1.0 if gamma == 1.0 else 0.1
    arm_effect = share * {"plain": 0.0, "eps": EPS, "adjusted": EPS + GATE}[arm]
    rate = 0.0 if "lr" not in labels else {0.003: 0.2, 0.03: -0.04 if gamma == 0.5 else 0.1}[labels["lr"]]
    return 2.0 + 40 * SIZES[size] ** -0.3 + 0.3 * (gamma - 0.8) ** 2 + arm_effect + rate + 0.01 * seed * (1 + gamma) + noise


def study_in(folder, **how):
    (folder / "small_figures.py").write_text(GRID)
    spec = str(folder / "small_figures.py")
    return write_study(folder / "w", spec, noise=0.0, loss_of=loss_of, parameters=SIZES, **how)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(losses, "fit_scaling", functools.partial(losses.fit_scaling, resamples=5))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A complete study, drawn: its folder and the rows by figure."""
    folder = tmp_path_factory.mktemp("figures")
    study_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "fit_scaling", functools.partial(losses.fit_scaling, resamples=5))
        made = run.draw(list(catalog.load(OURS).values()), folder / "w", "cpu")
    assert [one.error for one in made] == [None] * len(OURS)
    return folder / "w", {one.id: one.rows for one in made}


def pick(rows, quantity, **labels):
    return [row for row in rows if row["quantity"] == quantity and labels.items() <= row.items()]


def only(rows, quantity, **labels):
    (row,) = pick(rows, quantity, **labels)
    return row


# ---- which cells ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", catalog.TRAINED)
def test_every_cell_is_read_and_every_figure_has_cells(scale):
    grid = call(f"grids/figures:scale={scale}", "get_grid")
    reads = {id_: {cell.name for cell in figure.reads(grid)} for id_, figure in catalog.load(OURS).items()}
    assert all(reads.values()) and set.union(*reads.values()) == {cell.name for cell in grid.cells}
    size, smallest = catalog.largest(grid), catalog.dense_sizes(grid)[0]
    seeds = {cell.labels["seed"] for cell in grid.cells if cell.labels["size"] == size}
    assert reads["fig1d"] == {f"{size}-{arm}-gamma1-seed{seed}" for arm in ("plain", "eps") for seed in seeds}
    assert {name.partition("-gamma")[2].partition("-")[0] for name in reads["fig3b"]} == {"0.5", "0.75", "1", "1.25", "1.5"}
    assert all(name.startswith(smallest + "-") and "-lr" not in name for name in reads["fig3b"])
    assert any("-lr" in name for name in reads["fig1b"]) and not reads["fig2b"] & reads["fig2c"]
    monitored = [cell for cell in grid.cells if "monitor.kinds" in cell.overrides]
    assert [cell.name for cell in monitored] == [f"{size}-adjusted-gamma{gamma}-seed{n}" for gamma in ("0.5", "1") for n in sorted(seeds)]
    for cell in [*monitored, *{cell.labels["size"]: cell for cell in grid.cells}.values()]:
        assert len(cell.config().monitor.kinds) == 5 * (cell in monitored)


def test_the_catalog_is_of_one_mind():
    figures = catalog.load(OURS)
    assert list(figures) == sorted(OURS) and all(id_ == figure.id for id_, figure in figures.items())
    assert not set(catalog.IDS) & set(TABLES) and len(set(catalog.IDS)) == len(catalog.IDS)
    with pytest.raises(ConfigError, match="did you mean fig1a"):
        catalog.load(["fig1aa"])
    with pytest.raises(ConfigError, match="fig3b has no scale init"):
        run.choose("fig3b", "init")
    with pytest.raises(ConfigError, match="none of init, cpu, gpu, paper"):
        run.choose("fig3b", "cup")
    assert run.choose("fig3b", None)[1] == "cpu"


# ---- numbers -------------------------------------------------------------------------------------------------------------------------


def test_gaps_and_ablations_against_the_sums(drawn):
    """Second − first, paired by seed, with the interval that SciPy's paired t-test gives."""
    rows = drawn[1]
    at = {(arm, g): np.array([loss_of({"size": "nano", "arm": arm, "gamma": g, "seed": s}) for s in range(2)])
          for arm in ("plain", "adjusted") for g in (0.5, 1.0)}  # fmt: skip
    gap = {arm: at[arm, 1.0] - at[arm, 0.5] for arm in ("plain", "adjusted")}
    for id_, arm in (("fig1b", "plain"), ("fig2a", "plain"), ("fig2a", "adjusted"), ("fig1a", "plain")):
        row = only(rows[id_], "gap", size="nano", arm=arm, rate="fixed")
        low, high = scipy.stats.ttest_1samp(gap[arm], 0).confidence_interval()
        assert (row["value"], row["low"], row["high"]) == pytest.approx((np.mean(gap[arm]), low, high))
        assert (row["seeds"], row["parameters"], row["scale"], row["figure"]) == (2, SIZES["nano"], "cpu", id_)
    assert len(pick(rows["fig1b"], "gap", rate="fixed")) == 3
    tuned = only(rows["fig1b"], "gap", rate="tuned")  # γ = .5 is best at .03, where its loss is .04 lower; γ = 1 at its own rate
    assert tuned["size"] == "nano" and tuned["value"] == pytest.approx(np.mean(gap["plain"]) + 0.04)
    contrast = only(rows["fig2a"], "gap contrast", size="nano", rate="fixed")
    assert contrast["value"] == pytest.approx(0.9 * (EPS + GATE)) and contrast["low"] == pytest.approx(contrast["high"])
    assert only(rows["fig1d"], "eps effect")["value"] == pytest.approx(EPS)
    assert only(rows["fig1e"], "eps effect")["value"] == pytest.approx(0.1 * EPS)
    assert [row["value"] for row in pick(rows["fig1h"], "gate effect")] == pytest.approx([0.1 * GATE, GATE])
    assert only(rows["fig1h"], "gate contrast")["value"] == pytest.approx(0.9 * GATE)
    assert only(rows["fig2b"], "gap contrast")["value"] == pytest.approx(0.9 * (EPS + GATE))
    apart = [loss_of({"size": "nano", "arm": "plain", "gamma": g, "seed": s}) for s in range(2) for g in (1.0, 0.5)]
    expected = (apart[1] + apart[3] - apart[0] - apart[2]) / 2
    assert only(rows["fig3b"], "difference from 1", arm="plain", gamma=0.5)["value"] == pytest.approx(expected)
    assert only(rows["fig1h"], "gate contrast")["value"] == pytest.approx(0.9 * GATE)
    assert only(rows["fig2a"], "adjustment effect", size="nano-192", gamma=1.0)["value"] == pytest.approx(EPS + GATE)
    mixtures = [only(rows[id_], "gap", arm="adjusted") for id_ in ("fig2b", "fig2c")]
    assert [row["size"] for row in mixtures] == ["tiny-moe", "mini-moe"]
    assert mixtures[0]["value"] == pytest.approx(np.mean(gap["adjusted"]))
    assert only(rows["fig2c"], "gap contrast")["value"] == pytest.approx(0.9 * (EPS + GATE))


def test_curves_are_means_over_seeds(drawn):
    """The training losses of the two seeds, averaged and smoothed by hand."""
    workdir, rows = drawn
    logged = []
    for seed in range(2):
        lines = (workdir / f"cells/nano-plain-gamma1-seed{seed}/metrics.jsonl").read_text().splitlines()
        logged.append([row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"])
    mean, keep = np.mean(logged, 0), 1 - 1 / (0.03 * len(logged[0]))
    weights = keep ** np.arange(len(mean))
    expected = sum(weights[::-1] * mean) / sum(weights)
    found = pick(rows["fig1a"], "train loss", size="nano", gamma=1.0)
    assert found[-1]["value"] == pytest.approx(expected) and found[-1]["x"] == 120 * 4 * 32
    assert [row["x"] for row in found] == sorted({row["x"] for row in found})


def test_the_minimum_in_gamma(drawn):
    """.3 (γ − .8)² and, adjusted, a step between γ = .75 and 1: the parabola through the three γ's, by NumPy."""
    for arm in ("plain", "adjusted"):
        row = only(drawn[1]["fig3b"], "best gamma", arm=arm)
        mean = [np.mean([loss_of({"size": "nano", "arm": arm, "gamma": g, "seed": s}) for s in range(2)]) for g in (0.5, 0.75, 1.0)]
        a, b, _ = np.polyfit([0.5, 0.75, 1.0], mean, 2)
        inside = mean[1] == min(mean)
        assert row["value"] == pytest.approx(-b / (2 * a) if inside else 1.0)
        assert row["low"] <= row["value"] <= row["high"]
    assert "lowest mean is at the highest γ" in (drawn[0] / "figures/fig3b/caption.txt").read_text()  # of the adjusted arm


def test_scaling_rows(drawn):
    """Both γ's have one law up to a constant, so the interpolated gains have the sign of the gap and no figure is infinite."""
    rows = drawn[1]["fig2a"]
    gains = pick(rows, "effective size gain", arm="adjusted", by="interpolation")
    assert len(gains) == 3 and all(row["value"] > 0 for row in gains)
    assert {row["quantity"] for row in rows if row.get("by") != "interpolation"} >= {"law E", "law alpha", "effective size gain"}
    assert all(value is None or math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


# ---- files, page, parts ----------------------------------------------------------------------------------------------------------------


def test_files_and_page(drawn):
    workdir, rows = drawn
    for id_ in OURS:
        folder = workdir / "figures" / id_
        assert {path.name for path in folder.iterdir()} == {f"{id_}.png", f"{id_}.svg", "numbers.jsonl", "caption.txt"}
        assert [json.loads(line) for line in (folder / "numbers.jsonl").read_text().splitlines()] == rows[id_]
        assert "Scale cpu: " in (caption := (folder / "caption.txt").read_text()) and "2 seeds" in caption and "15.4k tokens" in caption
        assert (folder / f"{id_}.svg").read_text().startswith("<svg") and (folder / f"{id_}.png").read_bytes()[1:4] == b"PNG"
    page = Page((workdir / "figures/index.html").read_text("utf-8"))
    assert {"viewport"} <= {attrs.get("name") for tag, attrs in page.tags if tag == "meta"}
    assert set(OURS) <= set(page.ids()) and len(page.ids()) == len(set(page.ids()))
    links = [attrs[key] for _, attrs in page.tags for key in ("href", "src", "xlink:href") if key in attrs]
    assert links and all(link.startswith("#") or (workdir / "figures" / link).exists() for link in links)


def test_parts_of_a_grid(tmp_path, capsys, monkeypatch):
    """Failed and unfinished cells are said; a figure without any is reported, and the others are drawn."""
    load = catalog.load
    monkeypatch.setattr(catalog, "load", lambda ids=("fig1a", "fig1b", "fig2b", "fig2c", "fig3b"): load(ids))  # "all" is these
    (tmp_path / "small_figures.py").write_text(GRID)
    grid = load_grid(str(tmp_path / "small_figures.py"))
    skip = [c.name for c in grid.cells if c.labels["size"] in ("nano-96", "tiny-moe", "nano-192") and c.labels["arm"] != "eps"]
    study_in(tmp_path, skip=skip, fail=["nano-plain-gamma1-seed1"], curves=False)
    assert main(["figure", "all", "--no-training", "--workdir", str(tmp_path / "w"), "--json"]) == 1
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert {row["figure"] for row in rows} >= {"fig1a", "fig1b", "fig2c", "fig3b"} and "fig2b" not in {row["figure"] for row in rows}
    assert "fig2b could not be drawn: " in printed.err and "none of the 8 cells" in printed.err
    assert only([row for row in rows if row["figure"] == "fig1b"], "gap", rate="fixed")["seeds"] == 1
    caption = (tmp_path / "w/figures/fig1b/caption.txt").read_text()
    assert "9 of 20 cells" in caption and "1 failed, the first nano-plain-gamma1-seed1: TrainingError" in caption
    assert "nano-96: nothing has finished." in (tmp_path / "w/figures/fig1a/caption.txt").read_text()
    page = Page((tmp_path / "w/figures/index.html").read_text("utf-8"))
    assert "fig1a" in page.ids() and "fig2b" not in page.ids()


def test_a_fault_in_one_figure_leaves_the_others(drawn):
    figures = list(catalog.load(["fig1b", "fig3b"]).values())
    broken = dataclasses.replace(figures[0], draw=lambda study, scale: 1 / 0)
    first, second = run.draw([broken, figures[1]], drawn[0], "cpu")
    assert first.error == "ZeroDivisionError: division by zero" and second.error is None and second.rows


# ---- training ------------------------------------------------------------------------------------------------------------------------


def tiny_grid():
    """One size in three arms, two seeds."""
    of, seeds = arms("size", tiny={"size": "tiny"}), values("seed", range(2))
    every = product(of, arms(**ARMS), values("gamma", [0.5, 1.0]), seeds)
    return Grid("figures", "lm:steps=4", chain(every, product(of, arms(eps={"eps": 1e-12, "gate": "none"}), values("gamma", [1.0]), seeds)))


@pytest.fixture
def taken(monkeypatch):
    """Names of the cells that are trained, in turn; training is replaced by a loss that is known."""
    names = []

    def train(runs, *args, **how):
        names.extend(one.name for one in runs)
        if len(names) == 3:
            raise KeyboardInterrupt
        for one in runs:
            one.workdir.mkdir(parents=True, exist_ok=True)
            to_json(one.config, one.workdir / "config.json")
        return [Outcome(4, 1024, 1.0, validation={"loss": 3.0 + one.config.seed - 1e10 * one.config.model.norm_eps}) for one in runs]

    monkeypatch.setattr(runner, "train", train)
    return names


def test_stopped_resumed_and_shared(taken, tmp_path):
    """A kill at the third cell; what is done is not trained again, neither for this figure nor for others; grid.json is of all cells."""
    grid, figures = tiny_grid(), catalog.load(["fig1d", "fig1a", "fig3b"])
    with pytest.raises(KeyboardInterrupt):
        run.train([figures["fig1d"]], grid, tmp_path, mode="single")
    assert json.loads((tmp_path / "grid.json").read_text()) == json.loads(json.dumps(grid.to_json()))
    rows = run.train([figures["fig1d"]], grid, tmp_path, mode="single")
    names = [f"tiny-{arm}-gamma1-seed{seed}" for arm in ("plain", "eps") for seed in range(2)]
    assert [row["cell"] for row in rows] == names and taken == [*names[:3], *names[2:]]
    run.train(list(figures.values()), grid, tmp_path, mode="single")
    assert sorted(taken) == sorted([cell.name for cell in grid.cells] + [names[2]])
    assert json.loads((tmp_path / "grid.json").read_text()) == json.loads(json.dumps(grid.to_json()))
    (made,) = run.draw([figures["fig1d"]], tmp_path, "cpu")
    assert made.error is None and only(made.rows, "eps effect")["value"] == pytest.approx(1e10 * (1e-5 - 1e-12))


# ---- command line ----------------------------------------------------------------------------------------------------------------------


def test_command_line(drawn, capsys):
    workdir, rows = drawn
    assert main(["figure", "fig3b", "--scale", "cpu", "--no-training", "--workdir", str(workdir), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows["fig3b"]
    assert main(["figure", "fig3bb"]) == 2
    assert "did you mean fig3b?" in capsys.readouterr().err
    assert main(["figure", "fig1a", "--scale", "init"]) == 2
    assert main(["figure", "table2", "--config.seed=1"]) == 2
    assert main(["figure", "fig1a", "--no-training", "--workdir", str(workdir / "nothing")]) == 2
    capsys.readouterr()
    assert main(["figure", "fig1a", "--no-training", "--scale", "paper", "--workdir", str(workdir)]) == 2, "the caption would say paper"
    assert "Give --scale cpu." in capsys.readouterr().err
    assert main(["figure", "fig1a", "--no-training", "--workdir", str(workdir), "--config.seed=1"]) == 2
    assert "reach nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["figure", "--help"])
    printed = capsys.readouterr().out
    assert all(id_ in printed for id_ in (*catalog.IDS, *TABLES))


def test_several_processes_train_and_one_draws(monkeypatch, tmp_path, capsys):
    """Reading a checkpoint back takes all processes or one that is alone, so the first of several must not try."""
    monkeypatch.setattr(runner, "run_grid", lambda grid, workdir, **how: [{"status": "done"}])
    monkeypatch.setattr(run, "draw", lambda *args: pytest.fail("drawn by one of several"))
    monkeypatch.setattr(processes, "count", lambda: 2)
    assert main(["figure", "fig1d", "--workdir", str(tmp_path / "w")]) == 0
    assert f"gammalm figure fig1d --scale cpu --workdir {tmp_path / 'w'} --no-training" in capsys.readouterr().err


def test_overrides_reach_the_cells(monkeypatch, tmp_path):
    seen = {}

    def run_grid(grid, workdir, *, only, **how):
        seen["grid"] = grid
        return [{"cell": cell.name, "status": "failed"} for cell in grid.cells if only(cell)]

    monkeypatch.setattr(runner, "run_grid", run_grid)
    argv = ["figure", "fig1d", "--scale", "paper", "--workdir", str(tmp_path / "w"), "--grid-args", "data=data/mine"]
    assert main([*argv, "--config.optimizer.clip=0.5"]) == 2, "nothing was trained, so there is no grid to read"
    config = seen["grid"].cells[0].config()
    assert config.data.path == "data/mine" and config.optimizer.clip == 0.5
