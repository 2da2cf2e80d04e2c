"""The first minutes of a new user: what stands in the way is said in one message, with what to do about it, and no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from gammalm.cli import main as cli
from gammalm.cli.environment import explain
from gammalm.cli.together import keep_compiled
from gammalm.errors import ConfigError
from gammalm.files import make_folder

REPO = Path(__file__).resolve().parents[2]
TINY = "lm:size=nano,vocab=608,steps=4,seq_len=32,batch=8,mixture=natural"
NOWHERE = "/proc/no-folder-can-be-made-here"  # root cannot either, so that it holds in containers too


def heard() -> None:
    """Ctrl-C reaches a process that was started where it is ignored, as in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def python(program: str, **environment):
    """A fresh interpreter; `environment` over the test's own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment, timeout=120, cwd="/",
        preexec_fn=heard,
    )  # fmt: skip


def fails(capsys, *argv, status=1) -> str:
    """The message with which a command ends."""
    assert cli.main([str(word) for word in argv]) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


# ---- Python and packages ---------------------------------------------------------------------------------------------------------


def test_an_older_python_is_named():
    done = python("import sys; sys.version_info = (3, 9, 2, 'final', 0); import gammalm")
    assert done.returncode == 1 and "needs Python 3.11, 3.12 or 3.13" in done.stderr.splitlines()[-1]


STALE = """Metadata-Version: 2.1
Name: gammalm
Version: 0.0.1
Requires-Dist: numpy>=1
Requires-Dist: scipy>=99
Requires-Dist: no-such-package-anywhere>=1
Requires-Dist: not-asked-for; extra == "eval"
"""
RUN_REPORT = """
import sys, types
def run(args):
    {fault}
module = types.SimpleNamespace(add_parser=lambda s: s.add_parser("report"), run=run)
sys.modules["gammalm.cli.report"] = module
from gammalm.cli.main import main
sys.exit(main(["report"]))
"""


@pytest.fixture
def stale(tmp_path):
    """PYTHONPATH of an environment in which an older gammalm with other packages was installed."""
    folder = tmp_path / "gammalm-0.0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(STALE)
    return os.pathsep.join([str(tmp_path), str(REPO)])


def test_a_stale_environment_is_named_where_something_fails(stale):
    missing = python(RUN_REPORT.format(fault="import no_such_package_anywhere"), PYTHONPATH=stale)
    assert missing.returncode == 1 and "Traceback" not in missing.stderr
    told = missing.stderr
    assert "No module named 'no_such_package_anywhere'" in told and "made for gammalm 0.0.1" in told
    assert "no-such-package-anywhere is missing" in told and "and gammalm asks for >=99" in told and "-m pip install -e" in told
    assert "numpy" not in told and "not-asked-for" not in told

    bug = python(RUN_REPORT.format(fault="1 / 0"), PYTHONPATH=stale)  # which may well come of it: traceback and remark
    assert "ZeroDivisionError" in bug.stderr and "made for gammalm 0.0.1" in bug.stderr.splitlines()[-1]


def test_a_package_of_which_an_install_left_half_is_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed-1.0.dist-info").mkdir()
    (tmp_path / "gammalm-0.0.1.dist-info").mkdir()
    (tmp_path / "gammalm-0.0.1.dist-info" / "METADATA").write_text("Name: gammalm\nVersion: 0.0.1\nRequires-Dist: half-installed>=1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "half-installed is missing" in explain(KeyError())


def test_in_an_environment_that_fits_nothing_is_added(monkeypatch):
    monkeypatch.setattr("gammalm.cli.environment.misfits", lambda installed: [])
    for fault in (ImportError("a part of it"), KeyError("a bug")):
        monkeypatch.setattr(cli, "run", lambda argv, fault=fault: (_ for _ in ()).throw(fault))
        with pytest.raises(type(fault)) as caught:
            cli.main(["report"])
        assert not hasattr(caught.value, "__notes__")


def test_many_misfits_are_said_shortly(monkeypatch):
    monkeypatch.setattr("gammalm.cli.environment.importlib.metadata.distribution", lambda name: None)
    monkeypatch.setattr("gammalm.cli.environment.misfits", lambda installed: [f"p{i} is missing" for i in range(9)])
    said = explain(KeyError())
    assert "p4 is missing" in said and "p5" not in said and "4 more" in said


# ---- paths and files -------------------------------------------------------------------------------------------------------------


def test_a_workdir_that_cannot_be_written(corpus, tmp_path, capsys):
    (tmp_path / "file").touch()
    for workdir in (NOWHERE, tmp_path / "file", tmp_path / "file" / "below"):
        for command, config in (("train", TINY), ("grid", "grids/quickstart")):
            argv = [command, "--config", config, "--workdir", workdir]
            argv += ["--config.data.path", corpus[0]] if command == "train" else []
            assert "Choose a --workdir that you may write to" in fails(capsys, *argv, status=2)


def test_a_folder_that_only_root_may_write(tmp_path):
    """As another user than root, whom permissions do not bind."""
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() == 0:
        make_folder(tmp_path / "closed")
    else:
        with pytest.raises(ConfigError, match="Permission denied"):
            make_folder(tmp_path / "closed")


@pytest.mark.parametrize(
    "fault, says",
    [
        (PermissionError(13, "Permission denied", "W/x"), "Permission denied: W/x. Choose a place that you may read and write"),
        (OSError(30, "Read-only file system", "W/x"), "Read-only file system: W/x. Choose a place on a disk that can be written"),
        (NotADirectoryError(20, "Not a directory", "W/x/y"), "Not a directory: W/x/y. Something on this path is no folder"),
    ],
)
def test_paths_that_cannot_be_used(monkeypatch, capsys, fault, says):
    def run(argv):
        raise fault

    monkeypatch.setattr(cli, "run", run)
    assert fails(capsys, "report").startswith(f"gammalm: {says}")


def test_a_cache_that_cannot_be_written_is_said_once_and_not_used(monkeypatch, capsys):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("GAMMALM_CACHE", NOWHERE)
    before = jax.config.jax_compilation_cache_dir
    keep_compiled()
    assert "every start compiles. GAMMALM_CACHE names another folder" in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir == before


def test_a_corpus_that_is_not_there_or_holds_nothing(tmp_path, capsys):
    train = ["train", "--config", TINY, "--workdir", tmp_path / "run", "--config.data.path"]
    assert "gammalm data prepare" in fails(capsys, *train, tmp_path / "none")
    prepare = ["data", "prepare", "--out", tmp_path / "out", "--vocab-size", "600", "--source"]
    assert "There is no file" in fails(capsys, *prepare, tmp_path / "none.jsonl")
    for name, content, says in (
        ("empty.jsonl", b"", "No usable document"),
        ("keys.jsonl", b'{"content": "words"}\n', '1 no_text. Text is expected as UTF-8, under the key "text"'),
        ("torn.jsonl", b'{"text": "wor\n', "1 bad_json"),
        ("utf16.jsonl", '{"text": "words"}\n'.encode("utf-16"), "undecodable"),
        ("utf16.txt", "words\r\n".encode("utf-16"), "1 undecodable"),
    ):
        (tmp_path / name).write_bytes(content)
        assert says in fails(capsys, *prepare, tmp_path / name)
    assert not (tmp_path / "out").exists() and not (tmp_path / "run").exists()


def test_text_from_windows_is_read(tmp_path, capsys):
    bom, lines = b"\xef\xbb\xbf", [f"a line of text, number {i}" for i in range(60)]
    (tmp_path / "a.jsonl").write_bytes(bom + "".join(json.dumps({"text": line}) + "\r\n" for line in lines).encode())
    (tmp_path / "b.txt").write_bytes(bom + "\r\n".join(lines).encode())
    out = tmp_path / "out"
    assert cli.main(["data", "prepare", "--source", str(tmp_path), "--out", str(out), "--vocab-size", "600", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert [(s["documents"], s["skipped"]) for s in manifest["sources"]] == [(60, {}), (1, {})]
    assert cli.main(["data", "inspect", str(out), "--show", "text-und", "--documents", "99"]) == 0
    shown = capsys.readouterr().out
    assert "\ufeff" not in shown and lines[7] in shown


# ---- stopping --------------------------------------------------------------------------------------------------------------------


def test_interrupted_says_whether_it_goes_on(monkeypatch, capsys):
    def run(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", run)
    assert "The same command again goes on where it was" in fails(capsys, "train", status=130)
    assert fails(capsys, "advise", status=130) == "gammalm: interrupted.\n"


SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("went on")
"""


def test_ctrl_c_within_an_import_is_never_swallowed(tmp_path):
    """As by libraries in C; outside of imports it is a KeyboardInterrupt, which may be caught."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    done = python(RUN_REPORT.format(fault="import swallows"), PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gammalm: interrupted.\n")
    done = python(RUN_REPORT.format(fault=f"exec({SWALLOWS!r}); return 0"), PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "went on\n")


@pytest.mark.full
@pytest.mark.parametrize("moment", ["importing", "a row"])
def test_ctrl_c_ends_soon_and_the_run_goes_on(corpus, tmp_path, moment):
    """A real SIGINT: while JAX is imported, and while it trains; then the same command ends the run."""
    told = ["-X", "importtime"] * (moment == "importing")  # a line on stderr for each module
    argv = [sys.executable, *told, "-m", "gammalm.cli.main", "train", "--config", TINY.replace("steps=4", "steps=200"), "--workdir", "run"]
    argv += [f"--config.data.path={corpus[0]}", "--config.train.checkpoint_every=100", "--config.train.log_every=1"]
    one_device = os.environ | {"XLA_FLAGS": ""}
    pipe = subprocess.PIPE
    started = subprocess.Popen(argv, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=one_device, preexec_fn=heard)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while moment == "a row" and not (metrics.exists() and metrics.stat().st_size):
        assert started.poll() is None
        time.sleep(0.05)
    if moment == "importing":
        assert any("jax._src" in line for line in started.stderr)  # read up to there: hundreds more follow
    sent = time.monotonic()
    started.send_signal(signal.SIGINT)
    _, error = started.communicate(timeout=60)
    assert started.returncode == 130 and "gammalm: interrupted. The same command again" in error and "Traceback" not in error, error
    assert time.monotonic() - sent < 30
    if moment == "a row":
        again = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=one_device)
        assert again.returncode == 0 and "after 51,200 tokens" in again.stdout
