"""Two real processes on loopback, four CPU devices each: they train as one, stop as one, and one's death is the end of both."""

import json
import signal
import time

import jax
import numpy as np
import pytest

from gammalm.files import read_jsonl
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.loop import Run, train
from gammalm.training.program import Program, Programs

from .pairs import GAMMALM, Pair
from .test_loop import config

pytestmark = pytest.mark.full
STEPS = 12
OVERRIDES = {"train.checkpoint_every": 3, "train.validation_batches": 2, "batch.micro_batches": 1}


def arguments(c, workdir, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(c.to_json_best_effort())
    return ["train", "--config", file, "--workdir", workdir]


def losses(workdir):
    """{(kind, step): loss}"""
    rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["kind"] in ("train", "validation")]
    assert len({(row["kind"], row["step"]) for row in rows}) == len(rows), "one process writes, and each step once"
    return {(row["kind"], row["step"]): row["loss"] for row in rows}


def last_state(workdir, c):
    program = Program(c, np.zeros(608, np.int32))
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        step, state, _ = checkpointer.restore_latest(program.abstract_state)
    return step, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """An undisturbed run of two processes: (folder, config, last state)."""
    tmp_path = tmp_path_factory.mktemp("two")
    c = config(corpus, STEPS, **OVERRIDES, **{"mesh.data": 4, "mesh.fsdp": 2})
    with Pair(tmp_path / "pair", GAMMALM, *arguments(c, tmp_path / "run", tmp_path), flags=False) as pair:
        assert pair.ended() == [0, 0], pair.told()
        assert "2 processes" in pair.said(0) and "validation loss" in pair.said(0)
        assert "loss" not in pair.said(1), "process 0 alone speaks"
    return tmp_path / "run", c, last_state(tmp_path / "run", c)


def test_two_processes_train_as_one_process_and_as_one_device(two, corpus, tmp_path):
    workdir, _, _ = two
    whole = losses(workdir)
    assert [*whole] == [*(("train", step) for step in range(1, STEPS + 1)), ("validation", STEPS)]
    assert json.loads((workdir / "versions.json").read_text())["processes"] == "2"
    for devices in (8, 1):
        one = config(corpus, STEPS, **OVERRIDES, **{"mesh.data": -1, "mesh.fsdp": min(devices, 2)})
        train([Run(one, tmp_path / str(devices))], Programs(jax.devices()[:devices]))
        alone = losses(tmp_path / str(devices))
        assert [*whole] == [*alone]
        np.testing.assert_allclose([*whole.values()], [*alone.values()], atol=1e-5)
        counts = [
            [(row["counted_tokens"], row["tokens"]) for row in read_jsonl(folder / "metrics.jsonl") if row["kind"] == "train"]
            for folder in (workdir, tmp_path / str(devices))
        ]
        assert counts[0] == counts[1]
    assert whole["train", 1] > whole["validation", STEPS] + 0.1


def test_stopped_and_killed_it_ends_bit_for_bit_alike(two, tmp_path):
    """SIGTERM to both: both save the same step and say 75. kill -9 of one: the other ends, naming it. Then on to the end."""
    undisturbed, c, expected = two
    workdir = tmp_path / "run"
    asked = arguments(c, workdir, tmp_path)

    # Process 0 has begun step 6 when the notice comes, process 1 only step 5: both must go on to 6.
    with Pair(tmp_path / "stopped", GAMMALM, *asked, hold_at=(6, 5)) as pair:
        pair.until_held()
        for process in pair.processes:
            process.send_signal(signal.SIGTERM)
        pair.until(0, "told to stop (")
        pair.go_on()
        assert pair.ended() == [75, 75], pair.told()
        assert all(f"saved after step 6 of {STEPS}" in pair.said(i) for i in range(2)), pair.told()
    assert last_state(workdir, c)[0] == 6 == max(losses(workdir))[1]

    with Pair(tmp_path / "killed", GAMMALM, *asked, hold_at=(3, 3), GAMMALM_SILENT_SECONDS="8") as pair:
        pair.until_held()
        began = time.monotonic()
        pair.processes[1].kill()
        pair.go_on()
        assert pair.status(0) == 1, pair.said(0)
        assert time.monotonic() - began < 90, "8 s of silence, or 20 s after the step that failed, and 12 s to end; then a slow machine"
    said = pair.said(0)  # the silence is noticed first, or the step that fails
    assert "process 1 (" in said and ("no sign of life for 8 s" in said or "did not come within 20 s" in said), said

    with Pair(tmp_path / "ended", GAMMALM, *asked) as pair:
        assert pair.ended() == [0, 0], pair.told()
    assert last_state(workdir, c) == expected
    assert losses(workdir) == losses(undisturbed)


def test_a_process_that_stays_away_is_waited_for_within_the_bound(two, tmp_path):
    with Pair(tmp_path / "pair", GAMMALM, *arguments(two[1], tmp_path / "run", tmp_path), GAMMALM_START_TIMEOUT="5") as pair:
        pair.processes[0].kill()
        assert pair.status(1) == 1
    assert "after 5 s still missing: process 0" in pair.said(1) and "does not answer" in pair.said(1)


UNREADABLE = """
import sys
from gammalm.data.load import Split
from gammalm.errors import DataError
batch = Split.batch
def unreadable(self, step, rows=None):
    if step == 3 and sys.argv[-1] == "1":
        raise DataError("shard 7 cannot be read")
    return batch(self, step, rows)
Split.batch = unreadable
"""


def test_one_process_s_fault_ends_both_and_is_told(two, tmp_path):
    """A fault that process 1 alone meets: its shard of tokens cannot be read."""
    with Pair(tmp_path / "pair", UNREADABLE + GAMMALM, *arguments(two[1], tmp_path / "run", tmp_path)) as pair:
        assert pair.ended() == [1, 1], pair.told()
    assert "shard 7 cannot be read" in pair.said(1)
    assert "process 1 (" in pair.said(0) and "DataError: shard 7 cannot be read" in pair.said(0)
    assert "Traceback" not in pair.said(0)
