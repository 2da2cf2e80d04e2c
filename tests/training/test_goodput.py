"""Where the time goes: phases on a clock of our own, and what a run, a killed run and a run's command line say of it."""

import pytest

from gammalm.files import read_jsonl
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.goodput import PHASES, Goodput, add, describe, lost_with, row
from gammalm.training.loop import Run, train
from gammalm.training.program import Program

from .test_loop import config, programs  # noqa: F401


class Clock:
    def __init__(self):
        self.t = 100.0

    def __call__(self):
        return self.t

    def passes(self, seconds):
        self.t += seconds


@pytest.fixture
def clock():
    return Clock()


def test_every_second_is_in_one_phase(clock):
    """Blocks inside a block take their time from it, an error ends a block too, and all sums to the time passed."""
    g = Goodput(clock)
    clock.passes(1)
    with g.phase("validation"):
        clock.passes(2)
        with g.phase("compile"):
            clock.passes(4)
        with pytest.raises(ValueError), g.phase("data"):
            clock.passes(8)
            raise ValueError
        clock.passes(16)
    clock.passes(32)
    expected = dict.fromkeys(PHASES, 0.0) | {"idle": 33, "validation": 18, "compile": 4, "data": 8}
    assert g.seconds() == expected and sum(expected.values()) == clock.t - 100
    clock.passes(64)
    assert g.seconds()["idle"] == 97


def test_steps_thrown_away_are_lost(clock):
    g = Goodput(clock)
    for kept in (True, False, False):
        for name, seconds in (("step", 5), ("data", 1), ("checkpoint", 2), ("compile", 3)):
            with g.phase(name):
                clock.passes(seconds)
        g.keep() if kept else g.lose()
    found = g.seconds()
    assert (found["step"], found["data"], found["lost"]) == (5, 1, 12)
    assert (found["checkpoint"], found["compile"], sum(found.values())) == (6, 9, 33)


def test_what_a_dead_process_spent_by_its_rows():
    """16 tokens per step: 2 steps at 8 tokens/s, a validation row between, 3 steps at 4 tokens/s; saved after step 1."""
    rows = [{"kind": "train", "step": 3, "tokens_per_s": 8.0}, {"kind": "validation", "step": 3}]
    rows += [{"kind": "train", "step": 6, "tokens_per_s": 4.0}]
    assert lost_with(rows, 1, 16) == (5, 2 * 16 / 8 + 3 * 16 / 4)
    assert lost_with(rows[1:], 5, 16) == (1, 4.0)
    assert lost_with([], 5, 16) == (0, 0.0)


def test_the_row_and_its_line():
    found = row(add({"step": 30.0, "data": 1.0}, {"step": 60.0, "lost": 8.0}, 0.5), 7)
    assert (found["goodput"], found["seconds"], found["phases"]["step"], found["lost_steps"]) == (round(60 / 65, 4), 65.0, 60.0, 7)
    assert describe(found) == "goodput 92.3% of 65.0 s: step 60.0 s, lost 4.0 s, data 1.0 s; 7 steps were lost"
    assert row(dict.fromkeys(PHASES, 0.0), 0)["goodput"] == 0


@pytest.fixture
def slow_clock(monkeypatch):
    """The clock of runs moves by ten seconds whenever a step is dispatched, and not otherwise."""
    clock = Clock()
    monkeypatch.setattr(Goodput.__init__, "__defaults__", (clock,))
    step = Program.step

    def slowly(self, *arguments):
        clock.passes(10)
        return step(self, *arguments)

    monkeypatch.setattr(Program, "step", slowly)
    return clock


def test_it_goes_on_over_restarts(corpus, programs, slow_clock, tmp_path, monkeypatch):  # noqa: F811
    """Saved after step 2, dead after step 4: two steps are lost. The first call in each process counts as compiling."""
    c, real = config(corpus), Checkpointer.save
    saved = []

    def save(self, step, tree, extra):
        if len(saved) == 1:
            saved.append(step)
            raise KeyboardInterrupt
        saved.append(step)
        return real(self, step, tree, extra)

    monkeypatch.setattr(Checkpointer, "save", save)
    with pytest.raises(KeyboardInterrupt):
        train([Run(c, tmp_path)], programs)
    assert saved == [2, 4]
    for _ in range(2):  # a finished run says the same again and adds nothing
        (outcome,) = train([Run(c, tmp_path)], programs)
        rows = read_jsonl(tmp_path / "metrics.jsonl")
        (lost,) = (r for r in rows if r["kind"] == "lost")
        (found,) = (r for r in rows if r["kind"] == "goodput")
        assert outcome.goodput == found and found["phases"]["step"] == 40
        assert (lost["step"], lost["steps"], found["lost_steps"]) == (2, 2, 2)
        assert (found["phases"]["compile"], found["phases"]["lost"]) == (20, lost["seconds"]) and lost["seconds"] > 0
        assert sum(found["phases"].values()) == pytest.approx(found["seconds"], abs=0.01) and found["seconds"] >= 60
