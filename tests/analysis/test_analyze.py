"""`gammalm analyze sink|flow|norm`: the library's figures of the model that was named, as a table, as JSON, as a file; refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.analysis.flow import residual_flow
from gammalm.cli.main import main
from gammalm.cli.subject import split_step
from gammalm.config import load_config, validate
from gammalm.data.load import open_split
from gammalm.models.decoder import Model
from gammalm.training.load import save_model

from ..models.reference import random_params

SPEC = "lm:size=tiny,vocab=608,seq_len=32,batch=8,steps=10,packing=documents"
SMALL = [("model.d_model", 16), ("model.head_dim", 8), ("model.d_ff", 24), ("model.dtype", "float32"), ("model.residual_dtype", "float32")]
ASIDE = [f"--config.{name}={value}" for name, value in SMALL]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Folder of a run at step 0 with random weights, trained on the corpus's tokenizer; its config and parameters."""
    folder = tmp_path_factory.mktemp("run") / "tiny"
    config = validate(load_config(SPEC, [*SMALL, ("data.path", str(corpus[0]))]))
    params = jax.tree.map(jnp.asarray, random_params(Model(config.model).specs))
    save_model(folder, config, params, {}, corpus[0] / "tokenizer.model")
    return folder, config, params


def analyze(capsys, *argv):
    assert main(["analyze", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_is_measured_on_its_own_data(run, capsys, tmp_path):
    folder, config, params = run
    out = tmp_path / "flow.json"
    found = json.loads(analyze(capsys, "flow", "--checkpoint", folder, "--batches", 2, "--sequences", 4, "--json", "--out", out))
    split = open_split(config.data.path, "validation", seq_len=32, packing="documents", mixture=config.data.mixture, seed=0, batch=4)
    batches = [batch for domain in split.domains for batch, _ in zip(split.validation(domain), range(2), strict=False)]
    expected = residual_flow(Model(config.model), params, {}, batches)
    assert (found["analysis"], found["step"], found["packing"], found["tokens"]) == ("flow", 0, "documents", expected.tokens)
    assert found["ratio"] == pytest.approx(expected.ratio) and len(found["layers"]["ffn"]) == config.model.n_layers
    np.testing.assert_allclose(found["layers"]["attention"], expected.attention_L)
    assert json.loads(out.read_text()) == found
    text = analyze(capsys, "flow", "--checkpoint", f"{folder}:0", "--batches", 2, "--sequences", 4)
    assert f"|h - e|/|e| = {found['ratio']:.4g}" in text and f"{expected.tokens:,} tokens" in text


def test_a_config_is_measured_as_it_is_initialized(corpus, capsys):
    """At γ = 1 the first norm's variance is d^-2; all of the split is more than one batch of each domain."""
    argv = ["norm", "--config", SPEC, *ASIDE, "--data", corpus[0]]
    found = json.loads(analyze(capsys, *argv, "--json"))
    assert found["config"] == SPEC and found["gamma"] == 1.0
    assert found["norms"]["attn_norm"]["variance"][0] == pytest.approx(16**-2, rel=0.1)
    fewer, more = (json.loads(analyze(capsys, *argv, "--json", "--sequences", 2, "--batches", n)) for n in (1, 0))
    assert fewer["tokens"] < found["tokens"] <= more["tokens"]
    wider = json.loads(analyze(capsys, *argv, "--json", "--config.init.gamma=0.5"))
    assert wider["norms"]["attn_norm"]["variance"][0] == pytest.approx(16**-1, rel=0.1)
    assert "final_norm      -" in analyze(capsys, *argv)


@pytest.mark.parametrize("packing, unit", [("documents", "document"), ("concat", "sequence")])
def test_sink_says_whose_first_token(corpus, capsys, packing, unit):
    argv = ["sink", "--config", SPEC.replace("documents", packing), *ASIDE, "--data", corpus[0]]
    found = json.loads(analyze(capsys, *argv, "--json"))
    assert found["first_token_of"] == unit and np.shape(found["heads"]["later"]) == (2, 2)
    assert found["mean"]["alpha"] == pytest.approx(np.mean(found["heads"]["alpha"]))
    assert found["mean"]["later"] == pytest.approx(found["uniform"]["later"], rel=0.05)  # small queries: nearly uniform
    assert f"first token of the {unit}" in analyze(capsys, *argv)


def refusal(capsys, *argv):
    try:
        status = main(["analyze", *map(str, argv)])
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().err


def test_refusals(run, corpus, capsys, tmp_path):
    folder = run[0]
    for argv in (["sink"], ["sink", "--checkpoint", folder, "--config", SPEC], ["sinks"]):
        assert refusal(capsys, *argv)[0] == 2
    status, said = refusal(capsys, "flow", "--checkpoint", folder, "--config.init.gamma=1")
    assert status == 2 and "--config.init.gamma" in said and "--checkpoint" in said
    status, said = refusal(capsys, "flow", "--checkpoint", folder, "--sequences", 0)
    assert status == 2 and "--sequences 0" in said
    status, said = refusal(capsys, "flow", "--checkpoint", f"{folder}:7")
    assert status == 1 and "7" in said
    status, said = refusal(capsys, "flow", "--config", "lm:size=tiny,vocab=300", "--data", corpus[0])
    assert status == 1 and "another tokenizer" in said
    status, said = refusal(capsys, "flow", "--checkpoint", folder, "--batches", 1, "--out", tmp_path / "none" / "x.json")
    assert status == 2 and "cannot be written" in said


def test_another_tokenizer_is_refused(run, corpus, capsys, tmp_path):
    folder, config, params = run
    (tmp_path / "other.model").write_bytes((corpus[0] / "tokenizer.model").read_bytes() + b"\n")
    save_model(tmp_path / "run", config, params, {}, tmp_path / "other.model")
    status, said = refusal(capsys, "flow", "--checkpoint", tmp_path / "run")
    assert status == 1 and "another tokenizer" in said


def test_a_step_is_what_follows_the_last_colon():
    assert [str(split_step("a:b/run:12")[0]), split_step("a:b/run:12")[1]] == ["a:b/run", 12]
    assert split_step("runs/a:b") == (split_step("runs/a:b:3")[0], None)
