"""Loss spikes: the rule against NumPy, the step that leaves one out, and runs that skip or roll back, killed and resumed included.

Runs are those of test_loop with a loss that is made to jump: the batch of one index has its tokens drawn anew, out of another range.
Shapes: N losses remembered.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from gammalm.config import LATER, from_json
from gammalm.data.load import Split
from gammalm.errors import ConfigError
from gammalm.files import read_jsonl
from gammalm.training import loop, spikes
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.load import load_model
from gammalm.training.loop import Run, train
from gammalm.training.program import Program, Programs
from gammalm.training.step import scalars

from ..models.reference import small_config
from .test_loop import config, equal, parameters, programs  # noqa: F401

N = 5


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_that_of_scipy(seed):
    recent = np.random.default_rng(seed).gumbel(3, 0.4, N).astype(np.float32)
    expected = np.median(recent) + 6 * stats.median_abs_deviation(recent.astype(np.float64), scale="normal")
    assert float(spikes.bound(jnp.asarray(recent), 6.0)) == pytest.approx(expected, rel=1e-5)


def test_the_bound_of_equal_losses_and_of_too_few():
    assert float(spikes.bound(jnp.full(N, 4.0), 6.0)) == pytest.approx(4.0 * 1.006)
    recent = spikes.nothing_seen(N)
    for step in range(2 * N):
        assert np.isinf(spikes.bound(recent, 6.0)) == (step < N)
        recent = spikes.remember(recent, step, jnp.float32(step))
    assert sorted(recent.tolist()) == [5, 6, 7, 8, 9]


def test_a_lasting_rise_is_accepted_after_half_the_window():
    recent, judged = jnp.asarray([2.0, 2.01, 1.99, 2.02, 1.98]), []
    for step in range(6):
        loss = jnp.float32(3 + step / 100)
        judged.append(bool(loss > spikes.bound(recent, 6.0)))
        recent = spikes.remember(recent, step, loss)
    assert judged == [True, True, True, False, False, False]


# ---- the step

SPIKY = dict(train__spike="skip", train__spike_window=8, train__spike_sigma=6.0)


def small(ffn="dense", **changes):
    spec = "lm:vocab=50,seq_len=12,batch=4,steps=40,gate=none"
    return small_config(spec, ffn=ffn, optimizer__learning_rate=1e-2, optimizer__warmup_steps=0, loss_chunk=8, **SPIKY | changes)


def batch(seed, low=0, high=10):
    return {"tokens": np.random.default_rng(seed).integers(low, high, (4, 13)).astype(np.int32)}


SPIKE = batch(7, 40, 50)  # tokens that were never seen


def test_off_adds_nothing_to_the_state_and_the_metrics():
    c = small(train__spike="off")
    program = Program(c, np.ones(50, np.int32), devices=jax.devices()[:1])
    state, metrics = program.step(program.init(c), program.put([batch(0)]), scalars(c))
    assert set(state) == {"step", "params", "buffers", "adam", "halted"} and "spike" not in metrics


@pytest.mark.parametrize("ffn", ["dense", pytest.param("moe", marks=pytest.mark.full)])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_spike_moves_nothing_but_the_count(ffn, micro_batches):
    """Parameters, moments, buffers stay; the step and what is remembered go on; the same batch under "off" would have moved them."""
    c = small(ffn, batch__micro_batches=micro_batches)
    program = Program(c, np.ones(50, np.int32), devices=jax.devices()[:1])
    state = program.init(c)
    for step in range(20):
        before = jax.device_get(state)
        state, metrics = program.step(state, program.put([batch(step)]), scalars(c))
        assert not metrics["spike"], step
    before = jax.device_get(state)
    state, metrics = program.step(state, program.put([SPIKE]), scalars(c))
    assert bool(metrics["spike"]) and metrics["loss"] > metrics["spike_bound"] > max(before["recent"])
    after = jax.device_get(state)
    assert equal({k: after[k] for k in ("params", "buffers", "adam")}, {k: before[k] for k in ("params", "buffers", "adam")})
    assert after["step"] == 21 and after["recent"][20 % 8] == metrics["loss"] and not after["halted"]
    state, metrics = program.step(state, program.put([batch(20)]), scalars(c))
    assert not metrics["spike"] and not equal(jax.device_get(state)["params"], after["params"])


@pytest.mark.parametrize("mode, devices", [("map", 1), ("vmap", 2)])
def test_cells_judge_each_for_itself(mode, devices):
    """Of two cells one meets the spike: it alone stays, and the other is where it would be alone."""
    c = small()
    single = Program(c, np.ones(50, np.int32), devices=jax.devices()[:1])
    both = Program(c, np.ones(50, np.int32), devices=jax.devices()[:devices], cells=2, mode=mode)
    place = lambda tree: jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), tree, both.abstract_state)  # noqa: E731
    start = jax.device_get(single.init(c))
    state, alone = both.stack([place(start), place(start)]), single.init(c)
    for step in range(12):
        each = [batch(step), SPIKE if step == 11 else batch(step)]
        before = jax.device_get(both.pick(state, 1))
        state, metrics = both.step(state, both.put(each), both.scalars([scalars(c)] * 2))
        alone, _ = single.step(alone, single.put([batch(step)]), scalars(c))
        assert metrics["spike"].tolist() == [False, step == 11]
    assert equal(jax.device_get(both.pick(state, 1))["params"], before["params"])
    for ours, theirs in zip(*(jax.tree.leaves(jax.device_get(s["params"])) for s in (both.pick(state, 0), alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_number_that_is_none_halts_and_is_no_spike():
    c = small()
    program = Program(c, np.ones(50, np.int32), devices=jax.devices()[:1])
    state = program.init(c) | {"recent": jnp.full(8, 4.0)}
    state["params"]["embed"]["table"] = state["params"]["embed"]["table"].at[3].set(jnp.nan)
    state, metrics = program.step(state, program.put([batch(0)]), scalars(c))
    assert metrics["halted"] and not metrics["spike"] and state["recent"].tolist() == [4.0] * 8


# ---- runs

STEPS, BAD = 20, 12  # steps; the index of the bad batch, that of step 13
RUN = {
    "train.spike_window": 4, "train.spike_sigma": 2.0, "train.checkpoint_every": 5, "train.validation_batches": 1,
    "optimizer.learning_rate": 3e-3,
}  # fmt: skip


@pytest.fixture
def bad(monkeypatch):
    """Indices of batches whose tokens are rare ones; the others are two batches in turn, so that the loss falls steadily."""
    indices, real = set(), Split.batch

    def jumping(self, index, rows=None):
        made = real(self, index % 2, rows)
        if index in indices:
            made["tokens"] = np.random.default_rng(index).integers(580, 600, made["tokens"].shape).astype(made["tokens"].dtype)
        return made

    monkeypatch.setattr(Split, "batch", jumping)
    return indices


@pytest.fixture
def trained(monkeypatch):
    """Indices of batches in the order in which steps were dispatched with them."""
    indices, real = [], loop.Loader.__next__

    def told(self):
        index, batch = real(self)
        indices.append(index)
        return index, batch

    monkeypatch.setattr(loop.Loader, "__next__", told)
    return indices


def rows_of(workdir, *kinds):
    return [row for row in read_jsonl(workdir / "metrics.jsonl") if row["kind"] in kinds]


def kill_at(monkeypatch, step):
    """The next run dies where `step` is to be saved."""
    real = Checkpointer.save

    def save(self, at, tree, extra):
        if at == step:
            monkeypatch.setattr(Checkpointer, "save", real)
            raise KeyboardInterrupt
        real(self, at, tree, extra)

    monkeypatch.setattr(Checkpointer, "save", save)


@pytest.mark.full
def test_skip_in_a_run_killed_and_resumed(corpus, programs, bad, tmp_path, monkeypatch):  # noqa: F811
    """The row names the step and the bound; killed before and after it, the run ends bit for bit as it would have, bound included."""
    bad.add(BAD)
    c = config(corpus, STEPS, **RUN, **{"train.spike": "skip"})
    (outcome,) = train([Run(c, tmp_path / "whole")], programs)
    (skipped,) = rows_of(tmp_path / "whole", "skipped")
    assert skipped["step"] == BAD + 1 and skipped["loss"] > skipped["bound"] and outcome.error is None
    for step in (10, 15):
        kill_at(monkeypatch, step)
        with pytest.raises(KeyboardInterrupt):
            train([Run(c, tmp_path / "killed")], programs)
    (again,) = train([Run(c, tmp_path / "killed")], programs)
    assert equal(parameters(tmp_path / "killed", c, programs)[1], parameters(tmp_path / "whole", c, programs)[1])
    assert rows_of(tmp_path / "killed", "skipped") == [skipped] and again.validation == outcome.validation
    assert load_model(tmp_path / "whole").step == STEPS  # what remembers losses is no part of the model


def test_off_goes_through_a_spike(corpus, programs, bad, tmp_path):  # noqa: F811
    bad.add(BAD)
    (outcome,) = train([Run(config(corpus, STEPS, **RUN), tmp_path)], programs)
    assert outcome.error is None and not rows_of(tmp_path, "skipped", "rollback")


def test_roll_back_leaves_the_batches_out(corpus, programs, bad, trained, tmp_path, capsys):  # noqa: F811
    """From step 13 back to 10: batches 10 to 12 are left out, and the run is the one whose data never had them, bit for bit."""
    bad.add(BAD)
    c = config(corpus, STEPS, **RUN, **{"train.spike": "rollback"})
    (outcome,) = train([Run(c, tmp_path / "run")], programs)
    (row,) = rows_of(tmp_path / "run", "rollback")
    assert (row["step"], row["spike_step"], row["left_out"]) == (11, 13, 3) and row["loss"] > row["bound"]
    assert "step 13: its loss" in (said := capsys.readouterr().err) and "Back to step 10" in said
    assert trained[:14] == list(range(14)) and trained[14:] == list(range(13, 23))  # step 14 was on its way
    assert [r["step"] for r in rows_of(tmp_path / "run", "train")] == list(range(1, STEPS + 1)) and outcome.steps == STEPS
    assert outcome.goodput["lost_steps"] == row["steps"] == 4 and outcome.goodput["phases"]["lost"] > 0

    bad.clear()
    real = Split.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Split, "batch", lambda self, index, rows=None: real(self, index + 3 * (index >= 10), rows))
        train([Run(c, tmp_path / "without")], programs)
    assert equal(parameters(tmp_path / "run", c, programs)[1], parameters(tmp_path / "without", c, programs)[1])


@pytest.mark.parametrize("step", [10, 15, 20])
def test_roll_back_is_resumed_exactly(corpus, programs, bad, trained, tmp_path, monkeypatch, step):  # noqa: F811
    """Killed where it saves before the spike, and at the two places after it: same parameters, same rows."""
    bad.update({BAD, BAD + 6})
    c = config(corpus, STEPS, **RUN, **{"train.spike": "rollback"})
    train([Run(c, tmp_path / "whole")], programs)
    kill_at(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train([Run(c, tmp_path / "killed")], programs)
    train([Run(c, tmp_path / "killed")], programs)
    assert equal(parameters(tmp_path / "killed", c, programs)[1], parameters(tmp_path / "whole", c, programs)[1])
    rows = [[(r["kind"], r["step"], r["loss"]) for r in rows_of(tmp_path / w, "train", "rollback")] for w in ("killed", "whole")]
    assert rows[0] == rows[1] and sum(kind == "rollback" for kind, *_ in rows[0]) == 2


def test_roll_back_without_a_checkpoint_and_too_often(corpus, programs, bad, tmp_path):  # noqa: F811
    """Steps 7 and (its batch being 7) again 7: from the beginning each time, then the bound ends the run as halted."""
    bad.update({6, 13, 20})
    c = config(corpus, 10, **RUN | {"train.checkpoint_every": 10}, **{"train.spike": "rollback", "train.spike_rollbacks": 2})
    (outcome,) = train([Run(c, tmp_path)], programs)
    rolled = rows_of(tmp_path, "rollback")
    assert [(row["step"], row["spike_step"], row["left_out"]) for row in rolled] == [(1, 7, 7), (1, 7, 14)]
    assert outcome.halted and "step 7: its loss" in outcome.error and "rolled back 2 times already" in outcome.error
    assert [row["step"] for row in rows_of(tmp_path, "halted")] == [7] and outcome.validation is None


def test_roll_back_of_several_cells_is_refused(corpus, tmp_path):
    c = config(corpus, 4, **{"train.spike": "rollback"})
    with pytest.raises(ConfigError, match="--mode single"):
        train([Run(c, tmp_path / "a"), Run(c, tmp_path / "b")], Programs(jax.devices()[:1]), mode="map")


def test_a_config_saved_before_some_leaves_came_is_read(corpus, tmp_path):
    c = config(corpus)
    old = c.to_dict()
    for name in LATER:
        group, leaf = name.split(".")
        del old[group][leaf]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert from_json(tmp_path / "config.json") == c
