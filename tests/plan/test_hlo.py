"""Counts read from a program's text, against closed forms: programs compiled here, and a text as TPUs write it.

Shapes: N floats per device, 8 devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gammalm.plan import hlo

N, TRIPS = 4096, 7
MESH = ((4, 2), ("a", "b"))


def compiled(function, in_spec, out_spec, shape=(8 * N,), loop=False):
    mesh = Mesh(np.asarray(jax.devices()).reshape(MESH[0]), MESH[1], axis_types=(AxisType.Auto,) * 2)

    def repeat(x):
        return jax.lax.fori_loop(0, TRIPS, lambda _, x: function(x) * 0.5, x) if loop else function(x)

    mapped = jax.shard_map(repeat, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, in_spec))
    return jax.jit(mapped).lower(x).compile().as_text()


ALL = PartitionSpec(("a", "b"))
CASES = {
    "all-reduce": (lambda x: jax.lax.psum(x, "a"), ALL, PartitionSpec("b"), 2 * 4 * N * 3 / 4),
    "all-gather": (lambda x: jax.lax.all_gather(x, "a", tiled=True), ALL, PartitionSpec("b"), 4 * 4 * N * 3 / 4),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "b", tiled=True), ALL, PartitionSpec(("a", "b")), 4 * N * 1 / 2),
    "all-to-all": (lambda x: jax.lax.all_to_all(x.reshape(4, -1), "a", 0, 0).ravel(), ALL, ALL, 4 * N * 3 / 4),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)]), ALL, ALL, 4 * N),
}


@pytest.mark.parametrize("kind", CASES)
def test_bytes_that_a_device_sends(kind):
    function, taken, given, sent = CASES[kind]
    found = hlo.traffic(compiled(function, taken, given), 8)
    assert found.collectives == {kind: [1, sent]} and found.loops_unknown == 0


def test_a_loop_counts_as_often_as_it_runs():
    found = hlo.traffic(compiled(lambda x: jax.lax.psum(x, ("a", "b")), ALL, ALL, loop=True), 8)
    assert found.collectives == {"all-reduce": [TRIPS, TRIPS * 2 * 4 * N * 7 / 8]}


def test_a_loop_of_unknown_length_counts_once_and_is_said():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e9, lambda x: 2 * jax.lax.psum(x, "a"), x)

    found = hlo.traffic(compiled(until, ALL, ALL), 8)
    assert found.loops_unknown == 1 and found.collectives["all-reduce"][0] == 1


def test_memory_traffic_of_plain_programs():
    x = jax.ShapeDtypeStruct((N, 8), jnp.float32)
    text = jax.jit(lambda x: jnp.sin(x) + 1).lower(x).compile().as_text()
    assert hlo.traffic(text, 1).hbm == 2 * 4 * 8 * N

    def rows(x):  # each trip reads one row of x: the whole of it once
        return jax.lax.scan(lambda total, row: (total + jnp.sin(row), None), jnp.zeros(N), x)[0]

    big = jax.ShapeDtypeStruct((100, N), jnp.float32)
    moved = hlo.traffic(jax.jit(rows).lower(big).compile().as_text(), 1).hbm
    assert 100 * N * 4 <= moved <= 5 * 100 * N * 4  # not 100 times 100 rows


TPU = """HloModule m
%all-reduce-scatter.1 (p: f32[64,8]) -> f32[4,8] {
  %p = f32[64,8]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,8]{1,0:T(8,128)} all-reduce(%p), channel_id=1, replica_groups=mesh['fsdp'=16,'x'=2] {'fsdp'}, to_apply=%add
  ROOT %d = f32[4,8]{1,0:T(8,128)} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4,8}
}
%async_collective_fusion.1 (p: bf16[4,8]) -> bf16[64,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, replica_groups=[2,16]<=[32], dimensions={0}
}
%async_collective_fusion.2 (p: bf16[4,8]) -> bf16[64,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, replica_groups=[2,16]<=[32], dimensions={0}
}
%cond (s: (s32[], f32[64,8])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) parameter(0)
  %c = s32[]{:T(128)} constant(24)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}
%body (s: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %s = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) parameter(0)
  %g = f32[64,8]{1,0:T(8,128)} get-tuple-element(%s), index=1
  %near = f32[64,8]{1,0:T(8,128)S(1)} negate(%g), backend_config={"estimated_cycles":"100"}
  %w = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} constant(0)
  %f = f32[4,8]{1,0:T(8,128)S(1)} fusion(%near), kind=kCustom, calls=%all-reduce-scatter.1
  %a = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} fusion(%w), kind=kOutput, calls=%async_collective_fusion.1
  %b = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} fusion(%w), kind=kOutput, calls=%async_collective_fusion.2
  %n = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %t = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) tuple(%n, %g)
}
ENTRY %main (x: f32[64,8]) -> f32[64,8] {
  %x = f32[64,8]{1,0:T(8,128)} parameter(0)
  %z = s32[]{:T(128)} constant(0)
  %t0 = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) tuple(%z, %x)
  %loop = (s32[]{:T(128)}, /*index=1*/f32[64,8]{1,0:T(8,128)}) while(%t0), condition=%cond, body=%body
  ROOT %r = f32[64,8]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_a_tpu_program():
    """A scatter written as a sum and a slice, one gather in a chain of two fusions, and memory that is not HBM."""
    found = hlo.traffic(TPU, 32)
    assert found.collectives == {
        "reduce-scatter": [24, 24 * 64 * 8 * 4 * 15 / 16],
        "all-gather": [24, 24 * 64 * 8 * 2 * 15 / 16],
    }
    assert found.hbm == 24 * 64 * 8 * 4  # of `near` the operand alone lies in HBM; what follows stays where it is
    assert found.cycles == 2400 and found.loops_unknown == 0


PARTS = """HloModule m
%relabel (p: bf16[24,64]) -> bf16[24,64] {
  ROOT %p = bf16[24,64]{0,1:T(16,128)} parameter(0)
}
%row (stack: bf16[24,64], n: s32[]) -> f32[1,64] {
  %stack = bf16[24,64]{1,0:T(16,128)} parameter(0)
  %same = bf16[24,64]{1,0:T(8,128)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%relabel
  %n = s32[]{:T(128)} parameter(1)
  %one = bf16[1,64]{1,0:T(8,128)} dynamic-slice(%same, %n, %n), dynamic_slice_sizes={1,64}
  ROOT %wide = f32[1,64]{1,0:T(8,128)} convert(%one)
}
%write (stack: bf16[24,64], n: s32[], new: bf16[1,64]) -> bf16[24,64] {
  %stack = bf16[24,64]{1,0:T(16,128)} parameter(0)
  %same = bf16[24,64]{1,0:T(8,128)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%relabel
  %n = s32[]{:T(128)} parameter(1)
  %new = bf16[1,64]{1,0:T(8,128)} parameter(2)
  ROOT %put = bf16[24,64]{1,0:T(16,128)} dynamic-update-slice(%same, %new, %n, %n)
}
ENTRY %main (x: bf16[24,64], n: s32[], y: bf16[1,64]) -> bf16[24,64] {
  %x = bf16[24,64]{1,0:T(8,128)} parameter(0)
  %n = s32[]{:T(128)S(6)} parameter(1)
  %y = bf16[1,64]{1,0:T(8,128)} parameter(2)
  OPERATION
}
"""


@pytest.mark.parametrize(
    "operation, moved",
    [
        # What is copied to a nearer memory is read once, however large the array that it is cut from.
        ("%s = ((bf16[24,64]{1,0:T(8,128)}), bf16[4,64]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:4], [0:64]}", 4 * 128),
        ("%s = ((bf16[24,64]{1,0:T(8,128)}), bf16[4,64]{1,0:T(8,128)}, s32[]{:S(2)}) slice-start(%x), slice={[0:4], [0:64]}", 2 * 4 * 128),
        ("%s = (bf16[24,64]{1,0:T(8,128)S(1)}, bf16[24,64]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)", 24 * 128),
        ("%s = bf16[24,64]{1,0:T(8,128)} copy-done(%x)", 0),
        ("%s = f32[1,64]{1,0:T(8,128)} fusion(%x, %n), kind=kLoop, calls=%row", 128 + 256),
        ("%s = bf16[24,64]{1,0:T(8,128)} fusion(%x, %n, %y), kind=kLoop, calls=%write", 2 * 128),
    ],
)
def test_parts_of_arrays_count_as_parts(operation, moved):
    assert hlo.traffic(PARTS.replace("OPERATION", operation), 1).hbm == moved


EXCHANGE = """HloModule m
ENTRY %main (a: bf16[32,64], b: bf16[32,64], n: s32[4]) -> bf16[32,64] {
  %a = bf16[32,64]{1,0} parameter(0)
  %b = bf16[32,64]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %e = ((bf16[32,64]{1,0}, bf16[32,64]{1,0}, s32[4]{0}, s32[4]{0}), bf16[32,64]{1,0}, u32[]) ragged-all-to-all-start(%a, %b, %n, %n), GROUPS
  %f = bf16[32,64]{1,0} ragged-all-to-all-done(%e)
  %g = ((bf16[32,64]{1,0}, bf16[32,64]{1,0}, s32[4]{0}, s32[4]{0}), bf16[32,64]{1,0}, u32[]) ragged-all-to-all-start(%f, %b, %n, %n), GROUPS
  %h = ((bf16[32,64]{1,0}, bf16[32,64]{1,0}), (bf16[128,64]{1,0}, bf16[128,64]{1,0})) all-gather-start(%a, %b), GROUPS
  ROOT %i = bf16[32,64]{1,0} ragged-all-to-all-done(%g)
}
""".replace("GROUPS", "channel_id=1, replica_groups={{0,1,2,3}}")


def test_exchanges_begun_and_ended_apart():
    """Ragged ones all have one channel number; where they write and what they are told of rows is not sent. Two gathers may be one."""
    whole = 32 * 64 * 2
    found = hlo.traffic(EXCHANGE, 4).collectives
    assert found == {"ragged-all-to-all": [2, 2 * whole * 3 / 4], "all-gather": [1, 2 * 4 * whole * 3 / 4]}


@pytest.mark.parametrize(
    "attribute, size",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}", 2),
        ("replica_groups={}", 8),
    ],
)
def test_ways_to_write_groups(attribute, size):
    assert hlo.group_size(f", channel_id=1, {attribute}, to_apply=%add", 8) == size
