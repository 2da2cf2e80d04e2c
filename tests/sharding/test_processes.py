"""How processes are asked for: flags, our environment, what launchers leave behind. Real ones: tests/training/test_processes.py."""

import jax
import pytest

from gammalm.errors import ConfigError, DataError, TrainingError
from gammalm.sharding import processes

TWO = {"coordinator_address": "a:9", "num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"}
OURS = {"GAMMALM_COORDINATOR": "a:9", "GAMMALM_PROCESSES": "2", "GAMMALM_PROCESS_ID": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    "flags, env, told",
    [
        ({}, {}, None),
        (dict(coordinator="a:9", processes=2, process_id=1), {}, TWO),
        ({}, OURS, TWO),
        (dict(process_id=0), OURS, TWO | {"process_id": 0}),  # a flag goes before the environment
        ({}, OURS | {"GAMMALM_PROCESSES": "1", "GAMMALM_PROCESS_ID": "0"}, None),
        (dict(coordinator="a:9"), SLURM, TWO),
        (dict(coordinator="a:9"), OPEN_MPI, TWO),
        (dict(coordinator="a:9", processes=2), {"JOB_COMPLETION_INDEX": "1"}, TWO),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:9", "NNODES": "2", "NODE_RANK": "1"}, TWO),
        ({}, SLURM, {"cluster_detection_method": "slurm"}),
        ({}, SLURM | {"SLURM_NTASKS": "1"}, None),
        ({}, {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),  # a batch script outside srun
        ({}, OPEN_MPI, {"cluster_detection_method": "ompi"}),
        ({}, {"TPU_WORKER_HOSTNAMES": "t0,t1"}, {}),
        ({}, {"TPU_WORKER_HOSTNAMES": "t0"}, None),
        (dict(coordinator="auto"), {}, {}),
        (dict(coordinator="none"), OURS, None),
        ({}, SLURM | {"GAMMALM_COORDINATOR": "none"}, None),
    ],
)
def test_what_the_runtime_is_told(flags, env, told):
    assert processes.arguments(**flags, env=env) == told


@pytest.mark.parametrize(
    "flags, env, says",
    [
        (dict(processes=2), {}, "need --coordinator"),
        (dict(coordinator="a:9"), {}, "--processes N and --process-id I"),
        (dict(coordinator="a:9", processes=2, process_id=2), {}, "process 2 of 2"),
        (dict(coordinator="a", processes=2, process_id=1), {}, "HOST:PORT"),
        (dict(coordinator="a:9"), {"GAMMALM_PROCESSES": "two", "GAMMALM_PROCESS_ID": "0"}, "GAMMALM_PROCESSES='two'"),
    ],
)
def test_what_is_incomplete_is_refused(flags, env, says):
    with pytest.raises(ConfigError, match=says):
        processes.arguments(**flags, env=env)


def test_jax_knows_the_launchers_by_these_names():
    """The names given to `cluster_detection_method` are those of the installed JAX."""
    from jax._src.clusters import ClusterEnv

    assert {"slurm", "ompi"} <= {kind.name for kind in ClusterEnv._cluster_types}


def test_alone_everything_is_a_formality():
    assert (processes.count(), processes.index(), processes.leads()) == (1, 0, True)
    assert processes.exchange("x", {"a": (1, 2)}) == [{"a": [1, 2]}]
    assert processes.on_first("x", lambda: 5) == 5
    assert processes.note(processes.STOP) is None and processes.lost(RuntimeError()) is None
    processes.announce(processes.FAULT, "nobody reads this")
    with pytest.raises(DataError, match="shard"):
        processes.on_first("x", lambda: (_ for _ in ()).throw(DataError("shard 3")))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_bounds_from_the_environment(monkeypatch, text):
    monkeypatch.setenv("GAMMALM_SILENT_SECONDS", text)
    with pytest.raises(ConfigError, match="GAMMALM_SILENT_SECONDS"):
        processes.Pulse()
    monkeypatch.setenv("GAMMALM_SILENT_SECONDS", "2.5")
    assert processes.Pulse().bound == 2.5


class Store:
    """A key-value store as the runtime's, without a server: waiting for what is not there is over at once."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        self.values = {key: value for key, value in self.values.items() if not key.startswith(folder)}


@pytest.fixture
def four(monkeypatch):
    """As one of four processes; gives (the store, a function that makes this one number `i`)."""
    store = Store()
    monkeypatch.setattr(processes, "_client", lambda: store)
    monkeypatch.setattr(processes, "count", lambda: 4)
    monkeypatch.setattr(processes, "_calls", processes.collections.Counter())
    store.values |= {f"gammalm/host/{i}": f"host-{i}" for i in range(4)}
    return store, lambda i: monkeypatch.setattr(processes, "index", lambda: i)


def test_only_those_who_are_late_are_named_by_all_alike(four):
    store, become = four
    become(0)
    store.values |= {f"gammalm/exchange/x/0/{i}": str(i) for i in (2, 3)}
    told = []
    for process in (0, 2, 1):  # 1 comes when it is over
        become(process)
        processes._calls.clear()
        if process:
            store.values.pop(f"gammalm/exchange/x/0/{process}", None)
        with pytest.raises(TrainingError) as error:
            processes.exchange("x", process)
        told.append(str(error.value))
    assert len(set(told)) == 1 and "x: process 1 (host-1) of 4 did not come" in told[0]


def test_where_the_first_still_waits_the_others_name_the_late_one_not_the_first(four):
    store, become = four
    become(3)
    store.values |= {f"gammalm/exchange/x/0/{i}": str(i) for i in (0, 2)}
    with pytest.raises(TrainingError, match=r"x: process 1 \(host-1\) of 4 did not come"):
        processes.exchange("x", 3)
    with pytest.raises(TrainingError, match=r"y: process 0 \(host-0\), process 1 .*, process 2 .* of 4"):
        processes.exchange("y", 3)


def test_what_was_exchanged_is_forgotten(four):
    store, become = four
    become(0)
    for call in range(5):
        store.values |= {f"gammalm/exchange/x/{call}/{i}": str(i) for i in (1, 2, 3)}
        assert processes.exchange("x", 0) == [0, 1, 2, 3]
    assert {key.split("/")[3] for key in store.values if "exchange" in key} == {"4"}


def test_the_silent_are_named_and_those_who_have_ended_are_not(four, monkeypatch):
    """Process 1 gives signs, 2 has ended well, 3 gives one and then no more, as would one that never gave any."""
    store, become = four
    now = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("GAMMALM_SILENT_SECONDS", "40")
    pulses = []
    for i in range(4):
        become(i)
        pulses.append(processes.Pulse())
        pulses[i].beat()
    become(2)
    pulses[2].end()
    for seconds in range(0, 100, 5):
        now[0] = 1000.0 + seconds
        for i in (1, 0):
            become(i)
            pulses[i].beat()
        assert (processes.note(processes.FAULT) is None) == (seconds <= 45), "its sign was seen after 5 s"
    assert processes.note(processes.FAULT) == (
        "process 0 (host-0): process 3 (host-3) has given no sign of life for 40 s: it or its host died"
    )
    del store.values[processes.FAULT], store.values["gammalm/pulse/3"]
    become(0)
    never, now[0] = processes.Pulse(), 2000.0
    never.beat()
    now[0] += 41
    pulses[1]._next = 0.0
    become(1)
    pulses[1].beat()
    become(0)
    never.beat()
    assert "process 3 (host-3) has given no sign" in processes.note(processes.FAULT)
