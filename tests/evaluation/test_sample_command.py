"""`gammalm sample` on the folder of a run at step 0 with a real tokenizer: prompts from words and files, streams, JSON, refusals."""

import json

import jax
import jax.numpy as jnp
import pytest

from gammalm.cli.main import main
from gammalm.cli.sample import read_prompts
from gammalm.data import tokenizer
from gammalm.models.decoder import Model
from gammalm.training.load import save_model

from ..conftest import WORDS
from ..models.reference import random_params, small_config

CONTEXT = 16  # a length of lengths.py: all batches here are of one shape


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(Folder of a run, its tokenizer)."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "some.model").write_bytes(tokenizer.train(WORDS * 50, 600))
    config = small_config(vocab_size=700, data__seq_len=CONTEXT, model__norm_eps=1e-3)
    params = jax.tree.map(jnp.asarray, random_params(Model(config.model).specs))
    save_model(folder / "run", config, params, {}, folder / "some.model")
    return folder / "run", tokenizer.Tokenizer.load(folder / "some.model")


def sample(run, *options):
    return main(["sample", "--checkpoint", str(run[0]), "--rows", "1", *options])


def texts(capsys, run, *options):
    assert sample(run, *options, "--json") == 0
    return json.loads(capsys.readouterr().out)["texts"]


def test_json_says_everything(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the model\n\nsmall 字\n", "utf-8")
    options = ["--max-new-tokens", "5", "--samples", "2", "--seed", "7", "--json"]
    assert sample(run, "--prompts", str(tmp_path / "a.txt"), *options) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 0 and said["prompts_cut"] == said["tokens_cut"] == 0
    assert said["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7}
    assert [text["prompt"] for text in said["texts"]] == ["the model"] * 2 + [""] * 2 + ["small 字"] * 2
    for text in said["texts"]:
        assert text["reason"] == "end" or len(text["tokens"]) == 5
        assert text["text"] == run[1].decode(text["tokens"])
        assert max(text["tokens"]) < run[1].vocab_size
    assert said["texts"][0]["tokens"] != said["texts"][1]["tokens"]


def test_prompts_of_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "the model"}\n{"prompt": "small\\n字", "more": 1}\n', "utf-8")
    (tmp_path / "a.txt").write_text("one\n\n two", "utf-8")
    assert read_prompts(tmp_path / "a.jsonl") == ["the model", "small\n字"]
    assert read_prompts(tmp_path / "a.txt") == ["one", "", " two"]


def test_one_text_is_streamed_and_several_come_in_order(run, capsys):
    short = ["--max-new-tokens", "6"]
    one, other = texts(capsys, run, "--prompt", "the model", "--prompt", "small", *short)
    assert sample(run, "--prompt", "the model", *short) == 0
    out, err = capsys.readouterr()
    assert out == "the model" + one["text"] + "\n"
    assert err.startswith(f"{len(one['tokens'])} tokens in ")
    assert sample(run, "--prompt", "the model", "--prompt", "small", *short) == 0
    assert capsys.readouterr().out == f"--- 1\nthe model{one['text']}\n--- 2\nsmall{other['text']}\n"


def test_long_prompts(run, capsys):
    text = "the model " * 20
    assert sample(run, "--prompt", text) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"and the model reads {CONTEXT} at most" in err
    assert sample(run, "--prompt", text, "--long", "left", "--max-new-tokens", "4") == 0
    cut = len(run[1].encode(text)) - (CONTEXT - 4)
    assert f"prompts cut from the left: 1, by {cut} tokens" in capsys.readouterr().err
    assert sample(run, "--prompt", "the " * 7, "--max-new-tokens", "1000") == 0
    err = capsys.readouterr().err
    assert "context is full" in err or "with the document" in err


@pytest.mark.full
def test_eight_devices_write_what_one_does(run, capsys):
    asked = ["--prompt", "the model", "--prompt", "small", "--samples", "3", "--max-new-tokens", "8", "--rows", "32"]
    for how in ([], ["--temperature", "0"]):
        assert texts(capsys, run, *asked, *how, "--mesh", "data=-1,fsdp=2,tensor=2") == texts(capsys, run, *asked, *how)


@pytest.mark.parametrize(
    "options, status, says",
    [
        ([], 2, "There is no prompt"), (["--prompt", "a", "--samples", "0"], 2, "--samples 0"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens 0"), (["--prompt", "a", "--top-p", "2"], 2, "top-p 2"),
        (["--prompt", "a", "--stop", ""], 2, "empty stop"), (["--prompts", "nowhere.txt"], 1, "nowhere.txt cannot be read"),
        (["--prompt", "a", "--mesh", "rows=2"], 2, "AXIS=SIZE"), (["--prompt", "a", "--mesh", "context=8"], 2, "context > 1"),
        (["--prompts", "bad.jsonl"], 1, "bad.jsonl, line 2"), (["--prompt", "a", "--tokenizer", "other.model"], 2, "is another tokenizer"),
    ],
)  # fmt: skip
def test_refusals(run, options, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    (tmp_path / "other.model").write_bytes(tokenizer.train([word[::-1] for word in WORDS] * 50, 600))
    assert sample(run, *options) == status
    assert says in capsys.readouterr().err


def test_a_checkpoint_without_its_tokenizer(run, tmp_path, capsys):
    config = small_config(vocab_size=700, data__seq_len=CONTEXT)
    save_model(tmp_path / "run", config, jax.tree.map(jnp.asarray, random_params(Model(config.model).specs)), {})
    bare = (tmp_path / "run", None)
    assert sample(bare, "--prompt", "a") == 2
    assert "Name its file with --tokenizer" in capsys.readouterr().err
    assert sample(bare, "--prompt", "a", "--max-new-tokens", "6", "--tokenizer", str(run[0] / "tokenizer.model")) == 0
