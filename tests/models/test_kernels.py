"""The attention kernels against the float64 reference and each other, on one device and several; and which is chosen where.

Shapes as in test_attention.py; splash attention runs in Pallas' interpreter, cuDNN's call with XLA in cuDNN's place.
Tolerance 1e-5: fp32 sums of at most 256 terms of order one.
"""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.config import apply_overrides, load_config
from gammalm.errors import ConfigError
from gammalm.models import kernels
from gammalm.models.kernels import attend, choose_attention, dense_mask_bytes, describe, head_sizes
from gammalm.sharding.mesh import make_mesh

from . import reference

B = 2


def draw(T, G, R, K, W, packed, seed=0):
    """q, k, v, the gradient of the output, and segments (some of them padding) or None."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((B, T, G, R, K), (B, T, G, K), (B, T, G, W), (B, T, G, R, W))]
    segments = np.cumsum(rng.uniform(size=(B, T)) < 0.03, axis=1).astype(np.int32) + 1
    segments[:, -3:] = 0
    return *arrays, segments if packed else None


def run(name, q, k, v, g, segments):
    """Output and gradients of Σ output·g through `attend`."""

    @jax.jit
    def both(q, k, v, g):
        out, vjp = jax.vjp(lambda *a: attend(*a, segments, name), q, k, v)
        return out, *vjp(g)

    return both(q, k, v, g)


def naive(q, k, v, g, segments):
    """As `run`, in float64, every head with its own softmax."""
    q, k, v, g = (a.astype(np.float64) for a in (q, k, v, g))
    out, d_q, d_k, d_v = np.zeros_like(g), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    T, K = q.shape[1], q.shape[-1]
    for b, h, r in np.ndindex(B, *q.shape[2:4]):
        visible = np.tril(np.ones((T, T), bool))
        if segments is not None:
            visible &= segments[b][:, None] == segments[b][None]
        p = np.exp(reference.log_softmax(np.where(visible, q[b, :, h, r] @ k[b, :, h].T / np.sqrt(K), -np.inf)))
        out[b, :, h, r] = p @ v[b, :, h]
        d_p = g[b, :, h, r] @ v[b, :, h].T
        d_s = p * (d_p - (p * d_p).sum(1, keepdims=True)) / np.sqrt(K)
        d_q[b, :, h, r] = d_s @ k[b, :, h]
        d_k[b, :, h] += d_s.T @ q[b, :, h, r]
        d_v[b, :, h] += p.T @ g[b, :, h, r]
    return out, d_q, d_k, d_v


def agree(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.fixture
def xla_for_cudnn(monkeypatch):
    """A GPU to choose for, and XLA in the place of cuDNN; says what the calls were given."""
    real, calls = jax.nn.dot_product_attention, []

    def stand_in(q, k, v, *, implementation, **how):
        assert implementation == "cudnn" and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        calls.append(how)
        return real(q, k, v, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(kernels, "_refusal", lambda *_: "")
    return calls


CASES = {"grouped": (2, 2, 8, 8, False), "documents, unequal heads": (2, 1, 12, 8, True), "wide values": (1, 2, 4, 10, True)}


@pytest.mark.parametrize(("case", "length"), [("grouped", 256), ("documents, unequal heads", 200), ("wide values", 128)])
def test_splash_equals_the_reference(case, length):
    """A length that is no multiple of its blocks is padded."""
    drawn = draw(length, *CASES[case])
    agree(run("splash", *drawn), naive(*drawn))


@pytest.mark.parametrize("case", CASES)
def test_the_call_of_cudnn_equals_the_reference(case, xla_for_cudnn):
    """Heads of one size that 8 divides, the scale of the size before padding, a mask for documents alone, causal by name."""
    drawn = draw(34, *CASES[case])
    agree(run("cudnn", *drawn), naive(*drawn))
    assert [call["is_causal"] for call in xla_for_cudnn] == [True] and (xla_for_cudnn[0]["mask"] is None) == (drawn[-1] is None)


MESHES = {
    "rows and heads": dict(data=2, fsdp=2, tensor=2),
    "context": dict(data=2, context=2, tensor=2),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("blockwise", "context"), ("splash", "rows and heads"), ("splash", "context"), ("cudnn", "rows and heads"), ("cudnn", "context")],
)
def test_devices_equal_one_device(name, mesh, xla_for_cudnn):
    sizes = MESHES[mesh]
    drawn = [np.repeat(a, 2, axis=0) for a in draw(256, 2, 1, 12, 8, True)]
    expected = run("blockwise", *drawn)
    with jax.set_mesh(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])):
        agree(run(name, *drawn), expected)


def test_cells_side_by_side_over_devices_with_a_context():
    """Within a `shard_map` over cells, as in training/step.py, and batched over the cells of a device."""
    drawn = [np.stack([a, a[::-1]]) for a in draw(256, 1, 1, 8, 8, True)]

    def each(*cell):
        return attend(*cell, "splash")

    expected = [each(*(a[i] for a in (*drawn[:3], drawn[4]))) for i in (0, 1)]
    with jax.set_mesh(make_mesh(dict(cell=2, context=2), jax.devices()[:4])):
        by_cell = jax.sharding.PartitionSpec("cell")
        over = jax.shard_map(jax.vmap(each), in_specs=by_cell, out_specs=by_cell, axis_names={"cell"}, check_vma=False)
        agree([jax.jit(over)(*drawn[:3], drawn[4])], [np.stack(expected)])


@pytest.mark.parametrize(("K", "W"), [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_splash_lowers_for_tpu(K, W, monkeypatch):
    """Mosaic takes the models' head sizes, MLA's unequal ones without padding, forward and backward (the compiler itself: tests/plan)."""
    monkeypatch.setattr(kernels, "platform", lambda: "tpu")
    given = [jax.ShapeDtypeStruct((1, 1024, *heads), jnp.bfloat16) for heads in ((2, 2, K), (2, K), (2, W))]
    slopes = jax.jit(jax.grad(lambda q, k, v, ids: attend(q, k, v, ids, "auto").astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    text = slopes.trace(*given, jax.ShapeDtypeStruct((1, 1024), jnp.int32)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3, "forward, gradient of the queries, gradient of keys and values"
    assert f"1x4x1024x{W}xbf16" in text and f"1x2x1024x{K}xbf16" in text


def test_who_gets_what(monkeypatch):
    choose = functools.partial(choose_attention, sizes=(128, 128), length=2048)
    assert choose("auto", "cpu", "bfloat16") == "blockwise"
    assert choose("auto", "tpu", "float32") == "splash"
    assert choose("auto", "gpu", "bfloat16") == "cudnn", "no GPU here: one of Hopper's kind is meant"
    assert choose("auto", "gpu", "float32") == "blockwise"
    assert choose_attention("auto", "gpu", "bfloat16", (192, 128), 2048) == "cudnn"
    assert choose_attention("auto", "gpu", "bfloat16", (320, 128), 2048) == "blockwise"
    assert choose("auto", "gpu", "float16") == "blockwise", "tried with bfloat16 alone"
    assert choose_attention("auto", "gpu", "bfloat16", (64, 64), 2047) == "blockwise"
    assert choose_attention("auto", "gpu", "bfloat16", (64, 64), 1026, context=2) == "blockwise", "513 queries of a device"
    assert choose_attention("auto", "tpu", "bfloat16", (64, 64), 2048, context=16) == "splash"
    assert choose_attention("auto", "tpu", "bfloat16", (64, 64), 2048, context=32) == "blockwise"
    assert choose("blockwise", "tpu", "bfloat16") == "blockwise"
    here = []
    monkeypatch.setattr(jax, "local_devices", lambda backend: here)
    cases = [("8.0", (128, 128), "cudnn"), ("8.9", (192, 128), "blockwise"), ("7.5", (64, 64), "blockwise"), ("9.0", (192, 128), "cudnn")]
    for capability, sizes, kernel in [*cases, ("10.0", (192, 128), "cudnn"), ("gfx942", (64, 64), "blockwise")]:
        here[:] = [SimpleNamespace(compute_capability=capability)]
        assert choose_attention("auto", "gpu", "bfloat16", sizes, 2048) == kernel
    here[:] = [SimpleNamespace(compute_capability="9.0")]
    for capability, sizes, kernel in cases:  # of absent devices, whatever is here
        assert choose_attention("auto", "gpu", "bfloat16", sizes, 2048, generation=float(capability)) == kernel


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "context", "message"),
    [
        ("cudnn", "cpu", "bfloat16", 1, "attention_kernel=cudnn needs an NVIDIA GPU, and this runs on cpu"),
        ("cudnn", "gpu", "float32", 1, "takes bfloat16 alone, and model.dtype is float32"),
        ("splash", "gpu", "bfloat16", 1, "is written for TPUs"),
        ("splash", "tpu", "bfloat16", 32, r"mesh.context=32 takes sequence lengths that 4096 divides alone, and this is 2048"),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_is_refused_by_name(name, platform, dtype, context, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention(name, platform, dtype, (64, 64), 2048, context)


def test_the_line_at_the_start():
    def said(spec, platform, **changes):
        return describe(apply_overrides(load_config(spec), [(k.replace("__", "."), v) for k, v in changes.items()]), platform)

    assert said("lm:size=125m", "cpu") == "kernels on cpu: attention blockwise"
    assert said("lm:size=tiny-moe", "cpu", model__attention_kernel="splash") == (
        "kernels on cpu: attention splash (interpreted: slow), experts blocked"
    )
    assert said("lm:size=1.5b,packing=documents", "tpu", mesh__context=4) == "kernels on tpu: attention splash"
    assert said("lm:size=1.5b,packing=documents", "gpu", mesh__context=4) == (
        "kernels on gpu: attention cudnn with a dense mask of 2.0 MiB per sequence"
    )
    assert said("lm:size=1.5b", "gpu", mesh__context=4) == "kernels on gpu: attention cudnn with a dense mask of 2.0 MiB"
    assert said("lm:size=1.5b", "gpu") == "kernels on gpu: attention cudnn"


def test_sizes_of_heads_and_masks():
    assert head_sizes(load_config("lm:size=760m").model) == (96, 96)
    assert head_sizes(load_config("lm:size=moe-3b-a0.5b,attention=mla").model) == (192, 128)
    assert dense_mask_bytes("splash", 4, 2048, 2, True) == dense_mask_bytes("blockwise", 4, 2048, 2, True) == 0


@pytest.mark.parametrize("context", [1, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_a_mask_are_those_of_the_call(context, packed, xla_for_cudnn):
    """Of what the call of a device is given, at cuDNN's two bytes per number."""
    drawn = [np.repeat(a, 2, axis=0) if a is not None else None for a in draw(64, 1, 1, 8, 8, packed)]
    with jax.set_mesh(make_mesh(dict(context=context), jax.devices()[:context])):
        jax.eval_shape(lambda *a: attend(*a, drawn[4], "cudnn"), *drawn[:3])
    (call,) = xla_for_cudnn
    given = 0 if call["mask"] is None else math.prod(call["mask"].shape) * 2
    assert dense_mask_bytes("cudnn", 4, 64, context, packed) == given and (given > 0) == (packed or context > 1)
