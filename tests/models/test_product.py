"""The products of the model: equal to plain einsums, and runnable under the compiler options that training uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.models.loss import summed_loss
from gammalm.models.parts import product
from gammalm.sharding.devices import compiler_options


def test_product_and_gradients_are_those_of_the_sum_over_inputs():
    rng = np.random.default_rng(0)
    x, w, d_y = rng.normal(size=(2, 5, 6)), rng.normal(size=(6, 3, 4)), rng.normal(size=(2, 5, 3, 4))
    y, pull = jax.vjp(product, jnp.float32(x), jnp.float32(w))
    d_x, d_w = pull(jnp.float32(d_y))
    np.testing.assert_allclose(y, np.einsum("bti,ihk->bthk", x, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_x, np.einsum("bthk,ihk->bti", d_y, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_w, np.einsum("bti,bthk->ihk", x, d_y), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_weight_is_not_rounded_to_the_compute_dtype():
    x = jnp.ones((1, 1001, 1), jnp.bfloat16)  # bf16 has no 1001
    d_w = jax.grad(lambda w: jnp.sum(product(x, w).astype(jnp.float32)))(jnp.ones((1, 1)))
    assert d_w.dtype == jnp.float32 and float(d_w[0, 0]) == 1001


@pytest.mark.parametrize("chunk", [0, 64])
def test_bf16_loss_with_an_untied_head_runs_as_compiled_for_training(chunk):
    """XLA:CPU's matrix kernels refuse some bf16 products whose result is transposed, at run time."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 32, 64)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(64, 256)) / 8, jnp.float32)
    targets, weights = jnp.asarray(rng.integers(0, 256, (4, 32))), jnp.full((4, 32), 1 / 128)

    def loss(x, kernel):
        return summed_loss(x, kernel.T, targets, weights, 0.0, chunk)

    d_kernel = jax.jit(jax.grad(loss, 1), compiler_options=compiler_options())(x, kernel)
    logits = np.asarray(x, np.float64).reshape(128, 64) @ np.asarray(kernel, np.float64)
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(128), np.asarray(targets).ravel()] -= 1
    expected = np.asarray(x, np.float64).reshape(128, 64).T @ share / 128
    np.testing.assert_allclose(d_kernel, expected, atol=0.02 * np.abs(expected).max())
