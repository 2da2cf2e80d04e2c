"""The house rules that a machine can check: file length, docstrings, import direction, no machine paths, ruff."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MAX_LINES = 400

SHARED = {"__init__", "errors", "files", "memory", "progress", "config", "config_checks", "quiet_tf", "trees"}
BELOW_EXPERIMENTS = {"initializers", "models", "sharding", "data", "training", "theory", "analysis", "evaluation"}
# Room -> the rooms it may import besides itself and SHARED (docs/architecture.md).
MAY_IMPORT = {
    "initializers": set(),
    "sharding": set(),
    "data": set(),
    "theory": set(),
    "models": {"initializers"},
    "training": {"initializers", "models", "data", "sharding"},
    "analysis": {"initializers", "models", "theory"},
    "evaluation": {"initializers", "models", "data"},
    "plan": {"initializers", "models", "sharding", "data", "training"},
    "interop": {"initializers", "models", "theory"},
    "experiments": BELOW_EXPERIMENTS,
    "inspection": BELOW_EXPERIMENTS | {"experiments", "interop"},
    "cli": BELOW_EXPERIMENTS | {"experiments", "inspection", "interop", "plan"},
}


# Folders that are none of the repository's, for where git cannot say: wherever they are, and at the root.
LEAVINGS = (".git", ".venv*", ".cache", "__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", "*.egg-info", "build", "dist")
LEAVINGS_AT_ROOT = ("data", "runs", "shared")


def repository_files(root: Path = REPO) -> list[Path]:
    """What git tracks or would track, as paths in the repository; without git or its metadata, what a walk finds beside leavings."""
    if (root / ".git").exists():
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
        try:
            listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return walked_files(root)
        return [Path(name) for name in listed.split("\0") if name and (root / name).is_file()]
    return walked_files(root)


def walked_files(root: Path) -> list[Path]:
    found = []
    for folder, below, names in os.walk(root):
        leavings = LEAVINGS + LEAVINGS_AT_ROOT * (Path(folder) == root)
        below[:] = [name for name in below if not any(fnmatch.fnmatchcase(name, pattern) for pattern in leavings)]
        found += [(Path(folder) / name).relative_to(root) for name in names]
    return found


@pytest.fixture(scope="module")
def files():
    return repository_files()


@pytest.mark.parametrize("git", ["none", "refuses"])
def test_files_are_found_without_git(tmp_path, git, monkeypatch):
    kept = ["README.md", ".ci/run", "gammalm/data/load.py", "tests/data/test_load.py"]
    left = [".venv-test/lib/a.py", "data/open-mix/b.py", "runs/c.py", "x/__pycache__/d.py", ".cache/e", "g.egg-info/f", "build/g.py"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if git == "refuses":
        (tmp_path / ".git").mkdir()  # empty: git ends with an error
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert sorted(map(str, repository_files(tmp_path))) == sorted(kept)


def test_the_walk_finds_what_git_lists(files):
    assert set(files) <= set(walked_files(REPO))


def test_files_are_short(files):
    lengths = {str(p): len((REPO / p).read_text("utf-8").splitlines()) for p in files if p.suffix in (".py", ".sh")}
    assert len(lengths) > 20
    assert {p: n for p, n in lengths.items() if n >= MAX_LINES} == {}


def test_every_module_says_what_it_is_for(files):
    silent = [str(p) for p in files if p.suffix == ".py" and not ast.get_docstring(ast.parse((REPO / p).read_text("utf-8")))]
    assert silent == []


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of everything that a module imports from gammalm, wherever in the file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "gammalm"}


def breaches(room: str, names: set[str]) -> set[str]:
    allowed = SHARED if room in SHARED else SHARED | MAY_IMPORT[room] | {room}
    return {name for name in names if name != "gammalm" and name.split(".")[1] not in allowed | {"__version__"}}


def test_imports_never_point_up():
    seen = set()
    for file in sorted((REPO / "gammalm").rglob("*.py")):
        room = file.relative_to(REPO / "gammalm").parts[0].removesuffix(".py")
        assert room in SHARED | set(MAY_IMPORT), f"{file} is in no room of the table"
        seen.add(room)
        assert breaches(room, imported(ast.parse(file.read_text("utf-8")))) == set(), file
    assert {"models", "cli", "config"} <= seen


def test_an_upward_import_would_be_seen():
    inside = "def f():\n    from gammalm.training import step\n    import gammalm.cli.main\n"
    assert breaches("models", imported(ast.parse(inside))) == {"gammalm.training.step", "gammalm.cli.main"}
    assert breaches("config", imported(ast.parse("from gammalm import models"))) == {"gammalm.models"}
    assert breaches("training", imported(ast.parse("from gammalm.models import decoder"))) == set()


# A home or a working folder of one machine. Written in two halves so that this file does not match itself.
MACHINE_PATH = re.compile("(?<![\\w.~$}/>-])/" + r"(?:root|home|Users|work|opt|mnt)/[\w.~-]")


def test_no_machine_paths(files):
    found = []
    for path in files:
        try:
            text = (REPO / path).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path}:{n}: {line.strip()[:80]}" for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]
    assert found == []
    assert MACHINE_PATH.search("see /" + "root/x") and not MACHINE_PATH.search("docs/work/x")


def test_ruff(files):
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "."], cwd=REPO, capture_output=True, text=True)
    if "No module named ruff" in done.stderr:
        pytest.skip("ruff is not installed here")
    assert done.returncode == 0, done.stdout


def test_scripts_are_executable_and_parse(files):
    scripts = [p for p in files if p.suffix == ".sh"] + [Path(".ci/run")]
    assert len(scripts) >= 4
    for script in scripts:
        assert (REPO / script).stat().st_mode & 0o111, f"{script} is not executable"
        subprocess.run(["bash", "-n", script], cwd=REPO, check=True)
