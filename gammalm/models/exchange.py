"""Expert parallelism: the routed experts over the mesh in use, every token sent at most once to each device that holds some of its experts.

Batch rows are cut over data, fsdp and expert, sequences over context; device r of P on the `expert` axis holds the experts
[r·E/P, (r+1)·E/P). Within a `shard_map` each device routes only its own tokens: the compiler never sees a sort of all devices' tokens.
A chunk of tokens is spread over the expert axis, each device runs its own experts on what arrives, and the parts of each token's
output are sent back and merged: summed in fp32. Spreading and merging are each other's transposes, so the backward pass is the same walk.

Shape legend: parts.py; N tokens of a device, n of a chunk, P devices on the expert axis, R = P·n rows that may arrive, S rows that may
be sent, A assignments per token, E experts; X any width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gammalm.models.parts import TOKEN_AXES, TOKENS, mesh_pieces, platform

EXPERT = "expert"
WIDTH = {"gate": 1, "up": 1, "down": 2}  # the axis of length D of each weight, which lies cut up over fsdp
ARRIVING = 4  # the rows that may arrive with one chunk, as a multiple of all tokens of a device


class Transport(NamedTuple):
    """How rows travel over the expert axis. The arguments called `plan` are what `plan` made of a chunk's assignments.

    plan(ids_nA, P, E) -> pytree; spread(a_nX, plan) -> [R, X], zeros where nothing arrived; merge(a_RX, plan) -> [n, X], summed in fp32
    and returned in the dtype of a.
    """

    plan: Callable
    spread: Callable
    merge: Callable


def choose_transport(platform: str, pieces: int, top_k: int) -> str:
    """`gather` (all tokens to all devices: the worst case as a rule) or `ragged` (tokens only to where some of their experts are).

    XLA has `ragged_all_to_all` on TPU and GPU, not on CPU. With uniform routing it sends 1 − (1 − 1/P)^top_k of what `gather` does: at most
    3/4 once P ≥ top_k, which is the rule here; for fewer devices the saving does not pay for exchanged sizes and compacted rows.
    The volume is computed, not timed: run so far on CPU alone, compiled for TPU.
    """
    return "ragged" if platform in ("tpu", "gpu") and pieces >= top_k else "gather"


def _merge_gathered(a_RX, _):
    pieces = jax.lax.axis_size(EXPERT)
    parts_PnX = jax.lax.all_to_all(a_RX.reshape(pieces, -1, a_RX.shape[-1]), EXPERT, 0, 0)  # half of an fp32 psum_scatter's bytes in bf16
    return jnp.sum(parts_PnX.astype(jnp.float32), axis=0).astype(a_RX.dtype)


GATHER = Transport(
    plan=lambda ids_nA, pieces, n_experts: None,
    spread=lambda a_nX, _: jax.lax.all_gather(a_nX, EXPERT, tiled=True),
    merge=_merge_gathered,
)


class Plan(NamedTuple):
    """The token of each row sent [S], rows ordered by destination; offsets and sizes [P] of `ragged_all_to_all` for both directions."""

    tokens_S: jax.Array
    there: tuple
    back: tuple


def _plan_ragged(ids_nA, pieces, n_experts):
    n, A = ids_nA.shape
    owners_nA = ids_nA // (n_experts // pieces)
    wanted_Pn = jnp.any(owners_nA[None] == jnp.arange(pieces, dtype=ids_nA.dtype)[:, None, None], axis=-1)
    (order_S,) = jnp.nonzero(wanted_Pn.reshape(-1), size=n * min(A, pieces), fill_value=0)
    rows_PP = jax.lax.all_gather(jnp.sum(wanted_Pn, axis=1, dtype=jnp.int32), EXPERT)  # [from, to]
    start_PP = jnp.cumsum(rows_PP, axis=1) - rows_PP  # where the rows begin among those of their sender,
    land_PP = jnp.cumsum(rows_PP, axis=0) - rows_PP  # and among those of their receiver
    me = jax.lax.axis_index(EXPERT)
    there = (start_PP[me], rows_PP[me], land_PP[me], rows_PP[:, me])
    back = (land_PP[:, me], rows_PP[:, me], start_PP[:, me], rows_PP[me])
    return Plan(order_S % n, there, back)


def _spread_ragged(a_nX, plan):
    n, X = a_nX.shape
    arrived_RX = jnp.zeros((jax.lax.axis_size(EXPERT) * n, X), a_nX.dtype)
    return jax.lax.ragged_all_to_all(a_nX[plan.tokens_S], arrived_RX, *plan.there, axis_name=EXPERT)


def _merge_ragged(a_RX, plan):
    n, X = a_RX.shape[0] // jax.lax.axis_size(EXPERT), a_RX.shape[1]
    returned_SX = jnp.zeros((plan.tokens_S.size, X), a_RX.dtype)
    returned_SX = jax.lax.ragged_all_to_all(a_RX, returned_SX, *plan.back, axis_name=EXPERT)
    merged_nX = jnp.zeros((n, X), jnp.float32).at[plan.tokens_S].add(returned_SX.astype(jnp.float32))
    return merged_nX.astype(a_RX.dtype)


RAGGED = Transport(_plan_ragged, _spread_ragged, _merge_ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread(a_nX, plan, transport):
    return transport.spread(a_nX, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _merge(a_RX, plan, transport):
    return transport.merge(a_RX, plan)


_spread.defvjp(
    lambda a_nX, plan, transport: (transport.spread(a_nX, plan), plan), lambda transport, plan, d_RX: (transport.merge(d_RX, plan), None)
)
_merge.defvjp(
    lambda a_RX, plan, transport: (transport.merge(a_RX, plan), plan), lambda transport, plan, d_nX: (transport.spread(d_nX, plan), None)
)


def _by_tensor(collective, w, axis):
    """`collective` of the parts of a weight [E, D, F] or [E, F, D] that lie on each tensor device; D is `axis`.

    Where the tensor axis is left to the compiler, it makes F whole on every device before a collective along D.
    """
    part = PartitionSpec(*[None] * (3 - axis), "tensor")
    return jax.shard_map(collective, in_specs=part, out_specs=part, axis_names={"tensor"}, check_vma=False)(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole_width(w, axis, dtype):
    """A weight at full D, in fp32 with the values of `dtype`, in which it travels; its gradient is summed over fsdp in fp32."""
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=axis, tiled=True)
    return _by_tensor(gather, w.astype(dtype), axis).astype(w.dtype)


def _whole_width_backward(axis, dtype, _, d_w):
    scatter = functools.partial(jax.lax.psum_scatter, axis_name="fsdp", scatter_dimension=axis, tiled=True)
    return (_by_tensor(scatter, d_w, axis),)


_whole_width.defvjp(lambda w, axis, dtype: (_whole_width(w, axis, dtype), None), _whole_width_backward)


def _exchanged(x_ND, ids_NA, gates_NA, w, compute, transport):
    """`compute` with the experts of the whole expert axis, of which `w` are this device's: (y [N, D], assignments computed here).

    In ⌈P / ARRIVING⌉ chunks of equal length, the last one padded, whatever the routing: the rows that may arrive at once are at most
    about ARRIVING times the tokens of a device. Several chunks are recomputed one by one on the way back.
    """
    pieces, held = jax.lax.axis_size(EXPERT), w["gate"].shape[0]
    n_experts = pieces * held

    def one(x_nD, ids_nA, gates_nA, w):
        plan = transport.plan(ids_nA, pieces, n_experts)
        # Ids travel as their distance from "none": what nobody wrote, zero, reads "none".
        ids_RA = transport.spread(ids_nA - n_experts, plan) + n_experts - held * jax.lax.axis_index(EXPERT)
        ids_RA = jnp.where((ids_RA >= 0) & (ids_RA < held), ids_RA, held)
        y_RD, computed = compute(_spread(x_nD, plan, transport), ids_RA, _spread(gates_nA, plan, transport), w)
        return _merge(y_RD, plan, transport), computed

    chunks, N = -(-pieces // ARRIVING), x_ND.shape[0]
    if chunks == 1:
        return one(x_ND, ids_NA, gates_NA, w)

    def cut(a_NX, fill):
        padded = jnp.pad(a_NX, ((0, -N % chunks), (0, 0)), constant_values=fill)
        return padded.reshape(chunks, -1, a_NX.shape[1])

    step = jax.checkpoint(lambda _, chunk: (None, one(*chunk, w)), prevent_cse=False)
    _, (y_CnD, computed_C) = jax.lax.scan(step, None, (cut(x_ND, 0), cut(ids_NA, n_experts), cut(gates_NA, 0)))
    return y_CnD.reshape(-1, x_ND.shape[1])[:N], jnp.sum(computed_C, dtype=jnp.int32)


def sharded_expert_ffn(x_BTD, ids_BTA, gates_BTA, w, compute):
    """The routed experts on the mesh in use: (y [B, T, D] in the dtype of x, computed [] int32 over all devices).

    x_BTD in the compute dtype; ids_BTA int32, E for "none"; gates_BTA fp32; w = {"gate", "up": [E, D, F], "down": [E, F, D]} fp32;
    compute(x_ND, ids_NA, gates_NA, w) -> (y_ND, computed) is `gammalm.models.experts.expert_ffn` with its backend bound. It may be given
    fewer experts than E, with ids to match. Differentiable in x, gates and w; gradients of w are summed over devices in fp32.
    On a mesh B must be a multiple of data x fsdp x expert, T of context, E of expert, D of fsdp, F of tensor: ValueError from
    `shard_map` otherwise (`gammalm.sharding.mesh` and `gammalm.config_checks` look at all of them before a run).
    """

    def flat(x_BTD, ids_BTA, gates_BTA, w, compute=compute):
        y_ND, computed = compute(*(a.reshape(-1, a.shape[-1]) for a in (x_BTD, ids_BTA, gates_BTA)), w)
        return y_ND.reshape(x_BTD.shape), computed

    if mesh_pieces(*TOKEN_AXES) == 1:
        return flat(x_BTD, ids_BTA, gates_BTA, w)
    if mesh_pieces(EXPERT) > 1:
        ragged = choose_transport(platform(), mesh_pieces(EXPERT), ids_BTA.shape[-1]) == "ragged"
        compute = functools.partial(_exchanged, compute=compute, transport=RAGGED if ragged else GATHER)

    def local(x_BTD, ids_BTA, gates_BTA, w):
        w = {name: _whole_width(w[name], WIDTH[name], x_BTD.dtype) for name in w}
        y_BTD, computed = flat(x_BTD, ids_BTA, gates_BTA, w, compute)
        return y_BTD, jax.lax.psum(computed, TOKEN_AXES)

    lie = {name: PartitionSpec(EXPERT, *[None] * (axis - 1), "fsdp") for name, axis in WIDTH.items()}
    return jax.shard_map(
        local, in_specs=(TOKENS, TOKENS, TOKENS, lie), out_specs=(TOKENS, PartitionSpec()), axis_names=set(TOKEN_AXES), check_vma=False
    )(x_BTD, ids_BTA, gates_BTA, w)  # fmt: skip
