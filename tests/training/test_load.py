"""Models read from runs and written as the beginning of one; and that a mixture's run goes on from its checkpoint as if never stopped."""

import hashlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.config import apply_overrides, load_config, validate
from gammalm.data.load import open_split
from gammalm.errors import CheckpointError, ConfigError, DataError
from gammalm.files import read_jsonl
from gammalm.models.decoder import Model
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.load import load_model, save_model
from gammalm.training.loop import Run, train
from gammalm.training.program import Programs
from gammalm.training.step import loss_and_gradients

from ..models.reference import random_buffers, random_params

SPEC = "lm:size=tiny-moe,attention=mla,vocab=608,seq_len=32,batch=8,lr=1e-2,packing=documents,mixture=natural,steps=4"
SMALL = {
    "model.d_model": 16, "model.n_heads": 2, "model.moe.n_experts": 4, "model.moe.top_k": 2, "model.moe.d_expert": 8,
    "model.moe.bias_rate": 0.1, "model.mla.kv_rank": 8, "model.mla.nope_dim": 4, "model.mla.rope_dim": 4, "model.mla.v_dim": 4,
    "model.dtype": "float32", "model.residual_dtype": "float32", "batch.micro_batches": 2, "train.checkpoint_every": 2,
    "train.log_every": 1, "train.checkpoints_kept": 9,
}  # fmt: skip
UNTIMED = ("loss", "grad_norm", "load_entropy", "load_max", "load_min", "dropped", "balance")


@pytest.fixture(scope="module")
def programs():
    return Programs(jax.devices()[:1])


@pytest.fixture(scope="module")
def config(corpus):
    return validate(load_config(SPEC, list((SMALL | {"data.path": str(corpus[0])}).items())))


@pytest.fixture(scope="module")
def whole(config, programs, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mixture")
    (outcome,) = train([Run(config, workdir)], programs)
    assert outcome.error is None
    return workdir


def equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.full
def test_a_mixture_goes_on_bit_for_bit(config, programs, whole, tmp_path):
    """From step 2 of the whole run: parameters, selection bias and what was logged of the last steps."""
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "000000004")
    train([Run(config, again)], programs)
    before, after = load_model(whole), load_model(again)
    assert before.step == after.step == 4
    equal(before.params, after.params)
    equal(before.buffers, after.buffers)
    assert abs(np.asarray(after.buffers["layers"]["ffn"]["bias"])).max() > 0.05
    rows = [[{k: row[k] for k in UNTIMED} for row in read_jsonl(w / "metrics.jsonl") if row["kind"] == "train"] for w in (whole, again)]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    assert all(len(row["load_entropy"]) == 2 and row["dropped"] == [0, 0] for row in rows[0])


def test_load_reads_parameters_and_buffers_of_any_step(config, whole):
    with Checkpointer(whole / "checkpoints") as checkpointer:
        steps = checkpointer.steps()
    assert steps == [2, 4]
    newest, older = load_model(whole), load_model(whole, 2)
    assert (newest.step, older.step) == (4, 2)
    assert newest.config == config
    assert newest.tokenizer_sha256 == open_split(
        config.data.path, "train", seq_len=32, packing="documents", mixture="natural", seed=0, batch=8
    ).tokenizer_sha256
    assert {path: leaf.shape for path, leaf in _flat(newest.params).items()} == {p: s.shape for p, s in newest.model.specs.items()}
    moved = [abs(np.asarray(a) - b).max() for a, b in zip(*map(jax.tree.leaves, (newest.params, older.params)), strict=True)]
    assert min(moved) > 0


def _flat(tree):
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in found}


def test_what_cannot_be_loaded(whole, tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json. Name the folder of a run, its --workdir"):
        load_model(tmp_path)
    for inside in (whole / "checkpoints", whole / "checkpoints" / "000000004"):
        with pytest.raises(ConfigError, match=f"The run is {re.escape(str(whole))}; choose a step"):
            load_model(inside)
    with pytest.raises(CheckpointError, match="no step 3"):
        load_model(whole, 3)
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    data = max((damaged / "checkpoints" / "000000004").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data.write_bytes(data.read_bytes()[:-1] + b"\x55\x55")
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(damaged)


def test_nothing_restarts_from_zero_unasked(config, programs, whole, tmp_path):
    """Neither where every step has lost its checksums, nor where those of an imported model have: training stops and says so."""
    run = shutil.copytree(whole, tmp_path / "run")
    for seal in run.glob("checkpoints/*/checksums.json"):
        seal.unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        train([Run(config, run)], programs)
    model = Model(config.model)
    imported = tmp_path / "imported"
    save_model(imported, config, *jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model))))
    (imported / "imported" / "000000000" / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        train([Run(config, imported)], programs)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(imported)


def test_an_interrupted_import_is_no_run(config, tmp_path, monkeypatch):
    """Stopped while it saves: no config.json is left that training would take for a fresh run, and importing again works."""
    model = Model(config.model)
    weights = jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model)))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Checkpointer, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_model(tmp_path / "run", config, *weights)
    assert not (tmp_path / "run" / "config.json").exists()
    save_model(tmp_path / "run", config, *weights)
    equal(load_model(tmp_path / "run").params, weights[0])


def test_an_imported_run_begins_again_from_its_weights(config, programs, tmp_path):
    """When its one step is damaged that is said; with its checkpoints moved away it takes the same steps from the imported weights."""
    model = Model(config.model)
    run = tmp_path / "run"
    save_model(run, config, *jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model))))
    train([Run(config, run)], programs)
    rows = [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "train"]
    shutil.rmtree(run / "checkpoints" / "000000004")
    data = max((run / "checkpoints" / "000000002").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        train([Run(config, run)], programs)
    shutil.rmtree(run / "checkpoints")
    train([Run(config, run)], programs)
    assert [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "train"] == rows


def test_the_tokenizer_of_an_imported_model_is_held(config, programs, tmp_path):
    model = Model(config.model)
    other = tmp_path / "other.model"
    other.write_bytes(b"another tokenizer")
    weights = jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model)))
    save_model(tmp_path / "run", config, *weights, tokenizer=other)
    assert load_model(tmp_path / "run").tokenizer_sha256 == hashlib.sha256(other.read_bytes()).hexdigest()
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == other.read_bytes()
    with pytest.raises(DataError, match="another tokenizer"):
        train([Run(config, tmp_path / "run")], programs)


@pytest.mark.full
def test_training_begins_from_saved_weights(config, programs, tmp_path):
    """The first step's loss is that of the saved weights, its bias moves from the saved one, and the run goes on as any other."""
    c = apply_overrides(config, [("train.steps", 2), ("model.moe.backend", "dense")])
    model = Model(c.model)
    params, buffers = jax.tree.map(jnp.asarray, (random_params(model.specs), random_buffers(model)))
    save_model(tmp_path / "run", apply_overrides(c, [("train.steps", 9), ("optimizer.learning_rate", 0.5)]), params, buffers)
    loaded = load_model(tmp_path / "run")
    equal(loaded.params, params)
    equal(loaded.buffers, buffers)
    assert loaded.step == 0 and loaded.tokenizer_sha256 is None
    with pytest.raises(ConfigError, match="model.rope_theta"):
        train([Run(apply_overrides(c, [("model.rope_theta", 5.0)]), tmp_path / "run")], programs)
    (outcome,) = train([Run(c, tmp_path / "run")], programs)  # with its own steps and rate, not those it came with
    assert outcome.error is None and outcome.steps == 2
    split = open_split(c.data.path, "train", seq_len=32, packing="documents", mixture="natural", seed=0, batch=8)
    loss, *_ = jax.jit(lambda p, b: loss_and_gradients(model, p, buffers, b, c.model.norm_eps, 1))(params, split.batch(0))
    first = next(row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train")
    assert first["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert not (tmp_path / "run" / "init_table.json").exists(), "nothing was drawn"
    moved = np.asarray(load_model(tmp_path / "run").buffers["layers"]["ffn"]["bias"]) - buffers["layers"]["ffn"]["bias"]
    np.testing.assert_allclose(np.abs(moved).max(), 0.2, rtol=1e-5)  # two steps of 0.1 in one direction, for some expert
    with pytest.raises(ConfigError, match="train.steps"):  # from now on it is a run like any other
        train([Run(apply_overrides(c, [("train.steps", 3)]), tmp_path / "run")], programs)
    with pytest.raises(CheckpointError, match="holds a run already"):
        save_model(tmp_path / "run", c, params, buffers)
