"""Figures of condensation from written monitors: curves with a known minimum, heat maps of known blocks."""

import json

import numpy as np
import pytest

from gammalm.analysis.condensation import RowCosines
from gammalm.errors import ConfigError
from gammalm.experiments.figures import condense
from gammalm.experiments.figures.catalog import load
from gammalm.experiments.grid import Grid, arms, fixed, product, values
from gammalm.experiments.monitors import write_maps
from gammalm.experiments.results import append_result, read_study

from .untrained import only, pick

STEPS = (0, 1, 2, 4, 8, 16)
PATHS = ("embed/table", "layers/attn/q", "layers/attn/out", "layers/ffn/up")


def rank(step, layer, gamma):
    """Lowest after step 4 at γ = 1, a slow decline at γ = .5."""
    return 20 + (layer or 0) - (np.log2(step + 1) if gamma == 0.5 else 10 - 2 * abs(np.log2(step + 1) - np.log2(5)))


@pytest.fixture
def study(tmp_path):
    cells = product(
        arms("size", nano={"size": "nano"}), arms(adjusted={"eps": 1e-12, "gate": "elementwise"}), values("gamma", [0.5, 1.0]),
        values("seed", range(2)),
    )  # fmt: skip
    measured = fixed({"monitor.kinds": ("condensation",)})
    grid = Grid("figures", "lm:steps=16", [product([c], measured)[0] if c.labels["seed"] == 0 else c for c in cells])
    (tmp_path / "grid.json").write_text(json.dumps(grid.to_json()))
    for cell in grid.cells:
        folder = tmp_path / "cells" / cell.name
        folder.mkdir(parents=True)
        result = {"cell": cell.name, "status": "failed" if cell.labels["gamma"] == 0.5 else "done", "labels": dict(cell.labels)}
        append_result(tmp_path, {**result, "loss": 1.0, "parameters": 10, "tokens": 20})
        (folder / "config.json").write_text(json.dumps({"optimizer": {"learning_rate": 0.01}}))
        if cell.labels["seed"]:
            continue
        lines = [json.dumps(row(step, cell.labels["gamma"])) + "\n" for step in (*STEPS, 16)]  # a step that was taken twice
        (folder / "monitors.jsonl").write_text("".join(lines))
        for step in STEPS:
            write_maps(folder / "monitors", step, {(f"layers/{name}", 0): blocks(step) for name in condense.SHOWN})
    return read_study(tmp_path)


def row(step, gamma):
    matrices = [
        {"path": path, "layer": layer, "expert": expert,
         "stable_rank": rank(step, layer, gamma) + (expert or 0), "stable_rank_random": 19.5,
         "mean_abs_cosine": None if expert else 0.1 + step / 100, "mean_abs_cosine_random": 0.08}
        for path in PATHS
        for layer in ([None] if path == "embed/table" else [0, 1])
        for expert in ([0, 1, 2] if path == "layers/ffn/up" else [None])
    ]  # fmt: skip
    return {"kind": "condensation", "step": step, "matrices": matrices}


def blocks(step):
    """Two directions, taken in turn by the rows, after step 4; before it independent rows."""
    alike = np.equal.outer(np.arange(12) % 2, np.arange(12) % 2).astype(np.float32)
    return RowCosines(alike if step >= 4 else np.eye(12, dtype=np.float32), np.arange(12), 12, 0)


def test_which_cells_are_read(study):
    for id_, gammas in (("fig4d", {1.0}), ("fig4g", {0.5}), ("fig7", {0.5, 1.0})):
        cells = load([id_])[id_].reads(study.grid)
        assert {cell.labels["gamma"] for cell in cells} == gammas and {cell.labels["seed"] for cell in cells} == {0}


def test_rank_rows_and_their_summary(study):
    drawing = load(["fig5"])["fig5"].draw(study, "cpu")
    assert {r["matrix"] for r in drawing.rows} == {"attn/q"}
    assert [r["value"] for r in pick(drawing.rows, "stable rank", gamma=1.0, layer=1)] == pytest.approx([rank(s, 1, 1.0) for s in STEPS])
    assert [r["x"] for r in pick(drawing.rows, "stable rank", gamma=1.0, layer=1)] == list(STEPS)
    found = {q: only(drawing.rows, q, gamma=1.0, layer="mean")["value"] for q in ("initial stable rank", "lowest stable rank",
             "final stable rank", "step of lowest stable rank")}  # fmt: skip
    means = [rank(step, 0.5, 1.0) for step in STEPS]
    assert found["step of lowest stable rank"] == 4
    assert [found["initial stable rank"], found["lowest stable rank"], found["final stable rank"]] == pytest.approx(
        [means[0], min(means), means[-1]]
    )
    assert only(drawing.rows, "step of lowest stable rank", gamma=0.5)["value"] == 16
    assert only(drawing.rows, "random stable rank")["value"] == 19.5
    assert any("nano-adjusted-gamma0.5-seed0 is failed" in note for note in drawing.notes)


def test_groups_and_experts(study):
    drawing = load(["fig7"])["fig7"].draw(study, "cpu")
    value = only(drawing.rows, "stable rank", matrix="ffn/up", gamma=1.0, layer=0, x=0)["value"]
    assert value == pytest.approx(rank(0, 0, 1.0) + 1)  # mean over three experts
    assert {r["matrix"] for r in load(["fig8"])["fig8"].draw(study, "cpu").rows} == {"embed/table"}
    assert {r["matrix"] for r in load(["fig6"])["fig6"].draw(study, "cpu").rows} == {"attn/out"}


def test_heat_maps(study):
    run = next(run for run in study.runs if run.gamma == 1.0 and run.seed == 0)
    assert condense.snapshots_of(run) == [0, 1, 2, 8, 16]
    maps, notes = condense.maps_of(run, [0, 8])
    assert not notes and np.array_equal(maps["attn/q", 0], np.eye(12))
    half = np.ones((6, 6))
    assert np.array_equal(maps["ffn/up", 8], np.block([[half, 0 * half], [0 * half, half]]))  # clusters one after another
    drawing = load(["fig4d"])["fig4d"].draw(study, "cpu")
    assert only(drawing.rows, "row cosine", matrix="attn/q", layer=0, x=8)["value"] == pytest.approx(0.18)
    assert not pick(drawing.rows, "row cosine", gamma=0.5)
    shown = [axes.images[0].get_array() for axes in drawing.figure.axes if axes.images]
    assert len(shown) == 10 and np.array_equal(shown[-1], maps["ffn/up", 8])


def test_a_lost_snapshot_is_said_and_no_monitor_is_an_error(study):
    run = next(run for run in study.runs if run.gamma == 1.0 and run.seed == 0)
    (run.folder / "monitors/16.npz").write_bytes(b"torn")
    drawing = load(["fig4d"])["fig4d"].draw(study, "cpu")
    assert any("16.npz" in note for note in drawing.notes)
    (run.folder / "monitors.jsonl").unlink()
    with pytest.raises(ConfigError, match="no run has measured"):
        load(["fig4d"])["fig4d"].draw(read_study(study.workdir), "cpu")
