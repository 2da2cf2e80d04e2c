"""What the arrays of a JAX checkpoint are, by the names of Flax, Haiku, MaxText and the like, and by their shapes.

A kernel multiplies from the right: [in, out], for attention [in, heads, size], and [heads, size, out] where it writes. An embedding is
[vocabulary, width]. Layers may be stacked on an axis of every array below one name: a norm's gains, which are vectors in one layer, show
which axis. What stays open is said, not guessed.
"""

import re

from gammalm.interop.layouts import Matrix, Weights, piece, vector
from gammalm.interop.mapped import Tensor

NOT_WEIGHTS = re.compile(r"(?:^|/)(?:opt_state|optimizer|adam|mu|nu|ema|step|count|rng|rngs|batch_stats|buffers)(?:/|$)")
VECTORS = ("scale", "bias", "gain", "offset", "b")
READS = {  # part of a path -> kind of a matrix that reads the stream
    "q": "q", "query": "q", "q_proj": "q", "wq": "q", "k": "k", "key": "k", "k_proj": "k", "wk": "k", "v": "v", "value": "v",
    "v_proj": "v", "wv": "v", "gate_proj": "ffn_gate", "wi_0": "ffn_gate", "up_proj": "ffn_up", "wi_1": "ffn_up", "wi": "ffn_up",
    "up": "ffn_up", "w1": "ffn_gate", "w3": "ffn_up", "c_fc": "ffn_up", "lm_head": "head", "logits_dense": "head", "unembed": "head",
    "router": "router", "qkv": "qkv", "c_attn": "qkv", "gate": "gate",
}  # fmt: skip
WRITES = {"out": "out", "o_proj": "out", "out_proj": "out", "wo": "ffn_down", "o": "out", "down_proj": "ffn_down", "down": "ffn_down",
          "w2": "ffn_down", "c_proj": "out"}  # fmt: skip
EMBEDDINGS = ("embedding", "embed", "token_embedder", "embed_tokens", "wte", "embedder", "input_embedding", "table")
BY_HEAD = ("q", "k", "v", "qkv", "gate", "out")  # kinds of three axes; of others the first may count experts
STACKED = re.compile(r"(?:^|/)(?:[a-z_]*layers|blocks|h)(?:/|$)")
NUMBERED = re.compile(r"(?:^|/)(?:[a-z_]*layers?|blocks?|h)[/_](\d+)(?:/|$)")


def read_jax(tensors: list[Tensor]) -> Weights:
    """The matrices and vectors of a tree of arrays; what an optimizer or a counter keeps is passed over."""
    found = Weights([], [], {}, [])
    params = [t for t in tensors if "params" in t.name.split("/") and not NOT_WEIGHTS.search(t.name)]
    params = params or [t for t in tensors if not NOT_WEIGHTS.search(t.name)]
    if len(params) < len(tensors):
        found.notes.append(f"{len(tensors) - len(params)} arrays of an optimizer and the like were passed over.")
    axis, layers = _layer_axis(params)
    for tensor in params:
        number = NUMBERED.search(tensor.name)
        layer = int(number[1]) if number else None
        stacked = layer is None and layers and bool(STACKED.search(tensor.name))
        stacked = stacked and len(tensor.shape) > axis and tensor.shape[axis] == layers
        if tensor.open is None:
            found.unread[tensor.name] = f"its dtype {tensor.dtype} holds no weights as they stand"
            continue
        places = [(i, (*[slice(None)] * axis, i)) for i in range(layers)] if stacked else [(layer, ())]
        dims = len(tensor.shape) - stacked
        if layer is None and not stacked and dims > 2 and STACKED.search(tensor.name):
            dims = 0  # one axis of it counts layers, and nothing says which
        last = _parts(tensor.name)[1]
        for index, at in places if tensor.size > 1 else []:
            if dims != 1 and len(tensor.shape) > 1 and last not in VECTORS:  # a bias or a gain of [heads, size] is no matrix
                found.matrices.append(_matrix(tensor, index, at, dims))
            elif len(tensor.shape) > stacked:
                kind = "bias" if last in ("bias", "b", "offset") else "gain" if last in VECTORS or "norm" in tensor.name else "other"
                found.vectors.append(vector(tensor, index, kind, at))
    return found


def _layer_axis(tensors: list[Tensor]) -> tuple[int, int]:
    """(axis, number of layers) of stacked layers; (0, 0) where none are seen. A norm's gains have that axis and the model's width."""
    widths = {t.shape[1] for t in tensors if len(t.shape) == 2 and set(_parts(t.name)[0]) & set(EMBEDDINGS)}
    for t in tensors:
        if len(t.shape) == 2 and STACKED.search(t.name) and not NUMBERED.search(t.name) and "norm" in t.name.lower():
            axes = [axis for axis in (0, 1) if t.shape[1 - axis] in widths and t.shape[axis] not in widths]
            if len(axes) == 1:
                return axes[0], t.shape[axes[0]]
    return 0, 0


def _parts(name: str) -> tuple[list[str], str]:
    """(parts of a path from the last to the first, the last that names something)."""
    parts = name.split("/")
    if len(parts) > 1 and parts[-1] in ("value", "raw_value"):  # NNX wraps an array so
        parts.pop()
    return parts[::-1], parts[-1]


def _matrix(tensor: Tensor, layer: int | None, at: tuple, dims: int) -> Matrix:
    shape = list(tensor.shape)
    if at:
        shape.pop(len(at) - 1)
    parts = _parts(tensor.name)[0]
    named = next((part for part in parts if part in READS or part in WRITES), "")
    kind = READS.get(named) or WRITES.get(named) or "other"
    if named in ("wo", "c_proj", "gate"):  # attention's in some libraries, the feed-forward layer's in others
        attends = re.search(r"attention|attn", tensor.name)
        kind = ("gate" if attends else "ffn_gate") if named == "gate" else "out" if attends else "ffn_down"
    place = dict(layer=layer, at=at)
    if dims == 2 and not named and (set(parts[:3]) & set(EMBEDDINGS)):
        kind = "position" if re.search(r"pos|wpe", tensor.name) else "embed"
        return piece(tensor, tensor.name, kind, inputs="columns", **place)
    if dims == 2 and (named or parts[0] in ("kernel", "w")):
        return piece(tensor, tensor.name, kind, inputs="rows", **place)
    if dims == 3 and named in READS and kind in BY_HEAD:
        return piece(tensor, tensor.name, kind, inputs="rows", rows=shape[0], **place)
    if dims == 3 and named in WRITES and kind in BY_HEAD:
        return piece(tensor, tensor.name, kind, inputs="rows", rows=shape[0] * shape[1], **place)
    why = f"nothing says which axes of {shape} are inputs"
    return piece(tensor, tensor.name, kind, inputs=None, unsaid=why, **place)
