"""Bytes of a training step on one device, by kind: what its config alone says.

The state is exact: shapes and shardings of the program. Activations are a model of what the step keeps at its peak, without fragmentation
and padding; where a compiler can be asked, its own figure takes their place.
Shape legend: gammalm/models/parts.py; N tokens of one micro-batch on one device.
"""

import math

import jax

from gammalm.models.kernels import dense_mask_bytes, head_sizes, kernel_of
from gammalm.sharding.mesh import BATCH_AXES
from gammalm.training.optimizer import moments_like
from gammalm.trees import flat, nested

# What a plan's total is the sum of; `program` is known where one was compiled.
KINDS = ("parameters", "optimizer", "buffers", "batch", "gradients", "activations", "program")


def state(config, model, shardings, buffers: int) -> dict[str, int]:
    """Bytes of one device: fp32 parameters, the optimizer's moments, gradients as large as the parameters, and `buffers` with the counters.

    `shardings`: nested as `parameter_shardings` gives them.
    """
    shards = flat(shardings)
    each = {path: 4 * math.prod(shards[path].shard_shape(spec.shape)) for path, spec in model.specs.items()}
    parameters = sum(each.values())
    moments = sum(jax.tree.leaves(moments_like(config, model.specs, nested(each), 0)))
    counters = 4 + 4 + 1 + 16 * (config.optimizer.kind == "muon")  # step, Adam's count, halted; Muon's count and three coefficients
    return {"parameters": parameters, "optimizer": moments, "buffers": buffers + counters, "gradients": parameters}


def batch(config, mesh_shape: dict[str, int]) -> int:
    """Bytes of one device's rows of a step's batch, all micro-batches: int32 tokens, and document ids if packed so, and
    fp32 weights where not all targets count."""
    rows = config.batch.sequences // math.prod(mesh_shape[axis] for axis in BATCH_AXES)
    T = config.data.seq_len
    return rows * 4 * ((T + 1) * (2 if config.data.packing == "documents" else 1) + T * (config.data.loss == "last"))


def whole_layer(specs, pieces: int) -> int:
    """fp32 bytes of one layer's parameters, gathered over fsdp; `pieces` devices still share them (tensor, expert)."""
    stacked = [spec for path, spec in specs.items() if path.startswith("layers/")]
    return sum(4 * math.prod(spec.shape[1:]) for spec in stacked) // pieces


def activations(config, specs, mesh_shape: dict[str, int], platform: str, generation: float | None = None) -> dict[str, int]:
    """Bytes of one device at the step's peak, by what holds them: layer inputs, one layer's own, the loss, gathered weights, masks.

    `platform` and `generation` as in `choose_attention`.
    """
    c, T = config.model, config.data.seq_len
    size = 4 if c.dtype == "float32" else 2
    context, tensor = mesh_shape["context"], mesh_shape["tensor"]
    rows = config.batch.sequences // config.batch.micro_batches // math.prod(mesh_shape[axis] for axis in BATCH_AXES)
    N = rows * T // context
    stream = N * c.d_model * (4 if c.residual_dtype == "float32" else 2)
    qk, value = head_sizes(c)
    heads = c.n_heads * (2 * qk + 2 * value) + (c.n_heads * value if c.gate == "elementwise" else 0)
    if c.ffn == "moe":
        width = 3 * (c.moe.top_k + c.moe.n_shared) * c.moe.d_expert
    else:
        width = (2 if c.ffn == "mlp" else 3) * c.d_ff
    products = N * (heads + width) // tensor * size  # what the matrix products of a layer give out
    inner = products + 4 * N * c.d_model * size  # with normed inputs and branch outputs
    kept = {"none": inner, "dots": products, "full": 0}[c.remat]
    chunk = min(N, c.loss_chunk or N)
    kernel = kernel_of(config, platform, generation)
    scores = 0 if kernel != "blockwise" else 2 * rows * c.n_heads // tensor * max(128, T // 16) * T * 4
    head = c.vocab_size // tensor * c.d_model
    return {
        "layer inputs": c.n_layers * (stream + kept),
        "one layer": 2 * inner + scores,
        "loss": 2 * chunk * c.vocab_size // tensor * 4 + head * (4 + size),
        "gathered weights": 0 if mesh_shape["fsdp"] == 1 else 2 * whole_layer(specs, tensor * mesh_shape["expert"]),
        "dense mask": dense_mask_bytes(kernel, rows, T, context, config.data.packing == "documents"),
    }
