"""The decoder against the same model written in float64 NumPy (reference.py), and the properties every variant must have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.initializers import init_params
from gammalm.models.decoder import Model
from gammalm.training.step import loss_and_gradients

from . import reference
from .reference import random_buffers, random_params, small_config

# Every option on in one of a few programs: each differs from the others in several leaves.
VARIANTS = {
    "plain": dict(),
    "headwise, untied, learned sink": dict(gate="headwise", softmax_sink="learned", tie_embeddings=False),
    "elementwise, qk-norm, softcap": dict(
        gate="elementwise", softmax_sink="one", qk_norm=True, logit_softcap=3.0, n_kv_heads=1, head_dim=8,
    ),
    "mha, wide heads, theta": dict(n_kv_heads=4, head_dim=10, rope_theta=100.0, gate="elementwise", tie_embeddings=False, norm_eps=0.3),
    "mla, headwise": dict(attention="mla", gate="headwise", tie_embeddings=False),
    "compressed mla, elementwise, moe after a dense layer": dict(
        attention="mla", ffn="moe", gate="elementwise", n_layers=3, model__mla__q_rank=8, model__moe__first_k_dense=1,
        softmax_sink="learned",
    ),
    "gpt2": dict(style="gpt2"),
    "post-norm, two matrices without biases": dict(
        style="gpt2", residual="post", activation="gelu", biases=False, gate="elementwise", tie_embeddings=False,
    ),
    "deepnorm": dict(preset="deepnorm", qk_norm=True),
    "deepnorm, moe": dict(ffn="moe", residual="deepnorm"),
    "fixup": dict(preset="fixup", gate="headwise"),
    "fixup, gpt2": dict(style="gpt2", preset="fixup", activation="relu"),
    "no norm": dict(style="gpt2", norm="none", activation="silu"),
    "moe, softmax, two shared": dict(
        ffn="moe", model__moe__score="softmax", model__moe__n_shared=2, model__moe__route_scale=2.5, model__moe__top_k=3,
    ),
}  # fmt: skip
T = 12
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [3] * 4, [1] * 9 + [2] * 2 + [0] * 2], np.int32)


def tokens(seed=0, rows=2):
    return np.random.default_rng(seed).integers(0, 50, (rows, T + 1)).astype(np.int32)


class Built:
    """A small model with random parameters, its logits compiled once with segments (None: one document each)."""

    def __init__(self, **changes):
        self.config = small_config(**changes)
        self.model = Model(self.config.model)
        self.params = random_params(self.model.specs)
        self.buffers = random_buffers(self.model)
        self.eps = self.config.model.norm_eps
        self._logits = jax.jit(lambda params, tokens, segments: self.model.bind(params, self.buffers).logits(tokens, segments, self.eps))

    def logits(self, tokens, segments=None):
        """Without segments: those of one document, which mean the same (`test_one_segment_is_none`) and share the program."""
        return np.asarray(self._logits(self.params, tokens, np.ones_like(tokens) if segments is None else segments))


@pytest.fixture(scope="module")
def built():
    made = {}

    def build(name):
        if name not in made:
            made[name] = Built(**VARIANTS[name])
        return made[name]

    return build


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_reference(built, name):
    """1e-5 of the largest logit: fp32 through two layers of sums over at most 40 terms. With documents and without."""
    b = built(name)
    for segments in (None, SEGMENTS[:, :-1]):
        ours = b.logits(tokens()[:, :-1], segments)
        for row in range(2):
            expected, measured = reference.forward(
                b.params, b.config.model, tokens()[row, :-1], None if segments is None else segments[row], b.buffers
            )
            assert all(margin > 1e-4 for *_, margin in measured), "a choice that rounding could turn"
            np.testing.assert_allclose(ours[row], expected, atol=1e-5 * abs(expected).max())


FULL_TIER = (
    "compressed mla, elementwise, moe after a dense layer", "deepnorm", "deepnorm, moe", "fixup", "no norm",
    "post-norm, two matrices without biases",
)  # fmt: skip
DIFFERENTIATED = [name for name in VARIANTS if name not in ("plain", "mha, wide heads, theta")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in FULL_TIER else []) for n in DIFFERENTIATED])
def test_gradient_is_the_slope_of_the_reference_loss(built, name):
    """Along one random direction per parameter, against central differences in float64 (their own error is about h² = 1e-10).

    The slope along a bias of keys is 0 where keys are not rotated, and what fp32 leaves of it is as large as the whole gradient says.
    """
    b = built(name)
    batch = {"tokens": tokens(), "segments": SEGMENTS}
    loss, gradients, count, measured = jax.jit(lambda p: loss_and_gradients(b.model, p, b.buffers, batch, b.eps, 1))(b.params)
    assert float(count) == 3 + 4 + 3 + 8 + 1  # targets inside their document; the padding is none
    objective = functools.partial(reference.mean_loss, c=b.config.model, tokens_BS=tokens(), segments_BS=SEGMENTS, buffers=b.buffers)
    balance = b.config.model.moe.balance_loss * measured["balance"].sum() if measured else 0.0
    assert float(loss + balance) == pytest.approx(objective(b.params), rel=1e-5)
    rng = np.random.default_rng(3)
    flat, structure = jax.tree.flatten(jax.tree.map(lambda a: np.asarray(a, np.float64), b.params))
    h = 1e-5
    whole = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradients)))
    for i, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.normal(size=flat[i].shape)
        ends = []
        for sign in (h, -h):
            moved = [a + sign * direction if j == i else a for j, a in enumerate(flat)]
            ends.append(objective(jax.tree.unflatten(structure, moved)))
        slope = (ends[0] - ends[1]) / (2 * h)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert float((gradient * direction).sum()) == pytest.approx(slope, abs=1e-5 * size + 1e-6 * whole), list(b.model.specs)[i]


def test_one_segment_is_none(built):
    b = built("plain")
    without = jax.jit(lambda p, t: b.model.bind(p).logits(t, None, b.eps))(b.params, tokens()[:, :-1])
    np.testing.assert_allclose(without, b.logits(tokens()[:, :-1]), atol=1e-5)


def test_positions_start_again_at_each_document(built):
    """Within a document RoPE sees distances alone, so logits cannot show it: the angles can. Padding is a document of its own."""
    b = built("plain")
    decoder = b.model.bind(jax.tree.map(jnp.asarray, b.params))
    cos, sin = decoder.start(tokens()[:, :-1], jnp.asarray(SEGMENTS[:, :-1]))[1]
    positions = np.stack([reference.positions_of(row, T) for row in SEGMENTS[:, :-1]])
    np.testing.assert_allclose(cos[:, :, 0, 0], np.cos(positions), atol=1e-6)  # the first frequency is 1
    np.testing.assert_allclose(sin[:, :, 0, 0], np.sin(positions), atol=1e-6)
    cos, _ = decoder.start(tokens()[:, :-1], None)[1]
    np.testing.assert_allclose(cos[0, :, 0, 0], np.cos(np.arange(T)), atol=1e-6)


@pytest.mark.parametrize("name", ["elementwise, qk-norm, softcap", "compressed mla, elementwise, moe after a dense layer"])
def test_packed_documents_equal_each_document_alone(built, name):
    """Documents of 4, 5 and 3 tokens packed into one row against the same documents at the start of rows of their own."""
    b = built(name)
    row = tokens()[:1, :-1]
    packed = b.logits(np.repeat(row, 2, 0), np.repeat(SEGMENTS[:1, :-1], 2, 0))[0]
    for start, end in ((0, 4), (4, 9), (9, 12)):
        alone = np.zeros((2, T), np.int32)
        alone[:, : end - start] = row[0, start:end]
        np.testing.assert_allclose(b.logits(alone)[0, : end - start], packed[start:end], atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_changes_nothing_before_it(built, name):
    b = built(name)
    before = tokens()[:, :-1]
    after = before.copy()
    after[:, 7] = (after[:, 7] + 1) % 50
    changed = abs(b.logits(after) - b.logits(before)).max(axis=(0, 2))
    assert (changed[:7] == 0).all()
    assert (changed[7:] > 1e-4).all()


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_gate_starts_at_one_half(gate):
    """At γ=1 the gate is ½ ± ¼·d^(-1/2) (science 3): mean within four standard errors, std within 5 %.

    The pre-activation is a sum of d terms of variance d^-2; the slope of the sigmoid at 0 is ¼.
    """
    d, h = 256, 16
    c = small_config(gate=gate, d_model=d, n_heads=h, n_kv_heads=h, n_layers=1, norm_eps=1e-12)
    model = Model(c.model)
    kernel = np.asarray(draw_init(model, c, gamma=1.0)["layers"]["attn"]["gate"][0]).reshape(d, -1)
    rng = np.random.default_rng(0)
    normed = rng.normal(size=(256, d))
    normed /= np.sqrt((normed**2).mean(1, keepdims=True))
    values = reference.sigmoid(normed @ kernel)
    assert values.std() == pytest.approx(0.25 * d**-0.5, rel=0.05)
    assert values.mean() == pytest.approx(0.5, abs=4 * 0.25 * d**-0.5 / np.sqrt(kernel.shape[1]))


def draw_init(model, c, **init):
    with c.unlocked():
        c.init.update(init)
    return init_params(model.specs, c.init, 0, d_model=c.model.d_model, n_layers=c.model.n_layers)


def test_bf16_is_near_fp32(built):
    """Eight bits per rounding: about one part in 256 times a few, of the largest logit. The residual dtype is a choice of its own."""
    exact = built("plain")
    logits = exact.logits(tokens()[:, :-1])
    errors = []
    for residual in ("float32", "bfloat16"):
        c = small_config(dtype="bfloat16", residual_dtype=residual)
        model = Model(c.model)
        decoder = model.bind(jax.tree.map(jnp.asarray, exact.params))
        assert decoder.start(tokens(), None)[0].dtype == residual
        ours = jax.jit(lambda p, t, model=model: model.bind(p).logits(t, None, exact.eps))(exact.params, tokens()[:, :-1])
        assert ours.dtype == jnp.float32
        errors.append(np.sqrt(((np.asarray(ours) - logits) ** 2).mean()) / logits.std())
    assert errors[0] < errors[1] < 0.03, errors
    assert errors[0] > 1e-4  # it really computed in bf16


def test_bind_puts_every_parameter_in_its_place(built):
    """Each leaf of the module is the array of the same path, whatever the order of the dict."""
    b = built("mha, wide heads, theta")
    backwards = {name: b.params[name] for name in reversed(b.params)}
    decoder = b.model.bind(backwards)
    assert set(b.model.specs) == {
        "embed/table", "layers/attn_norm/gain", "layers/attn/q", "layers/attn/k", "layers/attn/v", "layers/attn/gate", "layers/attn/out",
        "layers/ffn_norm/gain", "layers/ffn/gate", "layers/ffn/up", "layers/ffn/down", "final_norm/gain", "head/kernel",
    }  # fmt: skip
    for path, spec in b.model.specs.items():
        node, array = decoder, b.params
        for part in path.split("/"):
            node, array = getattr(node, part), array[part]
        np.testing.assert_array_equal(node[...], array)
        assert array.shape == spec.shape


def test_bind_refuses_another_models_parameters(built):
    with pytest.raises((ValueError, KeyError)):
        built("plain").model.bind(built("headwise, untied, learned sink").params)
