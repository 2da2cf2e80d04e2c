"""What a model answers in the composition task: counting, the forward pass that gives answers, rows over seeds, the command, the loss."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.analysis import composition as analysis
from gammalm.analysis.composition import Answers, answer, judge
from gammalm.cli.main import main
from gammalm.config import apply_overrides
from gammalm.data import composition as task
from gammalm.experiments.composition import draw, rows_of
from gammalm.experiments.grid import load_grid
from gammalm.experiments.results import Run
from gammalm.models.decoder import Model
from gammalm.training.load import save_model
from gammalm.training.step import loss_and_gradients

from ..models.reference import random_params

GRID = "grids/composition:gammas=0.5/1,lrs=0.01,seeds=2,arms=plain"
SMALL = {"model.d_model": 16, "model.n_heads": 2, "model.n_kv_heads": 2, "model.head_dim": 8, "model.d_ff": 24, "model.dtype": "float32",
         "model.residual_dtype": "float32", "model.n_layers": 1}  # fmt: skip


def test_a_model_that_composes_and_one_that_mirrors():
    asked = task.held_out_examples(draws=1)
    unseen = (asked.pair_B2 == (4, 3)).all(axis=1)
    given = {"composes": asked.answers_B, "mirrors": np.where(unseen, asked.key_B - 6, asked.answers_B), "errs": asked.answers_B + 1}
    found = {name: judge(g, asked.pair_B2, task.UNSEEN, asked.answers_B, asked.mirrored_B) for name, g in given.items()}
    shares = {name: (a.seen, a.composed, a.mirrored, a.other) for name, a in found.items()}
    assert shares == {"composes": (1, 1, 0, 0), "mirrors": (1, 0, 1, 0), "errs": (0, 0, 0, 1)}
    assert set(found["composes"].by_pair) == set(task.SEEN) and found["composes"].examples == unseen.sum()


def test_shares_are_counted_by_pair():
    pairs = np.array([(1, 1), (1, 1), (1, 2), (4, 3), (4, 3), (4, 3), (4, 3)])
    expected, mirrored = np.array([9, 9, 9, 1, 1, 1, 1]), np.array([0, 0, 0, 2, 2, 2, 2])
    found = judge(np.array([9, 8, 9, 1, 2, 2, 3]), pairs, (4, 3), expected, mirrored)
    assert found.by_pair == {(1, 1): 0.5, (1, 2): 1.0} and found.seen == 0.75  # pairs count alike, whatever their examples
    assert (found.composed, found.mirrored, found.other, found.examples) == (0.25, 0.5, 0.25, 4)
    with pytest.raises(ValueError, match="examples of"):
        judge(expected[:3], pairs[:3], (4, 3), expected[:3], mirrored[:3])


@pytest.fixture(scope="module")
def model():
    config = load_grid(GRID, SMALL.items()).cells[0].config()
    model = Model(config.model)
    return config, model, jax.tree.map(jnp.asarray, random_params(model.specs))


def test_answers_are_the_likeliest_last_tokens(model, monkeypatch):
    _, model, params = model
    tokens = task.training_examples(20).tokens_BT
    whole = answer(model, params, {}, tokens)
    one_by_one = [int(np.argmax(model.bind(params).logits(row[None], None, jnp.float32(1e-5))[0, -1])) for row in tokens[:5]]
    assert whole[:5].tolist() == one_by_one and len(set(whole.tolist())) > 3
    monkeypatch.setattr(analysis, "AT_ONCE", 8)
    assert (answer(model, params, {}, tokens) == whole).all()


def test_the_loss_is_that_of_the_answers_alone(model):
    """With the batch's own weights: −log p of the last token, mean over examples; noise tokens have no part in it, nor in its gradient."""
    _, model, params = model
    made = task.training_examples(30)
    tokens = np.concatenate([made.tokens_BT, made.answers_B[:, None]], axis=1).astype(np.int32)
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), "weights": np.zeros((30, 9), np.float32)}
    batch["weights"][:, -1] = 1
    loss, _, count, _ = jax.jit(lambda p: loss_and_gradients(model, p, {}, batch, jnp.float32(1e-5), 1))(params)
    logits = np.asarray(model.bind(params).logits(made.tokens_BT, None, jnp.float32(1e-5)), np.float64)[:, -1]
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(30), made.answers_B]
    assert count == 30 and float(loss) == pytest.approx(expected.mean(), rel=1e-5)
    in_two, *_ = jax.jit(lambda p: loss_and_gradients(model, p, {}, batch, jnp.float32(1e-5), 2))(params)
    assert float(in_two) == pytest.approx(float(loss), rel=1e-5)


def fake(gamma, seed, composed, mirrored, seen=1.0):
    cell = next(c for c in load_grid(GRID).cells if (c.labels["gamma"], c.labels["seed"]) == (gamma, seed))
    run = Run(cell, None, "plain", gamma, 0.01, seed, "done", {"loss": 0.0}, {})
    return run, Answers(seen, {}, composed, mirrored, 100)


def test_rows_are_means_over_runs_that_learned_the_task():
    found = [fake(0.5, 0, 0.1, 0.9), fake(0.5, 1, 0.3, 0.5), fake(1.0, 0, 0.6, 0.2), fake(1.0, 1, 0.0, 0.0, seen=0.4)]
    rows = rows_of(found)
    value = {(r["quantity"], r["gamma"]): (r["value"], r["seeds"]) for r in rows}
    assert value["composed", 0.5] == pytest.approx((0.2, 2)) and value["mirrored", 0.5] == pytest.approx((0.7, 2))
    assert value["composed", 1.0] == (0.6, 1) and value["other", 1.0] == pytest.approx((0.2, 1)) and value["seen", 1.0] == (0.7, 2)
    assert value["composed gap", 1.0] == (0.5, 1), "paired by seed: the second run of γ = 1 is not compared"
    assert {r["gamma"]: r["unfit"] for r in rows} == {0.5: 0, 1.0: 1}
    low, high = next((r["low"], r["high"]) for r in rows if (r["quantity"], r["gamma"]) == ("composed", 0.5))
    assert high - 0.2 == pytest.approx(12.706 * 0.1, rel=1e-3) and low == pytest.approx(0.4 - high)  # t(.975, 1) × s/√2
    axes = draw(found, rows).axes[0]
    assert [line.get_xdata().tolist() for line in axes.lines if line.get_linestyle() == "-" and line.get_marker() == "s"] == [[0.5, 1.0]]


def test_the_command_over_a_grid_and_over_one_run(model, tmp_path, capsys):
    _, model, params = model
    grid = load_grid(GRID, SMALL.items())
    (tmp_path / "grid.json").write_text(json.dumps(grid.to_json()))
    for cell in grid.cells[:3]:
        save_model(tmp_path / "cells" / cell.name, cell.config(), params, {})
    done = [{"cell": c.name, "status": "done", "loss": 1.0, "tokens": 5, "parameters": 7} for c in grid.cells[:3]]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in done))
    assert main(["analyze", "composition", "--workdir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    folder = tmp_path / "figures" / "composition"
    assert [run["cell"] for run in found["runs"]] == [cell.name for cell in grid.cells[:3]]
    assert [json.loads(line) for line in (folder / "numbers.jsonl").read_text().splitlines()] == found["rows"]
    assert {row["quantity"] for row in found["rows"]} == {"seen"}, "random weights have not learned the task"
    assert (folder / "composition.png").stat().st_size > 5000 and (folder / "composition.svg").read_text().startswith("<svg")
    assert "3 of 4 runs" in (folder / "caption.txt").read_text()
    assert main(["analyze", "composition", "--workdir", str(tmp_path)]) == 0
    assert "unfit" in capsys.readouterr().out
    assert main(["analyze", "composition", "--checkpoint", str(tmp_path / "cells" / grid.cells[0].name), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["seen"] == found["runs"][0]["seen"] and len(one["by_pair"]) == 15 and one["examples"] == 248


def test_a_model_of_something_else_is_refused(model, tmp_path, capsys):
    config, model, params = model
    save_model(tmp_path / "run", apply_overrides(config, [("data.seq_len", 32)]), params, {})
    assert main(["analyze", "composition", "--checkpoint", str(tmp_path / "run")]) == 2
    assert "composition task" in capsys.readouterr().err
