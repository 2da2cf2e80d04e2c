"""The loop: exact resume after kill -9, fallback from damage, halting on non-finite numbers, validation over the whole split."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from gammalm.config import load_config, validate
from gammalm.data.load import open_split
from gammalm.data.prepare import Request, prepare
from gammalm.errors import ConfigError, DataError
from gammalm.files import read_jsonl
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.loop import Run, train
from gammalm.training.program import Program, Programs
from gammalm.training.workdir import Metrics

TINY = "lm:size=tiny,vocab=608,seq_len=32,batch=8,lr=1e-2,packing=documents,mixture=natural"


def config(corpus, steps=6, **overrides):
    base = {
        "model.d_model": 16, "model.n_heads": 2, "model.n_kv_heads": 1, "model.head_dim": 8, "model.d_ff": 32,
        "model.dtype": "float32", "model.residual_dtype": "float32",
        "data.path": str(corpus[0]), "batch.micro_batches": 2, "train.checkpoint_every": 2, "train.log_every": 1,
        "train.validation_batches": 0, "mesh.data": -1,
        "mesh.fsdp": 1,
    }  # fmt: skip
    return validate(load_config(f"{TINY},steps={steps}", list((base | overrides).items())))


@pytest.fixture(scope="module")
def programs():
    """Programs on one device: what a laptop has; eight are the business of test_sharding."""
    return Programs(jax.devices()[:1])


def program_of(c, programs):
    """The compiled program that `train` uses for this config."""
    split = open_split(c.data.path, "train", seq_len=32, packing="documents", mixture="natural", seed=0, batch=8)
    return programs.get(c, split.token_bytes, cells=None, mode="single", cell_devices=1)


def parameters(workdir, c, programs):
    program = program_of(c, programs)
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        step, state, _ = checkpointer.restore_latest(program.abstract_state)
    return step, jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def whole(corpus, programs, tmp_path_factory):
    """An undisturbed run of six steps: its folder, outcome, final state."""
    c = config(corpus)
    workdir = tmp_path_factory.mktemp("whole")
    (outcome,) = train([Run(c, workdir)], programs)
    return workdir, outcome, parameters(workdir, c, programs)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_interrupted_twice_ends_bit_for_bit_alike(corpus, programs, whole, tmp_path):
    """Packing, accumulation and Adam's moments included: 2 + 2 + 2 steps are 6."""
    c = config(corpus)

    class Stop(Exception):
        pass

    for stop in (3, 5):  # between checkpoints: the steps after the last one are lost and run again
        made = program_of(c, programs)
        original = Program.step

        def step(self, state, batch, scalars):
            if int(state["step"]) == stop:  # noqa: B023
                raise Stop
            return original(self, state, batch, scalars)  # noqa: B023

        made.step = step.__get__(made)
        with pytest.raises(Stop):
            train([Run(c, tmp_path)], programs)
        del made.step
    (outcome,) = train([Run(c, tmp_path)], programs)
    step, state = parameters(tmp_path, c, programs)
    assert step == 6 and equal(state, whole[2][1])
    assert outcome.validation == whole[1].validation and outcome.train_loss == whole[1].train_loss
    rows = [(row["kind"], row["step"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rows == [("train", n) for n in range(1, 7)] + [("validation", 6), ("goodput", 6)]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_newest_checkpoint_falls_back_aloud(corpus, programs, whole, tmp_path, damage, capsys):
    c = config(corpus)
    shutil.copytree(whole[0], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "000000006"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    if damage == "remove":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content if damage == "flip" else content[:-7])
    (outcome,) = train([Run(c, tmp_path / "run")], programs)
    said = capsys.readouterr().err
    assert "step 6 is damaged" in said and "using step 4" in said
    step, state = parameters(tmp_path / "run", c, programs)
    assert step == 6 and equal(state, whole[2][1])
    assert outcome.validation == whole[1].validation


def test_finished_run_trains_nothing(corpus, programs, whole, monkeypatch):
    monkeypatch.setattr(Program, "step", lambda *a: pytest.fail("a step was taken"))
    (outcome,) = train([Run(config(corpus), whole[0])], programs)
    assert outcome.validation == whole[1].validation


def test_validation_is_the_token_weighted_mean_over_the_split(corpus, programs, whole):
    """Against all logits in float64, one validation sequence at a time."""
    c = config(corpus)
    split = open_split(c.data.path, "validation", seq_len=32, packing="documents", mixture="natural", seed=0, batch=1)
    program = program_of(c, programs)
    model = program.model.bind(jax.tree.map(jax.numpy.asarray, whole[2][1]["params"]))
    logits = jax.jit(lambda tokens, segments: model.logits(tokens, segments, 1e-12))
    nats = tokens = size = 0.0
    for domain in split.domains:
        for batch in split.validation(domain):
            z = np.asarray(logits(batch["tokens"][:, :-1], batch["segments"][:, :-1]), np.float64)[0]
            targets, weights = batch["tokens"][0, 1:], batch["weights"][0]
            losses = np.log(np.exp(z).sum(-1)) - z[np.arange(32), targets]
            nats, tokens = nats + (losses * weights).sum(), tokens + weights.sum()
            size += (split.token_bytes[targets] * weights).sum()
    row = whole[1].validation
    assert row["loss"] == pytest.approx(nats / tokens, abs=2e-5)
    assert row["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert sum(d["tokens"] for d in row["domains"].values()) == tokens


def test_non_finite_step_stops_and_names_the_layer(corpus, programs, tmp_path, monkeypatch):
    """A weight that overflows in layer 1's feed-forward branch, written into the checkpoint of step 2."""
    c = config(corpus, steps=4)
    train([Run(config(corpus, steps=4), tmp_path)], programs)
    step, state = parameters(tmp_path, c, programs)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()
    params = jax.tree.map(np.array, state["params"])
    params["layers"]["ffn"]["down"][1] = 1e38
    params["layers"]["ffn"]["up"][1] = 1e38
    state = {**state, "params": params, "step": np.int32(2)}
    tokenizer = json.loads((corpus[0] / "manifest.json").read_text())["tokenizer"]["sha256"]
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(2, jax.tree.map(jax.numpy.asarray, state), {"seconds": 1.0, "error": None, "tokenizer": tokenizer})
    closed, close = [], Metrics.close
    monkeypatch.setattr(Metrics, "close", lambda self, failed=False: (closed.append(failed), close(self, failed)))
    (outcome,) = train([Run(c, tmp_path)], programs)
    assert closed == [True]  # for a tracker
    assert "step 3: loss or gradient is not finite: layer 1's feed-forward branch" in outcome.error
    assert outcome.validation is None
    halted = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["kind"] == "halted"]
    assert [row["step"] for row in halted] == [3]


def test_another_config_in_the_workdir_is_refused(corpus, programs, whole):
    with pytest.raises(ConfigError, match="init.gamma 1.0 -> 0.5"):
        train([Run(config(corpus, **{"init.gamma": 0.5}), whole[0])], programs)


def test_a_model_with_too_few_tokens_is_refused(corpus, programs, tmp_path):
    with pytest.raises(DataError, match="vocab_size is 512"):
        train([Run(config(corpus, **{"model.vocab_size": 512}), tmp_path)], programs)


def test_another_tokenizer_on_resume_is_refused(corpus, programs, whole, tmp_path):
    """The same text prepared with another vocabulary, put in the place of what the run began with."""
    other = prepare(Request((str(corpus[0].parent / "corpus.jsonl"),), tmp_path / "other", vocab_size=560, quiet=True))
    assert other["tokenizer"]["vocab_size"] == 560
    with pytest.raises(DataError, match="another tokenizer"):
        train([Run(config(corpus, **{"data.path": str(tmp_path / "other")}), whole[0])], programs)


def test_what_a_run_leaves_behind(corpus, whole):
    workdir, outcome, _ = whole
    versions = json.loads((workdir / "versions.json").read_text())
    assert versions["jax"] == jax.__version__ and versions["platform"] == "cpu"
    assert json.loads((workdir / "config.json").read_text())["init"]["gamma"] == 1.0
    assert list((workdir / "tensorboard").glob("events*"))
    rows = read_jsonl(workdir / "metrics.jsonl")
    assert rows[0]["tokens"] == 8 * 32 and rows[0]["mfu"] is None
    assert outcome.steps == 6 and outcome.tokens == 6 * 8 * 32


@pytest.mark.full
def test_kill_9_of_the_command_line(corpus, programs, tmp_path):
    """`gammalm train`, killed at the first checkpoint and run again: state and table are those of a run that was not, bit for bit."""
    changed = {"data.path": str(corpus[0]), "train.checkpoint_every": 5, "batch.micro_batches": 2}
    config = validate(load_config(f"{TINY},steps=40", list(changed.items())))
    overrides = [f"--config.{name}={value}" for name, value in changed.items()]
    command = [sys.executable, "-m", "gammalm.cli.main", "train", "--json", "--config", f"{TINY},steps=40", *overrides, "--workdir"]
    env = os.environ | {"XLA_FLAGS": ""}
    with open(tmp_path / "said", "w") as said:
        victim = subprocess.Popen([*command, str(tmp_path / "killed")], env=env, stdout=said, stderr=said)
    while not list((tmp_path / "killed" / "checkpoints").glob("0000000[0-9][0-9]")) and victim.poll() is None:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, (tmp_path / "said").read_text()
    tables, states = [], []
    for name in ("killed", "whole"):
        done = subprocess.run([*command, str(tmp_path / name)], env=env, capture_output=True, text=True, check=True)
        tables.append({key: value for key, value in json.loads(done.stdout).items() if key not in ("seconds", "workdir", "goodput")})
        states.append(parameters(tmp_path / name, config, programs))
    assert tables[0] == tables[1]
    assert states[0][0] == states[1][0] == 40 and equal(states[0][1], states[1][1])
