"""Progress of long work on stderr: what is done, how much, and how long it will still take."""

import sys
import time

SECONDS_BETWEEN_LINES = {True: 0.2, False: 5.0}  # on a terminal the line is rewritten, elsewhere lines pile up


class Progress:
    """One stage of `total` units, `done` of them before it began: `advance` as units finish, `close` at the end; silent when `quiet`."""

    def __init__(self, stage: str, total: float, unit: str, *, done: float = 0.0, quiet: bool = False):
        self.stage, self.total, self.unit, self.quiet = stage, total, unit, quiet
        self.before = done
        self.done, self.start, self.last = done, time.monotonic(), 0.0
        self.terminal = sys.stderr.isatty()

    def advance(self, amount: float, note: str = ""):
        self.done += amount
        now = time.monotonic()
        if self.quiet or now - self.last < SECONDS_BETWEEN_LINES[self.terminal]:
            return
        self.last = now
        seconds, new = now - self.start, self.done - self.before
        left = seconds * (self.total - self.done) / new if new else float("inf")
        eta = f", about {left:.0f} s left" if 0 <= left < 1e6 else ""
        self._write(f"{self.stage}: {self.done:.0f} of {self.total:.0f} {self.unit}{eta}{'  ' + note if note else ''}", end=False)

    def close(self, note: str = ""):
        if not self.quiet:
            self._write(f"{self.stage}: done in {time.monotonic() - self.start:.1f} s{'; ' + note if note else ''}", end=True)

    def _write(self, line: str, end: bool):
        sys.stderr.write(f"\r\033[K{line}" + ("\n" if end else "") if self.terminal else line + "\n")
        sys.stderr.flush()
