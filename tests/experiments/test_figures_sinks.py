"""Figures of sinks over models that were never trained: what is plotted, and in which order differences are taken."""

import shutil

import jax.numpy as jnp
import pytest

from gammalm.analysis.sink import sink_scores
from gammalm.errors import ConfigError
from gammalm.experiments.figures import sinks
from gammalm.experiments.figures.catalog import load
from gammalm.experiments.figures.sinks import BATCHES, SEQUENCES
from gammalm.training.load import load_model, validation_batches, validation_split

from .untrained import only, pick, write_untrained

DEFINITIONS = ("later", "alpha", "sinks", "last")


def even_at_half(labels, params):
    """γ = .5 attends evenly in every layer: its queries are zero."""
    if labels["gamma"] == 1:
        return params
    layers = params["layers"]
    return params | {"layers": layers | {"attn": layers["attn"] | {"q": jnp.zeros_like(layers["attn"]["q"])}}}


@pytest.fixture(scope="module")
def study(tmp_path_factory, corpus):
    return write_untrained(tmp_path_factory.mktemp("sinks") / "w", corpus[0], even_at_half, names=("plain",), init__group_gammas=(0.5,) * 4,
                           init__preset="groups")  # fmt: skip


def test_scores_by_layer_and_their_difference(study):
    drawing = load(["fig1f"])["fig1f"].draw(study, "cpu")
    for name in ("later", "alpha", "last"):
        floor = only(drawing.rows, "uniform sink score", definition=name)["value"]
        for layer in (0, 1, "mean"):
            assert only(drawing.rows, "sink score", gamma=0.5, definition=name, layer=layer)["value"] == pytest.approx(floor, rel=1e-4)
    measured = {}
    for run in study.runs:
        loaded = load_model(run.folder)
        batches = validation_batches(validation_split(loaded, SEQUENCES), BATCHES)
        found = sink_scores(loaded.model, loaded.params, loaded.buffers, batches).by_layer()["later"]
        measured[run.gamma, run.seed] = [*found, found.mean()]
    for i, layer in enumerate((0, 1, "mean")):
        row = only(drawing.rows, "sink score", gamma=1.0, definition="later", layer=layer)
        assert row["value"] == pytest.approx((measured[1.0, 0][i] + measured[1.0, 1][i]) / 2, rel=1e-5) and row["seeds"] == 2
        assert row["low"] < row["value"] < row["high"]
        apart = [measured[1.0, seed][i] - measured[0.5, seed][i] for seed in (0, 1)]
        row = only(drawing.rows, "sink difference", layer=layer)
        assert row["value"] == pytest.approx(sum(apart) / 2, rel=1e-4) and abs(row["value"]) > 1e-4
    assert {row["definition"] for row in pick(drawing.rows, "other sink difference")} == set(DEFINITIONS) - {"later"}
    assert "first token of its sequence" in drawing.caption and not drawing.notes


def test_the_panel_with_the_highest_score_sets_the_axis(study):
    def panels(sides):
        high, low = sides["plain", 1.0], sides["plain", 0.5]
        for of in (of for found in high.seeds.values() for of in found.values()):
            of.update({layer: 5 * score for layer, score in of.items()})
        looks = {name: {"color": "red", "marker": "o", "label": name} for name in ("high", "low")}
        return [(name, [(side, looks[name])] * 2, {}) for name, side in (("high", high), ("low", low))]

    drawing = sinks._draw("fig1g", "two panels", study, "cpu", ["plain"], panels)
    tops = [axes.get_ylim()[1] for axes in drawing.figure.axes]
    assert tops[0] == tops[1] > max(row["value"] for row in pick(drawing.rows, "sink score", definition="later"))
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == ["high", "even weights", "low"]


def test_a_damaged_run_is_left_out_and_named(study, tmp_path):
    shutil.copytree(study.workdir, tmp_path / "w")
    from gammalm.experiments.results import read_study

    copied = read_study(tmp_path / "w")
    shutil.rmtree(copied.runs[0].folder / "imported")
    drawing = load(["fig1f"])["fig1f"].draw(copied, "cpu")
    assert copied.runs[0].cell.name in drawing.notes[0]
    assert only(drawing.rows, "sink score", gamma=0.5, definition="later", layer=0)["seeds"] == 1
    with pytest.raises(ConfigError, match="none of the 0 cells"):
        load(["fig1g"])["fig1g"].draw(copied, "cpu")
