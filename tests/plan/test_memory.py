"""Bytes by kind: the state against the arrays of a real run, activations by what must make them grow."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gammalm.config import load_config, validate
from gammalm.plan.estimate import plan
from gammalm.plan.topology import Topology, load
from gammalm.training.program import Program

from ..models.reference import small_config

SMALL = "lm:vocab=64,seq_len=256,batch=8,steps=10,gate=none"


@pytest.mark.parametrize("mesh", [dict(fsdp=4, data=2), dict(tensor=2, fsdp=2, data=2), dict(fsdp=1, data=8)])
@pytest.mark.parametrize("ffn, kind", [("dense", "adamw"), ("moe", "muon")])
def test_the_state_is_that_of_a_run(mesh, ffn, kind):
    config = small_config(SMALL, ffn=ffn, n_kv_heads=2, optimizer__kind=kind, **{f"mesh__{axis}": size for axis, size in mesh.items()})
    memory = plan(config, Topology("cpu:8", "cpu", "cpu", 8))["memory"]
    state = Program(config, np.ones(64, np.int32)).abstract_state  # what a run's state is made as

    def held(tree):
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))

    assert memory["parameters"] == memory["gradients"] == held(state["params"])
    muon = [state["muon"]] if kind == "muon" else []
    assert memory["optimizer"] == held([state["adam"].mu, state["adam"].nu, *(m.mu for m in muon)])
    count = [state["adam"].count, *((m.count, m.ns_coeffs) for m in muon)]
    assert memory["buffers"] == held([state["buffers"], state["step"], state["halted"], count])
    assert memory["total"] == sum(memory[k] for k in ("parameters", "optimizer", "buffers", "batch", "gradients", "activations"))
    assert memory["batch"] == 257 * 4 * 8 // math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp"))


def large(**changes):
    named = [(name.replace("__", ".") if "__" in name else f"model.{name}", str(value)) for name, value in changes.items()]
    return validate(load_config("lm:size=1.5b,batch=64", named))


def activations(topology="h100:8", **changes):
    return plan(large(mesh__data=8, **changes), load(topology))["memory"]["activations"]


def test_what_makes_activations_grow():
    assert activations(remat="full") < activations(remat="dots") < activations(remat="none")
    assert activations(batch__micro_batches=2) < activations() / 1.5
    assert activations(residual_dtype="float32") > activations()


def test_a_dense_document_mask_is_counted_where_the_kernel_needs_one():
    """cuDNN takes documents as a mask of T x T numbers per sequence; the blockwise kernel takes ids."""
    found = {}
    for kernel in ("cudnn", "blockwise"):
        for packing in ("concat", "documents"):
            config = large(mesh__data=8, data__packing=packing, attention_kernel=kernel)
            found[kernel, packing] = plan(config, load("h100:8"))["memory"]
    assert found["cudnn", "documents"]["dense_mask"] == 8 * 2048 * 2048 * 2
    ids = 8 * 2049 * 4
    assert found["cudnn", "documents"]["total"] - found["cudnn", "concat"]["total"] == 8 * 2048 * 2048 * 2 + ids
    assert found["blockwise", "documents"]["dense_mask"] == found["cudnn", "concat"]["dense_mask"] == 0
    cut = plan(large(mesh__data=2, mesh__context=4, attention_kernel="cudnn"), load("h100:8"))["memory"]
    assert cut["dense_mask"] == 512 * 2048 * 2, "one for all rows: queries of a part of the sequence have a diagonal of their own"


def test_a_plan_does_not_ask_the_gpu_that_is_here(monkeypatch):
    """Heads of 192 go to cuDNN on Hopper, whatever makes the plan."""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(compute_capability="8.0")])
    found = plan(load_config("lm:size=moe-3b-a0.5b,attention=mla,packing=documents"), load("h100:8"))
    assert "attention cudnn" in found["kernels"] and found["memory"]["dense_mask"] > 0


def test_fits_by_how_much():
    """16 bytes a parameter on one device of 141 GiB, of which a quarter is not JAX's."""
    memory = plan(large(mesh__data=1, batch__micro_batches=64), load("h200:1"))["memory"]
    assert memory["parameters"] + memory["optimizer"] + memory["gradients"] == 16 * 1_509_263_360
    assert memory["available"] == 0.75 * 141 * 2**30 and memory["left"] == memory["available"] - memory["total"]
    assert memory["fits"] is True
    memory = plan(large(mesh__data=1, remat="none"), load("h100:1"))["memory"]
    assert memory["fits"] is False and memory["left"] < 0
