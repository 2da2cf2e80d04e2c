"""Benchmarks while a model trains: their rows are what an evaluation of the saved checkpoints says, they change nothing, and each step
counts once whatever stops the run; for cells of one program, over meshes, over two processes. Toy tasks, a tiny model and corpus."""

import sys

import pytest

from gammalm.cli.main import main
from gammalm.config import from_json
from gammalm.errors import ConfigError
from gammalm.experiments import downstream
from gammalm.experiments.monitors import Monitor
from gammalm.files import read_jsonl
from gammalm.training import loop
from gammalm.training.loop import Run
from gammalm.training.preemption import Preempted
from gammalm.training.program import Programs

from ..evaluation.toy_tasks import write_tasks
from ..training.pairs import GAMMALM, Pair
from ..training.test_loop import config, equal, parameters, programs  # noqa: F401
from ..training.test_preemption import Told

FEW = "from gammalm.evaluation import harness; from gammalm.evaluation.harness import Tasks; "
FEW += "harness.Tasks = lambda include_path: Tasks(include_path=include_path, include_defaults=False)"
SAVED = {"train.checkpoint_every": 1, "train.checkpoints_kept": 9}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Leaves that ask for the toy tasks; the harness's own, thousands of files, are left out."""
    pytest.importorskip("lm_eval")
    folder = write_tasks(tmp_path_factory.mktemp("toy"))
    with pytest.MonkeyPatch.context() as patch:
        from gammalm.evaluation import harness

        whole = harness.Tasks
        patch.setattr(harness, "Tasks", lambda include_path: whole(include_path=include_path, include_defaults=False))
        yield {"downstream.tasks": ("tiny_both",), "downstream.steps": (0, 3), "downstream.include": str(folder)}


def train(*runs, on, **how):
    return loop.train([*runs], on, monitor=Monitor, **how)


def rows_of(workdir):
    return read_jsonl(workdir / "monitors.jsonl")


@pytest.fixture(scope="module")
def tested(corpus, programs, asked, tmp_path_factory):  # noqa: F811
    """An undisturbed run of six steps, all of them saved, tested before the first, after the third and after the last: its folder."""
    workdir = tmp_path_factory.mktemp("tested")
    (outcome,) = train(Run(config(corpus, **asked, **SAVED), workdir), on=programs)
    assert outcome.goodput["phases"]["monitor"] > outcome.goodput["phases"]["validation"]
    return workdir


@pytest.mark.parity
def test_rows_are_what_an_evaluation_of_the_checkpoints_says(tested, asked, tmp_path):
    from gammalm.evaluation.results import read_results

    rows = rows_of(tested)
    assert [(row["kind"], row["step"]) for row in rows] == [("downstream", step) for step in (0, 3, 6)]
    values = []
    for row in rows:
        found = {(r["task"], r["metric"]): r for r in row["rows"]}
        assert set(found) == {("tiny_choices", "acc"), ("tiny_choices", "brier_score"), ("tiny_answers", "exact_match")}
        assert all((r["items"], r["of"], r["num_fewshot"]) == (9, 9, 0) for r in row["rows"])
        assert row["requests"]["requests"] == 36 and row["requests"]["written"] >= 9
        values.append(found["tiny_choices", "brier_score"]["value"])
    assert len(set(values)) == 3, "the weights moved"
    command = ["eval", "--checkpoint", f"{tested}:3", "--include", asked["downstream.include"], "--out", str(tmp_path)]
    assert main([*command, "--tasks", "tiny_both"]) == 0
    for ours, theirs in zip(rows[1]["rows"], read_results(tmp_path)["rows"], strict=True):
        assert ours == theirs | {"value": pytest.approx(theirs["value"], abs=1e-5), "stderr": ours["stderr"]}


@pytest.mark.parity
def test_training_is_the_same_bit_for_bit(corpus, programs, tested, tmp_path):  # noqa: F811
    c = config(corpus)
    loop.train([Run(c, tmp_path)], programs)
    assert equal(parameters(tested, from_json(tested / "config.json"), programs)[1], parameters(tmp_path, c, programs)[1])


@pytest.mark.parity
def test_told_to_stop_in_the_middle_it_tests_that_step_again(corpus, programs, asked, tested, tmp_path):  # noqa: F811
    """Among the answers after step 3, and again among those after the last, which are all that is left to do."""
    c = config(corpus, **asked)
    for units, step in ((45 + 3 + 20, 3), (45 + 3 + 10, 6)):  # 36 likelihoods and 9 texts are asked for each time
        with pytest.raises(Preempted, match=f"after step {step}"):
            train(Run(c, tmp_path), on=programs, notice=Told(units))
        assert [row["step"] for row in rows_of(tmp_path)] == [s for s in (0, 3) if s < step]
    train(Run(c, tmp_path), on=programs)
    assert rows_of(tmp_path) == rows_of(tested)


@pytest.mark.full
@pytest.mark.parity
def test_cells_over_a_mesh(corpus, programs, asked, tmp_path):  # noqa: F811
    """Two cells of one program over eight devices, of which one is tested. (One run over a mesh: two processes, below.)"""
    heads = {"model.n_kv_heads": 2}
    mesh = heads | {"mesh.fsdp": 2, "mesh.tensor": 2}
    cells = [config(corpus, **asked | mesh), config(corpus, **mesh, **{"model.norm_eps": 1e-2, "init.gamma": 0.5, "seed": 1})]
    train(*(Run(c, tmp_path / str(i)) for i, c in enumerate(cells)), on=Programs(), mode="map", cell_devices=2)
    train(Run(config(corpus, **asked | heads), tmp_path / "alone"), on=programs)
    for ours, alone in zip(rows_of(tmp_path / "0"), rows_of(tmp_path / "alone"), strict=True):
        for a, b in zip(ours["rows"], alone["rows"], strict=True):
            assert a["value"] == pytest.approx(b["value"], rel=1e-3, abs=1e-5)
    assert not (tmp_path / "1" / "monitors.jsonl").exists()


@pytest.mark.full
@pytest.mark.parity
def test_two_processes_answer_as_one(corpus, programs, asked, tmp_path):  # noqa: F811
    changes = asked | {"model.n_kv_heads": 2, "batch.micro_batches": 1}
    c = config(corpus, **changes, **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
    (tmp_path / "config.json").write_text(c.to_json_best_effort())
    command = ["train", "--config", tmp_path / "config.json", "--workdir", tmp_path / "two"]
    with Pair(tmp_path / "pair", f"{FEW}\n{GAMMALM}", *command) as pair:
        assert pair.ended() == [0, 0], pair.told()
    train(Run(config(corpus, **changes), tmp_path / "one"), on=programs)
    for ours, theirs in zip(rows_of(tmp_path / "two"), rows_of(tmp_path / "one"), strict=True):
        for a, b in zip(ours["rows"], theirs["rows"], strict=True):
            assert a["value"] == pytest.approx(b["value"], rel=1e-3, abs=1e-5)


# ---- asking for it


def said_of(workdir, capsys, **leaves):
    """(Status, message) of `gammalm train` with these leaves, which must not have begun anything."""
    asked = [f"--config.{name}={value}" for name, value in leaves.items()]
    status = main(["train", "--config", "lm:size=tiny,steps=6", "--workdir", str(workdir), *asked])
    assert not workdir.exists()
    return status, capsys.readouterr().err


@pytest.mark.parity
def test_what_cannot_be_asked_is_said_before_anything_is_trained(corpus, programs, asked, tmp_path, capsys):  # noqa: F811
    downstream._opened.cache_clear()
    where = {"downstream.include": asked["downstream.include"]}
    status, said = said_of(tmp_path / "run", capsys, **where, **{"downstream.tasks": "tiny_choises"})
    assert status == 2 and "downstream.tasks: there is no task 'tiny_choises'. Do you mean tiny_choices" in said
    long = write_tasks(tmp_path / "long", generation_kwargs={"until": ["\n"]})  # the harness's 256 tokens
    c = config(corpus, **asked | {"downstream.include": str(long)})
    with pytest.raises(ConfigError, match="tiny_answers lets a model write 256 tokens, and this one reads 32"):
        train(Run(c, tmp_path), on=programs)
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints" / "000000002").exists()


def test_values_that_cannot_be_are_said(tmp_path, capsys):
    status, said = said_of(tmp_path / "run", capsys, **{"downstream.tasks": "a", "downstream.steps": "3,7,9"})
    assert status == 2 and "downstream.steps: 7, 9 come after the last step (train.steps=6)" in said
    status, said = said_of(tmp_path / "run", capsys, **{"downstream.steps": "-1"})
    assert status == 2 and "downstream.steps" in said
    status, said = said_of(tmp_path / "run", capsys, **{"downstream.offline": "true", "downstream.include": "x"})
    assert status == 2 and "takes no downstream.include" in said


def test_without_the_harness_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    downstream._opened.cache_clear()
    monkeypatch.delitem(sys.modules, "gammalm.evaluation.harness", raising=False)
    monkeypatch.delattr("gammalm.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, said = said_of(tmp_path / "run", capsys, **{"downstream.tasks": "arc_challenge"})
    assert status == 2 and "pip install 'gammalm[eval]'" in said


def test_a_loop_that_cannot_measure_says_so(corpus, programs, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match="monitor=gammalm.experiments.monitors.Monitor"):
        loop.train([Run(config(corpus, **{"downstream.tasks": ("a",)}), tmp_path)], programs)


