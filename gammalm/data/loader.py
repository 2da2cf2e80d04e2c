"""Batches ahead of time: worker threads make the next steps' batches while the accelerator computes, and the wait for them is measured."""

import collections
import concurrent.futures
import time
from collections.abc import Iterator

import numpy as np

from gammalm.data.load import Split


class Loader:
    """Iterates over (step, batch) from `start_step` on, without end. Use as a context manager, or call `close`.

    `rows`: this host's rows of the global batch (None: all). `prefetch`: batches made ahead, each by a thread of its own; 0 makes them when
    asked. `waited`: seconds that the consumer has waited for data since the last call of `take_waited`. What a worker raises is raised to
    the consumer at that step. State is the step alone: a loader started anywhere gives what one that ran up to there would.
    """

    def __init__(self, split: Split, start_step: int = 0, rows: slice | np.ndarray | None = None, prefetch: int = 2):
        self._split, self._rows, self._prefetch = split, rows, prefetch
        self._next = start_step  # the step to be submitted next
        self._pending: collections.deque = collections.deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, min(prefetch, 2)), thread_name_prefix="gammalm-data")
        self._closed = False
        self.waited = 0.0

    def __iter__(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        return self

    def __next__(self) -> tuple[int, dict[str, np.ndarray]]:
        if self._closed:
            raise StopIteration
        while len(self._pending) <= self._prefetch:
            self._pending.append((self._next, self._pool.submit(self._split.batch, self._next, self._rows)))
            self._next += 1
        step, future = self._pending.popleft()
        begin = time.perf_counter()
        try:
            batch = future.result()
        except BaseException:
            self.close()
            raise
        self.waited += time.perf_counter() - begin
        return step, batch

    def take_waited(self) -> float:
        """Seconds waited since the last call, and start again from zero."""
        waited, self.waited = self.waited, 0.0
        return waited

    def close(self) -> None:
        """Drop what is pending and end the threads. Calling it again does nothing."""
        self._closed = True
        while self._pending:
            self._pending.pop()[1].cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_) -> None:
        self.close()
