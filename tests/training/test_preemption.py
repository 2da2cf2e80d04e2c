"""A notice to stop, and the watchdog: what a process by itself does. Several processes: test_processes.py."""

import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from gammalm.files import read_jsonl
from gammalm.training.loop import Run, train
from gammalm.training.preemption import Notice, Preempted
from gammalm.training.program import Programs

from .test_loop import config, equal, parameters


class Told:
    """A notice that comes before unit `after` of work."""

    def __init__(self, after):
        self.left = after

    def due(self):
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def programs():
    return Programs(jax.devices()[:1])


def rows(workdir):
    timed = ("tokens_per_s", "data_wait", "mfu")
    kept = [row for row in read_jsonl(workdir / "metrics.jsonl") if row["kind"] != "goodput"]  # times, all of it
    return [{k: v for k, v in row.items() if k not in timed} for row in kept]


@pytest.mark.parametrize("units", [3, 4])
def test_a_run_that_is_told_to_stop_again_and_again_ends_as_if_it_were_not(corpus, programs, tmp_path, units):
    """After so many units of work each time: steps, and batches of the validations within and at the end."""
    c = config(corpus, 5, **{"train.validate_every": 2, "train.checkpoint_every": 3, "train.validation_batches": 1})
    train([Run(c, tmp_path / "whole")], programs)
    whole = parameters(tmp_path / "whole", c, programs)
    stopped_at = []
    for _ in range(9):
        try:
            train([Run(c, tmp_path / "stopped")], programs, notice=Told(units))
        except Preempted as told:
            assert told.exit_status == 75
            stopped_at.append(parameters(tmp_path / "stopped", c, programs)[0])
        else:
            break
    step, state = parameters(tmp_path / "stopped", c, programs)
    assert step == 5 and equal(state, whole[1])
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    # Units: two steps, three domains, two steps, three domains, a step, three domains. A validation that was cut short begins again.
    assert stopped_at == {3: [2, 2, 4, 4, 5], 4: [2, 3, 4]}[units]


def test_told_before_the_first_step_there_is_nothing_to_save(corpus, programs, tmp_path):
    c = config(corpus, 5)
    with pytest.raises(Preempted, match="after step 0 of 5"):
        train([Run(c, tmp_path)], programs, notice=Told(0))
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_is_a_notice():
    before = signal.getsignal(signal.SIGTERM)
    with Notice() as notice:
        assert not notice.due() and not notice.due()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not notice.due():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert notice.due(), "and stays one"
    assert signal.getsignal(signal.SIGTERM) is before


STUCK = """
import ctypes
from gammalm.training.preemption import Notice
with Notice():
    print("ready", flush=True)
    for _ in range(60):
        ctypes.CDLL(None).poll(None, 0, 60_000)  # the main thread runs no Python code meanwhile
"""


def test_a_second_signal_ends_a_process_that_waits_for_its_device():
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None, "the first one lets it finish its step"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "told to stop" in said and "second SIGTERM" in said


WATCHED = """
import sys, time
from gammalm.training.watchdog import Watchdog

def stuck_here():
    time.sleep(60)

seconds, slow = map(float, sys.argv[1:])
with Watchdog(seconds) as watchdog:
    time.sleep(2 * seconds)  # before the first beat: compiling
    watchdog.beat("step 6 of it")
    time.sleep(slow)
    watchdog.beat("step 7 of it")
    watchdog.rest()
    time.sleep(2 * seconds)
    watchdog.beat("step 8 of it")
    if seconds:
        stuck_here()
"""


@pytest.mark.parametrize("seconds, slow, bound", [(0.4, 0.0, 0.4), (0.4, 0.2, 2.0)])
def test_the_watchdog_shows_where_and_ends(seconds, slow, bound):
    """A step is no stall before it has taken ten times the slowest one; compiling is none at all."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WATCHED, str(seconds), str(slow)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 76, done.stderr
    assert "finished last: step 8 of it" in done.stderr and "stuck_here" in done.stderr
    assert time.monotonic() - began > 4 * seconds + slow + bound


def test_no_watchdog_where_there_is_no_bound():
    done = subprocess.run([sys.executable, "-c", WATCHED, "0", "0"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_loop_tells_the_watchdog_what_moves(corpus, programs, tmp_path, monkeypatch):
    """A beat for each step and each batch of validation; rest only before what compiles."""
    heard = []

    class Ears:
        def __init__(self, seconds):
            heard.append(seconds)

        def beat(self, where):
            heard.append(where)

        def rest(self):
            heard.append("rest")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("gammalm.training.loop.Watchdog", Ears)
    c = config(corpus, 3, **{"train.stall_timeout": 9.0, "train.validation_batches": 1, "train.validate_every": 2})
    train([Run(c, tmp_path)], programs)
    batches = [f"a batch of {domain}, validation at step {{}} of train" for domain in ("code-en", "web-en", "web-zh")]
    steps = [f"step {n} of train" for n in (1, 2, 3)]
    assert heard == [
        9.0, "rest", *steps[:2], "rest", *(b.format(2) for b in batches), steps[2], *(b.format(3) for b in batches)
    ]  # fmt: skip
