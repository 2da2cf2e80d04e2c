"""The harness's own `hf` backend on an exported checkpoint gives the answers of our adapter on the original, request by request."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("torch")
pytest.importorskip("accelerate")

from gammalm.cli.harness import opened_lm
from gammalm.cli.main import main
from gammalm.data import tokenizer
from gammalm.models.decoder import Model
from gammalm.training.load import save_model

from ..conftest import HAN, WORDS
from ..models.reference import random_params, small_config

pytestmark = pytest.mark.parity
CONTEXT = 32


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(Our model, the harness's of its export)."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("both")
    (folder / "some.model").write_bytes(tokenizer.train([*WORDS * 50, HAN * 5], 600))
    types = {"model__dtype": "bfloat16", "model__residual_dtype": "bfloat16"}  # in training: both compute in fp32 here
    config = small_config(vocab_size=608, data__seq_len=CONTEXT, **types)
    params = jax.tree.map(jnp.asarray, random_params(Model(config.model).specs, seed=3))
    save_model(folder / "run", config, params, {}, folder / "some.model")
    assert main(["export", "hf", "--checkpoint", str(folder / "run"), "--out", str(folder / "hf")]) == 0
    with opened_lm(folder / "run", dtype="float32") as ours:
        yield ours, HFLM(pretrained=str(folder / "hf"), device="cpu", dtype="float32", batch_size=4)


def requests():
    rng = np.random.default_rng(0)
    text = lambda n: " ".join(rng.choice(WORDS, n)) + "".join(rng.choice(list(HAN), rng.integers(0, 4)))  # noqa: E731
    found = []
    for _ in range(12):
        context = text(rng.integers(1, 14)) + rng.choice(["", " ", "\n"])
        found += [(context, " " + text(rng.integers(1, 4))) for _ in range(4)] + [(context, letter) for letter in " A B C".split(" ")[1:]]
    return found + [("", text(3)), (text(40), " " + text(3))]


def asked(*args):
    return types.SimpleNamespace(args=args, task_name="task", doc_id=0)


def test_likelihoods(both):
    ours, theirs = (lm.loglikelihood([asked(*pair) for pair in requests()], disable_tqdm=True) for lm in both)
    np.testing.assert_allclose([one[0] for one in ours], [one[0] for one in theirs], rtol=0, atol=1e-3)
    assert [one[1] for one in ours] == [one[1] for one in theirs]
    assert both[0].requests["cut"] >= 1


def test_rolling_likelihoods(both):
    texts = [(" ".join(WORDS) * n,) for n in (1, 2, 5)]
    ours, theirs = (lm.loglikelihood_rolling([asked(*text) for text in texts], disable_tqdm=True) for lm in both)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


def test_generation(both):
    contexts = [" ".join(WORDS[n:]) + " " + HAN[n] for n in range(12)]
    asks = [asked(context, {"until": ["\n", "model"], "max_gen_toks": 12, "do_sample": False}) for context in contexts]
    ours, theirs = (lm.generate_until(asks, disable_tqdm=True) for lm in both)
    # Bytes that are no UTF-8, of which a random model writes many, become other numbers of U+FFFD in the two tokenizers.
    pairs = [pair for pair in zip(ours, theirs, strict=True) if "\ufffd" not in pair[1]]
    assert len(pairs) >= 3 and all(a == b and len(a) > 3 for a, b in pairs)
