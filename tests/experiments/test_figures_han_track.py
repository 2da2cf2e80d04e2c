"""E3 from written monitors whose curves are known: growth that falls with depth, one layer that does not settle; the grid that it reads."""

import json

import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.experiments.figures import han_track
from gammalm.experiments.figures.catalog import load
from gammalm.experiments.figures.run import draw
from gammalm.experiments.grid import load_grid
from gammalm.experiments.results import append_result, read_study

from .untrained import only, pick

STEPS, LAYERS = (0, 1, 10, 80, 90, 100), 4
GRID = "grids/han_e3:steps=100"


def std(step, layer, matrix):
    """Queries grow by 4, 3, 2, 1 times .1 a decade from .02 on; keys stay; the last layer's values still move in the last quarter."""
    if matrix == "q":
        return 0.02 * (1 + 0.1 * (LAYERS - layer) * np.log10(step + 1))
    return 0.02 * (1 + (step - 75) / 100) if matrix == "v" and layer == LAYERS - 1 and step > 75 else 0.02


def row(step):
    matrices = [
        {"path": f"layers/attn/{name}", "layer": layer, "expert": None, "std": std(step, layer, name),
         "sparsity": 0.08 + step / 1000, "kurtosis": 3.0}
        for name in ("k", "q", "v", "out") for layer in range(LAYERS)
    ]  # fmt: skip
    return {"kind": "weights", "step": step, "matrices": matrices}


@pytest.fixture
def workdir(tmp_path):
    home = tmp_path / "han_e3"
    grid = load_grid(GRID)
    for cell in [cell for cell in grid.cells if cell.labels["lr"] == 1e-4 and cell.labels["seed"] < 2]:
        folder = home / "cells" / cell.name
        folder.mkdir(parents=True)
        append_result(home, {"cell": cell.name, "status": "done", "labels": dict(cell.labels), "loss": 1.0, "parameters": 1, "tokens": 1})
        (folder / "config.json").write_text(json.dumps({"optimizer": {"learning_rate": 1e-4}}))
        (folder / "monitors.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in reversed(STEPS)))
    (home / "grid.json").write_text(json.dumps(grid.to_json()))
    return tmp_path


def test_the_measures_of_known_curves(workdir):
    drawing = han_track.FIGURES["han-e3"].draw(read_study(workdir / "han_e3"), "cpu")
    q, k, v = ({"arm": "source", "lr": 1e-4, "matrix": name} for name in "qkv")
    growth = [only(drawing.rows, "growth", **q, layer=layer)["value"] for layer in range(LAYERS)]
    assert growth == pytest.approx([std(100, layer, "q") / 0.02 for layer in range(LAYERS)])
    assert only(drawing.rows, "early growth", **q, layer=0)["value"] == pytest.approx(std(10, 0, "q") / 0.02)
    assert only(drawing.rows, "depth correlation", **q, at="early")["value"] == pytest.approx(-1)
    assert np.isnan(only(drawing.rows, "depth correlation", **k, at="end")["value"])  # all grow alike
    assert only(drawing.rows, "settled", **q)["value"] == 1.0  # a hundred steps later a decade has moved little
    assert only(drawing.rows, "settled", **v)["value"] == 0.75
    assert only(drawing.rows, "band low", **v, layer=3)["value"] == pytest.approx(std(80, 3, "v"))
    assert only(drawing.rows, "spread", **q, at="start")["value"] == 0
    end = np.array([std(100, layer, "q") for layer in range(LAYERS)])
    assert only(drawing.rows, "spread", **q, at="end")["value"] == pytest.approx((end.max() - end.min()) / end.mean())
    assert only(drawing.rows, "near zero change", **q)["value"] == pytest.approx(0.1)
    assert [r["x"] for r in pick(drawing.rows, "std", **q, layer=2)] == list(STEPS)
    assert only(drawing.rows, "settled", **v)["seeds"] == 2
    assert len(drawing.notes) == 2 and "V std × 1 to 1.25" in drawing.notes[0] and "75% of the layers settled" in drawing.notes[0]


def test_it_is_drawn_from_its_own_folder(workdir):
    (made,) = draw([load(["han-e3"])["han-e3"]], workdir, "cpu")
    assert made.error is None
    assert {path.name for path in made.folder.iterdir()} == {"han-e3.png", "han-e3.svg", "numbers.jsonl", "caption.txt"}
    assert "Partial: 8 of 12 cells" in (made.folder / "caption.txt").read_text(encoding="utf-8")


def test_nothing_measured(workdir):
    for file in workdir.glob("han_e3/cells/*/monitors.jsonl"):
        file.unlink()
    with pytest.raises(ConfigError, match="no run that measured"):
        han_track.FIGURES["han-e3"].draw(read_study(workdir / "han_e3"), "cpu")


def test_the_grid_trains_what_the_source_says():
    for scale, width, count in (("cpu", 48, 12), ("paper", 768, 2)):
        configs = {cell.name: cell.config() for cell in load_grid(f"grids/han_e3:scale={scale}").cells}
        assert len(configs) == count
        for name, c in configs.items():
            m = c.model
            assert (m.n_layers, m.d_model, m.d_ff, m.norm, m.positions, m.activation, m.gate) == (
                12, width, 4 * width, "layer", "learned", "gelu_tanh", "none"
            )  # fmt: skip
            assert c.batch.sequences == 16 and c.monitor.kinds == ("weights",)
            assert c.init.preset == ("fixed_std" if "-source-" in name else "fan_in")
    with pytest.raises(ConfigError, match="scale='gpu' is none of cpu, paper"):
        load_grid("grids/han_e3:scale=gpu")
