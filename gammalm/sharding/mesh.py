"""The device mesh of a run and the one table that maps logical axes of parameters to axes of the mesh.

Mesh axes: `cell` (runs side by side), `data` (batch only), `fsdp` (batch, and parameters cut up), `expert` (batch, and the experts of a
mixture shared out), `tensor` (matrix products cut up).
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gammalm.errors import ConfigError
from gammalm.trees import nested

AXES = ("cell", "data", "fsdp", "expert", "tensor")
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


def make_mesh(sizes: dict[str, int], devices=None) -> Mesh:
    """A mesh over all devices (or those given) with the axes AXES; the compiler chooses shardings in between ("auto" axes)."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


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
