"""The Slurm job, run with stand-ins: two tasks on this machine, the notice before the time limit, what is requeued."""

import os
import signal
import subprocess

import pytest

from .launching import BASH, RUN, VALID, calls, path_of, rendered, tool, wait_for

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "partition", "account", "requeue", "signal",
    "open-mode", "output",
}  # fmt: skip


def slurm_job(argv, cwd) -> str:
    command, text = rendered(argv, cwd)
    assert command == "sbatch"
    return text


def test_a_slurm_job_asks_for_what_was_said(tmp_path):
    head = slurm_job(VALID["slurm"], tmp_path).split("\nset ")[0].splitlines()
    assert head[0] == "#!/usr/bin/env bash" and all(line.startswith("#SBATCH --") for line in head[1:])
    options = dict((line.removeprefix("#SBATCH --") + "=").split("=", 1) for line in head[1:])
    options = {name: text.removesuffix("=") for name, text in options.items()}
    assert set(options) == SBATCH
    # One process per GPU is what JAX's own detection under Slurm supposes: it gives process i of a node the device i.
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "4", "4")
    assert (options["time"], options["signal"], options["output"]) == ("1-12:00:00", "B:USR1@120", "runs/x/slurm-%j.log")
    cpu = slurm_job(VALID["slurm-cpu"], tmp_path)
    assert "--ntasks-per-node=1\n" in cpu and "gpus" not in cpu


@pytest.fixture
def cluster(tmp_path):
    """A Slurm of two tasks on this machine. Called with STATUS it runs the job, whose tasks end with it, on SIGTERM if `until_told`."""
    folder = tmp_path / "tools"
    tool(folder, "srun", """
[ "$1" = --kill-on-bad-exit=0 ] || exit 99 # else the first task to end would take the others, which still save, with it
[ "$SRUN_CPUS_PER_TASK" = 8 ] || exit 98 # srun does not take the job's own --cpus-per-task
shift
children=()
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 "$@" &
    children+=($!)
done
printf '%s\\n' "${children[@]}" >tasks
status=0
for child in "${children[@]}"; do wait "$child"; ended=$?; [ $ended -le $status ] || status=$ended; done
exit $status""")
    tool(folder, "scancel", "xargs kill -TERM <tasks")
    tool(folder, "scontrol")
    tool(folder, "gammalm", """
env >"env.$SLURM_PROCID"
trap 'exit $STATUS' TERM
[ -z "$UNTIL_TOLD" ] || { : >"ready.$SLURM_PROCID"; for i in {1..200}; do sleep 0.05; done; }
exit $STATUS""")

    def run_job(status: int, until_told=False, restarted=0):
        env = {"PATH": path_of(folder), "STATUS": str(status), "UNTIL_TOLD": "yes" * until_told, "SLURM_JOB_ID": "77"}
        env |= {"SLURM_RESTART_COUNT": str(restarted)} if restarted else {}
        job = subprocess.Popen([BASH, "-c", slurm_job(VALID["slurm-cpu"], tmp_path)], cwd=tmp_path, env=env, stdout=subprocess.PIPE)
        if until_told:
            wait_for(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in (0, 1)))
            job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=20)
        made = calls(folder)
        return job.returncode, [call[1:-1] for call in made if call[0] == "scontrol"], made

    return run_job


REQUEUED = [["requeue", "77"]]


def test_tasks_of_a_slurm_job_find_each_other(cluster, tmp_path, monkeypatch):
    """What a task sees is what JAX detects Slurm by; both take the same coordinator."""
    from jax._src.clusters.slurm_cluster import SlurmCluster

    from gammalm.sharding.processes import arguments

    status, requeued, made = cluster(0)
    assert (status, requeued) == (0, [])
    assert [call[1:-1] for call in made if call[0] == "gammalm"] == [RUN[1:]] * 2
    found = set()
    for rank in (0, 1):
        seen = dict(line.split("=", 1) for line in (tmp_path / f"env.{rank}").read_text().splitlines() if "=" in line)
        assert seen["JAX_COMPILATION_CACHE_DIR"] == "runs/x/compiled"
        assert arguments(env=seen) == {"cluster_detection_method": "slurm"}
        for name in list(os.environ):
            if name.startswith("SLURM"):
                monkeypatch.delenv(name)
        for name, text in seen.items():
            monkeypatch.setenv(name, text)
        found.add((SlurmCluster.get_coordinator_address(1, None), SlurmCluster.get_process_count(), SlurmCluster.get_process_id()))
    assert {pair[1:] for pair in found} == {(2, 0), (2, 1)} and len({pair[0] for pair in found}) == 1


def test_near_the_limit_the_trainers_are_told_and_the_job_is_requeued(cluster):
    status, requeued, made = cluster(75, until_told=True)
    assert (status, requeued) == (0, REQUEUED)
    assert ["scancel", "--signal=TERM", "77", ""] in made


@pytest.mark.parametrize(
    "status, until_told, restarted, ends, requeued",
    [
        (0, True, 0, 0, []),  # it was at its last step
        (75, False, 0, 0, REQUEUED),  # preempted: Slurm told the trainers itself
        (76, False, 19, 0, REQUEUED),
        (75, False, 20, 75, []),  # often enough
        (1, False, 0, 1, []),
        (2, True, 0, 2, []),
    ],
)
def test_what_ends_a_slurm_job(cluster, status, until_told, restarted, ends, requeued):
    assert cluster(status, until_told, restarted)[:2] == (ends, requeued)
