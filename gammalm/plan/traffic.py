"""Arithmetic and bytes of a training step on one device as its config alone says: for hardware that nothing here compiles for.

A model of the traffic, within about a factor of two; what a compiler says (hlo.py) takes its place where there is one.
"""

import math

from gammalm.models.flops import training_flops_per_token


def flop_per_token(model, seq_len: int, remat: str) -> float:
    """Model FLOP and what is computed twice: under `full` every layer's forward pass, under `dots` its attention."""
    c = model.config
    training = training_flops_per_token(model, seq_len)
    head = 6 * c.vocab_size * c.d_model
    attention = training - 6 * (model.active_parameter_count - _outside(model))
    again = {"none": 0.0, "dots": attention / 3, "full": (training - head) / 3}
    return training + again[remat]


def _outside(model) -> int:
    roles = {"norm"} if model.config.tie_embeddings else {"norm", "embed"}
    return sum(math.prod(spec.shape) for spec in model.specs.values() if spec.role in roles)


def collectives(config, parameters: int, mesh_shape: dict[str, int]) -> dict[str, list[float]]:
    """Kind -> [count, bytes that one device sends]. `parameters` in all.

    Over fsdp weights are gathered in the compute dtype for each pass over them and gradients scattered in fp32; over data gradients are
    summed; over tensor the two branches of each layer are summed, forward, recomputed and backward.
    """
    c, M, layers = config.model, config.batch.micro_batches, config.model.n_layers
    size = 4 if c.dtype == "float32" else 2
    fsdp, data, tensor, expert = (mesh_shape[axis] for axis in ("fsdp", "data", "tensor", "expert"))
    passes = 2 if c.remat == "none" else 3
    rows = config.batch.sequences // M // (data * fsdp * expert)
    stream = rows * config.data.seq_len // mesh_shape["context"] * c.d_model * size
    here = parameters / (tensor * expert)
    found = {}
    if fsdp > 1:
        share = (fsdp - 1) / fsdp
        found["all-gather"] = [passes * M * layers, passes * M * here * size * share]
        found["reduce-scatter"] = [M * layers, M * here * 4 * share]
    sums = [0.0, 0.0]
    if data > 1:
        sums = [M * layers, M * 2 * here / fsdp * 4 * (data - 1) / data]
    if tensor > 1:
        sums = [sums[0] + 2 * passes * M * layers, sums[1] + 2 * passes * M * layers * 2 * stream * (tensor - 1) / tensor]
    if sums[0]:
        found["all-reduce"] = sums
    if expert > 1:
        exchanged = stream * min(c.moe.top_k, expert) * (expert - 1) / expert
        found["all-to-all"] = [2 * passes * M * layers, 2 * passes * M * layers * exchanged]
    return found


def hbm_bytes(config, parameters: int, held: dict[str, int], active: dict[str, int], mesh_shape: dict[str, int]) -> float:
    """Bytes of HBM read and written by one device: the optimizer's pass, weights for each pass over them, activations in and out.

    `held` and `active` are of memory.state and memory.activations.
    """
    c, M = config.model, config.batch.micro_batches
    passes = 2 if c.remat == "none" else 3
    optimizer = 2 * (held["parameters"] + held["optimizer"]) + 2 * held["gradients"]
    weights = M * passes * parameters / (mesh_shape["tensor"] * mesh_shape["expert"]) * (4 if c.dtype == "float32" else 2)
    streams = M * (2 * active["layer inputs"] + passes * c.n_layers * active["one layer"])
    return optimizer + weights + streams
