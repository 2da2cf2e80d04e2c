"""Gradients of decoders of ours, differentiated, against the recursion: of the embedding, over all tokens of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.initializers import init_params
from gammalm.models.decoder import Model
from gammalm.theory import Dense, Heads, Mixture, gamma_decoder
from gammalm.theory.gradients import stream_gradients

from .measured import described
from .test_recursion import MLA, config


def measured(c, tokens, targets, draws):
    """Mean square by channel of the gradient of the summed loss by the embedding, one number per draw.

    Tokens are distinct and the head untied, so that it is the gradient of the table's rows.
    """
    model = Model(c.model)

    @jax.jit
    def run(params):
        def loss(table):
            bound = model.bind({**params, "embed": {**params["embed"], "table": table}})
            logits_TV = bound.logits(tokens[None], jnp.ones_like(tokens)[None], c.model.norm_eps)[0]
            return -jnp.sum(jax.nn.log_softmax(logits_TV)[jnp.arange(len(tokens)), targets])

        return jnp.mean(jnp.square(jax.grad(loss)(params["embed"]["table"])[tokens]))

    sizes = {"d_model": c.model.d_model, "n_layers": c.model.n_layers}
    return np.array([float(run(init_params(model.specs, c.init, seed, **sizes))) for seed in range(draws)])


CASES = {  # arguments of a config, and the deviation allowed: what runs through queries and keys is left out
    "γ=1, gate": (dict(spec="gate=elementwise,gamma=1.0,eps=1e-12"), 0.03),
    "γ=.75": (dict(spec="gate=none,gamma=0.75,eps=1e-5", layers=3), 0.03),
    "γ=.75, headwise, two matrices": (dict(spec="style=gpt2,gate=headwise,gamma=0.75,eps=1e-5", rules=("embed/positions=zeros",)), 0.03),
    "γ=.75, latents": (dict(spec="attention=mla,gate=elementwise,gamma=0.75,eps=1e-5", **MLA), 0.03),
    "SwiGLU alone": (dict(spec="gate=none,gamma=0.7,eps=1e-12", rules=("attn/out=zeros",)), 0.03),
    "wide open and shut gates": (
        dict(spec="gate=elementwise,gamma=0.75,eps=1e-12", rules=("attn/gate=gamma_normal(gamma=0.2)", "ffn/down=zeros")), 0.03,
    ),
    "γ=.5": (dict(spec="gate=none,gamma=0.5,eps=1e-5"), 0.1),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_embedding(case):
    kind, tolerance = CASES[case]
    c = config(tie_embeddings=False, **kind)
    tokens = np.random.default_rng(0).permutation(1000)[:48].astype(np.int32)
    targets = np.concatenate([tokens[1:30], np.full(19, 7, np.int32)])  # some shared: attention adds them up
    found = measured(c, tokens, targets, draws=8)
    predicted = stream_gradients(described(c), tokens, targets)
    error = found.std(ddof=1) / np.sqrt(len(found)) / found.mean()
    assert np.sqrt(predicted[0] / found.mean()) == pytest.approx(1, abs=tolerance + error), (error, predicted[0] / predicted[-1])
    assert len(predicted) == c.model.n_layers + 1 and np.all(np.diff(predicted) < 0)


def test_refusals():
    sizes = dict(d_model=64, vocab_size=100, n_layers=1, attention=Heads(1, 64), gamma=1.0, eps=1e-12)
    with pytest.raises(ConfigError, match="mixture"):
        stream_gradients(gamma_decoder(ffn=Mixture(4, 2, 0, 32), **sizes), [1, 2], [2, 3])
    with pytest.raises(ConfigError, match="alike"):
        stream_gradients(gamma_decoder(ffn=Dense(64), **sizes), [1, 2], [2])
