"""`gammalm export hf` and `gammalm import hf` on the folder of a run."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file

from gammalm.cli.main import main
from gammalm.config import apply_overrides, leaves, to_json
from gammalm.data import tokenizer
from gammalm.training.load import load_model, save_model

from ..conftest import WORDS
from .cases import CASES, config_of, random_model, same


@pytest.fixture
def run(tmp_path):
    def write(name, tokenizer=None, **changes):
        config = config_of(CASES[name][1] | changes)
        params, buffers = random_model(config)
        save_model(tmp_path / "run", config, *jax.tree.map(jnp.asarray, (params, buffers)), tokenizer)
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


def export(folder, *more):
    return main(["export", "hf", "--checkpoint", str(folder / "run"), "--out", str(folder / "out"), *more])


@pytest.fixture(scope="module")
def tokenizers():
    """Two SentencePiece models."""
    return tokenizer.train(WORDS * 50, 600), tokenizer.train([word[::-1] for word in WORDS] * 50, 600)


def test_only_the_tokenizer_of_the_training_is_taken(run, tokenizers, tmp_path, capsys):
    trained, other = tokenizers
    (tmp_path / "trained.model").write_bytes(trained)
    (tmp_path / "other.model").write_bytes(other)
    config, *_ = run("llama, tied", tmp_path / "trained.model", vocab_size=700)
    data = tmp_path / "data"
    data.mkdir()
    to_json(apply_overrides(config, [("data.path", str(data))]), tmp_path / "run" / "config.json")
    in_run, in_data = tmp_path / "run" / "tokenizer.model", data / "tokenizer.model"

    assert export(tmp_path, "--tokenizer", str(tmp_path / "other.model")) == 2
    assert "other.model is another tokenizer" in capsys.readouterr().err
    in_run.write_bytes(other)
    in_data.write_bytes(other)
    assert export(tmp_path) == 0
    assert "no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None
    for path in (in_data, in_run, tmp_path / "trained.model"):
        in_run.write_bytes(other)
        in_data.write_bytes(other)
        path.write_bytes(trained)
        shutil.rmtree(tmp_path / "out")
        assert export(tmp_path, *(["--tokenizer", str(path)] if path.name == "trained.model" else [])) == 0
        assert (tmp_path / "out" / "tokenizer.model").read_bytes() == trained


def test_a_file_whose_run_knows_no_tokenizer_is_not_taken_for_it(run, tokenizers, tmp_path, capsys):
    run("llama, tied", vocab_size=700)
    (tmp_path / "run" / "tokenizer.model").write_bytes(tokenizers[0])
    assert export(tmp_path) == 0
    assert "no tokenizer" in capsys.readouterr().err and not (tmp_path / "out" / "tokenizer.model").exists()


def test_a_tokenizer_larger_than_the_model(run, tokenizers, tmp_path, capsys):
    (tmp_path / "some.model").write_bytes(tokenizers[0])
    size = tokenizer.Tokenizer(tokenizers[0]).vocab_size
    run("llama, tied", vocab_size=size - 1)
    assert export(tmp_path, "--tokenizer", str(tmp_path / "some.model")) == 2
    assert f"has {size} tokens, the model {size - 1}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # Nor does import take one that some other hand put into an export of ours.
    assert export(tmp_path) == 0
    shutil.copyfile(tmp_path / "some.model", tmp_path / "out" / "tokenizer.model")
    assert main(["import", "hf", "--model", str(tmp_path / "out"), "--workdir", str(tmp_path / "w")]) == 2
    assert f"has {size} tokens" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_the_end_token_is_the_tokenizers_own(run, tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 50), model_writer=model, model_type="bpe", vocab_size=400, hard_vocab_limit=False,
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        unk_id=0, eos_id=3, bos_id=-1, pad_id=-1, eos_piece="<eod>", minloglevel=3,
    )  # fmt: skip
    (tmp_path / "some.model").write_bytes(model.getvalue())
    run("llama, tied", vocab_size=700)
    assert export(tmp_path, "--tokenizer", str(tmp_path / "some.model")) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 3


def test_a_folder_inside_a_run_is_named_with_the_run(run, tmp_path, capsys):
    run("llama, tied")
    (tmp_path / "run" / "checkpoints" / "000000004").mkdir(parents=True)
    for inside in ("checkpoints", "checkpoints/000000004"):
        assert main(["export", "hf", "--checkpoint", str(tmp_path / "run" / inside), "--out", str(tmp_path / "out")]) == 2
        assert f"The run is {tmp_path / 'run'};" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_out_is_looked_at_before_the_model(tmp_path, capsys):
    (tmp_path / "out").symlink_to("nowhere")
    assert export(tmp_path) == 2  # there is no run either
    assert "symbolic link" in capsys.readouterr().err


def test_the_workdir_is_looked_at_before_the_model(run, tmp_path, capsys):
    run("llama, tied")
    assert main(["import", "hf", "--model", str(tmp_path / "nothing"), "--workdir", str(tmp_path / "run")]) == 1
    assert "holds a run already" in capsys.readouterr().err


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
