"""Experts over devices equal a float64 NumPy reference on one: output, gradients, computed assignments, on every mesh and both transports.

Shapes: B=8 rows of T=5 tokens, D=8, F=16, E=8 experts, A=2 assignments; tolerance 1e-5, fp32 sums in another order.
`ragged_all_to_all` does not run on CPU: `emulated` does what its documentation says, from all_gather, and is put in its place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gammalm.models import exchange
from gammalm.models.exchange import choose_transport, sharded_expert_ffn
from gammalm.training.step import over_cells

B, T, D, F, E, A = 8, 5, 8, 16, 8, 2
LIES = {
    "gate": PartitionSpec("expert", "fsdp", "tensor"),
    "up": PartitionSpec("expert", "fsdp", "tensor"),
    "down": PartitionSpec("expert", "tensor", "fsdp"),
}


def make_mesh(data, fsdp, expert, tensor, cell=1):
    shape = (cell, data, fsdp, expert, 1, tensor)
    names = ("cell", "data", "fsdp", "expert", "context", "tensor")
    return Mesh(np.asarray(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * 6)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """jax.lax.ragged_all_to_all by its documentation; rows become NaN where sender and receiver disagree on a size."""
    everyone = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    me = jax.lax.axis_index(axis_name)
    operands, starts, sizes, lands = map(everyone, (operand, input_offsets, send_sizes, output_offsets))
    row = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        start, size, land = starts[source, me], sizes[source, me], lands[source, me]
        sent = operands[source][jnp.clip(row - land + start, 0, operand.shape[0] - 1)]
        fits = (size == recv_sizes[source]) & (start + size <= operand.shape[0]) & (land + size <= output.shape[0])
        bad = jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else -1000
        sent = jnp.where(fits, sent, jnp.asarray(bad, output.dtype))
        output = jnp.where(((row >= land) & (row < land + size))[:, None] | ~fits, sent, output)
    return output


@pytest.fixture(params=["gather", "ragged"])
def transport(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


def use(name, monkeypatch):
    monkeypatch.setattr(exchange, "choose_transport", lambda *_: name)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)


def dense(x_ND, ids_NA, gates_NA, w):
    """Every expert on every token: the simplest thing that meets the interface."""
    n_experts = w["gate"].shape[0]
    gate, up, down = (w[name].astype(x_ND.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", x_ND, gate)) * jnp.einsum("nd,edf->enf", x_ND, up)
    hit_NAE = ids_NA[..., None] == jnp.arange(n_experts)[None, None]
    weight_EN = jnp.sum(hit_NAE * gates_NA[..., None], axis=1).T
    y_ND = jnp.einsum("enf,efd,en->nd", hidden, down, weight_EN.astype(x_ND.dtype), preferred_element_type=jnp.float32)
    return y_ND.astype(x_ND.dtype), jnp.sum(hit_NAE, dtype=jnp.int32)


ROUTINGS = ("random", "one device", "a device with none", "none at all")


def draw(seed, routing="random"):
    """x, ids, gates, w and the gradient that comes back to the output. Of the experts, the last is always the least loaded."""
    rng = np.random.default_rng(seed)
    among = {"random": E, "one device": 1, "a device with none": E - 1, "none at all": 1}[routing]
    ids = rng.permuted(np.tile(np.arange(among), (B, T, 1)), axis=-1)[..., :A]
    if among < A:  # both assignments to one expert
        ids = np.repeat(ids, A, axis=-1)
    ids[rng.random(ids.shape) < (1.0 if routing == "none at all" else 0.1)] = E
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    w = {"gate": normal(E, D, F), "up": normal(E, D, F), "down": normal(E, F, D)}
    return normal(B, T, D), ids.astype(np.int32), rng.random((B, T, A)).astype(np.float32), w, normal(B, T, D)


def reference(x, ids, gates, w, d_y):
    """float64: y, the gradients in x, gates, w, and the number of assignments, token by token and assignment by assignment."""
    x, gates, d_y, w = (jax.tree.map(np.float64, a) for a in (x, gates, d_y, w))
    y, d_x, d_gates, d_w = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates), jax.tree.map(np.zeros_like, w)
    for b, t, a in np.argwhere(ids < E):
        e, token, gate = ids[b, t, a], x[b, t], gates[b, t, a]
        p, u = token @ w["gate"][e], token @ w["up"][e]
        sigmoid = 1 / (1 + np.exp(-p))
        h = p * sigmoid * u
        out = h @ w["down"][e]
        y[b, t] += gate * out
        d_gates[b, t, a] = d_y[b, t] @ out
        d_w["down"][e] += np.outer(h, gate * d_y[b, t])
        d_h = w["down"][e] @ (gate * d_y[b, t])
        d_p, d_u = d_h * u * sigmoid * (1 + p * (1 - sigmoid)), d_h * p * sigmoid
        d_w["gate"][e] += np.outer(token, d_p)
        d_w["up"][e] += np.outer(token, d_u)
        d_x[b, t] += w["gate"][e] @ d_p + w["up"][e] @ d_u
    return y, (d_x, d_gates, d_w), np.sum(ids < E)


def with_gradients(x, ids, gates, w, d_y):
    """What `reference` returns, by the function under test."""

    def loss(x, gates, w):
        y, computed = sharded_expert_ffn(x, ids, gates, w, dense)
        return jnp.sum(y * d_y), (y, computed)

    gradients, (y, computed) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gates, w)
    return y, gradients, computed


def close(found, expected, tolerance=1e-5):
    def one(f, e):
        scale = np.abs(e).max()
        np.testing.assert_allclose(np.float64(f), e, rtol=0, atol=tolerance * scale)

    jax.tree.map(one, jax.device_get(found), expected)


def placed(mesh, x, ids, gates, w, d_y, lead=()):
    rows = NamedSharding(mesh, PartitionSpec(*lead, ("data", "fsdp", "expert")))
    lies = {name: NamedSharding(mesh, PartitionSpec(*lead, *spec)) for name, spec in LIES.items()}
    return jax.device_put((x, ids, gates, w, d_y), (rows, rows, rows, lies, rows))


def check(run, place):
    for seed, routing in enumerate(ROUTINGS):
        case = draw(seed, routing)
        *found, computed = run(*place(*case))
        *expected, assigned = reference(*case)
        close(found, expected)
        assert computed == assigned, routing


def test_no_mesh():
    check(jax.jit(with_gradients), lambda *case: case)


@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (1, 8, 1, 1)])
def test_rows_over_devices(shape):
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        check(jax.jit(with_gradients), functools.partial(placed, mesh))


@pytest.mark.parametrize("shape", [(1, 1, 8, 1), (2, 1, 4, 1), (1, 2, 2, 2), (2, 2, 2, 1)])
def test_experts_over_devices(shape, transport):
    mesh = make_mesh(*shape)  # with expert=8, the 5 tokens of a device go in chunks of 3 and 2
    with jax.set_mesh(mesh):
        check(jax.jit(with_gradients), functools.partial(placed, mesh))


def test_rows_that_the_devices_do_not_divide_are_refused():
    with jax.set_mesh(make_mesh(1, 1, 8, 1)), pytest.raises(ValueError, match="divisible"):
        sharded_expert_ffn(*(a[1:] for a in draw(0)[:3]), draw(0)[3], dense)


def layers(x, ids, gates, w, d_y):
    """Loss and gradients of three layers that share their weights but not their routing, each recomputed on the way back."""

    def loss(x, gates, w):
        def layer(x, shift):
            y, computed = sharded_expert_ffn(x, jnp.where(ids < E, (ids + shift) % E, E), gates, w, dense)
            return x + y / D, computed

        y, computed = jax.lax.scan(jax.checkpoint(layer), x, jnp.arange(3))
        return jnp.sum(y * d_y), computed

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gates, w)


def test_layers_in_a_scan_with_recomputation(transport):
    case, mesh = draw(5), make_mesh(1, 1, 8, 1)
    (loss, computed), expected = jax.device_get(jax.jit(layers)(*case))
    with jax.set_mesh(mesh):
        (found_loss, found_computed), found = jax.jit(layers)(*placed(mesh, *case))
    close(found, expected)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    assert computed.tolist() == found_computed.tolist() == [np.sum(case[1] < E)] * 3


@pytest.mark.parametrize("mode, transport", [("map", "ragged"), ("vmap", "gather")], indirect=["transport"])
def test_cells(mode, transport):
    cases = [draw(seed, routing) for seed, routing in enumerate(ROUTINGS)]
    stacked = jax.tree.map(lambda *a: np.stack(a), *cases)
    mesh = make_mesh(1, 1, 4, 1, cell=2) if mode == "map" else make_mesh(1, 2, 2, 2)
    with jax.set_mesh(mesh):
        run = jax.jit(over_cells(with_gradients, mode, mesh))
        y, gradients, computed = jax.device_get(run(*placed(mesh, *stacked, lead=("cell",))))
    for cell, case in enumerate(cases):
        *expected, assigned = reference(*case)
        close(jax.tree.map(lambda a, c=cell: a[c], [y, gradients]), expected)
        assert computed[cell] == assigned


def test_low_precision_keeps_weight_gradients_in_fp32(transport):
    x, *rest = draw(0)
    mesh = make_mesh(1, 2, 4, 1)
    with jax.set_mesh(mesh):
        y, (d_x, d_gates, d_w), _ = jax.jit(with_gradients)(*placed(mesh, x.astype(jnp.bfloat16), *rest))
    assert y.dtype == d_x.dtype == jnp.bfloat16 and {a.dtype for a in d_w.values()} | {d_gates.dtype} == {np.dtype(np.float32)}
    close((y, (d_x, d_gates, d_w)), reference(x, *rest)[:2], tolerance=0.03)


def test_experts_stay_where_they_are():
    """In the program for eight devices, no array has the weights of all experts; the control has."""
    mesh = make_mesh(1, 1, 8, 1)
    all_experts = (f"f32[{E},{D},{F}]", f"f32[{E},{F},{D}]")
    with jax.set_mesh(mesh):
        text = jax.jit(with_gradients).lower(*placed(mesh, *draw(0))).compile().as_text()
        whole = NamedSharding(mesh, PartitionSpec())
        gathered = jax.jit(lambda w: w, out_shardings=whole).lower(placed(mesh, *draw(0))[3]).compile().as_text()
    assert f"f32[1,{D},{F}]" in text and not any(shape in text for shape in all_experts)
    assert all(shape in gathered for shape in all_experts)


def test_arriving_rows_are_bounded(transport):
    seen = []

    def watched(x_ND, *others):
        seen.append(len(x_ND))
        return dense(x_ND, *others)

    x, ids, gates, w, _ = draw(0)
    x, ids, gates = (np.tile(a, (1, 8, 1)) for a in (x, ids, gates))
    for pieces in (2, 4, 8):
        with jax.set_mesh(make_mesh(8 // pieces, 1, pieces, 1)):
            jax.eval_shape(lambda *a: sharded_expert_ffn(*a, watched), x, ids, gates, w)
    assert set(seen) == {2 * 40, 4 * 40}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_ragged_sends_a_token_once_to_each_device_that_needs_it(routing):
    mesh, pieces = make_mesh(2, 1, 4, 1), 4
    ids = draw(3, routing)[1]
    rows = PartitionSpec(("data", "fsdp", "expert"))

    def sent(ids_BTA):
        return exchange.RAGGED.plan(ids_BTA.reshape(-1, A), pieces, E).there[1]

    with jax.set_mesh(mesh):
        sizes = jax.jit(jax.shard_map(sent, in_specs=rows, out_specs=rows, check_vma=False))(ids).reshape(8, pieces)
    owners = ids.reshape(8, -1, A) // (E // pieces)
    assert sizes.tolist() == [[int(np.sum(np.any(device == p, axis=-1))) for p in range(pieces)] for device in owners]


def test_ragged_is_what_a_tpu_gets(monkeypatch):
    """Tracing and lowering alone: the real collective in both directions, with cells side by side too."""
    monkeypatch.setattr(exchange, "choose_transport", lambda *_: "ragged")
    mesh = make_mesh(1, 2, 4, 1)
    stacked = jax.tree.map(lambda a: np.stack([a, a]), draw(0))
    with jax.set_mesh(mesh):
        lowered = jax.jit(over_cells(with_gradients, "vmap", mesh)).trace(*stacked).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("@ragged_all_to_all") == 7  # x, ids, gates there, y back; d_y there, d_x, d_gates back


def test_choice_of_transport():
    choices = {args: choose_transport(*args) for args in [("cpu", 64, 1), ("tpu", 8, 8), ("tpu", 7, 8), ("gpu", 2, 2), ("gpu", 64, 8)]}
    assert list(choices.values()) == ["gather", "ragged", "gather", "ragged", "ragged"]
