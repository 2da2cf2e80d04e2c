"""The experts' backends against a loop over tokens and experts in float64, with gradients written out by hand; and what they hold.

Shapes: N rows, A assignments per row, E experts, D d_model, F width of an expert.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError
from gammalm.models import experts_blocked
from gammalm.models.experts import BACKENDS, choose_backend, expert_ffn
from gammalm.sharding.devices import compiler_options

HERE = [name for name in BACKENDS if name != "tokamax" or importlib.util.find_spec("tokamax")]
E, D, F, A = 6, 12, 8, 3
N = 90


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def by_hand(x, ids, gates, w, d_y):
    """y, and the gradients of Σ y · d_y in x, gates, gate, up and down: float64, one token and one expert at a time."""
    x, gates, d_y = (np.asarray(a, np.float64) for a in (x, gates, d_y))
    w = {name: np.asarray(a, np.float64) for name, a in w.items()}
    y, d_x, d_gates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
    d_w = {name: np.zeros_like(a) for name, a in w.items()}
    for n in range(len(x)):
        for a, e in enumerate(np.asarray(ids)[n]):
            if e == len(w["gate"]):
                continue
            gate, up = x[n] @ w["gate"][e], x[n] @ w["up"][e]
            h = gate * sigmoid(gate) * up
            y[n] += gates[n, a] * (h @ w["down"][e])
            d_gates[n, a] = h @ w["down"][e] @ d_y[n]
            d_h = gates[n, a] * (w["down"][e] @ d_y[n])
            d_gate = d_h * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
            d_up = d_h * gate * sigmoid(gate)
            d_x[n] += w["gate"][e] @ d_gate + w["up"][e] @ d_up
            d_w["gate"][e] += np.outer(x[n], d_gate)
            d_w["up"][e] += np.outer(x[n], d_up)
            d_w["down"][e] += np.outer(h, gates[n, a] * d_y[n])
    return y, d_x, d_gates, d_w


def routing(name, rng, n=N):
    """ids [n, A]: distinct experts per row, with what makes the case."""
    ids = np.stack([rng.permutation(E)[:A] for _ in range(n)]).astype(np.int32)
    if name == "some none":
        ids[rng.random(ids.shape) < 0.4] = E
        ids[:5] = E
    elif name == "two experts idle":
        ids[(ids == 2) | (ids == E - 1)] = E
    elif name == "all to one":
        ids[:] = np.where(np.arange(A) == 1, 4, E)
    elif name == "all none":
        ids[:] = E
    return ids


def inputs(rng, ids, dtype=jnp.float32):
    """x, ids, gates, w and a cotangent, all values of which bf16 has too."""
    even = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    w = {"gate": even(E, D, F), "up": even(E, D, F), "down": even(E, F, D)}
    x, d_y = even(len(ids), D).astype(dtype), even(len(ids), D).astype(dtype)
    return x, jnp.asarray(ids), jnp.asarray(rng.random(ids.shape), jnp.float32), w, d_y


@functools.cache
def program(backend):
    """Output, count and gradients, compiled as for training; cases of one shape share it."""

    def both(x, ids, gates, w, d_y):
        y, pull, computed = jax.vjp(lambda x, gates, w: expert_ffn(x, ids, gates, w, backend), x, gates, w, has_aux=True)
        return y, computed, *pull(d_y)

    return jax.jit(both, compiler_options=compiler_options())


def run(backend, *args):
    """y, computed, and the gradients as `by_hand` has them."""
    y, computed, *gradients = program(backend)(*args)
    return y, int(computed), gradients


@pytest.fixture
def few_sizes(monkeypatch):
    """Fewer sizes of last blocks compile faster, where sizes are not the point."""
    monkeypatch.setattr(experts_blocked, "STEPS", 2)


def check(actual, expected, tolerance):
    """Within `tolerance` of the largest value, each array by itself; and fp32 where fp32 is due."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=0, atol=tolerance * max(np.abs(e).max(), 1e-30))


@pytest.mark.parametrize("case", ["plain", "some none", "two experts idle", "all to one", "all none"])
@pytest.mark.parametrize("backend", HERE)
def test_backends_equal_the_loop_over_tokens_and_experts(backend, case):
    """1e-5: some hundred fp32 roundings. 90 rows of 3: groups of about 45 in blocks of 64, or one of 90; no size divides them."""
    rng = np.random.default_rng(0)
    args = inputs(rng, routing(case, rng))
    y, computed, gradients = run(backend, *args)
    check((y, *gradients), by_hand(*args), 1e-5)
    assert computed == np.sum(np.asarray(args[1]) < E)


@pytest.mark.parametrize("backend", HERE)
def test_backends_in_bf16(backend, few_sizes):
    """3 %: bf16 has 8 bits, and five roundings follow one another. The gradients of gates and weights are fp32 all the same."""
    rng = np.random.default_rng(1)
    args = inputs(rng, routing("some none", rng), jnp.bfloat16)
    y, _, gradients = run(backend, *args)
    check((y, *gradients), by_hand(*args), 0.03)
    assert y.dtype == gradients[0].dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(gradients[1:])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, N * A])
def test_groups_of_every_remainder(rows):
    """One group of `rows` rows in blocks of 64: none, one or several full blocks and every kind of last one."""
    rng = np.random.default_rng(rows)
    ids = np.full(N * A, E, np.int32)
    ids[rng.permutation(N * A)[:rows]] = 3
    args = inputs(rng, ids.reshape(N, A))
    assert experts_blocked.block_size(N * A, E) == 64
    y, computed, gradients = run("blocked", *args)
    check((y, *gradients), by_hand(*args), 1e-5)
    assert computed == rows


def test_size_of_blocks_follows_the_mean_group():
    sizes = [experts_blocked.block_size(n, 96) for n in (1, 96 * 40, 96 * 64, 96 * 65, 96 * 10_000)]
    assert sizes == [experts_blocked.MIN_BLOCK, 64, 64, 128, experts_blocked.MAX_BLOCK]
    assert all(size % (experts_blocked.STEPS * experts_blocked.TILE) == 0 for size in sizes)


@pytest.mark.parametrize("backend", [name for name in HERE if name != "dense"])  # the reference computes every row
def test_rows_without_experts_are_zero_whatever_they_hold(backend):
    """Padding may hold anything: NaN in rows and cotangents sent nowhere reaches neither output nor gradient."""
    rng = np.random.default_rng(2)
    ids = routing("plain", rng)
    ids[10:20] = E
    x, ids, gates, w, d_y = inputs(rng, ids)
    y, _, gradients = run(backend, x.at[10:20].set(jnp.nan), ids, gates, w, d_y)
    check((y, *gradients), by_hand(x, ids, gates, w, d_y), 1e-5)
    assert not np.any(y[10:20])


@pytest.mark.parametrize("backend", HERE)
def test_under_scan_over_layers_and_remat(backend, few_sizes):
    """Two stacked layers under jit, scan and checkpoint: the outputs and gradients of two calls one after the other."""
    rng = np.random.default_rng(3)
    first, second = (inputs(rng, routing("some none", rng)) for _ in range(2))
    x, d_y = first[0], first[4]
    layers = jax.tree.map(lambda *a: jnp.stack(a), first[1:4], second[1:4])

    def scanned(x, gates, w):
        def layer(x, args):
            y, computed = expert_ffn(x, *args, backend)
            return 0.1 * y, computed

        y, computed = jax.lax.scan(jax.checkpoint(layer), x, (layers[0], gates, w))
        return jnp.sum(y * d_y), (y, computed)

    (_, (y, computed)), gradients = jax.jit(jax.value_and_grad(scanned, (0, 1, 2), has_aux=True))(x, *layers[1:])
    middle = 0.1 * by_hand(*first)[0]
    end, d_middle, *last = by_hand(middle, *second[1:4], 0.1 * np.asarray(d_y))
    _, d_x, *begin = by_hand(*first[:4], 0.1 * d_middle)
    check((y, gradients[0], gradients[1], gradients[2]), (0.1 * end, d_x, *jax.tree.map(lambda *a: np.stack(a), begin, last)), 1e-5)
    assert computed.tolist() == [np.sum(np.asarray(ids) < E) for ids in (first[1], second[1])]


@pytest.mark.parametrize("over", ["vmap", "map"])
@pytest.mark.parametrize("backend", HERE)
def test_over_cells(backend, over, few_sizes):
    """Cells with their own weights, routing and inputs, side by side or one after another."""
    rng = np.random.default_rng(4)
    cells = [inputs(rng, routing(case, rng, 40)) for case in ("plain", "all to one", "some none")]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *cells)

    def one(x, ids, gates, w, d_y):
        (y, computed), pull = jax.vjp(lambda *a: expert_ffn(a[0], ids, *a[1:], backend), x, gates, w)
        return y, computed, *pull((d_y, np.zeros((), jax.dtypes.float0)))

    function = jax.vmap(one) if over == "vmap" else lambda *args: jax.lax.map(lambda a: one(*a), args)
    y, computed, *gradients = jax.jit(function)(*stacked)
    for i, cell in enumerate(cells):
        check(jax.tree.map(lambda a, i=i: a[i], (y, *gradients)), by_hand(*cell), 1e-5)
        assert computed[i] == np.sum(np.asarray(cell[1]) < E)


def test_each_device_its_rows_and_experts(few_sizes):
    """Inside shard_map with manual rows and an automatic axis over the experts' width, as training runs it."""
    rng = np.random.default_rng(5)
    x, ids, gates, w, d_y = inputs(rng, routing("some none", rng, 64))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    P = jax.sharding.PartitionSpec

    def local(x, ids, gates, w, d_y):
        (y, computed), pull = jax.vjp(lambda *a: expert_ffn(a[0], ids, *a[1:], "blocked"), x, gates, w)
        d_x, d_gates, d_w = pull((d_y, np.zeros((), jax.dtypes.float0)))
        return y, jax.lax.psum(computed, "data"), d_x, d_gates, jax.lax.psum(d_w, "data")

    rows = P("data")
    into, out_of = (rows, rows, rows, P(), rows), (rows, P(), rows, rows, P())
    both = jax.shard_map(local, mesh=mesh, in_specs=into, out_specs=out_of, axis_names={"data"}, check_vma=False)
    wide = {name: P(None, None, "tensor") if name != "down" else P(None, "tensor", None) for name in w}
    w_cut = {name: jax.device_put(a, jax.sharding.NamedSharding(mesh, wide[name])) for name, a in w.items()}
    y, computed, *gradients = jax.jit(both)(x, ids, gates, w_cut, d_y)
    check((y, *gradients), by_hand(x, ids, gates, w, d_y), 1e-5)
    assert computed == np.sum(np.asarray(ids) < E)


def temporary(backend, n_experts, n=256, a=4, d=64, f=32):
    """Bytes of scratch that loss and gradients need, beside arguments and results."""
    w = {"gate": (n_experts, d, f), "up": (n_experts, d, f), "down": (n_experts, f, d)}
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    args = shape(n, d), shape(n, a), {name: shape(*s) for name, s in w.items()}
    ids = jax.ShapeDtypeStruct((n, a), jnp.int32)
    loss = lambda x, gates, w, ids: jnp.sum(jnp.square(expert_ffn(x, ids, gates, w, backend)[0]))  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args, ids).compile()
    return program.memory_analysis().temp_size_in_bytes


def bound(n_experts, n=256, a=4, d=64, f=32):
    """1.3 times what `blocked` holds: three [N·A, D] arrays (rows, gradients of their outputs and of themselves) and three [N·A, F] (before
    and after the activation), the weights and gradients of one expert, some arrays of one block, y with its cotangent, and a few numbers
    per assignment."""
    block = experts_blocked.block_size(n * a, n_experts)
    return 1.3 * 4 * (3 * (n * a + block) * (d + f) + 2 * 3 * d * f + block * (12 * f + 6 * d) + 2 * n * d + 12 * n * a)


def test_memory_does_not_grow_with_experts(few_sizes):
    few, many = temporary("blocked", 8), temporary("blocked", 64)
    assert few < bound(8) and many < bound(64)
    assert many < 1.1 * few


def test_the_bound_would_catch_every_expert_on_every_row():
    assert temporary("dense", 64) > 2 * bound(64)


def test_choice_of_backend(monkeypatch):
    installed = lambda yes: monkeypatch.setattr(importlib.util, "find_spec", lambda name: yes or None)  # noqa: E731
    installed(False)
    assert [choose_backend("auto", p) for p in ("cpu", "gpu", "tpu")] == ["blocked", "blocked", "ragged"]
    assert choose_backend("dense", "tpu") == "dense"
    with pytest.raises(ConfigError, match="pip install tokamax"):
        choose_backend("tokamax", "cpu")
    with pytest.raises(ConfigError, match="'raged'.*blocked"):
        choose_backend("raged", "cpu")
    installed(True)
    assert [choose_backend("auto", p) for p in ("cpu", "gpu", "tpu")] == ["blocked", "tokamax", "tokamax"]
