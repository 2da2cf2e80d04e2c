"""Expert products in blocks of rows sorted by expert: the work of dispatched assignments and no more, whatever the number of experts.

XLA:CPU lowers `jax.lax.ragged_dot` to every expert on every row. Here a loop walks over the experts, and inside over blocks of the rows
of one: as many full blocks as its group holds, and one shorter one in the smallest of STEPS sizes that fits. Each expert's weights are
cut out and cast once. Nothing here is as large as experts x rows.

Shape legend: N rows, A assignments per row, M = N·A and slack for the last block, D d_model, F width of an expert, E experts,
m rows of one block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

MAX_BLOCK = 256  # rows: larger products are no faster, and weight gradients are added up seldom enough
MIN_BLOCK = 32
STEPS = 8  # sizes of a group's last block: at most an eighth of a block is spent on rows of no use
MIN_STEP = 8  # rows: finer sizes of small blocks would save less than they take to compile
TILE = 4  # rows that a transpose moves together; divides every size of a block


def block_size(assignments: int, n_experts: int) -> int:
    """Rows of a full block: the mean group rounded up to a power of two, between MIN_BLOCK and MAX_BLOCK."""
    mean = max(1, assignments // n_experts)
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (mean - 1).bit_length()))


def _plan(ids_NA, n_experts: int):
    """(rows of a full block, `gather`: [N, D] -> [M, D] sorted by expert, place of each assignment [N, A], starts of groups [E + 1]).

    Behind the last group lie assignments to none, then the slack: gathered as zeros, so that whatever they hold stays out of products.
    """
    flat = ids_NA.reshape(-1)
    block = block_size(flat.size, n_experts)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
    starts = jnp.searchsorted(flat[order], jnp.arange(n_experts + 1)).astype(jnp.int32)
    row_M = jnp.pad(order // ids_NA.shape[1], (0, block))
    real_M1 = (jnp.arange(row_M.size) < starts[n_experts])[:, None]
    return block, lambda a_ND: jnp.where(real_M1, a_ND[row_M], 0), place.reshape(ids_NA.shape), starts


def _walk(start, end, block: int, body, zeros, buffers):
    """(total, buffers) after `body(first row, rows, total, buffers)` over rows start..end; the total begins as `zeros()`.

    First the rows that fill no block, in one block of the smallest size that fits: its total is then written, not added to zeros.
    """
    full = (end - start) // block
    rest, step = start + full * block, max(MIN_STEP, block // STEPS)
    sizes = range(step, block + 1, step)
    last = [functools.partial(lambda buffers, size: body(rest, size, zeros(), buffers), size=size) for size in sizes]
    carry = jax.lax.switch((end - rest + step - 1) // step, [lambda buffers: (zeros(), buffers), *last], buffers)
    return jax.lax.fori_loop(0, full, lambda i, carry: body(start + i * block, block, *carry), carry)


def _cut(a, first, rows: int):
    return jax.lax.dynamic_slice_in_dim(a, first, rows)


def _put(a, part, first):
    return jax.lax.dynamic_update_slice_in_dim(a, part, first, 0)


def _cast(w, dtype):
    return [w[name].astype(dtype) for name in ("gate", "up", "down")]


@jax.custom_vjp
def blocked_ffn(x_ND, ids_NA, gates_NA, w):
    """(Σ_a gate · SwiGLU of expert id [N, D] in the dtype of x, rows of groups that blocks went over); see `experts.expert_ffn`.

    Keeps the two [M, F] arrays before the activation for the backward pass, as a dense FFN does; `model.remat` gives them up.
    Under `vmap` the cells run one after another: side by side, every loop would run as long as its longest.
    """
    return _forward(x_ND, ids_NA, gates_NA, w)[0]


@sequential_vmap
def _into(x_ND, ids_NA, w):
    """gate x and up x of every assignment, both [M, F], and how many there were."""
    n_experts, _, F = w["gate"].shape
    block, gather, _, starts = _plan(ids_NA, n_experts)
    rows_MD = gather(x_ND)

    def expert(buffers, args):
        w, start, end = args
        gate_DF, up_DF, _ = _cast(w, x_ND.dtype)

        def body(first, size, ran, buffers):
            rows = _cut(rows_MD, first, size)
            gate_MF, up_MF = buffers
            buffers = _put(gate_MF, rows @ gate_DF, first), _put(up_MF, rows @ up_DF, first)
            return ran + jnp.minimum(size, end - first), buffers

        ran, buffers = _walk(start, end, block, body, lambda: jnp.zeros((), jnp.int32), buffers)
        return buffers, ran

    empty_MF = jnp.zeros((rows_MD.shape[0], F), x_ND.dtype)
    (gate_MF, up_MF), ran_E = jax.lax.scan(expert, (empty_MF, empty_MF), (w, starts[:-1], starts[1:]))
    return gate_MF, up_MF, jnp.sum(ran_E)


@sequential_vmap
def _out_of(gate_MF, up_MF, ids_NA, gates_NA, w):
    """y [N, D]. A loop of its own, which remat leaves out on its second way forward."""
    n_experts, _, D = w["down"].shape
    block, _, place_NA, starts = _plan(ids_NA, n_experts)
    h_MF = (jax.nn.silu(gate_MF.astype(jnp.float32)) * up_MF.astype(jnp.float32)).astype(gate_MF.dtype)

    def expert(out_MD, args):
        w, start, end = args
        *_, down_FD = _cast(w, h_MF.dtype)

        def body(first, size, _, out_MD):
            return None, _put(out_MD, _cut(h_MF, first, size) @ down_FD, first)

        return _walk(start, end, block, body, lambda: None, out_MD)[::-1]

    out_MD, _ = jax.lax.scan(expert, jnp.zeros((h_MF.shape[0], D), h_MF.dtype), (w, starts[:-1], starts[1:]))
    real_NA = ids_NA < n_experts
    parts = jnp.where(real_NA[..., None], gates_NA[..., None] * out_MD[place_NA].astype(jnp.float32), 0)
    return jnp.sum(parts, axis=1).astype(h_MF.dtype)


@sequential_vmap
def _gradients(x_ND, ids_NA, gates_NA, w, gate_MF, up_MF, d_y_ND):
    n_experts = w["gate"].shape[0]
    block, gather, place_NA, starts = _plan(ids_NA, n_experts)
    rows_MD, d_y_MD = gather(x_ND), gather(d_y_ND)
    weight_M = jnp.zeros(rows_MD.shape[:1], jnp.float32).at[place_NA.reshape(-1)].set(gates_NA.reshape(-1), unique_indices=True)

    def expert(buffers, args):
        w, start, end = args
        gate_DF, up_DF, down_FD = _cast(w, x_ND.dtype)

        def body(first, size, d_w, buffers):
            d_rows_MD, d_weight_M = buffers
            rows, d_y, weight, gate, up = (_cut(a, first, size) for a in (rows_MD, d_y_MD, weight_M, gate_MF, up_MF))
            own = (first + jnp.arange(size) < end)[:, None]
            gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
            sigmoid = jax.nn.sigmoid(gate)
            swish = gate * sigmoid
            d_out = jnp.einsum("md,fd->mf", d_y, down_FD).astype(jnp.float32)  # of swish · up, before the weight
            d_h = d_out * weight[:, None]
            # Rows of a last block beyond its group add nothing to this expert's gradients; what they write, their own expert overwrites.
            h, d_gate, d_up = (
                jnp.where(own, a, 0).astype(x_ND.dtype)
                for a in (swish * up * weight[:, None], d_h * up * (sigmoid + swish * (1 - sigmoid)), d_h * swish)
            )
            rows_Dm = _transposed(rows)
            pairs = {"gate": (rows_Dm, d_gate), "up": (rows_Dm, d_up), "down": (_transposed(h), d_y)}
            d_w = {k: d_w[k] + jnp.dot(a_Im, b_mO, preferred_element_type=jnp.float32) for k, (a_Im, b_mO) in pairs.items()}
            d_rows = jnp.einsum("mf,df->md", d_gate, gate_DF) + jnp.einsum("mf,df->md", d_up, up_DF)
            return d_w, (_put(d_rows_MD, d_rows, first), _put(d_weight_M, jnp.sum(swish * up * d_out, axis=1), first))

        zeros = lambda: {name: jnp.zeros(a.shape, jnp.float32) for name, a in w.items()}  # noqa: E731
        return _walk(start, end, block, body, zeros, buffers)[::-1]

    buffers = jnp.zeros_like(rows_MD), jnp.zeros_like(weight_M)
    (d_rows_MD, d_weight_M), d_w = jax.lax.scan(expert, buffers, (w, starts[:-1], starts[1:]))
    real_NA = ids_NA < n_experts
    d_x = jnp.sum(jnp.where(real_NA[..., None], d_rows_MD[place_NA].astype(jnp.float32), 0), axis=1)
    return d_x.astype(x_ND.dtype), jnp.where(real_NA, d_weight_M[place_NA], 0), d_w


def _transposed(a_mI):
    """[I, m], in two steps by TILE rows.

    XLA:CPU moves a plain transpose into the product that follows, and then has no bf16 kernel for it: twice the time, all in fp32.
    """
    m, width = a_mI.shape
    tiles = jax.lax.optimization_barrier(a_mI.reshape(m // TILE, TILE, width).swapaxes(1, 2))
    return tiles.swapaxes(0, 1).reshape(width, m)


def _forward(x_ND, ids_NA, gates_NA, w):
    gate_MF, up_MF, ran = _into(x_ND, ids_NA, w)
    return (_out_of(gate_MF, up_MF, ids_NA, gates_NA, w), ran), (x_ND, ids_NA, gates_NA, w, gate_MF, up_MF)


def _backward(saved, cotangents):
    d_x, d_gates, d_w = _gradients(*saved, cotangents[0])
    return d_x, None, d_gates, d_w


blocked_ffn.defvjp(_forward, _backward)
