"""Which tensor of a Hugging Face checkpoint holds which of our parameters, and how its numbers are arranged.

One table serves every family of transformers, because the names follow from what a model has: `entries` lists them for one
`config.model`. An entry is reversible: `pack` makes the Hugging Face tensor from ours, `unpack` gives ours back, bit for bit.
Ours are stacked over layers and multiply from the right ([…in, …out]); theirs are one per layer and [out, in].
Shape legend: gammalm/models/parts.py; E experts.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gammalm.interop import gpt2, portable
from gammalm.models.decoder import Model
from gammalm.trees import flat


class Part(NamedTuple):
    """One of our arrays, or one layer (and expert) of a stack: `index` into the array at `path`, and the shape of what it picks."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor called `name` in the checkpoint: `parts`, which differ in their last axis alone, side by side along that axis.

    With `matrix` each part is a matrix first, that many axes by the rest (0: a vector), and they are side by side as such, not transposed.
    Else `inputs` of their axes, after the first `batch`, are the inputs of a matrix, which is stored transposed; 0: stored as it is.
    The last `rope` channels are stored interleaved (x0, x_{r/2}, x1, …), ours are half-split. `centred`: stored as gain − 1.
    `wide`: fp32 in every checkpoint (transformers keeps the router so).
    """

    name: str
    parts: tuple[Part, ...]
    inputs: int = 0
    batch: int = 0
    rope: int = 0
    centred: bool = False
    wide: bool = False
    matrix: int | None = None

    @property
    def joined(self) -> tuple[int, ...]:
        """Shape of the parts side by side, in our order of axes."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        if self.matrix is not None:
            rows = (math.prod(self.parts[0].shape[: self.matrix]),) if self.matrix else ()
            return (*rows, sum(self._columns()))
        if not self.inputs:
            return self.joined
        inner = self.batch + self.inputs
        return (*self.joined[: self.batch], math.prod(self.joined[inner:]), math.prod(self.joined[self.batch : inner]))

    def _columns(self) -> list[int]:
        """Of each part as a matrix."""
        return [math.prod(part.shape[self.matrix :]) for part in self.parts]

    def _order(self) -> np.ndarray:
        """Our channel that each stored channel is."""
        plain = self.joined[-1] - self.rope
        return np.concatenate([np.arange(plain), plain + np.arange(self.rope).reshape(2, -1).T.ravel()])

    def pack(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The stored tensor of the parts' arrays; a view where that is possible."""
        if self.matrix is not None:
            arrays = [a.reshape(*self.shape[:-1], columns) for a, columns in zip(arrays, self._columns(), strict=True)]
        x = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        if self.rope:
            x = x[..., self._order()]
        if self.inputs:
            rows = math.prod(self.joined[self.batch : self.batch + self.inputs])
            x = x.reshape(*self.joined[: self.batch], rows, -1).swapaxes(-1, -2)
        return x - np.float32(1) if self.centred else x

    def unpack(self, stored: np.ndarray) -> list[np.ndarray]:
        """The parts' arrays in fp32, from the stored tensor."""
        x = np.asarray(stored, np.float32)
        if self.matrix is not None:
            pieces = np.split(x, np.cumsum(self._columns())[:-1], axis=-1)
            return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]
        if self.centred:
            x = x + np.float32(1)
        if self.inputs:
            x = x.swapaxes(-1, -2).reshape(self.joined)
        if self.rope:
            x = x[..., np.argsort(self._order())]
        return np.split(x, np.cumsum([part.shape[-1] for part in self.parts])[:-1], axis=-1)


def shapes(model) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Path -> shape of the parameters that `config.model` declares, and of its buffers (state without a gradient)."""
    built = Model(model)
    return {path: spec.shape for path, spec in built.specs.items()}, {path: leaf.shape for path, leaf in flat(built.buffers).items()}


def own_entries(model) -> Iterator[Entry]:
    """The tensors of our own modelling file: our names and layouts, one tensor per layer."""
    params, buffers = shapes(model)
    for path, shape in (params | buffers).items():
        stacked = portable.is_stacked(path)
        for i, name in enumerate(portable.tensor_names(path, shape[0])):
            part = Part(path, (i,) if stacked else (), shape[1:] if stacked else shape)
            yield Entry(name, (part,), wide=path.endswith(("ffn/router", "ffn/bias")))


class _Layer:
    """Builds entries of one layer, or of what stands outside the layers: names begin with `prefix`, paths with `stack`."""

    def __init__(self, known: dict[str, tuple[int, ...]], prefix: str, stack: str = "", index: tuple[int, ...] = ()):
        self.known, self.prefix, self.stack, self.index = known, prefix, stack, index

    def __call__(self, name: str, *paths: str, expert: int | None = None, **kind) -> Entry:
        index = self.index if expert is None else (*self.index, expert)
        parts = tuple(Part(self.stack + path, index, self.known[self.stack + path][len(index) :]) for path in paths)
        return Entry(self.prefix + name, parts, **kind)


def entries(model, *, centred: bool = False, interleaved: bool = True, fused: bool = False) -> Iterator[Entry]:
    """The tensors of a transformers checkpoint of `config.model`, layer by layer.

    `centred`: norms store gain − 1 (Qwen3-Next). `interleaved`: rotary channels of latent attention lie in pairs (DeepSeek's default).
    `fused`: the experts of a layer are two tensors, as transformers 5 holds them in memory, instead of three per expert.
    The model must be one that a family has: no headwise gate, for instance.
    """
    params, buffers = shapes(model)
    known = params | buffers
    outside = _Layer(known, "")
    yield outside("model.embed_tokens.weight", "embed/table")
    dense = model.moe.first_k_dense if model.ffn == "moe" else 0
    for i in range(model.n_layers):
        stack, index = ("dense_layers/", i) if i < dense else ("layers/", i - dense)
        layer = _Layer(known, f"model.layers.{i}.", stack, (index,))
        yield layer("input_layernorm.weight", "attn_norm/gain", centred=centred)
        yield from _latent(layer, model, interleaved) if model.attention == "mla" else _heads(layer, model, centred)
        yield layer("post_attention_layernorm.weight", "ffn_norm/gain", centred=centred)
        yield from _mixture(layer, model, fused) if model.ffn == "moe" and i >= dense else _swiglu(layer, "mlp", "ffn")
    yield outside("model.norm.weight", "final_norm/gain", centred=centred)
    if not model.tie_embeddings:
        yield outside("lm_head.weight", "head/kernel", inputs=1)


def gpt2_entries(model, prefixed: bool = True) -> Iterator[Entry]:
    """The same of a GPT-2, whose matrices are torch's Conv1D, stored [in, out] as ours are, with q, k and v side by side in one.

    `prefixed`: not so in the files that OpenAI's weights come in.
    """
    known, prefix = shapes(model)[0], gpt2.PREFIX if prefixed else ""
    body = _Layer(known, prefix)
    yield body("wte.weight", "embed/table")
    yield body("wpe.weight", "embed/positions")
    for i in range(model.n_layers):
        layer = _Layer(known, f"{prefix}h.{i}.", "layers/", (i,))
        yield from _layer_norm(layer, "ln_1", "attn_norm")
        yield layer("attn.c_attn.weight", "attn/q", "attn/k", "attn/v", matrix=1)
        yield layer("attn.c_attn.bias", "attn/q_bias", "attn/k_bias", "attn/v_bias", matrix=0)
        yield layer("attn.c_proj.weight", "attn/out", matrix=2)
        yield layer("attn.c_proj.bias", "attn/out_bias")
        yield from _layer_norm(layer, "ln_2", "ffn_norm")
        for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
            yield layer(f"mlp.{theirs}.weight", f"ffn/{ours}")
            yield layer(f"mlp.{theirs}.bias", f"ffn/{ours}_bias")
    yield from _layer_norm(body, "ln_f", "final_norm")
    if not model.tie_embeddings:
        yield _Layer(known, "")("lm_head.weight", "head/kernel", inputs=1)


def _layer_norm(layer: _Layer, name: str, path: str) -> Iterator[Entry]:
    yield layer(f"{name}.weight", f"{path}/gain")
    yield layer(f"{name}.bias", f"{path}/bias")


def _heads(layer: _Layer, model, centred: bool) -> Iterator[Entry]:
    gate = ["attn/gate"] if model.gate == "elementwise" else []
    yield layer("self_attn.q_proj.weight", "attn/q", *gate, inputs=1)
    yield layer("self_attn.k_proj.weight", "attn/k", inputs=1)
    yield layer("self_attn.v_proj.weight", "attn/v", inputs=1)
    yield layer("self_attn.o_proj.weight", "attn/out", inputs=2)
    if model.qk_norm:
        yield layer("self_attn.q_norm.weight", "attn/q_norm/gain", centred=centred)
        yield layer("self_attn.k_norm.weight", "attn/k_norm/gain", centred=centred)


def _latent(layer: _Layer, model, interleaved: bool) -> Iterator[Entry]:
    rope = model.mla.rope_dim if interleaved else 0
    if model.mla.q_rank:
        yield layer("self_attn.q_a_proj.weight", "attn/q_down", inputs=1)
        yield layer("self_attn.q_a_layernorm.weight", "attn/q_norm/gain")
        yield layer("self_attn.q_b_proj.weight", "attn/q_up", inputs=1, rope=rope)
    else:
        yield layer("self_attn.q_proj.weight", "attn/q", inputs=1, rope=rope)
    yield layer("self_attn.kv_a_proj_with_mqa.weight", "attn/kv_down", "attn/k_rope", inputs=1, rope=rope)
    yield layer("self_attn.kv_a_layernorm.weight", "attn/kv_norm/gain")
    yield layer("self_attn.kv_b_proj.weight", "attn/k_up", "attn/v_up", inputs=1)
    yield layer("self_attn.o_proj.weight", "attn/out", inputs=2)


def _swiglu(layer: _Layer, name: str, path: str, **kind) -> Iterator[Entry]:
    for matrix in ("gate", "up", "down"):
        yield layer(f"{name}.{matrix}_proj.weight", f"{path}/{matrix}", inputs=1, **kind)


def _mixture(layer: _Layer, model, fused: bool) -> Iterator[Entry]:
    yield layer("mlp.gate.weight", "ffn/router", inputs=1, wide=True)
    yield layer("mlp.gate.e_score_correction_bias", "ffn/bias", wide=True)
    if fused:
        yield layer("mlp.experts.gate_up_proj", "ffn/experts/gate", "ffn/experts/up", inputs=1, batch=1)
        yield layer("mlp.experts.down_proj", "ffn/experts/down", inputs=1, batch=1)
    else:
        for expert in range(model.moe.n_experts):
            yield from _swiglu(layer, f"mlp.experts.{expert}", "ffn/experts", expert=expert)
    if model.moe.n_shared:
        yield from _swiglu(layer, "mlp.shared_experts", "ffn/shared")
