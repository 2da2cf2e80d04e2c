"""Getting installed: which Python is found, when an environment is made anew, what a wheel holds."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
OWN = f"3.{sys.version_info.minor}"
# The interpreter itself, not the one of an environment: environments made by the tests rest on it.
REAL = os.path.realpath(sys.executable)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find(*folders: Path, home: Path, version=()):
    """launch/find_python.sh with these folders as the whole PATH."""
    environment = {"PATH": os.pathsep.join(map(str, folders)), "HOME": str(home)}
    return subprocess.run([BASH, REPO / "launch/find_python.sh", *version], capture_output=True, text=True, env=environment)


def shims(folder: Path) -> Path:
    """What pyenv leaves for versions that are not selected: programs that only complain."""
    for name in ("python3.13", "python3.12", "python3.11", "python3", "python"):
        program(folder / name, f"#!{BASH}\necho 'pyenv: {name}: command not found' >&2\nexit 127\n")
    return folder


def answering(folder: Path, version: str) -> Path:
    """A Python that passes for `version` and says that it is itself."""
    return program(folder / f"python{version}", f'#!{BASH}\n[ "${{@: -1}}" = {version} ] && echo "$0"\n')


def real(folder: Path, name: str) -> Path:
    return program(folder / name, f'#!{BASH}\nexec {REAL} "$@"\n')


def test_a_shim_that_errors_is_no_python(tmp_path):
    broken = shims(tmp_path / "shims")
    none = find(broken, home=tmp_path)
    assert none.returncode == 1 and none.stdout == "" and "No working Python" in none.stderr and "3.11" in none.stderr

    real(tmp_path / "bin", "python3")
    found = find(broken, tmp_path / "bin", home=tmp_path)
    assert found.returncode == 0 and os.path.realpath(found.stdout.strip()) == REAL


def test_the_newest_wins_wherever_it_is(tmp_path):
    old, new = answering(tmp_path / "a", "3.11"), answering(tmp_path / "b", "3.13")
    assert find(old.parent, new.parent, home=tmp_path).stdout.strip() == str(new)
    assert find(old.parent, new.parent, home=tmp_path, version=["3.11"]).stdout.strip() == str(old)
    newest = answering(tmp_path / ".pyenv/versions/3.13.1/bin", "3.13")
    assert find(old.parent, home=tmp_path).stdout.strip() == str(newest)
    assert find(home=tmp_path, version=["3.12"]).returncode == 1


def test_a_free_threaded_build_is_passed_over(tmp_path):
    """The interpreter here, once as it is and once saying of itself that it was built without the lock."""
    says = "import sysconfig; sysconfig.get_config_var = lambda name: {} if name == 'Py_GIL_DISABLED' else None"
    for value, status in ((1, 1), (0, 0)):
        program(tmp_path / "bin/python3", f'#!{BASH}\nexec {REAL} -I -c "{says.format(value)}\n$3" "$4"\n')
        assert find(tmp_path / "bin", home=tmp_path, version=[OWN]).returncode == status


def test_a_name_is_not_believed(tmp_path):
    other = next(v for v in ("3.13", "3.12") if v != OWN)
    real(tmp_path / "bin", f"python{other}")
    assert find(tmp_path / "bin", home=tmp_path).returncode == 1


# Stands in for Python and for the environment's Python: makes environments of itself, and counts what pip is asked.
FAKE = """#!{bash}
case "$*" in
*"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; : >"$3/pyvenv.cfg" ;;
*"-m pip install"*) echo "$*" >>{calls}; [ "$(wc -l <{calls})" -ge "$(cat {needed})" ] ;;
*) exec {real} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with launch/env.sh alone, a fake Python, and a `sleep` that does not: env() runs it and counts pip's calls so far."""
    root = tmp_path / "checkout"
    (root / "launch").mkdir(parents=True)
    shutil.copy(REPO / "launch/env.sh", root / "launch")
    (root / "setup.py").write_text("one")
    calls, needed = tmp_path / "calls", tmp_path / "needed"
    calls.touch()
    needed.write_text("1")
    python = program(tmp_path / "bin/fakepython", FAKE.format(bash=BASH, calls=calls, needed=needed, real=REAL))
    program(tmp_path / "bin/sleep", f"#!{BASH}\n")

    def env(extras="test"):
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [BASH, root / "launch/env.sh", ".venv", python, extras], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        return done.returncode, len(calls.read_text().splitlines()), done.stdout

    env.root, env.needed, env.python = root, needed, python
    return env


def test_an_environment_is_installed_once_and_when_something_changed(checkout):
    assert checkout()[:2] == (0, 1)
    assert checkout()[:2] == (0, 1)  # up to date: pip is not asked
    (checkout.root / "setup.py").write_text("two")
    assert checkout()[:2] == (0, 2)
    assert checkout(extras="test,parity")[:2] == (0, 3)
    assert checkout(extras="test,parity")[:2] == (0, 3)


def test_a_broken_environment_is_made_anew(checkout):
    checkout()
    left = checkout.root / ".venv/left-from-before"
    left.touch()
    program(checkout.root / ".venv/bin/python", f"#!{BASH}\nexit 127\n")
    status, calls, output = checkout()
    assert (status, calls) == (0, 2) and not left.exists() and "making it anew" in output


def test_a_folder_that_is_no_environment_is_left_alone(checkout):
    mine = checkout.root / ".venv/mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    status, calls, output = checkout()
    assert (status, calls) == (1, 0) and mine.read_text() == "keep" and "is no virtual environment" in output


def test_an_environment_made_by_hand_is_used_and_never_deleted(checkout):
    folder = checkout.root / ".venv"
    program(folder / "bin/python", checkout.python.read_text())
    (folder / "pyvenv.cfg").touch()
    assert checkout()[:2] == (0, 1)  # its Python fits: installed into it
    program(folder / "bin/python", f"#!{BASH}\nexit 127\n")
    status, calls, output = checkout()
    assert (status, calls) == (1, 1) and (folder / "pyvenv.cfg").exists() and "did not make" in output


def test_installing_is_tried_three_times(checkout):
    checkout.needed.write_text("3")
    assert checkout()[:2] == (0, 3)
    (checkout.root / "setup.py").write_text("two")
    checkout.needed.write_text("100")
    status, calls, output = checkout()
    assert (status, calls) == (1, 6) and "could not be installed" in output
    checkout.needed.write_text("1")
    assert checkout()[:2] == (0, 7)  # a failed attempt leaves no stamp behind


@pytest.mark.parametrize("parity_status", [0, 1])
def test_a_parity_environment_that_fails_is_told_and_the_rest_runs(tmp_path, parity_status):
    """launch/test.sh with a stand-in for installing, and for the environment's Python, which writes down what is tested."""
    shutil.copytree(REPO / "launch", tmp_path / "launch")
    ran = tmp_path / "ran"
    python = program(tmp_path / "python", f'#!{BASH}\ncase "$*" in *pytest*) echo "$0" >>{ran} ;; *) echo 3.13 ;; esac\n')
    program(tmp_path / "launch/find_python.sh", f"#!{BASH}\necho {python}\n")
    program(
        tmp_path / "launch/env.sh",
        f'#!{BASH}\nmkdir -p "$1/bin" && cp {python} "$1/bin/python"\n[ "$1" != .venv-parity ] || exit {parity_status}\n',
    )
    done = subprocess.run([BASH, tmp_path / "launch/test.sh"], capture_output=True, text=True)
    tested = ran.read_text().split()
    assert done.returncode == parity_status, done.stdout + done.stderr
    assert tested == [".venv-test/bin/python", ".venv-parity/bin/python"][: 2 - parity_status]
    assert ("environment .venv-parity: FAILED" in done.stdout) == bool(parity_status)
    assert "in all" in done.stdout


def test_a_wheel_holds_the_configs(tmp_path):
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    for name in ("gammalm", "configs"):  # a copy, so that building leaves nothing in the checkout
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(REPO / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(source.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(unpacked)
    ours = {p.relative_to(REPO).as_posix() for folder in ("gammalm", "configs") for p in (REPO / folder).rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == {f"gammalm/{p}" if p.startswith("configs/") else p for p in ours}

    program_text = (
        "import gammalm.configs.lm as lm; from gammalm.config import load_config as load, configs_folder; print(configs_folder());"
        "assert load('lm:size=tiny') == load('configs/lm.py:size=tiny') == lm.get_config('size=tiny')"
    )
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", program_text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(unpacked / "gammalm/configs"), done.stderr
