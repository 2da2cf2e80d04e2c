"""The softmax sink (`model.softmax_sink`): kernels against a softmax with one more column in float64, over devices and cells; what a model
declares for it. The decoder with it: test_decoder.py; its sink scores: tests/analysis/test_sink.py.

Shapes: B batch, T tokens, G key heads, R queries per key head, K head size, W value size. Tolerance 1e-5: fp32 sums of at most 256 terms
of order one; the gradient of a sink sums over all queries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.config import apply_overrides, load_config
from gammalm.errors import ConfigError
from gammalm.initializers import PRESETS, init_params, init_table
from gammalm.models import blockwise, kernels
from gammalm.models.decoder import Model
from gammalm.models.kernels import attend, choose_attention, describe
from gammalm.sharding.mesh import make_mesh
from gammalm.training.optimizer import decay_mask

from . import reference

SINK_GR = np.array([[0.3, 2.0, -1.0], [0.0, -3.0, 1.0]], np.float32)


def draw(B, T, G, R, K, W, packed, seed=0):
    """q, k, v, sink, the gradient of the output, and segments (some of them padding) or None."""
    rng = np.random.default_rng(seed)
    q, k, v, g = (rng.normal(size=s).astype(np.float32) for s in ((B, T, G, R, K), (B, T, G, K), (B, T, G, W), (B, T, G, R, W)))
    segments = np.cumsum(rng.uniform(size=(B, T)) < 0.1, axis=1).astype(np.int32) + 1
    segments[:, -2:] = 0
    return q, k, v, SINK_GR[:G, :R], g, segments if packed else None


def through(name, q, k, v, sink, g, segments):
    """Output and gradients of Σ output·g with respect to q, k, v and sink, through `attend`."""

    @jax.jit
    def both(q, k, v, sink, g):
        out, vjp = jax.vjp(lambda q, k, v, sink: attend(q, k, v, segments, name, sink), q, k, v, sink)
        return out, *vjp(g)

    return both(q, k, v, sink, g)


def naive(q, k, v, sink, g, segments):
    """The same in float64, every head with its own softmax over T + 1 columns, the last of which has a value of zero."""
    q, k, v, sink, g = (np.asarray(a, np.float64) for a in (q, k, v, sink, g))
    out, d_q, d_k, d_v, d_sink = (np.zeros_like(a) for a in (g, q, k, v, sink))
    B, T, K = q.shape[0], q.shape[1], q.shape[-1]
    for b, h, r in np.ndindex(B, *q.shape[2:4]):
        visible = np.tril(np.ones((T, T), bool))
        if segments is not None:
            visible &= segments[b][:, None] == segments[b][None]
        scores = np.where(visible, q[b, :, h, r] @ k[b, :, h].T / np.sqrt(K), -np.inf)
        values = np.concatenate([v[b, :, h], np.zeros((1, v.shape[-1]))])
        p = np.exp(reference.log_softmax(np.concatenate([scores, np.full((T, 1), sink[h, r])], axis=1)))
        out[b, :, h, r] = p @ values
        d_p = g[b, :, h, r] @ values.T
        d_s = p * (d_p - (p * d_p).sum(1, keepdims=True))
        d_q[b, :, h, r] = d_s[:, :T] @ k[b, :, h] / np.sqrt(K)
        d_k[b, :, h] += d_s[:, :T].T @ q[b, :, h, r] / np.sqrt(K)
        d_v[b, :, h] += p[:, :T].T @ g[b, :, h, r]
        d_sink[h, r] += d_s[:, T].sum()
    return out, d_q, d_k, d_v, d_sink


def agree(ours, theirs, atol=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 4), (2, 1, 6, 4)], ids=["grouped", "as latent attention"])
def test_blockwise_equals_a_softmax_with_one_more_column(sizes, packed, monkeypatch):
    """Blocks of 4, the last one ragged."""
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    drawn = draw(2, 18, *sizes, packed)
    expected = naive(*drawn)
    agree(through("blockwise", *drawn), expected)
    assert abs(expected[-1]).min() > 0.01


def test_splash_equals_a_softmax_with_one_more_column():
    drawn = draw(2, 100, 1, 2, 8, 6, True)
    agree(through("splash", *drawn), naive(*drawn), atol=3e-5)


@pytest.mark.parametrize("name", ["blockwise", "splash"])
def test_devices_equal_one_device(name):
    """Rows, heads and tokens cut up: each device has a part of the gradient of a sink."""
    drawn = draw(2, 256, 2, 2, 8, 8, True)
    expected = through("blockwise", *drawn)
    with jax.set_mesh(make_mesh(dict(data=2, context=2, tensor=2), jax.devices()[:8])):
        agree(through(name, *drawn), expected, atol=3e-5)


@pytest.mark.parametrize("batched", [jax.vmap, lambda f: lambda *a: jax.lax.map(lambda one: f(*one), a)], ids=["vmap", "map"])
def test_cells_side_by_side_equal_each_alone(batched):
    cells = [draw(1, 9, 2, 2, 4, 4, False, seed)[:5] for seed in (0, 1)]
    cells[1] = (*cells[1][:3], cells[1][3] + 1, cells[1][4])
    side_by_side = batched(functools.partial(through, "blockwise", segments=None))
    found = side_by_side(*(np.stack(a) for a in zip(*cells, strict=True)))
    for i, cell in enumerate(cells):
        agree([a[i] for a in found], naive(*cell, None))


def test_far_sinks_take_nothing_or_all():
    """At −∞ there is no sink; scores of ±4000 and sinks of as much do not overflow."""
    q, k, v, _, g, _ = draw(2, 8, 2, 3, 4, 4, False)
    gone = through("blockwise", q, k, v, np.full((2, 3), -np.inf, np.float32), g, None)
    without = jax.jit(lambda q, k, v: attend(q, k, v, None, "blockwise"))(q, k, v)
    np.testing.assert_allclose(gone[0], without, rtol=1e-6)
    assert not np.asarray(gone[-1]).any()
    for sink in (-4000.0, 4000.0):
        found = through("blockwise", 2000 * q, k, v, np.full((2, 3), sink, np.float32), g, None)
        assert all(np.isfinite(a).all() for a in found)
    all_of_it = jax.jit(lambda *a: blockwise.causal_attention(*a[:3], sink_GR=a[3]))(q, k, v, np.full((2, 3), 4000.0, np.float32))
    assert not np.asarray(all_of_it[0]).any() and (np.asarray(all_of_it[1]) == 4000).all()


def test_in_bf16_the_sink_and_its_gradient_are_fp32():
    """Gradients of bf16 products; without rounding of the sink itself 1.001 and 1 would differ by nothing."""
    q, k, v, _, g, _ = (None if a is None else jnp.asarray(a, jnp.bfloat16) for a in draw(2, 8, 2, 1, 4, 4, False))
    near, one = (jnp.full((2, 1), s, jnp.float32) for s in (1.001, 1.0))
    out, *_, d_sink = through("blockwise", q, k, v, one, g, None)
    assert (out.dtype, d_sink.dtype) == (jnp.bfloat16, jnp.float32)
    lse = lambda s: blockwise.causal_attention(q, k, v, None, None, None, s)[1]  # noqa: E731
    assert (np.asarray(lse(near)) > np.asarray(lse(one))).all()
    np.testing.assert_allclose(d_sink, naive(q, k, v, one, g, None)[-1], atol=0.05)


def test_cudnn_is_not_chosen_and_is_refused_by_name():
    config = apply_overrides(load_config("lm:size=125m"), [("model.softmax_sink", "learned")])
    assert describe(config, "gpu", 9.0) == "kernels on gpu: attention blockwise"
    assert describe(config, "tpu") == "kernels on tpu: attention splash"
    with pytest.raises(ConfigError, match="attention_kernel=cudnn gives no gradient .* model.softmax_sink"):
        choose_attention("cudnn", "gpu", "bfloat16", (64, 64), 2048, generation=9.0, sink=True)
    assert kernels.kernel_of(apply_overrides(config, [("model.softmax_sink", "none")]), "gpu", 9.0) == "cudnn"


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_what_a_model_declares(attention):
    """A logit per head and layer for `learned`, nothing for `one`: zero under every preset, without decay."""
    plain = reference.small_config(attention=attention)
    configs = {kind: apply_overrides(plain, [("model.softmax_sink", kind)]) for kind in ("none", "one", "learned")}
    models = {kind: Model(config.model) for kind, config in configs.items()}
    assert models["one"].specs == models["none"].specs == {k: s for k, s in models["learned"].specs.items() if k != "layers/attn/sink"}
    spec = models["learned"].specs["layers/attn/sink"]
    assert (spec.shape, spec.axes, spec.role, spec.fans()) == ((2, 4), ("layers", "heads"), "sink", (None, None))
    assert models["learned"].parameter_count == models["none"].parameter_count + 2 * 4
    assert decay_mask(models["learned"].specs, ("norm",))["layers"]["attn"]["sink"] == 0.0
    size = dict(d_model=24, n_layers=2)
    for preset in PRESETS:
        init = apply_overrides(plain, [("init.preset", preset)]).init
        rows = {row["path"]: row for row in init_table(models["learned"].specs, init, **size)}
        assert (rows["layers/attn/sink"]["initializer"], rows["layers/attn/sink"]["sigma"]) == ("zeros", 0.0)
    drawn = init_params({"layers/attn/sink": spec}, plain.init, 0, **size)
    assert not np.asarray(drawn["layers"]["attn"]["sink"]).any()


def test_splash_with_a_sink_lowers_for_tpu(monkeypatch):
    """Mosaic takes the sink in the forward kernel; the two of the backward pass have it in the log-sum-exp."""
    monkeypatch.setattr(kernels, "platform", lambda: "tpu")
    given = [jax.ShapeDtypeStruct((1, 512, *heads), jnp.bfloat16) for heads in ((2, 2, 64), (2, 64), (2, 64))]
    total = lambda q, k, v, sink: attend(q, k, v, None, "auto", sink).astype(jnp.float32).sum()  # noqa: E731
    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3))).trace(*given, jax.ShapeDtypeStruct((2, 2), jnp.float32))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3
