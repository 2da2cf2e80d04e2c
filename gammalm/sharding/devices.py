"""What is known of each kind of device: peak arithmetic, memory, interconnect; and compiler options that measurements speak for.

All figures are per device as JAX counts devices, from the makers' data sheets. Peaks are dense bf16 FLOP/s, never the sparse figure.
Sources: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} (a chip's interconnect is given there for both directions together; half
of it is taken here), NVIDIA's data sheets of each GPU (NVLink likewise). A TPU7x chip is two devices, a v3 chip too.
"""

import dataclasses
import functools
import os
import re

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: peak dense bf16 FLOP/s, HBM in bytes, HBM and interconnect in bytes/s (all links, one direction); None: not known."""

    peak: float
    hbm: float | None = None
    hbm_rate: float | None = None
    link_rate: float | None = None
    clock: float | None = None  # cycles/s of a TPU core: peak over the FLOP that its matrix units do in a cycle
    per_chip: int = 1  # devices that one chip is
    capability: float | None = None  # compute capability of an NVIDIA GPU


# Whole words of `device_kind`, lower case, as a pattern -> what is known. The first match counts.
DEVICES = {
    "tpu v5 lite$|tpu v5e$": Device(197e12, 16 * GIB, 819e9, 200e9, 1.5e9),
    "tpu v6 lite$|tpu v6e$": Device(918e12, 32 * GIB, 1638e9, 400e9, 1.75e9),
    "tpu7x$|tpu v7x$": Device(2307e12 / 2, 96 * GIB, 7380e9 / 2, 600e9 / 2, per_chip=2),
    "tpu v5p?$": Device(459e12, 95 * GIB, 2765e9, 600e9, 1.75e9),
    "tpu v4$": Device(275e12, 32 * GIB, 1228e9, 300e9),
    "tpu v3$": Device(61.5e12, 16 * GIB, 450e9, per_chip=2),
    "gh200": Device(989e12, capability=9.0),  # 96 or 144 GB: the kind does not say
    "h200": Device(989e12, 141 * GIB, 4800e9, 450e9, capability=9.0),
    "h100 pcie": Device(756e12, 80 * GIB, 2000e9, capability=9.0),
    "h100 nvl": Device(835e12, 94 * GIB, 3900e9, capability=9.0),
    "h100": Device(989e12, 80 * GIB, 3350e9, 450e9, capability=9.0),
    "a100": Device(312e12, capability=8.0),  # 40 or 80 GB: the kind does not always say
    "l40s": Device(362e12, 48 * GIB, 864e9, capability=8.9),
    "l4": Device(121e12, 24 * GIB, 300e9, capability=8.9),
    "t4": Device(65e12, 16 * GIB, 300e9, capability=7.5),  # fp16
    "v100-pcie": Device(112e12, capability=7.0),  # fp16; 16 or 32 GB
    "v100": Device(125e12, capability=7.0),  # fp16
}


def known(device_kind: str) -> Device | None:
    """What is known of a `device_kind` as JAX names it, or None (every CPU)."""
    kind = device_kind.lower()
    return next((device for name, device in DEVICES.items() if re.search(rf"\b(?:{name})\b", kind)), None)


def peak_flops(device) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known (every CPU)."""
    found = known(device.device_kind)
    return found and found.peak


def describe(devices) -> str:
    """What runs and the peak that MFU is of: "8 × TPU v5 lite, peak 197 TFLOP/s each (dense bf16)"."""
    peak = peak_flops(devices[0])
    said = f"peak {peak / 1e12:g} TFLOP/s each (dense bf16)" if peak else "peak unknown"
    return f"{len(devices)} × {devices[0].device_kind}, {said}"


@dataclasses.dataclass(frozen=True)
class Option:
    """What XLA is told beside its defaults: the value, why, and whether only a program over several devices needs it."""

    value: bool | str
    why: str
    several: bool = False


# Platform of JAX -> options of XLA. TPUs have none: their compiler overlaps communication by itself, and nothing else was measured.
OPTIONS = {
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": Option(
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
            "YNNPACK takes single matrix products, in bf16 twice as fast as XLA's own kernels where there is AVX512-bf16. XLA's default, "
            "which gives it reductions and element-wise chains too, was no different in turns (docs/benchmarks.md).",
        )
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": Option(
            True,
            "Moves collectives so that they overlap with computation: recommended by JAX (docs.jax.dev, GPU performance tips) and set in "
            "NVIDIA's JAX image (docs.nvidia.com/jax-toolbox, environment variables). Not measured here.",
            several=True,
        )
    },
}


def compiler_options(platform: str | None = None, count: int = 1) -> dict[str, bool | str]:
    """Compiler options for a program over `count` devices of a platform of JAX; of the default backend where none is named.

    Left out are those that the user sets by XLA_FLAGS or LIBTPU_INIT_ARGS, and those that the installed XLA does not know.
    """
    users = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}"
    named = set(re.findall(r"--(?:no)?(\w+)", users))
    options = OPTIONS.get(platform or jax.default_backend(), {})
    wanted = {name: option.value for name, option in options.items() if name not in named and (count > 1 or not option.several)}
    return {name: value for name, value in wanted.items() if _xla_knows(name, value)}


@functools.cache
def _xla_knows(name: str, value: bool | str) -> bool:
    """Whether the XLA of the default backend takes the option. An unknown one would end the program that asks for it."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
