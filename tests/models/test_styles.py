"""The parts that `lm:style=gpt2` and the presets bring: over devices, in generation and in measurements; what they refuse.

Their numbers against a float64 model: test_decoder.py, test_cache.py. Against transformers' GPT-2: tests/parity/test_gpt2.py.
Shapes: B=4 sequences, T=8 tokens.
"""

import jax
import numpy as np
import pytest

from gammalm.analysis.flow import residual_flow
from gammalm.analysis.norms import norm_regime
from gammalm.analysis.sink import sink_scores
from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.models.cache import prefill
from gammalm.models.decoder import Model
from gammalm.models.flops import training_flops_per_token
from gammalm.plan.arithmetic import of_function
from gammalm.sharding.mesh import batch_sharding, make_mesh, parameter_shardings
from gammalm.training.step import loss_and_gradients

from . import reference
from .reference import random_params, small_config

TOKENS = np.random.default_rng(0).integers(0, 50, (4, 9)).astype(np.int32)
GPT2 = dict(style="gpt2", n_kv_heads=4, max_positions=8, n_layers=3)


@pytest.mark.parametrize("changes", [GPT2 | dict(residual="post"), dict(preset="fixup", n_layers=3)], ids=["gpt2, post-norm", "fixup"])
def test_devices_equal_one_device(changes):
    """Loss and gradients with parameters over fsdp and tensor and each sequence over context. 1e-4 of an array's largest: sums of fp32."""
    c = small_config(**changes)
    model = Model(c.model)
    params = random_params(model.specs)

    def both(params, tokens):
        return loss_and_gradients(model, params, {}, {"tokens": tokens}, c.model.norm_eps, 1)[:2]

    alone = jax.jit(both)(params, TOKENS)
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 2, "context": 2})
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, parameter_shardings(model.specs, mesh))
        loss, gradients = jax.jit(both)(placed, jax.device_put(TOKENS, batch_sharding(mesh)))
    assert float(loss) == pytest.approx(float(alone[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * max(abs(b).max(), 0.01)), gradients, alone[1])


def test_tokens_beyond_the_learned_positions_are_refused():
    c = small_config(**GPT2).model
    model = Model(c)
    decoder = model.bind(random_params(model.specs))
    with pytest.raises(ConfigError, match=r"9 tokens, but model.max_positions=8"):
        decoder.hidden(TOKENS, None, c.norm_eps)
    with pytest.raises(ConfigError, match=r"9 tokens, but model.max_positions=8"):
        prefill(decoder, TOKENS[:, :3], np.full(4, 3, np.int32), 9, c.norm_eps)


def test_model_flop_are_those_of_the_products():
    """3 · the products of a forward pass in which attention's square is counted whole; half of it is what the convention counts."""
    c = load_config("lm:size=tiny,style=gpt2,vocab=64,seq_len=16", [("model.loss_chunk", 0), ("model.dtype", "float32")]).model
    model = Model(c)
    tokens = jax.ShapeDtypeStruct((1, 16), np.int32)
    params = jax.eval_shape(lambda: random_params(model.specs))
    traced = of_function(lambda p, t: model.bind(p).logits(t, None, 1e-5), params, tokens) / 16
    square = 2 * 2 * c.n_layers * c.n_heads * c.head_dim * 16  # scores and weighted values, every query against 16 keys
    assert 3 * (traced - square / 2) == pytest.approx(training_flops_per_token(model, 16))


def test_norms_of_a_post_norm_model_see_the_sum():
    """Against the float64 model: LayerNorm's variance is about the mean, of the stream plus the branch. No final norm."""
    c = small_config(**GPT2, residual="deepnorm").model
    model = Model(c)
    params = random_params(model.specs)
    found = norm_regime(model, params, {}, [{"tokens": TOKENS}], eps=c.norm_eps)
    assert set(found.norms) == {"attn_norm", "ffn_norm"}
    seen = []

    def tied_in(x, y, w, c):
        total = (2 * c.n_layers) ** 0.25 * x + y
        seen.append(total.var(axis=-1).mean())
        return reference.norm_of(total, w, c)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "tied_in", tied_in)
        for row in TOKENS:
            reference.forward(params, c, row[:-1])
    variances = np.array(seen).reshape(4, 3, 2).mean(axis=0)
    np.testing.assert_allclose(found.norms["attn_norm"].variance_L, variances[:, 0], rtol=1e-4)
    np.testing.assert_allclose(found.norms["ffn_norm"].variance_L, variances[:, 1], rtol=1e-4)


def test_measurements_without_norms():
    c = small_config(preset="fixup").model
    model = Model(c)
    params, batches = random_params(model.specs), [{"tokens": TOKENS}]
    assert np.isfinite(residual_flow(model, params, {}, batches).ratio)
    assert (sink_scores(model, params, {}, batches).later_LH > 0).all()
    with pytest.raises(ConfigError, match="model.norm='fixup' normalises nothing"):
        norm_regime(model, params, {}, batches)
