"""`gammalm export hf` and `gammalm import hf` on the folder of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from gammalm.cli.main import main
from gammalm.config import leaves
from gammalm.data import tokenizer
from gammalm.training.load import load_model, save_model

from ..conftest import WORDS
from .cases import CASES, config_of, random_model, same


@pytest.fixture
def run(tmp_path):
    def write(name, **changes):
        config = config_of(CASES[name][1] | changes)
        params, buffers = random_model(config)
        save_model(tmp_path / "run", config, *jax.tree.map(jnp.asarray, (params, buffers)))
        return config, params, buffers

    return write


@pytest.mark.parametrize("name", ["llama, tied", "deepseek-v3, q latent, first layer dense", "own: softmax router"])
def test_out_in_and_out_again(name, run, tmp_path, capsys):
    config, params, buffers = run(name)
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "a"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["target"] == CASES[name][0] and said["step"] == 0 and said["tokenizer"] is None
    assert main(["import", "hf", "--model", str(tmp_path / "a"), "--workdir", str(tmp_path / "imported"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    loaded = load_model(tmp_path / "imported")
    assert same(loaded.params, params) and same(loaded.buffers, buffers)
    assert leaves(loaded.config) == leaves(config)
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "imported"), "--out", str(tmp_path / "b")]) == 0
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in "ab")
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)


def test_the_tokenizer_goes_along(run, tmp_path, capsys):
    model = tokenizer.train(WORDS * 50, 600)
    (tmp_path / "some.model").write_bytes(model)
    run("llama, tied", vocab_size=700)
    there = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "some.model")]
    assert main(["export", "hf", *there]) == 0
    assert "not " not in capsys.readouterr().err
    assert json.loads((tmp_path / "a" / "config.json").read_text())["eos_token_id"] == tokenizer.Tokenizer(model).eod_id
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert main(["import", "hf", "--model", str(tmp_path / "a"), "--workdir", str(tmp_path / "w")]) == 0
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "w"), "--out", str(tmp_path / "b")]) == 0
    for name in ("tokenizer.model", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_faults_end_with_a_message(run, tmp_path, capsys):
    run("own: headwise gate")
    out = ["--out", str(tmp_path / "out")]
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "run"), *out, "--target", "llama"]) == 2
    assert "model.gate=headwise" in capsys.readouterr().err
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "nothing"), *out]) != 0
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "run"), *out]) == 0
    assert "not llama: model.gate=headwise" in capsys.readouterr().err
    assert main(["export", "hf", "--checkpoint", str(tmp_path / "run"), *out]) == 2
    assert "no empty folder" in capsys.readouterr().err
    assert main(["import", "hf", "--model", str(tmp_path / "out"), "--workdir", str(tmp_path / "run")]) == 1
    assert "holds a run already" in capsys.readouterr().err
