"""The device mesh of a run and the one table that maps logical axes of parameters to axes of the mesh.

Mesh axes: `cell` (runs side by side), `data` (batch only), `fsdp` (batch, and parameters cut up), `expert` (batch, and the experts of a
mixture shared out), `context` (each sequence cut up), `tensor` (matrix products cut up): in order of rising traffic. Devices that are
near each other talk fast (within a slice of TPUs, or a host of GPUs); of `data` and `fsdp` a factor may lie between slices.
"""

import contextlib
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gammalm.errors import ConfigError
from gammalm.trees import nested

AXES = ("cell", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")

# Logical axis of a parameter -> mesh axis it is cut along. What is not named here is whole on every device.
RULES = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "experts": "expert"}


def mesh_shape(sizes: dict[str, int], devices: int) -> tuple[int, ...]:
    """Size of each of AXES over `devices` devices; one size may be -1, "whatever is left". Raises ConfigError where they do not divide."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    known = math.prod(size for size in shape if size != -1)
    text = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    if -1 in shape:
        if devices % known:
            raise ConfigError(f"config.mesh: {text} does not divide {devices} devices: {known} is no factor of {devices}.")
        shape[shape.index(-1)] = devices // known
    elif known != devices:
        raise ConfigError(f"config.mesh: {text} needs {known} devices and there are {devices}. Set one axis to -1 to take what is left.")
    return tuple(shape)


def between_slices(sizes: dict[str, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the size of each axis in `shape`, the factor that lies between slices. Raises ConfigError where it is none."""
    outer = tuple(sizes.get(f"dcn_{axis}", 1) for axis in AXES)
    for axis, size, factor in zip(AXES, shape, outer, strict=True):
        if size % factor:
            raise ConfigError(f"config.mesh: dcn_{axis}={factor} does not divide {axis}={size}, of which it is the part between slices.")
    return outer


def arrange(shape: tuple[int, ...], outer: tuple[int, ...], devices) -> np.ndarray:
    """`devices` as an array of `shape`, whose factors `outer` lie between slices. Raises ConfigError where there are not as many slices.

    On TPUs neighbours in the array are neighbours on the torus; elsewhere the order is that of the devices' numbers. A slice is what
    devices call so (`slice_index`), and a process where all devices say the same or nothing.
    """
    by_process = len({getattr(d, "slice_index", 0) for d in devices}) == 1
    slices = {d.process_index if by_process else d.slice_index for d in devices}
    wanted, said = math.prod(outer), " x ".join(f"dcn_{axis}={n}" for axis, n in zip(AXES, outer, strict=True) if n > 1)
    if wanted > 1 and wanted != len(slices):
        raise ConfigError(
            f"config.mesh: {said} needs {wanted} slices and the devices are in {len(slices)} ({'processes' if by_process else 'slices'})."
        )
    if wanted == 1 and not by_process and devices[0].platform == "tpu":
        raise ConfigError(f"config.mesh: the TPUs are in {len(slices)} slices. Set mesh.dcn_data={len(slices)}, or share it with dcn_fsdp.")
    if wanted == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    inner = tuple(size // factor for size, factor in zip(shape, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True)


def make_mesh(sizes: dict[str, int], devices=None) -> Mesh:
    """A mesh over all devices (or those given) with the axes AXES; the compiler chooses shardings in between ("auto" axes).

    `sizes` names axes, and as dcn_data and dcn_fsdp the factors of theirs that lie between slices; what is not named is 1.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    placed = arrange(shape, between_slices(sizes, shape), list(devices))
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """What programs over `mesh` run in, and whatever else looks at their arrays. XLA:CPU (JAX 0.12) deadlocks or aborts in the collectives
    of training steps that it reads back from the compilation cache, so on CPUs programs over several devices are not put there."""
    name = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, name)
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.config.update(name, float("inf"))
    try:
        with jax.set_mesh(mesh):
            yield
    finally:
        jax.config.update(name, least)


def parameter_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """How a parameter with these logical axes is cut up."""
    return PartitionSpec(*(RULES.get(axis) for axis in axes))


def parameter_shardings(specs, mesh: Mesh) -> dict:
    """Nested dict of NamedSharding for `specs` (path -> ParamSpec). Raises ConfigError naming a dimension that the mesh does not divide."""
    for path, spec in specs.items():
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            pieces = mesh.shape[RULES[axis]] if axis in RULES else 1
            if size % pieces:
                raise ConfigError(
                    f"config.mesh: {path} has {axis}={size}, which {RULES[axis]}={pieces} does not divide. Choose a factor of {size}."
                )
    return nested({path: NamedSharding(mesh, parameter_spec(spec.axes)) for path, spec in specs.items()})


def batch_sharding(mesh: Mesh, lead: tuple[str | None, ...] = ()) -> NamedSharding:
    """Rows over the batch axes; `lead` names axes before the rows."""
    return NamedSharding(mesh, PartitionSpec(*lead, BATCH_AXES))


def check_batch(sequences: int, micro_batches: int, mesh: Mesh) -> None:
    """Raises ConfigError where the rows of a micro-batch cannot be shared out over the batch axes."""
    pieces = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    rows = sequences // micro_batches
    if rows % pieces:
        raise ConfigError(
            f"config.batch: {sequences} sequences in {micro_batches} micro-batches are {rows} rows each, which data x fsdp x expert = "
            f"{pieces} does not divide. Choose batch.sequences as a multiple of {pieces * micro_batches}, or a smaller mesh.data."
        )
