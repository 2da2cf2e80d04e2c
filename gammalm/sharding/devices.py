"""What is known of each kind of device: peak arithmetic, and compiler options that measurements speak for.

Peaks are dense bf16 FLOP/s per device as JAX counts devices, from the makers' data sheets (never the sparse figure).
"""

import re

import jax

# Whole words of `device_kind`, lower case, as a pattern -> peak dense bf16 FLOP/s. The first match counts.
PEAK_FLOPS = {
    "tpu v5 lite$|tpu v5e$": 197e12,
    "tpu v6 lite$|tpu v6e$": 918e12,
    "tpu v5p?$": 459e12,
    "tpu v4$": 275e12,
    "tpu v3$": 61.5e12,  # one core; a chip has two
    "g?h200": 989e12,
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h100": 989e12,
    "a100": 312e12,
    "l40s": 362e12,
    "l4": 121e12,
    "t4": 65e12,  # fp16
    "v100-pcie": 112e12,  # fp16
    "v100": 125e12,  # fp16
}


def peak_flops(device) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known (every CPU)."""
    kind = device.device_kind.lower()
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b(?:{name})\b", kind)), None)


def compiler_options() -> dict[str, str]:
    """Compiler options for the default backend.

    On CPUs YNNPACK takes single matrix products, in bf16 twice as fast as XLA's own kernels where there is AVX512-bf16. XLA's default,
    which gives it reductions and element-wise chains too, was no different in turns (docs/benchmarks.md).
    """
    if jax.default_backend() == "cpu":
        return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    return {}
