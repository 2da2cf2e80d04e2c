"""Arithmetic and bytes of a training step on one device as its config alone says: for hardware that nothing here compiles for.

A model of the traffic, within about a factor of two; what a compiler says (hlo.py) takes its place where there is one.
"""

from gammalm.models.flops import training_flops_per_token, without_product
from gammalm.models.kernels import head_sizes


def flop_per_token(model, seq_len: int, remat: str) -> float:
    """Model FLOP and what is computed twice: under `full` every layer's forward pass, under `dots` its attention."""
    c = model.config
    training = training_flops_per_token(model, seq_len)
    head = 6 * c.vocab_size * c.d_model
    attention = training - 6 * (model.active_parameter_count - without_product(model))
    again = {"none": 0.0, "dots": attention / 3, "full": (training - head) / 3}
    return training + again[remat]


def _gathered(held: dict[str, int], mesh_shape: dict[str, int], bytes_each: int) -> float:
    """Bytes of a device's parameters once they are gathered over fsdp. `held` is of memory.state, fp32."""
    return held["parameters"] / 4 * mesh_shape["fsdp"] * bytes_each


def _passes(remat: str) -> int:
    """Passes over the weights of all layers: forward, recomputed, backward."""
    return 2 if remat == "none" else 3


def collectives(config, held: dict[str, int], mesh_shape: dict[str, int]) -> dict[str, list[float]]:
    """Kind -> [count, bytes that one device sends]; `held` is of memory.state.

    Over fsdp weights are gathered in the compute dtype for each pass over them and gradients scattered in fp32; over data gradients are
    summed (over expert too, except those of experts, which is left out here); over tensor the two branches of each layer are summed in
    every pass; over context keys and values are gathered in every pass, and what is sent back of them is as much as one more; over expert
    tokens go to where their experts are and back.
    """
    c, M, layers = config.model, config.batch.micro_batches, config.model.n_layers
    size = 4 if c.dtype == "float32" else 2
    fsdp, data, tensor, expert, context = (mesh_shape[axis] for axis in ("fsdp", "data", "tensor", "expert", "context"))
    passes = _passes(c.remat)
    rows = config.batch.sequences // M // (data * fsdp * expert)
    tokens = rows * config.data.seq_len // context
    stream = tokens * c.d_model * size
    count, sent = {}, {}

    def add(kind: str, times: int, bytes_: float) -> None:
        count[kind], sent[kind] = count.get(kind, 0) + times, sent.get(kind, 0.0) + bytes_

    if fsdp > 1:
        share = (fsdp - 1) / fsdp
        add("all-gather", passes * M * layers, passes * M * _gathered(held, mesh_shape, size) * share)
        add("reduce-scatter", M * layers, M * _gathered(held, mesh_shape, 4) * share)
    if context > 1:
        kv_heads = c.n_heads if c.attention == "mla" else c.n_kv_heads
        of_layer = tokens * kv_heads // tensor * sum(head_sizes(c)) * size * (context - 1)  # a device sends its part to all others
        add("all-gather", (passes - 1) * M * layers, (passes - 1) * M * layers * of_layer)
        add("reduce-scatter", M * layers, M * layers * of_layer)
    if data > 1:
        add("all-reduce", M * layers, M * 2 * held["gradients"] * (data - 1) / data)
    if tensor > 1:
        add("all-reduce", 2 * passes * M * layers, 2 * passes * M * layers * 2 * stream * (tensor - 1) / tensor)
    if expert > 1:
        exchanged = stream * min(c.moe.top_k, expert) * (expert - 1) / expert
        add("all-to-all", 2 * passes * M * layers, 2 * passes * M * layers * exchanged)
    return {kind: [count[kind], sent[kind]] for kind in count}


def hbm_bytes(config, held: dict[str, int], active: dict[str, int], mesh_shape: dict[str, int]) -> float:
    """Bytes of HBM read and written by one device: the optimizer's pass, weights for each pass over them, activations in and out.

    `held` and `active` are of memory.state and memory.activations.
    """
    c, M = config.model, config.batch.micro_batches
    optimizer = 2 * (held["parameters"] + held["optimizer"]) + 2 * held["gradients"]
    weights = M * _passes(c.remat) * _gathered(held, mesh_shape, 4 if c.dtype == "float32" else 2)
    streams = M * (2 * active["layer inputs"] + _passes(c.remat) * c.n_layers * active["one layer"])
    return optimizer + weights + streams
