"""The grid runner: the same table however it was interrupted and in whatever mode, failures recorded, finished cells left alone."""

import dataclasses
import json
import math

import jax
import pytest

from gammalm.errors import ConfigError, DataError
from gammalm.experiments import runner
from gammalm.experiments.grid import ARMS, Grid, arms, fixed, product, values
from gammalm.experiments.report import print_table, text_table, write_report
from gammalm.experiments.results import read_results
from gammalm.models import kernels
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.loop import Outcome
from gammalm.training.program import Program

SMALL = {
    "model.d_model": 16, "model.n_heads": 2, "model.n_kv_heads": 2, "model.head_dim": 8, "model.d_ff": 32, "model.dtype": "float32",
    "model.residual_dtype": "float32", "train.checkpoint_every": 2, "train.log_every": 1, "train.validation_batches": 0,
}  # fmt: skip


def run(grid, workdir, **how):
    """On one device: sharding the cells over several is the business of test_cells."""
    return runner.run_grid(grid, workdir, devices=jax.devices()[:1], **({"mode": "single"} | how))


def small_grid(corpus, lrs=(1e-2, 3e-2), steps=4):
    cells = product(
        arms(**ARMS), values("gamma", [0.5, 1.0]), values("lr", lrs),
        fixed(SMALL | {"data.path": str(corpus[0])}),
    )  # fmt: skip
    return Grid("small", f"lm:size=tiny,vocab=608,seq_len=32,batch=8,steps={steps},mixture=natural", cells)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """An undisturbed grid: folder and rows."""
    workdir = tmp_path_factory.mktemp("grid")
    return workdir, run(small_grid(corpus), workdir)


def test_every_cell_has_its_row(corpus, finished):
    workdir, rows = finished
    assert [row["cell"] for row in rows] == [cell.name for cell in small_grid(corpus).cells]
    assert all(row["status"] == "done" and math.isfinite(row["loss"]) and row["tokens"] == 4 * 8 * 32 for row in rows)
    assert len({row["loss"] for row in rows}) == len(rows), "gamma, eps, gate and rate must each matter"
    by = {(r["labels"]["arm"], r["labels"]["gamma"], r["labels"]["lr"]): r for r in rows}
    plain, gated = by["plain", 0.5, 1e-2]["parameters"], by["adjusted", 0.5, 1e-2]["parameters"]
    assert gated - plain == 2 * 16 * 16, "the small override fixes F, so the gate's matrices come on top"


def saved_arrays(checkpointer):
    """Path -> [dtype, shape] of what a cell's last checkpoint holds."""
    return json.loads((checkpointer.directory / "000000004" / "checksums.json").read_text())["body"]["facts"]["tree"]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["map", "vmap"])
def test_modes_give_the_same_losses(corpus, finished, tmp_path, mode):
    rows = run(small_grid(corpus), tmp_path, mode=mode)
    for row, single in zip(rows, finished[1], strict=True):
        assert row["cell"] == single["cell"]
        assert row["loss"] == pytest.approx(single["loss"], abs=2e-5)
    cell = tmp_path / "cells" / rows[0]["cell"] / "checkpoints"
    with Checkpointer(cell) as ours, Checkpointer(finished[0] / "cells" / rows[0]["cell"] / "checkpoints") as theirs:
        assert ours.steps() == theirs.steps() == [2, 4] and saved_arrays(ours) == saved_arrays(theirs)


@pytest.mark.parametrize("mode", ["single", pytest.param("map", marks=pytest.mark.full)])
def test_stopped_and_run_again_gives_the_same_table(corpus, finished, tmp_path, monkeypatch, mode):
    """Stopped inside a cell after its checkpoint, as Ctrl-C does."""
    real, taken = Program.step, []

    def step(self, state, batch, scalars):
        taken.append(1)
        if len(taken) == (11 if mode == "single" else 4):
            raise KeyboardInterrupt
        return real(self, state, batch, scalars)

    monkeypatch.setattr(Program, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run(small_grid(corpus), tmp_path, mode=mode)
    rows = run(small_grid(corpus), tmp_path, mode=mode)
    if mode == "single":
        assert text_table(rows, times=False) == text_table(finished[1], times=False)
        assert len(taken) == 8 * 4 + 1, "at most the interrupted step is taken twice"
    else:
        assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in finished[1]], abs=2e-5)


def test_finished_grid_trains_nothing(corpus, finished, monkeypatch):
    monkeypatch.setattr(Program, "step", lambda *a: pytest.fail("a step was taken"))
    assert run(small_grid(corpus), finished[0]) == finished[1]


@pytest.mark.full
def test_failing_cells_are_recorded_and_passed_over(corpus, tmp_path, monkeypatch, capsys):
    """A rate of 1e30 overflows; a cell whose data fails; the rest goes on and is reported."""
    grid = small_grid(corpus, lrs=(1e-2, 1e30))
    real = runner.train

    def train(runs, *args, **kwargs):
        if runs[0].name == grid.cells[0].name:
            raise DataError("shard 7 is damaged")
        return real(runs, *args, **kwargs)

    monkeypatch.setattr(runner, "train", train)
    rows = {row["cell"]: row for row in run(grid, tmp_path)}
    assert rows[grid.cells[0].name]["error"] == "DataError: shard 7 is damaged"
    for row in rows.values():
        if row["labels"]["lr"] == 1e30:
            assert row["status"] == "failed" and "not finite" in row["error"] and row["loss"] is None
        elif row["cell"] != grid.cells[0].name:
            assert row["status"] == "done"
    print_table(rows.values())
    assert "failed" in capsys.readouterr().out
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "shard 7 is damaged" in page
    monkeypatch.setattr(runner, "train", real)
    again = {row["cell"]: row for row in run(grid, tmp_path)}  # a fault of data may have passed; numbers that went wrong have not
    assert again[grid.cells[0].name]["status"] == "done"
    halted = [name for name, row in again.items() if row["halted"]]
    assert halted == [name for name, row in rows.items() if row["labels"]["lr"] == 1e30]
    assert all(again[name] == rows[name] for name in halted), "not tried again unasked"
    step, taken = Program.step, []
    monkeypatch.setattr(Program, "step", lambda self, state, *rest: taken.append(int(state["step"])) or step(self, state, *rest))
    retried = {row["cell"]: row for row in run(grid, tmp_path, retry_failed=True)}
    assert taken.count(0) == len(halted) > 0, "each from its beginning"
    assert all(retried[name]["halted"] for name in halted)
    assert read_results(tmp_path)[0].keys() == again.keys()


def test_a_cell_that_overflows_does_not_disturb_its_neighbours(corpus, finished, tmp_path):
    rows = run(small_grid(corpus, lrs=(1e-2, 1e30)), tmp_path, mode="vmap")
    singles = {row["cell"]: row for row in finished[1]}
    for row in rows:
        assert (row["status"] == "failed") == (row["labels"]["lr"] == 1e30)
        if row["status"] == "done":
            assert row["loss"] == pytest.approx(singles[row["cell"]]["loss"], abs=2e-5)


def test_cells_trained_alone_before_join_a_group(corpus, finished, tmp_path, monkeypatch):
    """One at a time until the first cell is beyond its first checkpoint, then all together: nothing is lost, nothing clashes."""
    real, taken = Program.step, []

    def step(self, state, batch, scalars):
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return real(self, state, batch, scalars)

    monkeypatch.setattr(Program, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run(small_grid(corpus), tmp_path)
    rows = run(small_grid(corpus), tmp_path, mode="map")
    assert all(row["status"] == "done" for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in finished[1]], abs=2e-5)


def test_a_mesh_that_does_not_fit_ends_the_grid(corpus, tmp_path):
    grid = small_grid(corpus)
    grid = Grid(grid.name, grid.base, [dataclasses.replace(c, overrides={**c.overrides, "mesh.data": 3}) for c in grid.cells])
    with pytest.raises(ConfigError, match="data=3"):
        run(grid, tmp_path)
    assert not (tmp_path / "results.jsonl").exists()


def test_another_grid_in_the_workdir_is_refused(corpus, finished):
    with pytest.raises(ConfigError, match="another grid"):
        run(small_grid(corpus, lrs=(1e-3,)), finished[0])
    with pytest.raises(ConfigError, match="--mode fast"):
        run(small_grid(corpus), finished[0], mode="fast")


def test_the_kernels_of_the_cells_are_named_once(corpus, tmp_path, monkeypatch, capsys):
    """Also where cells that are batched have another one than each alone."""
    monkeypatch.setattr(runner, "train", lambda runs, *_, **__: [Outcome(steps=0, tokens=0, seconds=0.0, error="not tried") for _ in runs])
    plain = small_grid(corpus)
    packed = dataclasses.replace(plain, base=f"{plain.base},packing=documents")

    def named(grid, mode):
        run(grid, tmp_path / f"{'packed' if grid is packed else 'plain'}-{mode}", mode=mode)
        return [line for line in capsys.readouterr().err.splitlines() if "kernels" in line]

    assert named(plain, "single") == ["grid: kernels on cpu: attention blockwise"]
    monkeypatch.setitem(kernels.PREFERRED, "cpu", "cudnn")
    monkeypatch.setattr(kernels, "_refusal", lambda *_: "")
    assert named(packed, "map") == ["grid: kernels on cpu: attention cudnn with a dense mask of 0.0 MiB per sequence"]
    assert named(packed, "vmap") == ["grid: kernels on cpu: attention blockwise"]
