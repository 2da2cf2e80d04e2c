"""What reaches cuDNN, lowered for CUDA without a GPU: its calls forward and backward, and what cells side by side can hand it.

Shapes: parts.py; C cells. What cuDNN itself computes is not tested here: the call with XLA in its place is, in test_kernels.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.models import kernels
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import make_mesh
from gammalm.training.program import Program, batchable
from gammalm.training.step import init_state, make_step, make_validation, over_cells, scalars

from ..models.reference import small_config

C, V, T, B = 3, 50, 16, 2
CALLS = {
    False: {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"},
    True: {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"},
}


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch):
    """JAX and we take this machine for one with a GPU of compute capability 9.0."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")


def lowered(function, *given) -> set[str]:
    """The calls of cuDNN in the program for CUDA."""
    text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"__cudnn\$\w+", text))


def config(packing="concat", **changes):
    return small_config(f"lm:vocab={V},seq_len={T},batch={B},steps=10,packing={packing}", dtype="bfloat16", **changes)


def step_of(made, cells=None):
    """The step of a model, and of several cells batched; the shapes of what it takes."""
    model = Model(made.model)
    given = [jax.eval_shape(lambda: init_state(model, made, 0)), {"tokens": jax.ShapeDtypeStruct((B, T + 1), jnp.int32)}]
    if made.data.packing == "documents":
        given[1]["segments"] = given[1]["tokens"]
    given.append(jax.eval_shape(lambda: scalars(made)))
    step, validate = make_step(model, made), make_validation(model, np.ones(V, np.int32))
    weighted = given[1] | {"weights": jax.ShapeDtypeStruct((B, T), jnp.float32)}
    of_validation = [given[0]["params"], given[0]["buffers"], weighted, given[2]["norm_eps"]]
    if cells:
        step, validate = (over_cells(f, "vmap", make_mesh({}, jax.devices()[:1])) for f in (step, validate))
        given, of_validation = jax.tree.map(lambda a: jax.ShapeDtypeStruct((cells, *a.shape), a.dtype), (given, of_validation))
    return (step, *given), (validate, *of_validation)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_step_calls_cudnn_forward_and_backward(packing):
    """Causal by name without documents, with a mask where there are some."""
    step, validate = step_of(config(packing))
    forward, backward = sorted(CALLS[packing == "documents"])
    assert lowered(*step) == {forward, backward} and lowered(*validate) == {forward}


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_cells_side_by_side_lower(packing):
    """Cells without a mask go to cuDNN together; with documents, which its batching rule does not take, to the blockwise kernel."""
    step, validate = step_of(batchable(config(packing), "vmap", "gpu"), C)
    assert lowered(*step) == (CALLS[False] if packing == "concat" else set())
    assert lowered(*validate) == ({"__cudnn$fmhaSoftmax"} if packing == "concat" else set())


@pytest.mark.parametrize(
    ("packing", "mode", "platform", "context", "kernel"),
    [
        ("documents", "vmap", "gpu", 1, "blockwise"),
        ("concat", "vmap", "gpu", 2, "blockwise"),  # its queries need a mask too
        ("concat", "vmap", "gpu", 1, "auto"),
        ("documents", "map", "gpu", 1, "auto"),
        ("documents", "single", "gpu", 1, "auto"),
        ("documents", "vmap", "tpu", 1, "auto"),
    ],
)
def test_which_cells_are_kept_from_cudnn(packing, mode, platform, context, kernel):
    given = config(packing, mesh__context=context)
    assert batchable(given, mode, platform).model.attention_kernel == kernel
    assert given.model.attention_kernel == "auto"


def test_cudnn_by_name_is_refused_where_cells_cannot_have_it():
    named = config("documents", attention_kernel="cudnn")
    assert batchable(named, "map", "gpu") is named
    with pytest.raises(ConfigError, match="takes no packed documents and no mesh.context under --mode vmap. Set it to auto, or --mode map"):
        batchable(named, "vmap", "gpu")


@pytest.mark.parametrize(("mode", "kernel"), [("vmap", "blockwise"), ("map", "auto")])
def test_a_program_of_cells_has_the_kernel_that_they_can_have(mode, kernel, monkeypatch):
    monkeypatch.setitem(kernels.PREFERRED, "cpu", "cudnn")
    monkeypatch.setattr(kernels, "_refusal", lambda *_: "")
    program = Program(config("documents"), np.ones(V, np.int32), cells=2, mode=mode, devices=jax.devices()[:1])
    assert program.model.config.attention_kernel == program.config.model.attention_kernel == kernel
