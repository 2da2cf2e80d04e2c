"""Hardware by name: `v5e:16x16`, `v5p:4x4x8`, `v6e:16x16`, `tpu7x:2x2x2`, `h100:8`, `h200:1`, `cpu`.

TPUs are described by libtpu, which compiles for them wherever it is installed; it never runs, and no TPU is looked for.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence

from gammalm.errors import ConfigError

# Name -> device kind as JAX gives it.
TPUS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
GPUS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
# The most chips that one pod has: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}.
LARGEST = {"v5e": 256, "v6e": 256, "v5p": 8960, "tpu7x": 9216}
EXAMPLES = "v5e:16x16, v5p:4x4x8, v6e:16x16, tpu7x:4x4x4, h100:8, h200:1 or cpu"

# What libtpu would ask a cloud machine for, and what keeps it from taking the one TPU of a machine that has one.
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any: the topology is named when it is asked for
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """`count` devices of one kind as JAX counts devices; `devices` where something can compile for them, else None."""

    name: str
    kind: str
    platform: str  # tpu | gpu | cpu, JAX's own names
    count: int
    devices: Sequence | None = None


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """Maker's name and extents, ("v5e", (16, 16)). Raises ConfigError."""
    kind, colon, extent = name.lower().partition(":")
    if kind == "cpu" and not colon:
        return kind, (1,)
    sides = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3} | dict.fromkeys(GPUS, 1)
    if kind not in sides or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", extent):
        raise ConfigError(f"--topology {name}: not known. Name {EXAMPLES}.")
    extents = tuple(int(n) for n in extent.split("x"))
    if len(extents) != sides[kind]:
        raise ConfigError(f"--topology {name}: {kind} has {sides[kind]} extent{'s' * (sides[kind] > 1)}, for instance {EXAMPLES}.")
    if math.prod(extents) > LARGEST.get(kind, math.inf):
        raise ConfigError(f"--topology {name}: no {kind} pod has more than {LARGEST[kind]} chips.")
    return kind, extents


def quiet_environment(name: str) -> None:
    """Call before jax is imported: lets libtpu describe a TPU without one, and keeps everything else off accelerators."""
    if parse(name)[0] in TPUS:
        os.environ.update(WITHOUT_TPU)
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def load(name: str, *, compile_step: bool = True) -> Topology:
    """The topology `name`. Raises ConfigError: unknown, or a TPU whose shape libtpu does not know, or to be compiled for without libtpu."""
    kind, extents = parse(name)
    if kind in GPUS:
        return Topology(name, GPUS[kind], "gpu", math.prod(extents))
    if kind == "cpu":
        return Topology(name, "cpu", "cpu", 1)
    if not has_libtpu() and not compile_step:
        from gammalm.sharding.devices import known  # imports JAX, which reads the environment

        return Topology(name, TPUS[kind], "tpu", math.prod(extents) * known(TPUS[kind]).per_chip)
    if not has_libtpu():
        raise ConfigError(f"--topology {name}: compiling for TPUs needs libtpu: pip install 'gammalm[plan]'. Or add --analytic.")
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name.lower()).devices
    except Exception as error:  # libtpu's own errors have no type of their own
        raise ConfigError(f"--topology {name}: libtpu does not know it ({str(error).splitlines()[0][:200]}). Name {EXAMPLES}.") from error
    return Topology(name, devices[0].device_kind, "tpu", len(devices), devices)
