"""Sink scores against full softmax matrices in float64, what they mean where attention is uniform, and what they cost in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.analysis.sink import THRESHOLD, log_sum_exps, sink_scores, sink_sums
from gammalm.errors import DataError
from gammalm.models.decoder import Model, fresh_buffers

from ..models import reference
from ..models.reference import random_params, small_config
from .naive import CASES, SEGMENTS, Case

NAMES = ("later", "alpha", "sinks", "last")


def naive_scores(case):
    """Each score [L, H] by loops over units, layers and full matrices."""
    units = case.units()
    later = [np.stack([w[:, begin + 1 : end, begin] for w in case.seen[b].weights]) for b, begin, end in units]
    alpha = [np.stack([w[:, begin:end, begin].mean(-1) for w in case.seen[b].weights]) for b, begin, end in units]
    assert np.abs(np.array(alpha) - THRESHOLD).min() > 1e-5  # or rounding would decide
    return {
        "later": np.concatenate(later, axis=-1).mean(-1),
        "alpha": np.mean(alpha, axis=0),
        "sinks": np.mean(np.array(alpha) > THRESHOLD, axis=0),
        "last": np.mean([a[..., -1] for a in later], axis=0),
    }


@pytest.mark.parametrize("name, packing", CASES)
def test_scores_are_those_of_the_full_matrix(name, packing):
    case = Case(name, packing)
    found, expected = sink_scores(*case.model_and_data), naive_scores(case)
    units = case.units()
    assert found.unit == {"concat": "sequence", "documents": "document"}[packing]
    assert found.units == len(units) == {"concat": 3, "documents": 5}[packing]
    assert found.queries == sum(end - begin - 1 for _, begin, end in units)
    for score in NAMES:
        np.testing.assert_allclose(getattr(found, f"{score}_LH"), expected[score], rtol=2e-4, atol=2e-6, err_msg=score)
        np.testing.assert_allclose(found.by_layer()[score], expected[score].mean(1), rtol=2e-4, atol=2e-6)
    assert expected["later"].std() > 0.01 and 0 < expected["sinks"].mean() < 1  # there is something to be wrong about


@pytest.mark.parametrize("documents", [False, True])
def test_the_log_sum_exp_of_several_blocks_is_exact(documents):
    """300 queries: two blocks of 128 and one that is filled up; two heads to a key head; documents that end within blocks."""
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 300, 2, 2, 8)).astype(np.float32), rng.normal(size=(2, 300, 2, 8)).astype(np.float32)
    segments = np.cumsum(rng.uniform(size=(2, 300)) < 0.02, axis=1).astype(np.int32) if documents else None
    found = np.asarray(jax.jit(log_sum_exps)(q, k, segments)).reshape(2, 4, 300)
    for b in range(2):
        one = q[b].reshape(300, 4, 8).astype(np.float64), k[b].astype(np.float64), k[b]
        np.testing.assert_allclose(found[b], reference.attention(*one, segments[b] if documents else None)[1], rtol=1e-5, atol=1e-5)


def without_queries(params):
    """Zero queries: every key gets the same score."""
    return params | {"layers": params["layers"] | {"attn": params["layers"]["attn"] | {"q": 0 * params["layers"]["attn"]["q"]}}}


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_uniform_attention_has_the_uniform_scores(packing):
    case = Case("gqa", packing)
    found = sink_scores(case.model, without_queries(case.params), case.buffers, [case.batch])
    for score in NAMES:
        np.testing.assert_allclose(getattr(found, f"{score}_LH"), found.uniform[score], rtol=1e-5)


def test_the_floor_is_the_harmonic_number():
    """science.md, section 4: H_T/T = .0741 at T = 64."""
    c = small_config(vocab_size=50).model
    model = Model(c)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 65)).astype(np.int32)
    found = sink_scores(model, random_params(model.specs), fresh_buffers(model), [{"tokens": tokens}])
    assert found.uniform["alpha"] == pytest.approx(0.0741, abs=5e-5)
    assert found.uniform["later"] == pytest.approx((64 * 0.0741 - 1) / 63, abs=1e-4)
    assert found.uniform["last"] == pytest.approx(1 / 64) and found.uniform["sinks"] == 0


def test_batches_weigh_as_much_as_they_hold():
    """A batch of long sequences and one of which little counts: the same as both in one."""
    case = Case("gqa", "documents")
    parts = [jax.tree.map(lambda a, rows=rows: a[rows], case.batch) for rows in (slice(2, 4), slice(0, 2))]
    apart, together = (sink_scores(case.model, case.params, case.buffers, batches) for batches in (parts, [case.batch]))
    assert (apart.units, apart.queries, apart.unit) == (together.units, together.queries, "document")
    for score in NAMES:
        np.testing.assert_allclose(getattr(apart, f"{score}_LH"), getattr(together, f"{score}_LH"), rtol=1e-5)


def test_nothing_to_measure_is_said():
    case = Case("gqa", "documents")
    with pytest.raises(DataError, match="no batch"):
        sink_scores(case.model, case.params, case.buffers, [])
    padding = {"tokens": case.batch["tokens"], "segments": 0 * SEGMENTS}
    with pytest.raises(DataError, match="nothing that counts"):
        sink_scores(case.model, case.params, case.buffers, [padding])


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_it_needs_hardly_more_memory_than_a_forward_pass(packing):
    """At most 1.3 times the temporaries of the losses of the same batch, and no T x T array among them."""
    B, T = 2, 768
    c = small_config(d_model=128, n_layers=4, n_heads=8, n_kv_heads=8, head_dim=16, d_ff=352, vocab_size=1024, loss_chunk=256).model
    model = Model(c)
    params = jax.eval_shape(lambda: random_params(model.specs))
    batch = {"tokens": jax.ShapeDtypeStruct((B, T + 1), jnp.int32)}
    if packing == "documents":
        batch["segments"] = batch["tokens"]

    def forward(params, batch):
        tokens, segments = batch["tokens"], batch.get("segments")
        inner = None if segments is None else segments[:, :-1]
        return model.bind(params).token_losses(tokens[:, :-1], tokens[:, 1:], inner, 1e-6)

    def sinks(params, batch):
        return sink_sums(model, params, fresh_buffers(model), batch, jnp.float32(1e-6))

    compiled = [jax.jit(f).lower(params, batch).compile() for f in (sinks, forward)]
    ours, theirs = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert ours <= 1.3 * theirs, f"{ours:,} against {theirs:,}"
    text = compiled[0].as_text()
    assert f"{T},{T}]" not in text and f",128,{T}]" in text  # no matrix of all queries, but blocks of 128 of them
