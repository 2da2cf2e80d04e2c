"""Where a run's wall-clock time goes: one clock that is always in exactly one phase, so that the phases sum to the time.

Nothing here waits for the device. The loop dispatches a step and then fetches the metrics of the one before, so the time that the device
computes shows as waiting for them: phase "step". Data that come while the device computes cost nothing and are counted as little as that.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import jax

# start: data opened, program built, state restored or drawn. compile: first call of each compiled function. data: waiting for a batch and
# handing it over. checkpoint: what saving keeps the loop from. monitor: measuring the model (config.monitor). idle: everything else (rows,
# messages, agreeing with other processes). lost: steps whose result was thrown away, because the process died before they were saved or
# the run was rolled back.
PHASES = ("start", "compile", "data", "step", "checkpoint", "validation", "monitor", "idle", "lost")


class Goodput:
    """Seconds by phase since it was made, in the main thread. `now`: a monotonic clock, seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "idle", now()
        self._kept = dict(self._seconds)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the block is that of phase `name`, but for what blocks inside it take; named in a profile too."""
        outer = self._phase
        self._enter(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._enter(outer)

    def _enter(self, name: str) -> None:
        now = self._now()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now

    def keep(self) -> None:
        """The steps so far are saved: nothing of them is lost any more."""
        self._enter(self._phase)
        self._kept = dict(self._seconds)

    def lose(self) -> None:
        """The steps since the last `keep` are thrown away: their time in phases "step" and "data" becomes "lost"."""
        self._enter(self._phase)
        for name in ("step", "data"):
            self._seconds["lost"] += self._seconds[name] - self._kept[name]
            self._seconds[name] = self._kept[name]

    def seconds(self) -> dict[str, float]:
        """Seconds by phase up to now."""
        self._enter(self._phase)
        return dict(self._seconds)


def lost_with(rows: list[dict], step: int, tokens_per_step: int) -> tuple[int, float]:
    """(steps, seconds) that a dead process spent after `step`, the last one saved, as far as the rows of its metrics tell.

    `rows`: all of metrics.jsonl, in their order. A train row's `tokens_per_s` is over the time since the row before it.
    """
    before, steps, seconds = step, 0, 0.0
    for row in rows:
        if row["kind"] == "train" and row["step"] > step:
            seconds += (row["step"] - before) * tokens_per_step / max(row["tokens_per_s"], 1e-9)
            steps, before = steps + row["step"] - before, row["step"]
    return steps, seconds


def add(a: dict[str, float], b: dict[str, float], share: float = 1.0) -> dict[str, float]:
    """Seconds by phase: a + share · b."""
    return {name: round(a.get(name, 0.0) + share * b.get(name, 0.0), 3) for name in PHASES}


def describe(row: dict) -> str:
    """A row "goodput" in one line, largest phase first."""
    parts = sorted(((seconds, name) for name, seconds in row["phases"].items() if seconds >= 0.05), reverse=True)
    lost = f"; {row['lost_steps']} steps were lost" if row["lost_steps"] else ""
    return f"goodput {row['goodput']:.1%} of {row['seconds']:,.1f} s: " + ", ".join(f"{name} {s:,.1f} s" for s, name in parts) + lost


def row(seconds: dict[str, float], lost_steps: int) -> dict:
    """What is written at the end of a run: the share of its time in steps that count, all of its seconds, and those by phase."""
    total = sum(seconds.values())
    share = round(seconds["step"] / total, 4) if total else 0.0
    return {"goodput": share, "seconds": round(total, 3), "lost_steps": lost_steps, "phases": seconds}
