"""What is known of device kinds, by the names that JAX gives them: figures of the makers' tables, and what hangs together."""

from types import SimpleNamespace

import jax
import pytest

from gammalm.sharding import devices
from gammalm.sharding.devices import DEVICES, compiler_options, known


@pytest.mark.parametrize(
    "kind, peak, hbm, rate",
    [
        ("TPU v5 lite", 197e12, 16 * 2**30, 819e9),
        ("TPU v5", 459e12, 95 * 2**30, 2765e9),
        ("TPU v6 lite", 918e12, 32 * 2**30, 1638e9),
        ("TPU7x", 2307e12 / 2, 96 * 2**30, 7380e9 / 2),
        ("NVIDIA H100 80GB HBM3", 989e12, 80 * 2**30, 3350e9),
        ("NVIDIA H200", 989e12, 141 * 2**30, 4800e9),
        ("NVIDIA GH200 480GB", 989e12, None, None),
    ],
)
def test_figures(kind, peak, hbm, rate):
    found = known(kind)
    assert (found.peak, found.hbm, found.hbm_rate) == (peak, hbm, rate)


def test_what_is_not_known_is_none():
    assert known("cpu") is None and known("TPU v99") is None and known("NVIDIA Something") is None


def test_figures_hang_together():
    """Links are slower than memory, a matrix unit does a power of two of FLOP in a cycle, and a chip is one device or two."""
    for name, d in DEVICES.items():
        assert d.link_rate is None or d.link_rate < d.hbm_rate, name
        assert d.per_chip in (1, 2)
        if d.clock:
            per_cycle = d.peak / d.clock / 2**17
            assert per_cycle == pytest.approx(round(per_cycle), rel=0.01) and round(per_cycle) in (1, 2, 4), name


LATENCY = "xla_gpu_enable_latency_hiding_scheduler"


def test_options_for_several_devices():
    assert compiler_options("gpu", 1) == {} and compiler_options("gpu", 2) == {LATENCY: True}
    assert compiler_options("tpu", 2) == {} and compiler_options("cpu", 2) == compiler_options("cpu", 1)


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_what_the_user_sets_is_left_to_the_user(variable, monkeypatch):
    monkeypatch.setenv(variable, f"--xla_other=1 --{LATENCY}=false")
    assert compiler_options("gpu", 2) == {} and compiler_options("cpu") != {}


def test_what_xla_does_not_know_is_left_out(monkeypatch):
    """As an older or newer XLA may not: the program compiles without."""
    monkeypatch.setitem(devices.OPTIONS, "cpu", {"xla_no_such_option": devices.Option(True, ""), **devices.OPTIONS["cpu"]})
    assert "xla_no_such_option" not in compiler_options("cpu") != {}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x, compiler_options={"xla_no_such_option": True}).lower(0.0).compile()


def test_devices_are_described_with_their_peak():
    assert devices.describe([SimpleNamespace(device_kind="TPU v5 lite")] * 8) == "8 × TPU v5 lite, peak 197 TFLOP/s each (dense bf16)"
    assert devices.describe([SimpleNamespace(device_kind="cpu")]) == "1 × cpu, peak unknown"


def test_options_are_those_of_the_platform_compiled_for():
    assert compiler_options("tpu") == compiler_options("gpu") == {}
    assert compiler_options("cpu") == compiler_options() != {}
