"""`--profile A:B`: a trace with exactly the named steps, what is refused, and what a start says that finds them made already."""

import gzip
import json

import pytest

from gammalm.cli.main import main
from gammalm.cli.train import parse_range
from gammalm.errors import ConfigError
from gammalm.training.profile import STEP

from .test_loop import TINY


@pytest.mark.parametrize("text, span", [("1:1", (1, 1)), ("3:8", (3, 8)), ("8:8", (8, 8))])
def test_a_range(text, span):
    assert parse_range(text, 8) == span


@pytest.mark.parametrize("text", ["", "3", "0:2", "4:3", "3:9", "-1:2", "1:2:3", "a:b", "1.0:2"])
def test_no_range(text):
    with pytest.raises(ConfigError, match="1 <= A <= B <= 8"):
        parse_range(text, 8)


def arguments(corpus, workdir, *more):
    changed = {"data.path": corpus[0], "model.d_model": 16, "model.d_ff": 32, "mesh.data": 1, "mesh.fsdp": 8, "train.checkpoint_every": 5}
    overrides = [f"--config.{name}={value}" for name, value in changed.items()]
    return ["train", "--json", "--config", f"{TINY},steps=7", *overrides, "--workdir", str(workdir), *more]


def test_a_bad_range_is_refused_before_any_work(corpus, tmp_path, capsys):
    assert main(arguments(corpus, tmp_path / "run", "--profile", "5:9")) == 2
    assert "--profile 5:9" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.full
def test_the_trace_holds_the_steps(corpus, tmp_path, capsys):
    """Steps 4 to 6 of 7, a checkpoint among them: each once, by its number, with the phases of the loop beside them."""
    workdir = tmp_path / "run"
    assert main(arguments(corpus, workdir, "--profile", "4:6")) == 0
    printed = capsys.readouterr()
    assert f"profile: {workdir / 'profile'}" in printed.err
    assert "peak unknown; MFU: 6 FLOP per active matrix parameter and token" in printed.err
    assert json.loads(printed.out)["goodput"]["phases"]["step"] > 0 and "\ngoodput " in printed.err
    (file,) = (workdir / "profile").rglob("*.trace.json.gz")
    assert list(file.parent.glob("*.xplane.pb"))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == STEP and "step_num" in event.get("args", {})]
    assert sorted(steps) == ["4", "5", "6"]
    assert {"data", "step", "checkpoint"} <= {event.get("name") for event in events}

    assert main(arguments(corpus, workdir, "--profile", "4:6")) == 0
    assert "step 6 was made already" in capsys.readouterr().err
    assert len(list((workdir / "profile").rglob("*.xplane.pb"))) == 1
