"""What the tests of the launchers share: command lines, running them, and stand-ins for the platforms' tools."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
RUN = ["--", "train", "--config", "lm:size=tiny", "--workdir", "runs/x", "--config.init.rules=('a=\"b\" $(HOME)',)"]
SLURM = ["slurm", "--nodes", "2", "--gpus-per-node", "4", "--time", "1-12:00:00"]
GPU = ["gpu_node", "--gpus", "4"]
JOBSET = ["jobset", "--name", "no", "--image", "me/gammalm:tpu", "--storage", "pvc:claim"]
TPU = ["tpu_vm", "--name", "demo", "--zone", "us-east5-a", "--topology", "v6e:4x4", "--image", "me/gammalm:tpu", "--storage", "nfs://h/e"]
BUILD = ["docker", "build", "--device", "cuda13", "--tag", "me/gammalm:cuda13"]
DOCKER = ["docker", "run", "--image", "me/gammalm:cpu", "--storage", "."]
ODD = ["--env", "ODD=it's \"a\" $(B) \\ #x"]
VALID = {
    "slurm": [*SLURM, "--partition", "p", "--account", "a", "--env", "A=1", *ODD, *RUN],
    "slurm-cpu": ["slurm", "--nodes", "2", "--gpus-per-node", "0", "--time", "30", "--gammalm", "gammalm", *RUN],
    "gpu_node": [*GPU, "--gammalm", "gammalm", *ODD, *RUN],
    "gpu_node-processes": [*GPU, "--processes", "2", "--gammalm", "gammalm", *RUN],
    "jobset-tpu": [*JOBSET, "--topology", "v5p:4x4x8", "--slices", "2", "--queue", "q", "--node-selector", "a.b/c=d", *ODD, *RUN],
    "jobset-gpu": [*JOBSET, "--nodes", "4", "--gpus-per-node", "8", "--namespace", "ns", "--service-account", "sa", *RUN],
    "jobset-cpu": [*JOBSET[:-1], "nfs://h/e/f", "--nodes", "2", "--gpus-per-node", "0", *RUN],
    "jobset-one-chip": [*JOBSET[:-1], "gs://bucket", "--topology", "v5e:1x1", *RUN],
    "tpu_vm": [*TPU, "--spot", "--delete", "--project", "p", *ODD, *RUN],
    "docker-build": [*BUILD, "--python", "3.12"],
    "docker-run": [*DOCKER, "--gpus", "all", *ODD, *RUN],
}


def launch(argv, cwd, path="/nonexistent", dry=False, **env) -> subprocess.CompletedProcess:
    """`launch/NAME.sh ARGUMENTS` in `cwd`; on PATH there is nothing but what `path` says."""
    command = [BASH, str(REPO / f"launch/{argv[0]}.sh"), *argv[1:]]
    if dry:
        command.insert(3 if argv[0] == "docker" else 2, "--dry-run")
    return subprocess.run(command, cwd=cwd, env={"PATH": path, **env}, capture_output=True, text=True, timeout=30)


def dry(argv, cwd) -> str:
    done = launch(argv, cwd, dry=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def tool(folder: Path, name: str, body: str = "") -> None:
    """A stand-in: notes its name, arguments and (of what reads one) standard input, then does `body`."""
    folder.mkdir(exist_ok=True)
    read = 'given="$(cat)"' if name in ("sbatch", "kubectl") else 'given=""'
    note = f"printf -v note '%s\\037' {name} \"$@\"; printf '%s%s\\036' \"$note\" \"$given\" >>{folder}/calls"
    (folder / name).write_text(f"#!{BASH}\n{read}\n{note}\n{body}\n")
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[list[str]]:
    """What was called since the last time, in the order of time: name, arguments, standard input."""
    file = folder / "calls"
    text = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return [line.split("\037") for line in text.split("\036")[:-1]]


def stand_ins(tmp_path: Path) -> Path:
    """A folder with every tool that the launchers call; they do nothing and succeed."""
    folder = tmp_path / "tools"
    for name in ("sbatch", "kubectl", "docker", "gammalm", "gcloud"):
        tool(folder, name)
    tool(folder, "nvidia-smi", "printf 'GPU 0\\nGPU 1\\nGPU 2\\nGPU 3\\n'")
    return folder


def path_of(tools: Path) -> str:
    """PATH with the stand-ins in front of the system's own programs."""
    return f"{tools}:/usr/bin:/bin"


def rendered(argv, cwd) -> tuple[str, str]:
    """Command and file of a dry run that feeds the one with the other."""
    command, text = dry(argv, cwd).split(" <<'END'\n", 1)
    return command.splitlines()[-1], text.removesuffix("END\n")


def validator(name: str, package: str) -> str:
    """The path of a checker that is installed here; the test is skipped where it is not."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    return found or pytest.skip(f"{name} is not installed here ({package})")


def wait_for(there) -> None:
    """Until `there()` holds; at most ten seconds."""
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)
