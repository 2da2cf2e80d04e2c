"""Every measurement over a mesh gives what one device gives; batches say which tokens count; the walk is the forward pass.

Shapes: B=8 sequences, T=12 tokens.
"""

import jax
import numpy as np
import pytest

from gammalm.analysis.flow import flow_sums
from gammalm.analysis.norms import norm_sums
from gammalm.analysis.sink import sink_sums
from gammalm.analysis.walk import inputs_of, total
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import batch_sharding, make_mesh, parameter_shardings

from ..models.reference import random_buffers, random_params, small_config
from .naive import SEGMENTS, WEIGHTS

MESHES = {"fsdp and tensor": dict(data=2, fsdp=2, tensor=2), "context": dict(data=4, context=2)}


@pytest.fixture(scope="module")
def built():
    model = Model(small_config(n_layers=2, gate="elementwise", qk_norm=True).model)
    tokens = np.random.default_rng(3).integers(0, 50, (8, 13)).astype(np.int32)
    return model, random_params(model.specs, scale=2.0), {"tokens": tokens, "segments": np.concatenate([SEGMENTS, SEGMENTS[::-1]])}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("sums", [sink_sums, flow_sums, norm_sums])
def test_a_mesh_changes_nothing(built, sums, sizes):
    model, params, batch = built
    alone = total(sums, model, params, {}, [batch])
    mesh = make_mesh(sizes)
    spread = jax.device_put(params, parameter_shardings(model.specs, mesh))
    with jax.set_mesh(mesh):
        found = total(sums, model, spread, {}, [jax.device_put(batch, batch_sharding(mesh))])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, alone)


def test_padding_does_not_count():
    tokens = np.zeros((4, 13), np.int32)
    assert inputs_of({"tokens": tokens})[2].all()
    assert (inputs_of({"tokens": tokens, "weights": WEIGHTS})[2] == (WEIGHTS > 0)).all()
    # With documents, the last token of each is no context of a target, and still is one that was read.
    assert (inputs_of({"tokens": tokens, "weights": WEIGHTS, "segments": SEGMENTS})[2] == (SEGMENTS[:, :-1] > 0)).all()


def test_the_walk_is_the_forward_pass():
    """In both stacks of a mixture whose first layer is dense: the stream it returns is what the logits are made of, layer after layer."""
    model = Model(small_config(attention="mla", ffn="moe", n_layers=3, model__moe__first_k_dense=1).model)
    decoder = model.bind(random_params(model.specs), random_buffers(model))
    tokens, eps = np.random.default_rng(0).integers(0, 50, (2, 12)).astype(np.int32), model.config.norm_eps
    stream_BTD, (before, between, after) = jax.jit(
        lambda: decoder.walk(tokens, None, eps, lambda visit: (visit.before_BTD, visit.between_BTD, visit.after_BTD))
    )()
    hidden_BTD = jax.jit(lambda: decoder.hidden(tokens, None, eps)[0])()
    np.testing.assert_allclose(decoder.final_norm(stream_BTD, eps), hidden_BTD, rtol=1e-4, atol=1e-5)
    assert before.shape == between.shape == (3, *stream_BTD.shape)
    np.testing.assert_array_equal(before[1:], after[:-1])
    np.testing.assert_array_equal(after[-1], stream_BTD)
