"""What the compiled program holds: no B·T·V fp32 array, less memory under remat, the same numbers whatever the options.

Shapes: L=8 layers, B=4 sequences, T=64 tokens, V=1024.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models.decoder import Model, fresh_buffers
from gammalm.training.step import loss_and_gradients
from gammalm.trees import nested

from .reference import random_params, small_config

B, T, V = 4, 64, 1024
OPTIONS = {
    "none": dict(remat="none"),
    "dots": dict(remat="dots"),
    "full": dict(remat="full"),
    "full, unrolled": dict(remat="full", scan_unroll=8),
    "full, ragged": dict(remat="full", scan_unroll=5),
    "all logits": dict(remat="none", loss_chunk=0),
}


@pytest.fixture(scope="module")
def compiled():
    """Function: name in OPTIONS -> (compiled loss and gradients, their values)."""
    made = {}
    batch = {"tokens": np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)}

    def build(name):
        if name not in made:
            c = small_config(vocab_size=V, n_layers=8, data__seq_len=T, **({"loss_chunk": 32} | OPTIONS[name]))
            model = Model(c.model)
            params = jax.tree.map(jnp.asarray, random_params(model.specs))
            program = jax.jit(lambda p, b: loss_and_gradients(model, p, {}, b, 1e-5, 1)).lower(params, batch).compile()
            made[name] = program, program(params, batch)
        return made[name]

    return build


def temporary(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "none"])
def test_options_change_no_number(compiled, name):
    """Relative 1e-5 of each gradient's norm: sums in another order, in fp32."""
    loss, gradients, *_ = compiled(name)[1]
    expected_loss, expected, *_ = compiled("none")[1]
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def test_remat_saves_memory(compiled):
    """Full remat keeps one [B, T, D] per layer instead of some twenty arrays of that size; dots lies between."""
    none, dots, full = (temporary(compiled(name)[0]) for name in ("none", "dots", "full"))
    assert full < 0.5 * none
    assert full < dots < none


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA:CPU ignores what keeps expressions apart before JAX 0.12")
@pytest.mark.parametrize("name", ["full, unrolled", "full, ragged"])
def test_unrolling_does_not_lose_remat(compiled, name):
    """Layers outside a loop lie beside their backward pass, where equal expressions would be merged and remat undone."""
    assert temporary(compiled(name)[0]) < 0.6 * temporary(compiled("none")[0])


def largest_array(program) -> int:
    """Elements of the largest array of any type in the compiled program."""
    shapes = re.findall(r"\b(?:f32|bf16|f16|s32|pred)\[([\d,]+)\]", program.as_text())
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)


def test_all_logits_never_exist(compiled):
    """The program whose chunk is the whole batch shows that such an array would be seen."""
    assert largest_array(compiled("all logits")[0]) >= B * T * V
    assert largest_array(compiled("none")[0]) < B * T * V / 2


@pytest.mark.parametrize("backend", ["blocked", "dense"])
def test_a_mixture_holds_no_row_for_experts_it_was_not_sent_to(backend):
    """Temporary memory of loss and gradients under full remat, at most 1.3 times what has to be there:

    the gradient of every parameter; the stream that enters each layer; of the one layer at work the gradient of its experts, and per
    choice a row, the gradient of its output and the gradient of its input; a few arrays of the width of the stream. All fp32.
    `dense` runs every expert on every token: it shows that the bound sees such a lowering.
    """
    rows, length, width, experts, chosen, expert_width, layers = 16, 64, 64, 32, 2, 64, 4
    c = small_config(
        ffn="moe", n_layers=layers, d_model=width, n_heads=1, n_kv_heads=1, head_dim=16, data__seq_len=length, remat="full", loss_chunk=64,
        model__moe__n_experts=experts, model__moe__top_k=chosen, model__moe__d_expert=expert_width, model__moe__backend=backend,
    )  # fmt: skip
    model = Model(c.model)
    params = nested({path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in model.specs.items()})
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}
    program = jax.jit(lambda p, b: loss_and_gradients(model, p, fresh_buffers(model), b, 1e-5, 1)).lower(params, batch).compile()
    tokens = rows * length
    needed = 4 * (
        model.parameter_count + layers * tokens * width
        + 3 * experts * width * expert_width + 3 * tokens * chosen * width + 4 * tokens * width
    )  # fmt: skip
    assert (temporary(program) < 1.3 * needed) == (backend == "blocked"), temporary(program) / needed
