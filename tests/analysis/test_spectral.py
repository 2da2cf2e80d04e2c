"""Largest singular values and stable ranks against NumPy's SVD in float64, where they are hard: near-equal, equal, one, none, sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gammalm.analysis import spectral
from gammalm.analysis.condensation import random_stable_rank
from gammalm.analysis.spectral import RELATIVE_ERROR, stable_rank, top_singular
from gammalm.sharding.mesh import make_mesh

PROMISED = 1e-3  # of the stable rank


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_values(values, m=200, n=150, seed=1):
    """A matrix with these singular values, the rest zeros."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((size, len(values))))[0] for size in (m, n))
    return ((u * values) @ v.T).astype(np.float32)


CASES = {
    "square": gaussian(256, 256),
    "tall": gaussian(683, 256),
    "wide": gaussian(256, 683),
    "larger": gaussian(1024, 1024),
    "few rows": gaussian(3, 500),
    "one row": gaussian(1, 70),
    "one column": gaussian(70, 1),
    "one number": gaussian(1, 1),
    "rank one": with_values([3.0]),
    "rank one and noise": with_values([3.0]) + 1e-3 * gaussian(200, 150),
    "all equal": np.linalg.qr(gaussian(120, 120))[0],
    "two nearly equal": with_values([1.0, 0.99999, *np.linspace(0.9, 0.1, 100)]),
    "two equal": with_values([1.0, 1.0, 0.5]),
    "slow decay": with_values(1 / np.sqrt(np.arange(1, 121))),
    "zeros": np.zeros((40, 30), np.float32),
    "a row of zeros": np.concatenate([np.zeros((1, 40), np.float32), gaussian(30, 40)]),
    "tiny weights": 1e-30 * gaussian(64, 96),
    "huge weights": 1e25 * gaussian(96, 64),
}


def svd(w):
    """Singular values and stable rank in float64."""
    values = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    return values, (values**2).sum() / values[0] ** 2 if values[0] else 0.0


@pytest.mark.parametrize("name", CASES)
def test_as_the_svd_has_it(name):
    w = CASES[name]
    values, rank = svd(w)
    found = jax.device_get(top_singular(jnp.asarray(w)))
    rounding = 2e-6 * values[0]
    assert values[0] * (1 - PROMISED / 2) <= found.value <= values[0] + rounding
    assert found.error <= RELATIVE_ERROR * values[0]
    assert np.abs(values - found.value).min() <= found.error + rounding
    ours, error = stable_rank(jnp.asarray(w))
    np.testing.assert_allclose(ours, rank, rtol=PROMISED)
    assert float(error) <= 2 * RELATIVE_ERROR


@pytest.mark.parametrize("name", ["tall", "wide", "rank one", "two equal", "all equal", "tiny weights", "zeros"])
def test_vectors_belong_to_the_value(name):
    """‖W v − σu‖ and ‖Wᵀu − σv‖ are within the error that it states (√2 of it), and u and v are unit vectors."""
    w = CASES[name].astype(np.float64)
    value, left, right, error = (np.asarray(a, np.float64) for a in top_singular(jnp.asarray(CASES[name])))
    close = 2e-5 * value + np.sqrt(2) * error
    assert np.linalg.norm(w @ right - value * left) <= close
    assert np.linalg.norm(w.T @ left - value * right) <= close
    assert [np.linalg.norm(left), np.linalg.norm(right)] == pytest.approx([float(value > 0)] * 2, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 12, 40])
def test_the_error_is_stated_at_every_number_of_steps(steps, monkeypatch):
    """Stopped early, when the value is far off and when it is good: the nearest singular value is always within what is stated."""
    monkeypatch.setattr(spectral, "STEPS", steps)
    off = []
    for w in (gaussian(300, 500, seed=2), with_values(1 / np.sqrt(np.arange(1, 121)))):
        values, _ = svd(w)
        found = jax.device_get(spectral.top_singular.__wrapped__(jnp.asarray(w), 0.0))
        assert np.abs(values - found.value).min() <= found.error + 2e-6 * values[0]
        assert found.value <= values[0] * (1 + 2e-6)
        off.append(1 - found.value / values[0])
    assert min(off) > 0.05 if steps == 1 else max(off) < {12: 0.02, 40: 1e-4}[steps]


def test_a_start_that_hardly_sees_the_largest_value():
    """The start has .03 of a usual share in the first vector, the second value is .2 % below: stopped at 5e-4 the second passes for it."""
    n = 400
    start = np.asarray(jax.random.normal(jax.random.key(0, impl="threefry2x32"), (n,)), np.float64)
    start /= np.linalg.norm(start)
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
    first = vectors[:, 0] - start * (start @ vectors[:, 0]) + start * 0.03 / np.sqrt(n)
    vectors = np.linalg.qr(np.column_stack([first, vectors[:, 1:]]))[0]
    assert abs(vectors[:, 0] @ start) == pytest.approx(0.03 / np.sqrt(n), rel=0.1)
    values = np.concatenate([[1.002, 1], 0.99 * (1 - (np.arange(n - 2) / n) ** (2 / 3))])  # dense at the edge, as of a random matrix
    w = jnp.asarray((vectors * values) @ vectors.T, jnp.float32)
    assert float(top_singular(w, 5e-4).value) < 1.0005
    np.testing.assert_allclose(top_singular(w).value, 1.002, rtol=1e-5)


def test_stacks_are_single_matrices_side_by_side(monkeypatch):
    """[2, 3, r, c], of which one matrix is done at once, one is zero and one is not finite: on CPU and as accelerators do it."""
    w = gaussian(2, 3, 60, 90)
    w[0, 1] = 0
    w[1, 0] = with_values([2.0], 60, 90)
    w[1, 2, 5, 5] = np.nan
    want = np.array([[svd(one)[1] if np.isfinite(one).all() else np.nan for one in row] for row in w])
    np.testing.assert_allclose(stable_rank(jnp.asarray(w))[0], want, rtol=PROMISED)
    alone = np.array([[top_singular(jnp.asarray(one)).value for one in row] for row in w])
    np.testing.assert_allclose(top_singular(jnp.asarray(w)).value, alone, rtol=1e-5)
    monkeypatch.setattr(spectral, "platform", lambda: "gpu")
    monkeypatch.setattr(spectral, "top_singular", spectral.top_singular.__wrapped__)
    np.testing.assert_allclose(jax.jit(spectral.top_singular)(jnp.asarray(w)).value, alone, rtol=1e-5)


def test_weights_in_bf16_are_read_as_they_are():
    w = jnp.asarray(gaussian(128, 96), jnp.bfloat16)
    np.testing.assert_allclose(stable_rank(w)[0], svd(np.asarray(w, np.float32))[1], rtol=PROMISED)


def test_sharded_matrices_stay_where_they_are(monkeypatch):
    """Cut along both sides over eight devices, as accelerators do it: the same figures, and no device ever gathers a matrix."""
    mesh = make_mesh({"fsdp": 2, "tensor": 4}, jax.devices()[:8])
    w = gaussian(2, 128, 192)
    placed = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor")))
    monkeypatch.setattr(spectral, "platform", lambda: "gpu")
    monkeypatch.setattr(spectral, "top_singular", spectral.top_singular.__wrapped__)
    program = jax.jit(stable_rank.__wrapped__).lower(placed).compile()
    np.testing.assert_allclose(program(placed)[0], [svd(one)[1] for one in w], rtol=PROMISED)
    gathered = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"= f32\[([\d,]+)\]\S* all-gather", program.as_text())]
    assert all(size < 128 * 192 for size in gathered)
    assert "all-reduce" in program.as_text()


@pytest.mark.parametrize("rows, columns", [(512, 512), (512, 1365)])
def test_fresh_matrices_have_the_closed_form(rows, columns):
    """mn/(√m+√n)²: n/4 of a square matrix, .385·n of n × 8n/3, whatever the scale of the weights."""
    for gamma in (0.5, 1.0):
        found, _ = stable_rank(jnp.asarray(rows**-gamma * gaussian(rows, columns)))
        assert float(found) == pytest.approx(random_stable_rank(rows, columns), rel=0.03)
    share = random_stable_rank(rows, columns) / rows
    assert share == pytest.approx(0.25 if rows == columns else 0.385, abs=1e-3)


BIDIAGONALS = {  # (diagonal, above it; the last of these is unused)
    "one": ([2.0], [0.0]),
    "zeros": ([0.0] * 5, [0.0] * 5),
    "equal blocks apart": ([1.0, 1.0, 0.5, 1.0, 1.0], [0.5, 0.0, 0.0, 0.5, 0.0]),
    "hardly coupled": ([1.0, 1.0], [1e-10, 0.0]),
    "mixed": ([1e-6, 1e-5, 1, 1e-6, 1, 1e-6, 1e-6, 1], [1e-5, 1, 1e-6, 1, 1e-6, 1, 1e-5, 0]),
    "eight decades": (np.logspace(0, -8, 40), np.append(np.logspace(-1, -9, 39), 0)),
    "unfinished": (np.append(np.linspace(2, 1, 30), np.zeros(98)), np.append(np.linspace(1, 2, 29), np.zeros(99))),
    "flat": (np.linspace(1, 1.1, 128), np.append(np.linspace(0.9, 1, 127), 0)),
    **{f"drawn {seed}": np.random.default_rng(seed).choice([1, 1e-5, 1e-6], (2, 16)) for seed in range(8)},
}


@pytest.mark.parametrize("name", BIDIAGONALS)
def test_the_top_of_a_bidiagonal_matrix(name):
    alpha, beta = (np.float32(x) for x in BIDIAGONALS[name])
    B = np.diag(alpha.astype(np.float64)) + np.diag(beta[:-1].astype(np.float64), 1)
    value, p = (np.float64(x) for x in jax.jit(spectral._top_of_bidiagonal)(alpha, beta))
    largest = np.linalg.svd(B, compute_uv=False)[0]
    assert value == pytest.approx(largest, rel=1e-6) and np.linalg.norm(p) == pytest.approx(1, rel=1e-5)
    assert np.linalg.norm(B @ B.T @ p - value**2 * p) <= 1e-6 * largest**2
