"""One run over many processes: how they find each other, and how they agree without the devices.

Started from flags or GAMMALM_COORDINATOR, GAMMALM_PROCESSES and GAMMALM_PROCESS_ID, or from what Slurm, Open MPI or a TPU pod says; the
runtime is JAX's own (`jax.distributed`). Everything agreed on here goes through its key-value store, so it works while the devices are
busy or stuck, ends within a bound, and names who is late. In a process by itself every function here is a formality.
"""

import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the key-value store has no public name yet

from gammalm.errors import ConfigError, GammalmError, TrainingError

BARRIER_SECONDS = 600.0  # for work that may differ between hosts: verifying a large checkpoint, reading a slow disk
START_SECONDS = 300
HEARTBEAT_SECONDS = 100  # a process that is silent for so long is taken for dead by the runtime, which aborts the others
SILENT_SECONDS = 40.0  # and by us, who can say so: `Pulse`
SHUTDOWN_SECONDS = 600  # the others wait at their end for process 0, which may have a report to write
ANSWER_SECONDS = 10.0  # for process 0 to say who is late
LEAVE_SECONDS = 4.0  # after a fault, for the main thread to end by itself
# Where a launcher puts the number of processes and the number of this one, in the order in which they are believed.
COUNTED_BY = (("SLURM_NTASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("NNODES", "NODE_RANK"))
INDEX_ALONE = "JOB_COMPLETION_INDEX"  # of an indexed Kubernetes job, as JobSet makes them
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

T = TypeVar("T")
_calls: collections.Counter = collections.Counter()  # of exchange, by name: every process makes the same calls


def arguments(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None, env: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be told, or None for a process by itself.

    `coordinator`: HOST:PORT of process 0; "auto": as JAX finds out by itself (TPU VMs); "none": a process by itself, whatever the
    environment says. Raises ConfigError for what is incomplete or no number.
    """
    coordinator = coordinator or env.get("GAMMALM_COORDINATOR") or env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator == "none":
        return None
    if coordinator == "auto":
        return {}
    processes = _number(processes, "GAMMALM_PROCESSES", env)
    process_id = _number(process_id, "GAMMALM_PROCESS_ID", env)
    if coordinator is None:
        if processes is not None or process_id is not None:
            raise ConfigError("--processes and --process-id need --coordinator HOST:PORT (or GAMMALM_COORDINATOR): that of process 0.")
        return _detected(env)
    for count, index in COUNTED_BY:
        if processes is None and process_id is None and count in env and index in env:
            processes, process_id = _number(None, count, env), _number(None, index, env)
    if process_id is None:
        process_id = _number(None, INDEX_ALONE, env)
    if processes is None or process_id is None:
        raise ConfigError(
            f"coordinator {coordinator}: how many processes there are and which one this is must be said too: --processes N and "
            "--process-id I, or GAMMALM_PROCESSES and GAMMALM_PROCESS_ID."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 <= process_id < processes:
        raise ConfigError(
            f"coordinator {coordinator}, process {process_id} of {processes}: the coordinator is HOST:PORT, processes count from 0."
        )
    if processes == 1:
        return None
    return {
        "coordinator_address": coordinator, "num_processes": processes, "process_id": process_id, "cluster_detection_method": "deactivate",
    }  # fmt: skip


def _number(given: int | None, name: str, env: Mapping[str, str]) -> int | None:
    text = env.get(name)
    if given is not None or text is None:
        return given
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no whole number of at least 0.")
    return int(text)


def _detected(env: Mapping[str, str]) -> dict[str, Any] | None:
    """What an environment that holds several processes by itself is told; its details are JAX's own business."""
    if all(name in env for name in SLURM_STEP) and env["SLURM_NTASKS"] != "1":
        return {"cluster_detection_method": "slurm"}
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return {"cluster_detection_method": "ompi"}
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or env.get("MEGASCALE_NUM_SLICES", "1") != "1":
        return {}
    return None


def start(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the other processes, if there are any; before anything else touches a device. Arguments as `arguments`.

    Raises ConfigError for what `arguments` refuses, TrainingError where the others are not found in time.
    """
    how = arguments(coordinator, processes, process_id)
    if how is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself; training/preemption.py has it
    bound = int(env_seconds("GAMMALM_START_TIMEOUT", START_SECONDS))
    alarm = threading.Timer(bound, _alone, (how, bound))  # the runtime would abort with nothing but a stack
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **how, initialization_timeout=bound + 10, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(f"the processes were not joined: {type(error).__name__}: {' '.join(str(error).split())[:600]}") from error
    finally:
        alarm.cancel()
    _client().key_value_set(f"gammalm/host/{index()}", socket.gethostname())


def env_seconds(name: str, default: float) -> float:
    """Seconds from the environment. Raises ConfigError for what is no number above 0."""
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={text!r} is no number of seconds above 0.")
    return seconds


def _alone(how: dict, bound: int) -> None:
    """Ends a process whose fellows did not come. Who is missing is known only as far as the address of process 0 answers."""
    address = how.get("coordinator_address", "the address that JAX found")
    missing = f"one or more of processes 1 to {how.get('num_processes', 0) - 1}" if how.get("process_id") == 0 else f"others than {address}"
    if how.get("process_id"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=3).close()
        except OSError as error:
            missing = f"process 0, for {address} does not answer ({error})"
    print(
        f"gammalm: process {how.get('process_id', '?')} of {how.get('num_processes', '?')}: after {bound} s still missing: {missing}. "
        "Start all of them with the same address and number, and open its port between the hosts.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(TrainingError.exit_status)


def count() -> int:
    """Number of processes."""
    return distributed.global_state.num_processes if _client() else 1


def index() -> int:
    """Number of this process, from 0."""
    return distributed.global_state.process_id if _client() else 0


def leads() -> bool:
    """Whether this is the process that speaks, and writes what is written once."""
    return index() == 0


def _client():
    return distributed.global_state.client


def describe(process: int) -> str:
    """ "process 3 (host-b)"."""
    try:
        return f"process {process} ({_client().key_value_try_get(f'gammalm/host/{process}')})"
    except jax.errors.JaxRuntimeError:
        return f"process {process}"


def exchange(name: str, value: Any = None, *, seconds: float = BARRIER_SECONDS) -> list[Any]:
    """What every process gave for `value` (JSON), by process: a barrier that carries something. All must call it alike.

    Raises TrainingError after `seconds`, on every process, naming those that did not come. Process 0 collects and tells the others: N
    messages each way.
    """
    value = json.loads(json.dumps(value))
    if count() == 1:
        return [value]
    client, call = _client(), f"gammalm/exchange/{name}/{_calls[name]}"
    _calls[name] += 1
    keys = [f"{call}/{process}" for process in range(count())]
    deadline = time.monotonic() + seconds
    try:
        client.key_value_set(keys[index()], json.dumps(value))
        if leads():
            for key in keys:
                if _get(client, key, deadline - time.monotonic()) is None:
                    break  # the time is over for all
            there = dict(client.key_value_dir_get(f"{call}/"))
            late = [process for process, key in enumerate(keys) if key not in there]
            values = None if late else [json.loads(there[key]) for key in keys]
            client.key_value_set(f"{call}/all", json.dumps([late, values]))
            if _calls[name] > 1:  # all have read the one before: they have come to this one
                client.key_value_delete(f"gammalm/exchange/{name}/{_calls[name] - 2}/")
        elif answer := _get(client, f"{call}/all", seconds + ANSWER_SECONDS):
            late, values = json.loads(answer)
        else:  # process 0 still waits, or hangs
            there = dict(client.key_value_dir_get(f"{call}/"))
            late = [process for process, key in enumerate(keys) if key not in there] or [0]
        names = ", ".join(describe(process) for process in late)
    except jax.errors.JaxRuntimeError as error:
        raise TrainingError(f"{name}: process 0, which keeps them together, cannot be reached ({str(error)[:200]}).") from error
    if late:
        raise TrainingError(
            f"{name}: {names} of {count()} did not come within {seconds:.0f} s. Look there for what it does or died of, then start all of "
            "them again."
        )
    return values


def _get(client, key: str, seconds: float) -> str | None:
    """The value of `key`, waiting for it; None after `seconds`."""
    try:
        return client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def on_first(name: str, act: Callable[[], T]) -> T | None:
    """Runs `act` on process 0 while the others wait; its result there, None elsewhere. A GammalmError of it is raised by all."""
    result, fault = None, None
    if leads():
        try:
            result = act()
        except GammalmError as error:
            if count() == 1:
                raise
            fault = error
    (told, *_) = exchange(name, fault and [type(fault).__name__, str(fault)])
    if told:
        kinds = {kind.__name__: kind for kind in GammalmError.__subclasses__()}
        raise fault or kinds.get(told[0], GammalmError)(f"{describe(0)}: {told[1]}")
    return result


def lost(error: Exception, *, seconds: float = 20.0) -> GammalmError | None:
    """After a step that failed on the devices: the error that names the processes that are gone; None where all are there."""
    if count() == 1:
        return None
    try:
        exchange("after a failed step", seconds=seconds)
    except TrainingError as late:
        return TrainingError(f"{late} Here a step failed: {' '.join(str(error).split())[:200]}")
    return None


# ---- one process's fault is the end of all

FAULT = "gammalm/fault"
STOP = "gammalm/stop"


def announce(key: str, text: str) -> None:
    """Leaves a note for all processes, under FAULT or STOP. The first one stays."""
    if _client():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is one already, or nobody is left to read it
            _client().key_value_set(key, f"{describe(index())}: {text}")


def leave_seconds() -> float:
    """How long after a fault this process may stay. Process 0 goes last: without it the runtime aborts those that are still there."""
    return LEAVE_SECONDS * (3 if leads() else 1)


def note(key: str) -> str | None:
    """The note under `key`, or None."""
    if _client() is None:
        return None
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError:
        return None


class Pulse:
    """Signs of life through the key-value store: every process `beat`s every few seconds; process 0 sees who has stopped.

    A device whose process is gone lets the others wait without end on some backends.
    """

    ENDED = "ended"

    def __init__(self):
        self.bound = env_seconds("GAMMALM_SILENT_SECONDS", SILENT_SECONDS)
        self._beats, self._next = 0, 0.0
        self._seen: dict[int, tuple[str | None, float]] = {}  # by process: its last sign, and when it was first seen here

    def beat(self) -> None:
        """Gives a sign if it is time for one, and on process 0 announces as FAULT a process that has given none for `bound` seconds."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.bound / 8
        self._beats += 1
        signs = self._sign(str(self._beats))
        for process, sign in signs.items():
            if self._seen.get(process, (None, 0.0))[0] != sign:
                self._seen[process] = sign, now
            elif sign != self.ENDED and now - self._seen[process][1] > self.bound:
                announce(FAULT, f"{describe(process)} has given no sign of life for {self.bound:.0f} s: it or its host died")

    def end(self) -> None:
        """The last sign: no more will come, and all is well. Process 0 may be busy for long after the others, with a report say."""
        self._sign(self.ENDED)

    def _sign(self, text: str) -> dict[int, str]:
        """Leaves `text` as this process's sign; on process 0 the signs of all, "" for who has given none yet."""
        if _client() is None:
            return {}
        try:
            _client().key_value_set(f"gammalm/pulse/{index()}", text, allow_overwrite=True)
            if not leads():
                return {}
            there = dict(_client().key_value_dir_get("gammalm/pulse/"))
        except jax.errors.JaxRuntimeError:
            return {}  # process 0 is gone: the runtime ends us and says so
        return {process: there.get(f"gammalm/pulse/{process}", "") for process in range(count())}


@contextlib.contextmanager
def joined(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> Iterator[None]:
    """`start`, then the block; what ends it here is told to the other processes, which would wait for this one otherwise."""
    start(coordinator, processes, process_id)
    try:
        yield
    except BaseException as error:
        if getattr(error, "is_fault", True) and count() > 1:
            announce(FAULT, f"{type(error).__name__}: {error}"[:1000])
            bound = threading.Timer(leave_seconds(), os._exit, (getattr(error, "exit_status", 1),))
            bound.daemon = True
            bound.start()
        raise


def say(message: str) -> None:
    """One line on stderr, of process 0 alone."""
    if leads():
        print(message, file=sys.stderr, flush=True)
