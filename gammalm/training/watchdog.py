"""Ends a process whose training no longer moves: prints where every thread is, then exits. A hung device or host would wait for ever."""

import faulthandler
import os
import sys
import threading
import time

from gammalm.sharding import processes

STALLED = 76  # exit status
TIMES_SLOWEST = 10  # a step is no stall before it has taken so many times the slowest one so far


class Watchdog:
    """`beat` after each finished unit of work, `rest` before what may take longer than any stall (compiling); a context manager.

    `seconds`: a stall is that long without a beat, and TIMES_SLOWEST times the longest time between two beats so far; 0: never.
    """

    def __init__(self, seconds: float):
        self.seconds, self.where = seconds, "before the first step"
        self._last: float | None = None  # None: resting
        self._slowest = 0.0
        self._ended = threading.Event()

    def beat(self, where: str) -> None:
        """Work has moved: `where` names what was finished last."""
        now = time.monotonic()
        if self._last is not None:
            self._slowest = max(self._slowest, now - self._last)
        self._last, self.where = now, where

    def rest(self) -> None:
        """No stall until the next `beat`."""
        self._last = None

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            threading.Thread(target=self._watch, name="gammalm-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            last = self._last
            bound = max(self.seconds, TIMES_SLOWEST * self._slowest)
            if last is not None and time.monotonic() - last > bound:
                print(
                    f"gammalm: nothing has moved for {bound:.0f} s (train.stall_timeout={self.seconds:g}); finished last: {self.where}. "
                    "What every thread does:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(all_threads=True)
                if processes.count() > 1:
                    processes.announce(processes.FAULT, f"nothing has moved since {self.where}")
                    time.sleep(processes.leave_seconds())  # the others' stacks tell as much
                os._exit(STALLED)
