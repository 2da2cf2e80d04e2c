"""FLOP of traced programs: closed forms, and the analytic model of a step against the count of the step that is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models.flops import training_flops_per_token
from gammalm.plan.arithmetic import flops, of_function
from gammalm.plan.traffic import flop_per_token
from gammalm.training.program import Program

from ..models.reference import small_config


def test_products_loops_branches_and_derivatives():
    a, b = np.ones((6, 5), np.float32), np.ones((5, 7), np.float32)
    one = 2 * 6 * 5 * 7
    assert of_function(lambda a, b: a @ b, a, b) == one
    assert of_function(lambda a, b: jax.lax.map(lambda _: a @ b, jnp.arange(9)), a, b) == 9 * one
    assert of_function(lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: a @ (b @ b.T @ b)), a, b) == 2 * 5 * 5 * 7 * 2 + one
    assert of_function(jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), (0, 1)), a, b) == 3 * one
    assert of_function(jax.grad(jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(jnp.sin(a @ b)))), (0, 1)), a, b) == 4 * one


def test_each_row_of_a_grouped_product_counts_once():
    x, w = np.ones((12, 5), np.float32), np.ones((3, 5, 7), np.float32)
    assert of_function(lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([4, 4, 4])), x, w) == 2 * 12 * 5 * 7
    # Of rows for the worst case a quarter is in a group; other products are what they were.
    both = jax.make_jaxpr(lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([1, 1, 1])) @ np.ones((7, 3), np.float32))(x, w)
    assert flops(both, filled=0.25) == 2 * 12 * 5 * 7 / 4 + 2 * 12 * 7 * 3


@pytest.mark.full
def test_depth_does_not_lengthen_the_program():
    """So compiling takes as long for 24 layers as for 12. What differs is a number per shape."""
    lengths = []
    for layers in (12, 24):
        config = small_config("lm:vocab=64,seq_len=256,batch=8,steps=10", n_layers=layers, remat="full", mesh__fsdp=2, mesh__data=4)
        lengths.append(len(Program(config, np.ones(64, np.int32)).trace().lower().as_text()))
    assert lengths[1] < 1.01 * lengths[0]


@pytest.mark.parametrize("mesh", [{}, {"mesh__fsdp": 2, "mesh__data": 2, "mesh__tensor": 2}])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_model_of_a_step_is_its_count(mesh, remat):
    """Blockwise attention computes (n+1)/2n of the square, not half: 17/32 with 16 blocks. Nothing else may differ by more than 2 %."""
    config = small_config(
        "lm:vocab=512,seq_len=2048,batch=8,steps=10,gate=none", n_layers=3, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256,
        remat=remat, **mesh,
    )  # fmt: skip
    program = Program(config, np.ones(512, np.int32), devices=jax.devices()[: 8 if mesh else 1])
    counted = flops(program.trace().jaxpr) / (8 * 2048)
    model = flop_per_token(program.model, 2048, remat)
    attention = 3 * 3 * 2 * 2 * 16 * 4 * 2048 / 2  # layers, passes
    # The kernel's backward pass computes the scores anew: 5 products where the convention has 4; recomputation adds its 2.
    kernel = attention * (17 / 16) * (7 / 6)
    again = attention / 3 * (17 / 16) if remat == "full" else 0.0
    expected = model - attention - (attention / 3 if remat == "full" else 0.0) + kernel + again
    assert counted == pytest.approx(expected, rel=0.02)
    assert counted > training_flops_per_token(program.model, 2048)
