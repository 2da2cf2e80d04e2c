"""Two real processes on loopback, four CPU devices each: they train as one, stop as one, and one's death is the end of both.

The checkpoint tests run one program in both processes: what it asserts, it asserts in each.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from gammalm.files import read_jsonl
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.loop import Run, train
from gammalm.training.program import Program, Programs

from .test_loop import config

pytestmark = pytest.mark.long
STEPS = 12
SILENT_SECONDS = 8  # after which a process counts as dead here

# `gammalm train` itself, slow enough to be caught between two steps.
TRAIN = """
import sys, time
from gammalm.cli.main import main
from gammalm.training.program import Program
step = Program.step
def slow(*arguments):
    time.sleep(float(sys.argv[1]))
    return step(*arguments)
Program.step = slow
sys.exit(main(["train", *sys.argv[2:]]))
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Pair:
    """A program in two processes; killed at the end of the block if they still run."""

    def __init__(self, program, *arguments, flags=True, **env):
        port = free_port()
        env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"} | env
        self.processes = []
        for i in range(2):
            asked = {"coordinator": f"127.0.0.1:{port}", "processes": "2", "process-id": str(i)}
            command = [sys.executable, "-c", program, *map(str, arguments)]
            if flags:
                command += [word for name, value in asked.items() for word in (f"--{name}", value)]
            else:
                env = env | {f"GAMMALM_{name.upper().replace('-', '_')}": value for name, value in asked.items()}
            self.processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def ended(self, timeout=150):
        """[(status, what it said)]"""
        return [(p.wait(timeout), p.stdout.read()) for p in self.processes]


def caught(workdir, step, seconds=120):
    """Waits until `step` is in the metrics."""
    deadline = time.monotonic() + seconds
    while not any(row["step"] >= step for row in read_jsonl(workdir / "metrics.jsonl")):
        assert time.monotonic() < deadline, "no such step in time"
        time.sleep(0.05)


OVERRIDES = {"train.checkpoint_every": 3, "train.validation_batches": 2}


def arguments(c, workdir, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(c.to_json_best_effort())
    return ["--config", file, "--workdir", workdir]


def last_state(workdir, c):
    program = Program(c, np.zeros(608, np.int32))
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        step, state, _ = checkpointer.restore_latest(program.abstract_state)
    return step, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """An undisturbed run of two processes: (folder, config, last state)."""
    tmp_path = tmp_path_factory.mktemp("two")
    c = config(corpus, STEPS, **OVERRIDES, **{"mesh.data": 4, "mesh.fsdp": 2, "batch.micro_batches": 1})
    with Pair(TRAIN, 0.0, *arguments(c, tmp_path / "run", tmp_path), flags=False) as pair:
        for status, said in pair.ended():
            assert status == 0, said
    return tmp_path / "run", c, last_state(tmp_path / "run", c)


def test_two_processes_train_as_one_process_and_as_one_device(two, corpus, tmp_path):
    workdir, c, _ = two
    whole = read_jsonl(workdir / "metrics.jsonl")
    assert [row["step"] for row in whole] == [*range(1, STEPS + 1), STEPS], "one process writes"
    assert json.loads((workdir / "versions.json").read_text())["processes"] == "2"
    for devices in (8, 1):
        one = config(corpus, STEPS, **OVERRIDES, **{"mesh.data": -1, "mesh.fsdp": min(devices, 2), "batch.micro_batches": 1})
        train([Run(one, tmp_path / str(devices))], Programs(jax.devices()[:devices]))
        rows = read_jsonl(tmp_path / str(devices) / "metrics.jsonl")
        np.testing.assert_allclose([row["loss"] for row in whole], [row["loss"] for row in rows], atol=1e-5)
        assert [row.get("counted_tokens") for row in whole] == [row.get("counted_tokens") for row in rows]
        assert whole[-1]["domains"].keys() == rows[-1]["domains"].keys()
    assert whole[0]["loss"] > whole[-1]["loss"] + 0.1


def test_stopped_then_killed_it_ends_bit_for_bit_alike(two, tmp_path):
    """SIGTERM to one: both save the same step and say 75. kill -9 of one: the other ends within the bound, naming it."""
    undisturbed, c, expected = two
    workdir = tmp_path / "run"
    asked = arguments(c, workdir, tmp_path)

    with Pair(TRAIN, 0.3, *asked) as pair:
        caught(workdir, 4)
        pair.processes[1].send_signal(signal.SIGTERM)
        ended = pair.ended()
    assert [status for status, _ in ended] == [75, 75], ended
    stopped = last_state(workdir, c)[0]
    assert 4 < stopped < STEPS
    assert all(f"saved after step {stopped} of {STEPS}" in said for _, said in ended)
    assert read_jsonl(workdir / "metrics.jsonl")[-1]["step"] == stopped

    with Pair(TRAIN, 0.3, *asked, GAMMALM_SILENT_SECONDS=str(SILENT_SECONDS)) as pair:
        caught(workdir, stopped + 1)
        began = time.monotonic()
        pair.processes[1].kill()
        status, said = pair.processes[0].wait(60), pair.processes[0].stdout.read()
        assert time.monotonic() - began < 3 * SILENT_SECONDS + 10
    assert status == 1 and "process 1 (" in said and f"no sign of life for {SILENT_SECONDS} s" in said, said

    with Pair(TRAIN, 0.0, *asked) as pair:
        assert [status for status, _ in pair.ended()] == [0, 0]
    assert last_state(workdir, c) == expected
    losses = [[row["loss"] for row in read_jsonl(folder / "metrics.jsonl")] for folder in (workdir, undisturbed)]
    assert losses[0] == losses[1]


def test_a_process_that_stays_away_is_waited_for_within_the_bound(two, tmp_path):
    c = two[1]
    with Pair(TRAIN, 0.0, *arguments(c, tmp_path / "run", tmp_path), GAMMALM_START_TIMEOUT="5") as pair:
        pair.processes[0].kill()
        status, said = pair.processes[1].wait(60), pair.processes[1].stdout.read()
    assert status == 1 and "after 5 s still missing: process 0" in said and "does not answer" in said


def test_one_process_s_fault_ends_both_and_is_told(two, tmp_path):
    """A fault that process 1 alone meets: its shard of tokens cannot be read."""
    _, c, _ = two
    broken = TRAIN.replace("Program.step = slow", """
from gammalm.data.load import Split
from gammalm.errors import DataError
batch = Split.batch
def unreadable(self, step, rows=None):
    if step == 3 and "1" == sys.argv[-1]:
        raise DataError("shard 7 cannot be read")
    return batch(self, step, rows)
Split.batch = unreadable
""")  # fmt: skip
    with Pair(broken, 0.0, *arguments(c, tmp_path / "run", tmp_path)) as pair:
        ended = pair.ended(60)
    assert [status for status, _ in ended] == [1, 1], "\n".join(said for _, said in ended)
    assert "shard 7 cannot be read" in ended[1][1]
    assert "process 1 (" in ended[0][1] and "DataError: shard 7 cannot be read" in ended[0][1]
    assert "Traceback" not in ended[0][1]


MESHES = {"1": (1, 1, 1), "8,1,1": (8, 1, 1), "2,2,2": (2, 2, 2)}  # data, fsdp, tensor
BOTH = """
import sys, threading, time
from pathlib import Path
import jax
from gammalm.sharding import processes
processes.start()
from gammalm.errors import CheckpointError, DataError, TrainingError
from gammalm.training import checkpoint
from gammalm.training.checkpoint import Checkpointer
from tests.training.test_processes import check, expected, program

folder, me = Path(sys.argv[1]), jax.process_index()
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)

def raises(kind, act):
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

# every mesh to every mesh
programs = {name: program(name) for name in ("8,1,1", "2,2,2")}
for name, made in programs.items():
    with Checkpointer(folder / f"two {name}") as c:
        c.save(1, made.init(made.config), {"from": name})
for source in sorted(path.name for path in folder.iterdir()):
    for made in programs.values():
        with Checkpointer(folder / source) as c:
            step, state, extra = c.restore_latest(made.abstract_state)
        assert (step, extra) == (1, {"from": source.split()[1]})
        check(state, expected(made.config))
print("meshes done", flush=True)

# a step that is damaged for one is refused by both
said = []
made = programs["8,1,1"]
with Checkpointer(folder / "two 8,1,1", keep=9, say=said.append) as c:
    for step in (2, 3):
        c.save(step, made.init(made.config))
    c.wait()
    inspect = checkpoint.inspect
    checkpoint.inspect = lambda path: ({}, ["d/0 has changed contents"]) if me == 1 and path.name == "000000003" else inspect(path)
    assert c.restore_latest(made.abstract_state)[0] == 2
    checkpoint.inspect = inspect
    processes.exchange("set aside")
    assert c.agreed_steps() == [1, 2] and (c.directory / "000000003.damaged").is_dir()
    assert [("is damaged" in line and "for process 1" in line) or "using step 2" in line for line in said] == [True] * 2 * (me == 0), said

    # what fails in the background of one is raised in both, and the step before stays
    real = c._orbax.wait_until_finished
    def fail():
        real()
        if threading.current_thread() is not threading.main_thread():
            raise OSError("link lost")
    c._orbax.wait_until_finished = fail if me == 1 else real
    c.save(4, made.init(made.config))
    text = raises(CheckpointError, c.wait)
    assert "link lost" in text and (("process 1" in text) == (me == 0)), text
    c._orbax.wait_until_finished = real
    # what process 0 alone can see is refused by both
    text = raises(CheckpointError, lambda: c.save(1, made.init(made.config)))
    assert "step 1 cannot be saved" in text and (("process 0" in text) == (me == 1)), text
print("checkpoints done", flush=True)

def fault():
    raise DataError("no such corpus")
assert "no such corpus" in raises(DataError, lambda: processes.on_first("prepare", fault))
assert processes.exchange("numbers", me) == [0, 1]
if me == 1:
    time.sleep(3)
text = raises(TrainingError, lambda: processes.exchange("waiting", seconds=1.0))
assert "process 1 (" in text and "did not come within 1 s" in text, text
print("all done", flush=True)
"""


def program(mesh):
    """The tiny model of test_sharding.py on a mesh of that name."""
    from .test_sharding import TOKEN_BYTES
    from .test_sharding import config as small

    sizes = MESHES[mesh]
    return Program(small(*sizes), TOKEN_BYTES, devices=jax.devices()[: np.prod(sizes)])


def expected(c):
    """The state on one device of this process, on the host."""
    c = c.copy_and_resolve_references()
    c.mesh.data = c.mesh.fsdp = c.mesh.tensor = 1
    from .test_sharding import TOKEN_BYTES

    alone = Program(c, TOKEN_BYTES, devices=jax.local_devices()[:1])
    return jax.tree.map(np.asarray, alone.init(c))


def check(state, wanted):
    """Every shard that this process holds is, bit for bit, that part of the whole."""
    for leaf, whole in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()


def test_checkpoints_of_one_and_two_processes(tmp_path):
    """Saved by one process on three meshes and by two on two, restored on each; then faults that one process alone meets."""
    for name in MESHES:
        made = program(name)
        with Checkpointer(tmp_path / f"one {name}") as c:
            c.save(1, made.init(made.config), {"from": name})
    with Pair(BOTH, tmp_path, flags=False) as pair:
        ended = pair.ended()
    assert all(status == 0 and "all done" in said for status, said in ended), ended
    for source in sorted(path.name for path in tmp_path.iterdir()):
        for name in MESHES:
            made = program(name)
            with Checkpointer(tmp_path / source) as c:
                found, _ = c.restore(1, made.abstract_state)
            check(found, expected(made.config))
    assert len(list(tmp_path.iterdir())) == 5
