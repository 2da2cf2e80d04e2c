"""Which kernel computes what on which platform: the one place where it is decided, and the calls of the attention kernels.

Attention is our own blockwise kernel, which XLA compiles everywhere; cuDNN's flash attention on NVIDIA; Pallas splash attention on TPU.
Routed experts have their own backends (experts.py), chosen there and described here.
Over devices each has its own rows, heads and, with a `context` axis, its own part of each sequence: keys and values are then gathered
from the whole sequence, queries stay. Shape legend: parts.py; W size of a value, T queries and S keys of a sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from gammalm.errors import ConfigError
from gammalm.models.blockwise import causal_attention, visible_keys
from gammalm.models.experts import choose_backend
from gammalm.models.parts import BATCH_AXES, Tree, platform

LANES = 128  # splash attention walks over blocks of a multiple of this many tokens
SPLASH_BLOCK = 512  # the longest of them
PREFERRED = {"tpu": "splash", "gpu": "cudnn"}


def head_sizes(c) -> tuple[int, int]:
    """Size of a query or key head, and of a value head, under `config.model`."""
    return (c.mla.nope_dim + c.mla.rope_dim, c.mla.v_dim) if c.attention == "mla" else (c.head_dim, c.head_dim)


def _gpu_generation() -> float:
    """Compute capability of the GPU here; of Hopper where there is none, for devices that are absent; 0 for other makers' GPUs."""
    try:
        found = jax.local_devices(backend="gpu")[0].compute_capability
    except RuntimeError:
        return 9.0
    return float(found) if found.replace(".", "").isdigit() else 0.0


def _refusal(
    name: str, platform: str, dtype, sizes: tuple[int, int], length: int, context: int, generation: float | None, sink: bool
) -> str:
    """Why the kernel `name` does not take this attention; empty where it does. Arguments as in `choose_attention`."""
    if name == "cudnn":
        if platform != "gpu":
            return f"needs an NVIDIA GPU, and this runs on {platform}"
        generation = _gpu_generation() if generation is None else generation
        largest = 256 if generation >= 9 else 128
        if generation < 8:
            return "needs an NVIDIA GPU of compute capability 8.0 or later"
        if sink:
            return "gives no gradient through the softmax's denominator, which model.softmax_sink adds to"
        if jnp.dtype(dtype) != jnp.bfloat16:
            return f"takes bfloat16 alone, and model.dtype is {jnp.dtype(dtype).name}"
        if max(sizes) > largest:
            return f"takes heads of at most {largest} on this GPU, and these have {max(sizes)}"
        if length // context % 2:
            return f"takes an even number of tokens of a sequence on a device alone, and this is {length // context}"
    if name == "splash":
        if platform == "gpu":
            return "is written for TPUs, and this runs on a GPU"
        if context > 1 and length % (LANES * context):
            return f"over mesh.context={context} takes sequence lengths that {LANES * context} divides alone, and this is {length}"
    return ""


def choose_attention(
    name: str, platform: str, dtype, sizes: tuple[int, int], length: int, context: int = 1, generation: float | None = None,
    sink: bool = False,
) -> str:
    """The kernel for a `model.attention_kernel` on a platform of JAX ("cpu", "gpu", "tpu"): blockwise | cudnn | splash.

    `sizes` of query-key and value heads, `length` of a sequence, `context` devices that share one, `generation` the compute capability
    of absent GPUs (None: of those here), `sink` whether the softmax has an extra term (`model.softmax_sink`). "auto" is the platform's own
    kernel where that takes this attention, else `blockwise`. Raises ConfigError where a kernel is asked for by name that does not.
    """
    wanted = PREFERRED.get(platform, "blockwise") if name == "auto" else name
    why = _refusal(wanted, platform, dtype, sizes, length, context, generation, sink)
    if why and name != "auto":
        raise ConfigError(f"model.attention_kernel={name} {why}. Set model.attention_kernel=auto.")
    return "blockwise" if why else wanted


def kernel_of(config, platform: str, generation: float | None = None) -> str:
    """The attention kernel that `config` gets. `platform`, `generation` and errors as of `choose_attention`."""
    c, T, context, sink = config.model, config.data.seq_len, config.mesh.context, config.model.softmax_sink != "none"
    return choose_attention(c.attention_kernel, platform, c.dtype, head_sizes(c), T, context, generation, sink)


def dense_mask_bytes(kernel: str, rows: int, length: int, context: int, packed: bool) -> int:
    """Bytes of the mask [1 or rows, 1, T/c, T] in two bytes each that `kernel` needs on a device; 0 where causal order by name will do.

    `rows` sequences there of `length` T over `context` devices; `packed`: of several documents, which makes a mask of each row.
    """
    if kernel != "cudnn" or not (packed or context > 1):
        return 0
    return (rows if packed else 1) * (length // context) * length * 2


def describe(config, platform: str, generation: float | None = None) -> str:
    """One line that says which kernels a run of `config` uses. `platform` and `generation` as in `choose_attention`."""
    c, T, context = config.model, config.data.seq_len, config.mesh.context
    kernel = kernel_of(config, platform, generation)
    said = f"kernels on {platform}: attention {kernel}"
    if platform == "cpu" and kernel == "splash":
        said += " (interpreted: slow)"
    packed = config.data.packing == "documents"
    if mask := dense_mask_bytes(kernel, 1, T, context, packed):
        said += f" with a dense mask of {mask / 2**20:.1f} MiB" + " per sequence" * packed
    return said + (f", experts {choose_backend(c.moe.backend, platform)}" if c.ffn == "moe" else "")


def _blockwise(q_BTGRK, k_BSGK, v_BSGW, segments, first, sink_GR):
    if isinstance(segments[1], Tree):
        return causal_attention(q_BTGRK, k_BSGK, v_BSGW, None, None, first, sink_GR, segments[1].until_BT)[0]
    return causal_attention(q_BTGRK, k_BSGK, v_BSGW, *segments, first, sink_GR)[0]


def _cudnn(q_BTGRK, k_BSGK, v_BSGW, segments, first, _):
    """The public API knows one head size, no documents and no sink: the smaller of keys and values is padded, documents become a dense
    mask, a sink was refused (`_refusal`)."""
    B, T, G, R, K = q_BTGRK.shape
    S, W = v_BSGW.shape[1], v_BSGW.shape[-1]
    size = -(-max(K, W) // 8) * 8
    q, k, v = (jnp.pad(a, [(0, 0)] * 3 + [(0, size - a.shape[-1])]) for a in (q_BTGRK.reshape(B, T, G * R, K), k_BSGK, v_BSGW))
    mask = None
    if segments[0] is not None or first is not None:
        mask = visible_keys(T, S, 0 if first is None else first, *segments)[:, None]
    # Without a mask cuDNN skips what lies above the diagonal; queries that begin at `first` have another diagonal.
    causal = first is None
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=K**-0.5, is_causal=causal, implementation="cudnn")
    return y[..., :W].reshape(B, T, G, R, W)


def _splash_kernel(heads: int, length: int, pieces: int, interpret: bool):
    """Causal splash attention of one sequence, whose queries lie in `pieces` parts on as many devices."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # half a second that only TPUs need

    block = next(size for size in range(SPLASH_BLOCK, 0, -LANES) if (length // pieces) % size == 0)
    blocks = {name: block for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")}
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    return splash.make_splash_mha(mask, block_sizes=splash.BlockSizes(**blocks), head_shards=1, q_seq_shards=pieces, interpret=interpret)


def _splash(q_BTGRK, k_BSGK, v_BSGW, segments, kernel, sink_GR):
    """Sequences are padded to whole blocks at their end, which no query before it sees. The kernel itself has no scale."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    B, T, G, R, K = q_BTGRK.shape
    q = (q_BTGRK.astype(jnp.float32) * K**-0.5).astype(q_BTGRK.dtype).reshape(B, T, G * R, K)
    lengthen = lambda a: jnp.pad(a, [(0, 0), (0, -a.shape[1] % LANES)] + [(0, 0)] * (a.ndim - 2))  # noqa: E731
    q, k, v = (jnp.moveaxis(lengthen(a), 1, 2) for a in (q, k_BSGK, v_BSGW))
    ids = None if segments[0] is None else SegmentIds(*map(lengthen, segments))
    if kernel is None:
        kernel = _splash_kernel(G * R, q.shape[2], 1, platform() == "cpu")
    sink_H = None if sink_GR is None else sink_GR.reshape(-1)
    y_BHTW = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sink_H)
    return jnp.moveaxis(y_BHTW, 1, 2)[:, :T].reshape(B, T, G, R, -1)


# Each: (q, k, v, (segments of queries, of keys), place, sink_GR or None) -> y. `place` is None where the queries are the whole sequence;
# else what tells the kernel where they lie: the position of the first of them, or for splash the kernel that was made for this device.
KERNELS = {"blockwise": _blockwise, "cudnn": _cudnn, "splash": _splash}


def attend(q_BTGRK, k_BTGK, v_BTGW, segments_BT, name: str, sink_GR=None):
    """Causal softmax attention [B, T, G, R, W] of scores scaled by K^-1/2, within segments where `segments_BT` is given.

    That may be a `Tree` (parts.py), which the blockwise kernel alone knows. `name` is `config.model.attention_kernel`. `sink_GR`, where
    given, is fp32: exp(sink) is added to the denominator of each head. On a mesh B must be a multiple of its batch axes, G of tensor, T of
    context: ValueError from `shard_map` otherwise (gammalm.sharding.mesh checks all of them before a run).
    """
    mesh = jax.sharding.get_abstract_mesh()
    context = mesh.shape.get("context", 1)
    sizes = (q_BTGRK.shape[-1], v_BTGW.shape[-1])
    if isinstance(segments_BT, Tree):
        name = "blockwise"
    name = choose_attention(name, platform(), q_BTGRK.dtype, sizes, q_BTGRK.shape[1], context, sink=sink_GR is not None)
    kernel = KERNELS[name]
    # The compiler itself cuts the blockwise kernel over rows and heads; it can cut no kernel that it does not see into.
    if mesh.empty or mesh.size == 1 or (name == "blockwise" and context == 1):
        return kernel(q_BTGRK, k_BTGK, v_BTGW, (segments_BT, segments_BT), None, sink_GR)

    made, where = None, None
    if name == "splash" and context > 1:
        heads = q_BTGRK.shape[2] * q_BTGRK.shape[3] // mesh.shape["tensor"]
        made = _splash_kernel(heads, q_BTGRK.shape[1], context, platform() == "cpu")
        parts = AbstractMesh((context,), ("context",))  # the mesh itself may be in a `shard_map` over cells, which JAX does not expect here
        where = made.manual_sharding_spec(NamedSharding(parts, PartitionSpec(None, "context")))

    def local(q, k, v, segments, made, sink):
        if context == 1:
            return kernel(q, k, v, (segments, segments), None, sink)
        gather = functools.partial(jax.lax.all_gather, axis_name="context", axis=1, tiled=True)
        k, v, of_keys = jax.tree.map(gather, (k, v, segments))
        place = made if name == "splash" else jax.lax.axis_index("context") * q.shape[1]
        return kernel(q, k, v, (segments, of_keys), place, sink)

    tokens = PartitionSpec(BATCH_AXES, "context", "tensor")
    return jax.shard_map(
        local, in_specs=(tokens, tokens, tokens, PartitionSpec(BATCH_AXES, "context"), where, PartitionSpec("tensor")), out_specs=tokens,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes), check_vma=False,
    )(q_BTGRK, k_BTGK, v_BTGW, segments_BT, made, sink_GR)  # fmt: skip
