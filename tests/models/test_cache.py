"""The cache (gammalm.models.cache): tokens read in pieces against the same model read whole, in float64 (reference.py).

Rows of unequal length are read in three pieces, of unequal length too. 1e-5 of the largest logit: fp32 through two or three layers, as in
test_decoder.py; latent attention is computed another way round over a cache, with sums of the same length.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gammalm.errors import ConfigError
from gammalm.models.cache import extend, keep, layers_of, prefill
from gammalm.models.decoder import Model
from gammalm.models.parts import BATCH_AXES, Tree
from gammalm.sharding.mesh import make_mesh, parameter_shardings

from . import reference
from .reference import random_buffers, random_params, small_config

# Between them: MHA, GQA and MQA, latents with and without one for queries, every gate, every softmax sink, QK-norm, tied and untied heads,
# soft-cap, mixtures with and without dense first layers, both scores of a router, loops over layers and unrolled ones.
SLOTS = 14
VARIANTS = {
    "gqa": dict(),
    "mha, headwise, untied, learned sink": dict(n_kv_heads=4, head_dim=10, gate="headwise", softmax_sink="learned", tie_embeddings=False),
    "mqa, elementwise, qk-norm, softcap, sink of one": dict(
        n_kv_heads=1, head_dim=8, gate="elementwise", softmax_sink="one", qk_norm=True, logit_softcap=3.0, scan_unroll=2,
    ),
    "mla, headwise, untied": dict(attention="mla", gate="headwise", tie_embeddings=False),
    "compressed mla, elementwise, learned sink, moe after a dense layer": dict(
        attention="mla", ffn="moe", gate="elementwise", n_layers=3, model__mla__q_rank=8, model__moe__first_k_dense=1,
        softmax_sink="learned",
    ),
    "gpt2, post-norm": dict(style="gpt2", residual="post", max_positions=24),
    "fixup": dict(preset="fixup", gate="headwise"),
    "moe, softmax, two shared, sink of one": dict(
        ffn="moe", model__moe__score="softmax", model__moe__n_shared=2, model__moe__top_k=3, softmax_sink="one",
    ),
}  # fmt: skip
NORMED = "mqa, elementwise, qk-norm, softcap, sink of one"
MIXED = "compressed mla, elementwise, learned sink, moe after a dense layer"
V = 50
PIECES = np.array([[4, 3, 1], [6, 1, 1], [1, 3, 1], [2, 0, 1]])  # tokens of each row in each piece
WIDTHS = (6, 3, 3)  # of the arrays in which they come
ENDS = PIECES.sum(1)


def whole(seed=0):
    """Rows of tokens, int32 [4, 8]."""
    return np.random.default_rng(seed).integers(0, V, (len(PIECES), 8)).astype(np.int32)


class Built:
    def __init__(self, **changes):
        self.config = small_config(**changes)
        self.model = Model(self.config.model)
        self.params, self.buffers = random_params(self.model.specs), random_buffers(self.model)
        eps = self.config.model.norm_eps

        def first(params, tokens, lengths):
            decoder = self.model.bind(params, self.buffers)
            x, cache = prefill(decoder, tokens, lengths, SLOTS, eps)
            return decoder.logits_of(x), cache

        def further(params, tokens, counts, cache):
            decoder = self.model.bind(params, self.buffers)
            x, cache = extend(decoder, layers_of(decoder), tokens, counts, cache, eps)
            return decoder.logits_of(x), cache

        self.first, self.further = jax.jit(first), jax.jit(further)


@pytest.fixture(scope="module")
def built():
    return functools.cache(lambda name: Built(**VARIANTS[name]))


def read(b, params, tokens, filler=0, spoil=lambda cache: cache):
    """Logits [4, 8, V] of rows read in three pieces; what fills a piece up is `filler`, and `spoil` changes the cache in between."""
    logits, cache, at = np.zeros((*tokens.shape, V), np.float32), None, np.zeros(len(tokens), int)
    for counts, width in zip(PIECES.T, WIDTHS, strict=True):
        piece = np.full((len(tokens), width), filler, np.int32)
        for row, count in enumerate(counts):
            piece[row, :count] = tokens[row, at[row] : at[row] + count]
        counts = counts.astype(np.int32)
        found, cache = b.first(params, piece, counts) if cache is None else b.further(params, piece, counts, spoil(cache))
        for row, count in enumerate(counts):
            logits[row, at[row] : at[row] + count] = found[row, :count]
        at += counts
    np.testing.assert_array_equal(cache.lengths_B, ENDS)
    return logits


QUICK = (MIXED, "gpt2, post-norm")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in VARIANTS])
def test_pieces_equal_the_whole(built, name):
    b = built(name)
    found = read(b, b.params, whole())
    for row, end in enumerate(ENDS):
        expected, measured = reference.forward(b.params, b.config.model, whole()[row, :end], None, b.buffers)
        assert all(margin > 1e-4 for *_, margin in measured), "a choice that rounding could turn"
        np.testing.assert_allclose(found[row, :end], expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("name", [MIXED, pytest.param(NORMED, marks=pytest.mark.full)])
def test_what_does_not_count_changes_nothing(built, name):
    """Other filler, anything in slots that are not filled, another row: to the bit."""
    b = built(name)

    def spoil(cache):
        free = np.arange(SLOTS) >= np.asarray(cache.lengths_B)[:, None]
        return cache._replace(kept=jax.tree.map(lambda a: jnp.where(free[:, None, :, None], 1e4, a), cache.kept))

    tokens = whole()
    found = read(b, b.params, tokens)
    np.testing.assert_array_equal(read(b, b.params, tokens, filler=7, spoil=spoil), found)
    tokens[1] = (tokens[1] + 1) % V
    changed = read(b, b.params, tokens)
    np.testing.assert_array_equal(changed[[0, 2, 3]], found[[0, 2, 3]])
    assert (abs(changed[1] - found[1]).max(-1) > 1e-4).all()


def test_a_row_that_rests_stays_as_it_is(built):
    """Count 0: its length and what was in its cache; a token for which there is no slot overwrites none."""
    b = built(MIXED)
    _, cache = b.first(b.params, whole()[:, :6], np.array([6, 5, 6, 6], np.int32))
    for counts in ([3, 0, 3, 3], [3, 0, 3, 3], [2, 0, 2, 2]):
        _, cache = b.further(b.params, whole()[:, :3], np.array(counts, np.int32), cache)
    np.testing.assert_array_equal(cache.lengths_B, [SLOTS, 5, SLOTS, SLOTS])
    before = jax.tree.map(np.asarray, cache)
    _, cache = b.further(b.params, whole()[:, 3:6], np.zeros(4, np.int32), cache)
    np.testing.assert_array_equal(cache.lengths_B, before.lengths_B)
    for a, was in zip(jax.tree.leaves(cache.kept), jax.tree.leaves(before.kept), strict=True):
        np.testing.assert_array_equal(a[0], was[0])
        np.testing.assert_array_equal(a[1, :, :5], was[1, :, :5])


def test_a_cache_holds_what_it_says(built):
    """Keys and values of key heads alone; of latent attention rank and rotated part. In the compute dtype, which is not the stream's."""
    shapes = {
        "gqa": [((4, 2, SLOTS, 6),) * 2] * 2,
        MIXED: [(4, 1, SLOTS, 10 + 4)] * 3,
    }
    for name, expected in shapes.items():
        b = Built(**VARIANTS[name], dtype="bfloat16")
        cache = jax.eval_shape(b.first, b.params, whole()[:, :6], PIECES[:, 0].astype(np.int32))[1]
        assert jax.tree.map(lambda a: a.shape, cache.kept) == expected
        assert {a.dtype for a in jax.tree.leaves(cache.kept)} == {jnp.dtype("bfloat16")}


@pytest.mark.full
@pytest.mark.parametrize("name", ["gqa", "mla, headwise, untied"])
@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_in_bf16_pieces_are_near_the_whole(name, residual):
    """Eight bits per rounding: as far from the exact logits as the model read whole is, give or take half."""
    b, exact = Built(**VARIANTS[name], dtype="bfloat16", residual_dtype=residual), Built(**VARIANTS[name])
    found = read(b, b.params, whole())
    logits = jax.jit(lambda params, tokens: b.model.bind(params).logits(tokens, None, b.config.model.norm_eps))(b.params, whole())
    errors = []
    for ours in (found, np.asarray(logits)):
        off = [ours[row, :end] - reference.logits_of(b.params, exact.config.model, whole()[row, :end]) for row, end in enumerate(ENDS)]
        errors.append(np.sqrt(np.mean(np.concatenate(off) ** 2)))
    assert 0.5 < errors[0] / errors[1] < 1.5, errors
    assert errors[0] < 0.03 * np.asarray(logits).std()


@pytest.mark.full
@pytest.mark.parametrize("name, other", [("gqa", "data"), (MIXED, "expert")])
def test_eight_devices_equal_one(built, name, other):
    """Rows, heads, widths and experts cut up; every device keeps its rows of the cache, and its key heads."""
    b = built(name)
    found = read(b, b.params, whole())
    mesh = make_mesh({other: 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    with jax.set_mesh(mesh):
        params = jax.tree.map(jax.device_put, b.params, parameter_shardings(b.model.specs, mesh))
        np.testing.assert_allclose(read(b, params, whole()), found, atol=1e-5 * abs(found).max())
        _, cache = b.first(params, whole()[:, :6], PIECES[:, 0].astype(np.int32))
    kept = jax.tree.leaves(cache.kept)[0]
    assert kept.addressable_shards[0].data.shape == ((1, 1, SLOTS, 6) if name == "gqa" else (1, 1, SLOTS, 14))


def test_devices_keep_their_own_rows_and_exchange_nothing():
    """They would at every token, in every layer."""
    mesh = make_mesh({"data": 4, "fsdp": 2}, jax.devices()[:8])
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(8, 2, SLOTS, 6)), rng.normal(size=(8, 3, 2, 6)), rng.integers(0, SLOTS, 8)
    with jax.set_mesh(mesh):
        step = jax.jit(keep).lower(*jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))).compile()
        found = step(*jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(BATCH_AXES))))
    assert not re.search("all-(gather|reduce|to-all)|collective", step.as_text())
    for b, length in enumerate(arrays[2]):  # what comes after the last slot is lost
        wanted = np.concatenate([arrays[0][b, :, :length], arrays[1][b].swapaxes(0, 1), arrays[0][b, :, length + 3 :]], axis=1)
        np.testing.assert_array_equal(found[b], wanted[:, :SLOTS].astype(np.float32))


def test_a_mesh_with_context_is_refused(built):
    b = built("gqa")
    with jax.set_mesh(make_mesh(dict(context=2), jax.devices()[:2])), pytest.raises(ConfigError, match="context > 1"):
        b.first(b.params, whole()[:, :6], PIECES[:, 0].astype(np.int32))


def test_more_tokens_than_learned_positions_are_refused(built):
    """At once, whole or through a cache; a row of trees may be longer, as its sequences lie side by side."""
    b = built("gpt2, post-norm")
    decoder, most = b.model.bind(b.params, b.buffers), b.config.model.max_positions
    tokens = jnp.zeros((1, most + 1), jnp.int32)
    with pytest.raises(ConfigError, match=f"{most + 1} tokens, but model.max_positions={most}"):
        decoder.start(tokens, None)
    with pytest.raises(ConfigError, match="positions were learned"):
        prefill(decoder, tokens[:, :2], jnp.array([2]), most + 1, 1e-6)
    half, rest = [most // 2 + 1] * (most // 2 + 1), [most + 1] * (most - most // 2)
    x_BTD, _ = decoder.start(tokens, Tree(jnp.array([half + rest], jnp.int32)))
    np.testing.assert_array_equal(x_BTD[:, most // 2 + 1 :], x_BTD[:, : most - most // 2])  # position 0 again
