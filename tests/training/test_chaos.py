"""Twenty times kill -9 at random moments, saves included: the run ends with the parameters, bit for bit, of one that was left alone.

One program imports what a run needs and forks a child per life, before JAX has started anything. A child trains, with a checkpoint after
every step, until it is killed; the next one goes on from what it finds.
"""

import subprocess
import sys

import pytest

from .test_loop import config

HARNESS = r'''
import os, random, signal, sys, time, types
import numpy as np
import jax
from gammalm.quiet_tf import import_tensorflow

# TensorBoard's writer starts threads, which a fork does not survive; nothing of it reaches the parameters.
board = types.SimpleNamespace(write_scalars=lambda *_: None, close=lambda: None)
writers = types.ModuleType("clu.metric_writers")
writers.AsyncWriter, writers.MultiWriter, writers.SummaryWriter = lambda _: board, lambda _: None, lambda _: None
import clu
sys.modules["clu.metric_writers"] = clu.metric_writers = writers
from gammalm.training import loop, workdir
workdir.import_tensorflow = lambda: None
from gammalm.config import from_json, validate
from gammalm.training.loop import Run, train
from gammalm.training.program import Program, Programs

FOLDER, KILLS = sys.argv[1], 20
c = validate(from_json(f"{FOLDER}/config.json"))

def life(name, told):
    """Trains in a child to the end, which may come early: `told` gets a byte before its second step, when the first is compiled."""
    sys.stderr = open(f"{FOLDER}/{name}.log", "a")
    step = Program.step
    def second(*arguments):
        os.write(told, b"!")
        Program.step = step
        return step(*arguments)
    def first(*arguments):
        Program.step = second
        return step(*arguments)
    Program.step = first
    import pathlib
    (outcome,) = train([Run(c, pathlib.Path(FOLDER) / name)], Programs(jax.devices()[:1]))
    assert outcome.steps == c.train.steps and not outcome.error

def run(name, delay):
    """Whether the child ended by itself, and how long it lived. Killed `delay` seconds (None: never) after its second step began."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            life(name, w)
            os._exit(0)
        except BaseException:
            import traceback; traceback.print_exc(); sys.stderr.flush()
            os._exit(1)
    os.close(w)
    os.read(r, 1)
    began = time.monotonic()
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(r)
    assert status in (0, signal.SIGKILL), open(f"{FOLDER}/{name}.log").read()
    return status == 0, time.monotonic() - began

rng, left, reached = random.Random(0), set(), []
done, seconds = run("whole", None)
assert done
for _ in range(KILLS):
    # Together a third of the undisturbed run's time on average: the end is not reached before the last kill.
    assert not run("killed", rng.uniform(0, seconds / 30))[0], "it ended before it was killed"
    names = os.listdir(f"{FOLDER}/killed/checkpoints") if os.path.exists(f"{FOLDER}/killed/checkpoints") else []
    left |= {name.split(".", 1)[1].split(".")[0] for name in names if "." in name}
    reached.append(max((int(name) for name in names if name.isdigit()), default=0))
assert run("killed", None)[0]
print(reached, sorted(left))
assert reached == sorted(reached) and reached[-1] > reached[0], "each life goes on from the one before"
assert "saving" in left, "some kills met a save"
assert "damaged" not in left

from gammalm.training.checkpoint import Checkpointer
found = []
for name in ("whole", "killed"):
    program = Program(c, np.zeros(608, np.int32), devices=jax.devices()[:1])
    with Checkpointer(f"{FOLDER}/{name}/checkpoints") as checkpointer:
        step, state, _ = checkpointer.restore_latest(program.abstract_state)
    rows = workdir.read_jsonl(f"{FOLDER}/{name}/metrics.jsonl")
    rows = [(row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] in ("train", "validation")]
    found.append((step, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], rows))
assert found[0] == found[1] and found[0][0] == c.train.steps
'''


@pytest.mark.full
def test_twenty_kills_leave_no_trace(corpus, tmp_path):
    c = config(corpus, 120, **{"train.checkpoint_every": 1, "train.validation_batches": 1, "batch.micro_batches": 1})
    (tmp_path / "config.json").write_text(c.to_json_best_effort())
    done = subprocess.run([sys.executable, "-c", HARNESS, str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
