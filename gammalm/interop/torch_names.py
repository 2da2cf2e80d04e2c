"""What the tensors of a PyTorch model are, by the names that transformers gives them, and by their shapes where names do not say enough.

torch's Linear is [out, in], an embedding [vocabulary, width]; GPT-2's Conv1D is [in, out]. Side by side lie: q, k and v in Conv1D's columns
(c_attn), head by head (query_key_value) or one after another (qkv_proj); gate and up (gate_up_proj). Experts are apart, or stacked
[experts, out, in], or [experts, in, out] (transformers 5.24: gpt_oss, llama4). Source of names: transformers 5.24, models/*/modeling_*.py.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from gammalm.interop.layouts import Matrix, Weights, piece, same_numbers, vector
from gammalm.interop.mapped import Tensor

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
NAMES = {  # the last part of a name, without .weight -> kind
    "embed_tokens": "embed", "wte": "embed", "embed_in": "embed", "tok_embeddings": "embed", "word_embeddings": "embed",
    "wpe": "position", "embed_positions": "position", "position_embeddings": "position",
    "lm_head": "head", "embed_out": "head",
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "out_proj": "out", "wq": "q", "wk": "k", "wv": "v",
    "q_a_proj": "q_down", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b_proj": "kv_up",
    "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv", "W_pack": "qkv", "Wqkv": "qkv",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "gate_up_proj": "ffn_gate_up",
    "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down", "fc1": "ffn_up", "fc2": "ffn_down", "fc_in": "ffn_up", "fc_out": "ffn_down",
    "dense_h_to_4h": "ffn_up", "dense_4h_to_h": "ffn_down", "c_fc": "ffn_up", "router": "router", "gate": "router",
    "input_linear": "ffn_gate_up", "output_linear": "ffn_down",
}  # fmt: skip
CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")  # of GPT-2; others give Linears the same names, and shapes tell
INPUTS_FIRST = ("gpt_oss", "llama4", "llama4_text")  # whose stacked experts are [experts, in, out]
ATTENDS = re.compile(r"attn|attention", re.IGNORECASE)
BUFFERS = re.compile(r"inv_freq|position_ids$|num_batches_tracked$|masked_bias$")  # of no weights
SCALES = re.compile(r"[._]scales?(?:_inv|_weight)?$")  # what quantized numbers are multiplied by; before it: whose
SENSES = re.compile(r"(?:^|\.)(?:vision|visual|image|audio)[a-z_]*\.")  # what reads images or sound, beside a language model
NORM = re.compile(r"norm|(?:^|[._])ln(?:[._]|$|_?\d)", re.IGNORECASE)


class Known(NamedTuple):
    """What config.json says that names do not: its model_type, width, heads, key heads and size of a head (0: not said), tied head or not
    (None: not said)."""

    model_type: str = ""
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool | None = None


def read_torch(tensors: list[Tensor], known: Known = Known()) -> Weights:  # noqa: B008  (immutable)
    """The matrices and vectors of a state dict. A head that is the embedding once more is left out, and a note says so."""
    found = Weights([], [], {}, [])
    width = known.width or next((t.shape[1] for t in tensors if len(t.shape) == 2 and _kind(t.name) == "embed"), 0)
    conv1d = _is_conv1d(tensors)
    scaled = {SCALES.sub("", t.name) for t in tensors if SCALES.search(t.name)}
    senses = {t.name for t in tensors if SENSES.search(t.name)}
    senses = senses if len(senses) < len(tensors) else set()
    for tensor in tensors:
        aside = tensor.name in senses
        layer = None if aside else re.search(LAYER, tensor.name)
        layer = int(layer[1]) if layer else None
        if BUFFERS.search(tensor.name) or (len(tensor.shape) > 1 and tensor.name.endswith((".attn.bias", ".attention.bias"))):
            continue
        if tensor.open is None:
            found.unread[tensor.name] = f"its dtype {tensor.dtype} holds no weights as they stand"
        elif tensor.dtype.startswith("F8") and scaled & {tensor.name, tensor.name.removesuffix(".weight")}:
            found.unread[tensor.name] = f"its {tensor.dtype} numbers are weights only with the scales beside them"
        elif len(tensor.shape) > 1 and SCALES.search(tensor.name):
            found.unread[tensor.name] = "it holds scales of quantized numbers"
        elif len(tensor.shape) < 2:
            if tensor.size > 1:
                kind = "bias" if tensor.name.endswith("bias") else "gain" if NORM.search(tensor.name) else "other"
                found.vectors.append(vector(tensor, layer, kind))
        elif "experts" in tensor.name and tensor.name.endswith("_bias"):  # of stacked experts
            found.vectors.append(vector(tensor, layer, "bias"))
        elif 0 in tensor.shape:
            found.unread[tensor.name] = "it is empty"
        else:
            matrices = _matrices(tensor, layer, known, width, conv1d)
            found.matrices += (dataclasses.replace(m, kind="other") for m in matrices) if aside else matrices
    _drop_tied(found, known.tied)
    return found


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _kind(name: str) -> str:
    leaf = _leaf(name)
    if leaf in ("c_proj", "wo", "dense") and ATTENDS.search(name):
        return "out"
    if leaf == "dense":  # of BERT and its kin, whose other Linears are called so too
        return "ffn_up" if "intermediate" in name else "ffn_down" if ".output." in name else "other"
    if leaf in ("c_proj", "wo"):
        return "ffn_down"
    if leaf.endswith("put_linear") and ATTENDS.search(name):  # experts of JetMoE's attention
        return "other"
    if leaf == "weight" or (leaf == "output" and name.count(".") == 1):  # the head of Llama's own checkpoints
        return "head" if leaf == "output" else "other"
    return NAMES.get(leaf, "other")


def _is_conv1d(tensors: list[Tensor]) -> bool:
    """Whether c_attn, which is three times as wide as the model, has its inputs along the rows."""
    shapes = [t.shape for t in tensors if _leaf(t.name) == "c_attn" and len(t.shape) == 2]
    return bool(shapes) and shapes[0][1] == 3 * shapes[0][0]


def _matrices(tensor: Tensor, layer: int | None, known: Known, width: int, conv1d: bool) -> Iterator[Matrix]:
    name, shape, kind = tensor.name, tensor.shape, _kind(tensor.name)
    leaf = _leaf(name)
    expert = re.search(EXPERT, name)
    expert = int(expert[1]) if expert else None
    if len(shape) == 3 and kind != "other" and ("experts" in name or leaf in ("input_linear", "output_linear")):
        yield from _stacked(tensor, kind, layer, known, width)
    elif (len(shape) == 3 and "conv" not in name) or (kind == "other" and "weight" not in name.rpartition(".")[2]):
        unsaid = f"nothing says which axes of {list(shape)} are inputs"
        yield piece(tensor, name, kind, inputs=None, layer=layer, expert=expert, unsaid=unsaid)
    elif len(shape) > 2:  # a convolution of torch: [out, in, window...]
        yield piece(tensor, name, kind, inputs="columns", layer=layer, rows=shape[0])
    elif conv1d and leaf in CONV1D:
        third = shape[1] // 3
        parts = "qkv" if leaf == "c_attn" and shape[1] == 3 * shape[0] else ""  # beside cross-attention it is k and v alone
        for i, part in enumerate(parts):
            at = (slice(None), slice(i * third, (i + 1) * third))
            yield piece(tensor, f"{name}[{part}]", part, inputs="rows", layer=layer, at=at)
        if not parts:
            yield piece(tensor, name, kind, inputs="rows", layer=layer)
    elif kind == "ffn_gate_up":
        yield from _side_by_side(tensor, {"gate": "ffn_gate", "up": "ffn_up"}, [shape[0] // 2] * 2, layer, expert)
    elif kind == "qkv":
        yield from _fused(tensor, leaf, layer, known)
    elif leaf == "q_proj" and known.model_type == "qwen3_next" and known.heads and known.head_dim:
        heads, size = known.heads, known.head_dim  # each head's queries and its gate lie side by side
        if shape[0] == 2 * heads * size:
            for i, part in enumerate(("q", "gate")):
                at = (slice(None), i)
                yield piece(tensor, f"{name}[{part}]", part, inputs="columns", layer=layer, view=(heads, 2, size, shape[1]), at=at)
        else:
            yield piece(tensor, name, kind, inputs="columns", layer=layer)
    else:
        yield piece(tensor, name, kind, inputs="columns", layer=layer, expert=expert)


def _side_by_side(tensor: Tensor, parts: dict[str, str], rows: list[int], layer, expert, lead: tuple = ()) -> Iterator[Matrix]:
    """Matrices one after another along the outputs of [..., out, in]."""
    start = 0
    for (part, kind), count in zip(parts.items(), rows, strict=True):
        at = (*lead, slice(start, start + count))
        yield piece(tensor, f"{tensor.name}[{part}]", kind, inputs="columns", layer=layer, expert=expert, at=at)
        start += count


def _fused(tensor: Tensor, leaf: str, layer, known: Known) -> Iterator[Matrix]:
    """q, k and v of one Linear, where the config says how they lie; else the whole, whose fan-in is that of each."""
    rows, columns = tensor.shape
    heads, groups, size = known.heads, known.kv_heads or known.heads, known.head_dim
    if leaf == "query_key_value" and known.model_type == "gpt_neox" and heads and rows % (3 * heads) == 0:
        for i, part in enumerate("qkv"):
            view, at = (heads, 3, rows // (3 * heads), columns), (slice(None), i)
            yield piece(tensor, f"{tensor.name}[{part}]", part, inputs="columns", layer=layer, view=view, at=at)
    elif leaf in ("qkv_proj", "c_attn") and heads and size and rows == (heads + 2 * groups) * size:
        yield from _side_by_side(tensor, {"q": "q", "k": "k", "v": "v"}, [heads * size, groups * size, groups * size], layer, None)
    else:
        yield piece(tensor, tensor.name, "qkv", inputs="columns", layer=layer)


def _stacked(tensor: Tensor, kind: str, layer, known: Known, width: int) -> Iterator[Matrix]:
    """Each expert of [experts, a, b]; the model's width, or else the family, says which of the two is the input."""
    experts, a, b = tensor.shape
    reads = kind != "ffn_down"  # the stream, whose width is the model's; down writes into it
    if a != b and width in (a, b):
        inputs = "columns" if (b == width) == reads else "rows"
    elif known.model_type:
        inputs = "rows" if known.model_type in INPUTS_FIRST else "columns"
    else:
        inputs = None
    for expert in range(experts):
        if kind == "ffn_gate_up" and inputs == "columns":
            yield from _side_by_side(tensor, {"gate": "ffn_gate", "up": "ffn_up"}, [a // 2] * 2, layer, expert, (expert,))
        else:
            unsaid = "" if inputs else f"[{a}, {b}] may be [out, in] or [in, out], and no config.json says which"
            yield piece(tensor, tensor.name, kind, inputs=inputs, layer=layer, expert=expert, at=(expert,), unsaid=unsaid)


def _drop_tied(found: Weights, tied: bool | None) -> None:
    """Leaves out a head that holds the embedding's numbers. `tied`: what the config says; stored numbers decide."""
    embeddings = [m for m in found.matrices if m.kind == "embed"]
    heads = [m for m in found.matrices if m.kind == "head"]
    if len(embeddings) == 1 and not heads and tied is not False:
        verb = "is" if tied else "may be"
        found.notes.append(f"There is no head of its own: {embeddings[0].name} {verb} the output matrix too (tied); both read the width.")
    if len(embeddings) == len(heads) == 1 and same_numbers(embeddings[0], heads[0]):
        found.matrices.remove(heads[0])
        found.notes.append(f"{heads[0].name} holds the numbers of {embeddings[0].name} (tied): it is shown once.")
