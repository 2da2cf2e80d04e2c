"""The plan of one config on one topology: a dict of plain numbers (docs/plan.md names every key).

On TPU topologies the real training step is compiled and asked; elsewhere, and for `compile_step=False`, the numbers are a model's
("analytic"). Bytes and seconds are of one device as JAX counts devices and of one step, unless a key says otherwise.
"""

import math
import re
import time

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from gammalm.errors import ConfigError
from gammalm.models.decoder import Model
from gammalm.models.flops import training_flops_per_token
from gammalm.models.kernels import describe
from gammalm.plan import arithmetic, hlo, memory, traffic
from gammalm.plan.topology import Topology
from gammalm.sharding.devices import Device, known
from gammalm.sharding.mesh import AXES, check_batch, mesh_shape, parameter_shardings

# Share of HBM that a run cannot have: what a TPU's runtime keeps; of GPUs what JAX leaves by default (XLA_PYTHON_CLIENT_MEM_FRACTION).
RESERVE = {"tpu": 1 / 64, "gpu": 1 / 4, "cpu": 1 / 4}
SANE = (0.5, 20.0)  # the compiler's time as a multiple of the roofline's


def plan(config, topology: Topology, *, compile_step: bool = True, price: float | None = None, model: Model | None = None) -> dict:
    """What training `config` on `topology` would take; `price` per chip and hour, `model` where it is at hand (its remat does not matter).

    Raises ConfigError where the mesh does not fit the devices, the model or the batch.
    """
    sizes = {**config.mesh.to_dict(), "cell": 1}
    mesh = AbstractMesh(mesh_shape(sizes, topology.count), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    check_batch(config.batch.sequences, config.batch.micro_batches, mesh)
    model = model or Model(config.model)
    device = known(topology.kind) or Device(peak=0.0)
    tokens = config.batch.sequences * config.data.seq_len
    buffers = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(model.buffers))
    held = memory.state(config, model, parameter_shardings(model.specs, mesh), buffers)
    held |= {"batch": memory.batch(config, dict(mesh.shape))}
    active = memory.activations(config, model.specs, dict(mesh.shape), topology.platform, device.capability)
    found = {
        "topology": topology.name,
        "device": topology.kind,
        "devices": topology.count,
        "chips": topology.count // device.per_chip,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "kernels": describe(config, topology.platform, device.capability),
        "remat": config.model.remat,
        "micro_batches": config.batch.micro_batches,
        "parameters": model.parameter_count,
        "tokens_per_step": tokens,
        "steps": config.train.steps,
    }
    if compile_step and topology.devices is not None:
        found |= {"method": "compiled"} | _compiled(config, topology, held, 1 / mesh.shape["expert"])
        found.setdefault("traffic", None)
    else:
        found |= {"method": "analytic", "memory": held | {"activations": sum(active.values()), "activations_by": active}}
        found["flop_per_token"] = traffic.flop_per_token(model, config.data.seq_len, config.model.remat)
        found["traffic"] = {
            "hbm_bytes": traffic.hbm_bytes(config, held, active, dict(mesh.shape)),
            "collectives": traffic.collectives(config, held, dict(mesh.shape)),
            "loops_unknown": 0,
            "opaque": 0,
        }
    _fits(found["memory"], device, topology.platform, active["dense mask"])
    found["model_flop_per_token"] = training_flops_per_token(model, config.data.seq_len)
    found["model_flop_share"] = found["model_flop_per_token"] / found["flop_per_token"]
    if found["traffic"] is not None and device.peak:
        found |= _time(found, device, price)
    return found


def _compiled(config, topology: Topology, held: dict[str, int], filled: float) -> dict:
    """Memory, arithmetic and traffic of the step as its compiler sees it. A program too large for HBM has its size and no traffic.

    `filled`: a device of an expert axis takes as many rows as may come, and this share of them comes where routing is even.
    """
    from gammalm.training.program import Program

    start = time.monotonic()
    program = Program(config, np.zeros(config.model.vocab_size, np.int32), devices=topology.devices)
    traced = program.trace()
    per_token = arithmetic.flops(traced.jaxpr, filled) / (config.batch.sequences * config.data.seq_len)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+)([KMG]) of", str(error))
        if not used:
            raise ConfigError(f"--topology {topology.name}: the step cannot be compiled: {str(error).splitlines()[0][:300]}") from error
        total = float(used[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[used[2]]
        state = sum(held.values())
        return {
            "memory": held | {"activations": max(0.0, total - state)},
            "flop_per_token": per_token,
            "compile_seconds": time.monotonic() - start,
        }
    seconds = time.monotonic() - start
    said = compiled.memory_analysis()
    new_outputs = said.output_size_in_bytes - said.alias_size_in_bytes
    gradients = min(held["gradients"], said.temp_size_in_bytes)
    state = held["parameters"] + held["optimizer"] + held["buffers"]
    text = compiled.as_text()
    moved = hlo.traffic(text, topology.count)
    return {
        "memory": held
        | {
            "gradients": gradients,
            "activations": said.temp_size_in_bytes - gradients,
            "batch": said.argument_size_in_bytes - state,  # and what its layout adds to the state
            "program": said.generated_code_size_in_bytes + new_outputs,
            "arguments": said.argument_size_in_bytes,
            "temporary": said.temp_size_in_bytes,
        },
        "flop_per_token": per_token,
        "traffic": {"hbm_bytes": moved.hbm, "collectives": moved.collectives, "loops_unknown": moved.loops_unknown, "opaque": moved.opaque},
        "compiler_cycles": moved.cycles,
        "program_instructions": moved.instructions,
        "compile_seconds": seconds,
    }


def _fits(m: dict, device: Device, platform: str, mask: float) -> None:
    """Adds to the memory `m` its total, what there is, and whether the one is within the other (None where HBM is not known)."""
    m["dense_mask"] = mask
    m["total"] = sum(m.get(kind, 0) for kind in memory.KINDS)
    m |= {"reserve": None, "available": None, "left": None, "fits": None}
    if device.hbm:
        m["reserve"] = device.hbm * RESERVE[platform]
        m["available"] = device.hbm - m["reserve"]
        m["left"] = m["available"] - m["total"]
        m["fits"] = m["left"] >= 0


def _time(found: dict, device: Device, price: float | None) -> dict:
    """Seconds of a step by what bounds it, and what follows for the run."""
    here = found["tokens_per_step"] / found["devices"]
    sent = sum(bytes_ for _, bytes_ in found["traffic"]["collectives"].values())
    seconds = {
        "arithmetic": found["flop_per_token"] * here / device.peak,
        "hbm": device.hbm_rate and found["traffic"]["hbm_bytes"] / device.hbm_rate,
        "collectives": (device.link_rate and sent / device.link_rate) if sent else 0.0,
    }
    roofline = max(s for s in seconds.values() if s is not None)
    compiler = found.get("compiler_cycles", 0.0) / device.clock if device.clock else None
    if compiler is not None and not SANE[0] * roofline <= compiler <= SANE[1] * roofline:
        compiler = None
    step = max(roofline, compiler or 0.0)
    hours = step * found["steps"] / 3600
    return {
        "seconds": seconds | {"roofline": roofline, "compiler": compiler, "step": step},
        "mfu": found["model_flop_per_token"] * here / step / device.peak,
        "tokens_per_second": found["tokens_per_step"] / step,
        "hours": hours,
        "chip_hours": hours * found["chips"],
        "cost": price and price * hours * found["chips"],
    }
