"""How processes are asked for: flags, our environment, what launchers leave behind. Real ones: tests/training/test_processes.py."""

import pytest

from gammalm.errors import ConfigError, DataError
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
