"""A grid over two real processes, its cells side by side on the devices of both: stopped by a notice to one of them, then to its end."""

import json
import signal

import jax
import pytest

from gammalm.experiments.grid import load_grid
from gammalm.experiments.results import read_results
from gammalm.experiments.runner import run_grid

from ..training.pairs import GAMMALM, Pair

SMALL = {
    "model.d_model": 16, "model.n_heads": 2, "model.n_kv_heads": 2, "model.head_dim": 8, "model.d_ff": 32, "model.dtype": "float32",
    "model.residual_dtype": "float32", "train.checkpoint_every": 2, "train.log_every": 1, "train.validation_batches": 1,
}  # fmt: skip


@pytest.mark.full
def test_a_grid_over_two_processes_gives_the_rows_of_one(corpus, tmp_path):
    spec = "grids/quickstart:arms=plain,gammas=0.5/1,lrs=0.01,steps=5,batch=8,seq_len=32,vocab=608,mixture=natural"
    spec += f",data={corpus[0]}"
    workdir = tmp_path / "two"
    asked = ["grid", "--config", spec, *(f"--config.{name}={value}" for name, value in SMALL.items()), "--workdir", workdir, "--json"]
    with Pair(tmp_path / "stopped", GAMMALM, *asked, hold_at=(3, 3)) as pair:
        pair.until_held()
        pair.processes[1].send_signal(signal.SIGTERM)
        pair.until(0, "told to stop (process 1 (")
        pair.go_on()
        assert pair.ended() == [75, 75], pair.told()
        assert all("saved after step 3 of 5" in pair.said(i) for i in range(2)), pair.told()
    assert read_results(workdir)[0] == {} and not (workdir / "report").exists()

    with Pair(tmp_path / "ended", GAMMALM, *asked, JAX_DISABLE_MOST_OPTIMIZATIONS="false") as pair:  # as users run it
        assert pair.ended() == [0, 0], pair.told()
        printed = [json.loads(line) for line in pair.said(0).splitlines() if line.startswith("{")]
        assert "{" not in pair.said(1), "process 0 alone prints"
    rows = list(read_results(workdir)[0].values())
    assert printed == rows and (workdir / "report" / "index.html").exists()
    alone = run_grid(load_grid(spec, list(SMALL.items())), tmp_path / "one", mode="single", devices=jax.devices()[:1])
    assert [row["cell"] for row in rows] == [row["cell"] for row in alone] and len(rows) == 2
    for row, one in zip(rows, alone, strict=True):
        assert row["status"] == "done" and row["steps"] == 5 and row["tokens"] == one["tokens"]
        assert [row["loss"], row["train_loss"]] == pytest.approx([one["loss"], one["train_loss"]], abs=2e-5)
    assert rows[0]["loss"] != rows[1]["loss"]
