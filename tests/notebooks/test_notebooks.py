"""The notebooks: clean files that use what is public, a first cell that installs on Colab, and that each of them runs from top to bottom.

Without jupyter's packages (extra `notebooks`) they are neither validated nor run.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from gammalm.cli.main import build_parser
from gammalm.cli.options import split_overrides
from gammalm.config import load_config, validate
from gammalm.experiments.grid import load_grid

REPO = Path(__file__).resolve().parents[2]
BOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
NAMES = [
    "1_quick_tour", "2_epsilon_barrier", "3_sink_and_gating", "4_condensation_movie", "5_your_text", "6_inspect_a_model",
]  # fmt: skip
PICTURES = dict(zip(NAMES, (1, 2, 3, 1, 1, 1), strict=True))  # that each shows at least
SCALE = "GAMMALM_NOTEBOOK_SCALE"

each = pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)


def cells(book: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(book.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def faults(book: dict) -> list[str]:
    """What a committed notebook may not have: results, marks of the editor it was last open in, a title that is none."""
    found = [name for name in book["metadata"] if name not in ("kernelspec", "language_info")]
    found += [name for name in book["metadata"]["language_info"] if name != "name"]
    for cell in book["cells"]:
        found += [f"{cell['id']}: {name}" for name in ("outputs", "execution_count", "metadata", "attachments") if cell.get(name)]
    first = "".join(book["cells"][0]["source"])
    return found + ([] if book["cells"][0]["cell_type"] == "markdown" and first.startswith("# ") else ["no title"])


def test_all_six_are_there():
    assert [book.stem for book in BOOKS] == NAMES
    listed = re.findall(r"\]\((\w+)\.ipynb\)", (REPO / "notebooks" / "README.md").read_text("utf-8"))
    assert listed == NAMES


@each
def test_it_is_clean(book):
    text = book.read_text("utf-8")
    content = json.loads(text)
    assert faults(content) == []
    assert text == json.dumps(content, indent=1, ensure_ascii=False) + "\n"  # as Jupyter writes it: no difference by saving it
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(nbformat.from_dict(content))


def test_a_run_notebook_is_not_clean():
    content = json.loads(BOOKS[0].read_text("utf-8"))
    content["cells"][1] |= {"outputs": [{"output_type": "stream", "name": "stdout", "text": ["x"]}], "execution_count": 1}
    content["metadata"]["language_info"]["version"] = "3.12.1"
    assert len(faults(content)) == 3


@each
def test_it_begins_alike(book):
    """The cell that installs, the same in all; then the settings with both scales, which nothing else reads from outside."""
    install, settings, *others = cells(book, "code")
    assert install == cells(BOOKS[0], "code")[0] and "pip" in install and "google.colab" in install
    assert f'os.environ.get("{SCALE}", "laptop")' in settings
    assert all("laptop" in table and "test" in table for table in re.findall(r"= (\{[^}]*\})\[SCALE\]", settings))
    assert re.search(r"\}\[SCALE\]", settings) and not any("environ" in other for other in others)


def public(name: str) -> bool:
    return not any(re.match(r"_(?!_\w+__$)", part) for part in name.split("."))  # __version__ and its like are public


@each
def test_it_uses_what_is_public(book):
    """Names that it imports exist and, like all attributes that it takes, have no leading underscore."""
    assert public("a.b.__version__") and not public("a._b.c") and not public("__a")
    names = set()
    for source in cells(book, "code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                assert public(node.attr), ast.unparse(node)
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "gammalm":
                module = importlib.import_module(node.module)
                assert public(node.module) and all(public(alias.name) and hasattr(module, alias.name) for alias in node.names)
                names |= {alias.name for alias in node.names}
    assert names
    text = "\n".join(cells(book, "code"))
    assert [name for name in names if len(re.findall(rf"\b{name}\b", text)) < 2] == []  # nothing is imported for nothing


@each
def test_its_commands_and_links_are_right(book):
    text = "\n".join(cells(book, "markdown"))
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (book.parent / link).exists(), link
    commands = re.findall(r"^    (gammalm .+)$|`(gammalm \w+ [^`]+)`", text, re.MULTILINE)
    for command in map("".join, commands):
        overrides, argv = split_overrides(shlex.split(command)[1:])
        args = build_parser(argv[0]).parse_args(argv)
        config = getattr(args, "config", None)
        if config and not config.startswith("mine.py"):  # the reader's own file
            load_grid(config, overrides) if args.command == "grid" else validate(load_config(config, overrides))


# ---- the first cell, run where Colab, pip and a missing package are stand-ins


@pytest.fixture
def install(monkeypatch, tmp_path, capsys):
    """install(...) runs the first cell; it returns what pip was asked for (None: it was not) and what was printed."""

    def run(*, colab=True, installed=False, source=None, archive=True, nvidia=False, status=0, version=None, loaded=None):
        there, asked = [installed], []

        def pip(command, **_):
            asked.append(command[-1])
            there[0] = status == 0
            return SimpleNamespace(returncode=status, stderr="ERROR: no matching distribution")

        monkeypatch.chdir(tmp_path)
        if archive:
            (tmp_path / "gammalm.zip").touch()
        monkeypatch.setattr(subprocess, "run", pip)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace() if there[0] else None)
        monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if nvidia else None)
        versions = {name: getattr(sys.modules.get(name), "__version__", "0") for name in ("ml_dtypes", "jax")}
        versions["numpy"] = loaded or numpy.__version__
        monkeypatch.setattr("importlib.metadata.version", versions.get)
        monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace()) if colab else None
        monkeypatch.setattr(sys, "version_info", version) if version else None
        monkeypatch.setenv("GAMMALM_SOURCE", source) if source else monkeypatch.delenv("GAMMALM_SOURCE", raising=False)
        exec(compile(cells(BOOKS[0], "code")[0], "first cell", "exec"), {})
        return (asked[0] if asked else None), capsys.readouterr().out

    return run


def test_outside_colab_nothing_is_installed(install):
    asked, printed = install(colab=False, installed=True)
    assert asked is None and "JAX" in printed and "gammalm 0" in printed


def test_on_colab_it_is_installed_once(install):
    assert install()[0] == "gammalm.zip"
    assert install(nvidia=True)[0] == "gammalm.zip[cuda12]"
    assert install(source="git+https://host/gammalm", nvidia=True)[0] == "gammalm[cuda12] @ git+https://host/gammalm"
    assert install(installed=True)[0] is None


@pytest.mark.parametrize(
    "how, message",
    [
        ({"version": (3, 10, 1)}, "needs Python 3.11, 3.12 or 3.13"),
        ({"version": (3, 14, 0)}, "Choose another kernel"),
        ({"archive": False}, "gammalm.zip is not here. Upload"),
        ({"status": 1}, "could not install gammalm.zip:\nERROR: no matching"),
        ({"colab": False}, r"pip install -e '.\[notebooks\]'"),
        ({"installed": True, "loaded": "9.9.9"}, "numpy .* was in use .* Restart the session"),
    ],
)
def test_what_is_wrong_is_said(install, how, message):
    with pytest.raises(RuntimeError, match=message):
        install(**how)


# ---- run


def test_another_text_gets_runs_of_its_own():
    """Notebook 5 again with other text: a run of the text before would refuse the new tokenizer."""
    (cell,) = [cell for cell in cells(BOOKS[4], "code") if "\nfolders = " in cell]
    (lines,) = re.findall(r"\A(.*?^folders = .*?)$", cell, re.MULTILINE | re.DOTALL)
    folders = []
    for sha256 in ("a" * 64, "b" * 64):
        names = {"manifest": {"tokenizer": {"sha256": sha256}}, "RUNS": Path("runs"), "configs": {0.5: None, 1.0: None}}
        exec(lines, names)
        folders += names["folders"].values()
    assert len(set(folders)) == 4


@pytest.mark.full
@each
def test_it_runs(book, tmp_path, corpus, monkeypatch):
    """From top to bottom in a folder of its own, at scale test: no error, its pictures, no number that is none."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):  # not those of whoever runs this
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv(SCALE, "test")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # compiling is what a few steps take
    # One device, as at home. XLA takes a blank for the name of a file.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "").strip())
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    (work / "data" / "open-mix").symlink_to(corpus[0])  # so that no text is fetched
    content = nbformat.read(book, as_version=4)
    nbclient.NotebookClient(content, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(work)}}).execute()
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    pictures = [data for data in shown if "image/png" in data or "data:image/" in data.get("text/html", "")]
    assert len(pictures) >= PICTURES[book.stem]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert len(printed.splitlines()) > 5 and not re.search(r"\b(nan|inf)\b", printed)
    warned = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")
    assert "Warning" not in warned and "Traceback" not in warned
