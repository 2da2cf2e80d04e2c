"""A notice to stop (SIGTERM: Slurm, Kubernetes, a preempted machine), and the moment at which all processes stop alike.

Notice -> every process names the unit of work (a step, a batch of validation) that it has begun -> all go on up to the highest of them
-> all save the same step. While there is no notice this costs the loop one test of a flag per unit.
"""

import os
import select
import signal
import socket
import sys
import threading
import time

from gammalm.errors import GammalmError, TrainingError
from gammalm.sharding import processes

POLL_SECONDS = 1.0  # how soon a notice, or a fault of another process, is known here
ECHO_SECONDS = 0.5  # a signal again within these is the same one, passed on by a launcher too


class Preempted(GammalmError):
    """The run was told to stop; its state is saved. EX_TEMPFAIL: the same command again goes on."""

    exit_status = 75
    is_fault = False  # every process stops alike: there is nothing to tell the others


class Notice:
    """Listens for SIGTERM here and for notices of other processes, as a context manager around everything that `due` is asked in.

    A second SIGTERM ends the process at once, also while the main thread waits for a device. Enter it in the main thread, when the
    processes are joined: before, a signal may end a process as it always does. Raises ConfigError as `processes.env_seconds`.
    """

    def __init__(self):
        self._pulse = processes.Pulse()
        self._lock = threading.Lock()
        self._begun = 0  # units of work that this process has begun, or is held to begin: they need all processes
        self._noticed = threading.Event()
        self._agreed = threading.Event()
        self._last: int | None = None  # the unit after which all stop
        self._fault: TrainingError | None = None
        self._over = False

    def __enter__(self) -> "Notice":
        self._receive, self._send = socket.socketpair()
        self._send.setblocking(False)
        # Signals reach Python code only between two calls of the main thread, which may wait for a device; the wake-up byte is at once.
        self._before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="gammalm-notice", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        handler, wakeup = self._before
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        self._over = True
        self._send.send(b"\0")
        self._thread.join(2 * POLL_SECONDS)
        self._pulse.end()
        self._receive.close()
        self._send.close()

    def due(self) -> bool:
        """Asked before each unit of work, on every process alike: whether to stop now. False begins the unit.

        Raises TrainingError where the processes could not agree in time, naming who was late.
        """
        with self._lock:
            if not self._noticed.is_set():
                self._begun += 1
                return False
        self._agreed.wait()
        if self._fault:
            raise self._fault
        if self._begun >= self._last:
            return True
        self._begun += 1
        return False

    # ---- the listening thread

    def _listen(self) -> None:
        first = None  # when the first signal came
        while not self._over:
            if select.select([self._receive], [], [], POLL_SECONDS)[0] and signal.SIGTERM in self._receive.recv(64):
                if first is None:
                    first = time.monotonic()
                    processes.announce(processes.STOP, "SIGTERM")
                    self._begin_to_stop("SIGTERM")
                elif time.monotonic() - first > ECHO_SECONDS:
                    print("gammalm: a second SIGTERM: ending at once; the last complete checkpoint stays.", file=sys.stderr, flush=True)
                    os._exit(128 + signal.SIGTERM)
            if processes.count() > 1 and not self._over:
                self._hear_others()

    def _hear_others(self) -> None:
        self._pulse.beat()
        stop, fault = processes.note(processes.STOP), processes.note(processes.FAULT)
        if stop:
            self._begin_to_stop(stop)
        if fault:
            self._leave(fault)

    def _leave(self, fault: str) -> None:
        time.sleep(processes.leave_seconds())  # the main thread may be about to say more
        print(f"gammalm: ended, for the processes work together: {fault}", file=sys.stderr, flush=True)
        os._exit(TrainingError.exit_status)

    def _begin_to_stop(self, why: str) -> None:
        with self._lock:  # from here on no unit begins before all have agreed
            if self._noticed.is_set():
                return
            self._noticed.set()
        processes.say(f"gammalm: told to stop ({why}): saving, then ending")
        threading.Thread(target=self._agree, name="gammalm-agree", daemon=True).start()

    def _agree(self) -> None:
        try:
            self._last = max(processes.exchange("stop", self._begun))
        except TrainingError as late:
            self._fault = late
        finally:
            self._agreed.set()
