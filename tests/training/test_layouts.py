"""Checkpoints from every layout to every other: meshes {1}, {8,1,1}, {2,2,2} (data, fsdp, tensor) of one process, the last two of two.

And, with the two processes there, what one of them alone meets: damage, a full disk, a fault, lateness. BOTH runs in both processes:
what it asserts, it asserts in each.
"""

import jax
import numpy as np
import pytest

from gammalm.files import read_jsonl
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.loop import Run, train
from gammalm.training.preemption import Preempted
from gammalm.training.program import Program, Programs

from .pairs import Pair
from .test_loop import config, equal, parameters
from .test_preemption import Told
from .test_sharding import TOKEN_BYTES
from .test_sharding import config as small

MESHES = {"1": (1, 1, 1), "8,1,1": (8, 1, 1), "2,2,2": (2, 2, 2)}
LAYOUTS = {*(f"one {mesh}" for mesh in MESHES), "two 8,1,1", "two 2,2,2"}


def abstract(mesh):
    """The state of a tiny model on a mesh of that name: shapes, types, shardings."""
    return Program(small(*MESHES[mesh]), TOKEN_BYTES, devices=jax.devices()[: np.prod(MESHES[mesh])]).abstract_state


def numbers(tree):
    """Every leaf of `tree` whole, on the host: numbers that differ from place to place and from leaf to leaf."""
    draws = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: draws.integers(0, 1 << 20, leaf.shape).astype(leaf.dtype), tree)


def spread(tree):
    return jax.tree.map(
        lambda leaf, whole: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda where: whole[where]), tree, numbers(tree)
    )


def check(state, tree):
    """Every shard that this process holds lies where `tree` wants it and is, bit for bit, that part of the whole."""
    for leaf, like, whole in zip(*map(jax.tree.leaves, (state, tree, numbers(tree))), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()


def restore_each(folder, meshes, here):
    """Restores what every layout saved on each of `meshes`; gives the pairs of layouts."""
    done = set()
    for mesh in meshes:
        tree = abstract(mesh)
        for source in LAYOUTS:
            with Checkpointer(folder / source) as c:
                step, state, extra = c.restore_latest(tree)
            assert (step, extra) == (1, {"from": source})
            check(state, tree)
            done.add((source, f"{here} {mesh}"))
    return done


def save_each(folder, meshes, here):
    for mesh in meshes:
        with Checkpointer(folder / f"{here} {mesh}") as c:
            c.save(1, spread(abstract(mesh)), {"from": f"{here} {mesh}"})


BOTH = """
import errno, sys, threading
from pathlib import Path
import jax
from gammalm.sharding import processes
processes.start()
from gammalm.errors import CheckpointError, DataError, TrainingError
from gammalm.training import checkpoint
from gammalm.training.checkpoint import Checkpointer
from tests.training.test_layouts import abstract, restore_each, save_each, spread

folder, me = Path(sys.argv[1]), jax.process_index()
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)

def raises(kind, act):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

save_each(folder, ("8,1,1", "2,2,2"), "two")
for pair in sorted(restore_each(folder, ("8,1,1", "2,2,2"), "two")):
    print("pair", *pair, sep="|", flush=True)

# The newest step, damaged for one alone, is refused by both, and process 0 says so.
said, tree = [], abstract("8,1,1")
with Checkpointer(folder / "faults", keep=9, say=said.append) as c:
    for step in (1, 2, 3):
        c.save(step, spread(tree))
    c.wait()
    inspect = checkpoint.inspect
    checkpoint.inspect = lambda path: ({}, ["d/0 has changed contents"]) if me == 1 and path.name == "000000003" else inspect(path)
    assert c.restore_latest(tree)[0] == 2
    checkpoint.inspect = inspect
    assert c.agreed_steps() == [1, 2]
    processes.exchange("looked")
    assert (c.directory / "000000003.damaged").is_dir()
    assert [("is damaged" in line and "for process 1" in line) or "using step 2" in line for line in said] == [True] * 2 * (me == 0), said

    # What fails in the background of one is raised in both, and the steps before stay.
    real = c._orbax.wait_until_finished
    def fail():
        real()
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
    c._orbax.wait_until_finished = fail if me == 1 else real
    c.save(4, spread(tree))
    text = raises(CheckpointError, c.wait)
    assert "no room for the checkpoint of step 4" in text and (("process 1" in text) == (me == 0)), text
    assert "process 1 (" in (note := processes.note(processes.FAULT)) and "no room" in note, note
    c._orbax.wait_until_finished = real

    # What process 0 alone can see is refused by both.
    text = raises(CheckpointError, lambda: c.save(1, spread(tree)))
    assert "step 1 cannot be saved" in text and (("process 0" in text) == (me == 1)), text

def fault():
    raise DataError("no such corpus")
assert "no such corpus" in raises(DataError, lambda: processes.on_first("prepare", fault))
assert processes.exchange("numbers", me) == [0, 1]

# Each in turn is late: the other names it. The late one comes when that has happened.
store = processes._client()
if me == 1:
    store.blocking_key_value_get("gammalm/exchange/waiting/0/all", 200_000)
text = raises(TrainingError, lambda: processes.exchange("waiting", seconds=0.5))
assert "process 1 (" in text and "process 0" not in text and "did not come within 0 s" in text, text
if me == 1:
    processes.ANSWER_SECONDS = 0.5
    text = raises(TrainingError, lambda: processes.exchange("waiting too", seconds=0.5))
    assert "process 0 (" in text and "process 1" not in text, text
    store.key_value_set("told", "")
else:
    store.blocking_key_value_get("told", 200_000)
print("all done", flush=True)
"""


@pytest.mark.full
def test_every_layout_to_every_layout_and_faults_of_one_process(tmp_path):
    folder = tmp_path / "saved"
    save_each(folder, MESHES, "one")
    with Pair(tmp_path / "pair", BOTH, folder, flags=False) as pair:
        assert pair.ended() == [0, 0], pair.told()
        assert all("all done" in pair.said(i) for i in range(2)), pair.told()
    done = restore_each(folder, MESHES, "one")
    done |= {tuple(line.split("|")[1:]) for line in pair.said(1).splitlines() if line.startswith("pair|")}
    assert done == {(source, target) for source in LAYOUTS for target in LAYOUTS} and len(done) == 25


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_goes_on_with_other_types(corpus, tmp_path, capsys, before, after):
    """Parameters and moments are fp32 whatever the products are computed in: the state is taken up bit for bit."""
    programs = Programs(jax.devices()[:1])
    types = {dtype: config(corpus, 6, **{"model.dtype": dtype, "model.residual_dtype": dtype}) for dtype in (before, after)}
    with pytest.raises(Preempted, match="after step 3 of 6"):
        train([Run(types[before], tmp_path / "run")], programs, notice=Told(3))
    was, now = (parameters(tmp_path / "run", c, programs) for c in types.values())
    assert was[0] == now[0] == 3 and equal(was[1], now[1])
    (outcome,) = train([Run(types[after], tmp_path / "run")], programs)
    assert outcome.steps == 6 and not outcome.error
    assert f"goes on with model.dtype {before!r} -> {after!r}, model.residual_dtype {before!r} -> {after!r}" in capsys.readouterr().err
    train([Run(types[before], tmp_path / "alone")], programs)
    changed, alone = (
        [row["loss"] for row in read_jsonl(tmp_path / folder / "metrics.jsonl") if row["kind"] == "train"] for folder in ("run", "alone")
    )
    assert changed[:3] == alone[:3] and changed[3:] != alone[3:], "the other types do matter"
    np.testing.assert_allclose(changed[3:], alone[3:], atol=0.02)
