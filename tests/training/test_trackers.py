"""The tracker: numbers and config reach it, a run that goes on continues the same one, process 0 alone tells, refusals are plain.

The runs made here are stand-ins with the calls that are used; the real wandb runs where it is installed.
"""

import json
import sys
import types

import pytest

from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.experiments.grid import load_grid
from gammalm.experiments.runner import run_grid
from gammalm.training import trackers, workdir
from gammalm.training.workdir import Metrics, prepare


class Run:
    """What it was made with, and what it was told."""

    def __init__(self, **how):
        self.how, self.told, self.axes, self.ended = how, [], [], False

    def log(self, row):
        self.told.append(row)

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def finish(self, exit_code=None):
        self.ended, self.status = True, exit_code


@pytest.fixture
def made(monkeypatch):
    """A stand-in for wandb; gives the runs that were made."""
    runs = []

    def init(**how):
        runs.append(Run(**how))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=lambda **how: how))
    return runs


WANDB = load_config("lm:size=tiny", [("train.tracker", "wandb")])


def test_a_run_that_goes_on_continues_the_same_one(made, tmp_path):
    for step in (0, 4):
        metrics = Metrics(tmp_path, step, WANDB)
        metrics.write("train", step + 1, {"loss": 2.5 + step, "load_max": [1.0, 2.0], "note": "text"})
        metrics.show(step + 1, {"sink/rate": 0.5})
        metrics.close(failed=step == 4)
    first, second = made
    numbers = {"train/loss": 2.5, "train/load_max/0": 1.0, "train/load_max/1": 2.0}
    assert first.told == [{"step": 1, **numbers}, {"step": 1, "sink/rate": 0.5}]
    assert second.told[0] == {"step": 5, **numbers, "train/loss": 6.5}
    assert first.how["id"] == second.how["id"] == json.loads((tmp_path / "tracker.json").read_text())["wandb"]
    assert second.how["resume"] == "allow" and second.how["reinit"] == "create_new" and ("*", "step") in second.axes
    assert first.how["config"]["init"]["gamma"] == 1.0 and first.ended and second.ended
    assert (first.status, second.status) == (0, 1)


def test_only_the_first_process_tells(made, tmp_path, monkeypatch):
    monkeypatch.setattr(workdir.processes, "leads", lambda: False)
    metrics = Metrics(tmp_path, 0, WANDB)
    metrics.write("train", 1, {"loss": 1.0})
    metrics.close()
    assert made == [] and list(tmp_path.iterdir()) == []


def test_cells_of_a_grid_go_by_their_names(made, tmp_path):
    cell = tmp_path / "study" / "cells" / "gamma1"
    cell.mkdir(parents=True)
    trackers.open_tracker("wandb", cell, WANDB)
    assert (made[0].how["name"], made[0].how["group"]) == ("gamma1", "study")


def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what importing then raises is an ImportError
    with pytest.raises(ConfigError, match=r"needs the package wandb .*pip install 'gammalm\[wandb\]'"):
        prepare(tmp_path / "run", WANDB, {})
    assert not (tmp_path / "run").exists()


def test_a_grid_is_refused_before_it_is_recorded(tmp_path, monkeypatch):
    """Else the same grid without the tracker would be another one in the same folder."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs the package wandb"):
        run_grid(load_grid("grids/quickstart", [("train.tracker", "wandb")]), tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_a_tracker_that_does_not_start_is_a_plain_refusal(tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse, Settings=dict))
    with pytest.raises(ConfigError, match="does not start .*api_key not configured.*WANDB_MODE=offline"):
        trackers.open_tracker("wandb", tmp_path, WANDB)
    assert not (tmp_path / "tracker.json").exists()


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_tracker_that_fails_later_does_not_end_the_run(made, tmp_path, capsys, monkeypatch, call):
    """The rows are all there, and it is said once."""

    def gone(*_, **__):
        raise ConnectionError("the service is gone")

    monkeypatch.setattr(Run, call, gone)
    metrics = Metrics(tmp_path, 0, WANDB)
    for step in (1, 2, 3):
        metrics.write("train", step, {"loss": 2.0})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().err.count("the tracker has failed (ConnectionError: the service is gone)") == 1


def test_the_real_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for step in (0, 4):
        tracker = trackers.open_tracker("wandb", tmp_path, WANDB)
        tracker.write_scalars(step + 1, {"train/loss": 2.5})
        tracker.close()
        ids.append(json.loads((tmp_path / "tracker.json").read_text())["wandb"])
    assert ids[0] == ids[1]
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(name.endswith(ids[0]) for name in folders)
    assert wandb.run is None  # nothing is left open
