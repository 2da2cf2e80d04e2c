"""Residual flow against the float64 decoder, what is counted, and its precision beside a stream in bfloat16."""

import jax
import numpy as np
import pytest

from gammalm.analysis.flow import residual_flow
from gammalm.config import apply_overrides
from gammalm.models.decoder import Model

from .naive import CASES, Case


def streams(case):
    """The stream of all tokens that count [2L + 1, N, D]: e, then after each branch."""
    rows = []
    for valid, seen in zip(case.valid, case.seen, strict=True):
        pairs = zip(seen.norms["attn_norm"], seen.norms["ffn_norm"], strict=True)
        rows.append(np.stack([x for pair in pairs for x in pair] + seen.norms["final_norm"])[:, valid])
    return np.concatenate(rows, axis=1)


def naive_flow(case):
    h = streams(case)
    size = np.linalg.norm(h[0])
    updates = np.linalg.norm(np.diff(h, axis=0), axis=(1, 2)) / size
    return {"attention": updates[0::2], "ffn": updates[1::2], "moved": np.linalg.norm(h[2::2] - h[0], axis=(1, 2)) / size}


@pytest.mark.parametrize("name, packing", CASES)
def test_flow_is_that_of_the_plain_decoder(name, packing):
    case = Case(name, packing)
    found, expected = residual_flow(*case.model_and_data), naive_flow(case)
    assert found.tokens == case.valid.sum()
    assert found.embedding == pytest.approx(np.sqrt(np.mean(streams(case)[0] ** 2)), rel=1e-5)
    for branch, values in expected.items():
        np.testing.assert_allclose(getattr(found, f"{branch}_L"), values, rtol=1e-4, err_msg=branch)
    assert found.ratio == found.moved_L[-1]


def test_batches_weigh_as_much_as_they_hold():
    case = Case("gqa", "concat")
    parts = [jax.tree.map(lambda a, rows=rows: a[rows], case.batch) for rows in (slice(2, 4), slice(0, 2))]
    apart, together = (residual_flow(case.model, case.params, case.buffers, batches) for batches in (parts, [case.batch]))
    assert apart.tokens == together.tokens
    np.testing.assert_allclose(apart.moved_L, together.moved_L, rtol=1e-6)


def test_small_updates_are_measured_before_they_are_rounded():
    """A stream in bfloat16 swallows what is 1/500 of it; what the branch added is still seen."""
    case = Case("gqa", "concat")
    c = apply_overrides(case.config, [("model.residual_dtype", "bfloat16")]).model
    params = jax.tree.map(lambda a: a, case.params)
    params["layers"]["attn"]["out"] = params["layers"]["attn"]["out"] / 2000
    params["layers"]["ffn"]["down"] = params["layers"]["ffn"]["down"] / 2000
    found, exact = (residual_flow(m, params, case.buffers, [case.batch]) for m in (Model(c), case.model))
    assert exact.attention_L.max() < 0.005
    np.testing.assert_allclose(found.attention_L, exact.attention_L, rtol=0.01)
    np.testing.assert_allclose(found.ffn_L, exact.ffn_L, rtol=0.02)
