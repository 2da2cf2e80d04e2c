"""A model watched from outside: the float64 decoder of ../models/reference.py run on one sequence after another, with its norms and its
softmax matrices written down. Legend: L layers, T tokens, H heads.
"""

import dataclasses
from unittest import mock

import jax
import numpy as np

from gammalm.models.decoder import Model

from ..models import reference
from ..models.reference import random_buffers, random_params, small_config

T = 12
# Documents of several lengths: of one token, cut by the end of a sequence, and followed by padding; the last row is padding alone.
SEGMENTS = np.array([[1] * 4 + [2] + [3] * 8, [1] * 9 + [2] * 2 + [0] * 2, [1] * 13, [0] * 13], np.int32)
# The validation split's own padding: the last sequence that there is ends early, and what fills the batch counts for nothing.
WEIGHTS = np.array([[1] * 12, [1] * 12, [1] * 7 + [0] * 5, [0] * 12], np.float32)

VARIANTS = {
    "gqa": dict(),
    "elementwise gate, qk-norm, learned sink": dict(gate="elementwise", softmax_sink="learned", qk_norm=True, n_kv_heads=1, head_dim=8),
    "headwise gate, mixtures": dict(gate="headwise", ffn="moe"),
    "compressed mla, a mixture after two dense layers": dict(
        attention="mla", ffn="moe", gate="elementwise", n_layers=3, model__mla__q_rank=8, model__moe__first_k_dense=2
    ),
    "mla, sink of one": dict(attention="mla", gate="headwise", softmax_sink="one"),
}
CASES = [
    ("gqa", "concat"),
    ("gqa", "documents"),
    ("elementwise gate, qk-norm, learned sink", "documents"),
    ("headwise gate, mixtures", "concat"),
    ("compressed mla, a mixture after two dense layers", "documents"),
    ("mla, sink of one", "concat"),
]


@dataclasses.dataclass
class Seen:
    """Of one sequence: each layer's softmax weights [H, T, T], and what each norm normalises, by name, a list over layers."""

    weights: list
    norms: dict[str, list]


def watch(c, params, buffers, tokens_T, segments_T) -> Seen:
    """The reference run on one sequence with `attention` and `rms_norm` overheard; norms are told apart by their order."""
    inner = {"mla": ["q_norm"] * (c.attention == "mla" and c.mla.q_rank > 0) + ["kv_norm"], "mha": []}[c.attention]
    if c.attention == "mha" and c.qk_norm:
        inner = ["q_norm", "k_norm"]
    order = ["attn_norm", *inner, "ffn_norm"] * c.n_layers + ["final_norm"]
    seen = Seen([], {name: [] for name in order})
    attention, rms_norm = reference.attention, reference.rms_norm

    def overhear_attention(q_THK, k_TGK, v_TGK, segments, sink_H):
        visible = np.tril(np.ones((len(q_THK), len(q_THK)), bool))
        if segments is not None:
            visible &= segments[:, None] == segments[None, :]
        k_THK = np.repeat(k_TGK, q_THK.shape[1] // k_TGK.shape[1], axis=1)
        scores = np.where(visible, np.einsum("thk,shk->hts", q_THK, k_THK) / np.sqrt(q_THK.shape[-1]), -np.inf)
        weights = np.exp(scores)
        sinks = 0 if sink_H is None else np.exp(sink_H)[:, None, None]
        seen.weights.append(weights / (weights.sum(-1, keepdims=True) + sinks))
        return attention(q_THK, k_TGK, v_TGK, segments, sink_H)

    def overhear_norm(x, gain, eps):
        seen.norms[order.pop(0)].append(x)
        return rms_norm(x, gain, eps)

    with mock.patch.multiple(reference, attention=overhear_attention, rms_norm=overhear_norm):
        reference.forward(params, c, tokens_T, segments_T, buffers)
    assert not order
    return seen


class Case:
    """A variant with random weights, a batch of four rows in one packing, and what is seen of each row."""

    def __init__(self, name: str, packing: str, **changes):
        self.config = small_config(**VARIANTS[name], **changes)
        self.c = self.config.model
        self.model = Model(self.c)
        self.params = jax.tree.map(np.asarray, random_params(self.model.specs, scale=2.0))
        self.buffers = random_buffers(self.model)
        self.batch = {"tokens": np.random.default_rng(5).integers(0, 50, (4, T + 1)).astype(np.int32), "weights": WEIGHTS}
        self.segments = None
        if packing == "documents":
            weights = (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] > 0)
            self.batch |= {"segments": SEGMENTS, "weights": weights.astype(np.float32)}
            self.segments = SEGMENTS[:, :-1]
        self.valid = WEIGHTS > 0 if self.segments is None else self.segments > 0
        self.seen = [
            watch(self.c, self.params, self.buffers, row, None if self.segments is None else self.segments[b])
            for b, row in enumerate(self.batch["tokens"][:, :-1])
        ]

    @property
    def model_and_data(self):
        return self.model, self.params, self.buffers, [self.batch]

    def units(self):
        """(row, first token, one past the last that counts) of every sequence or document of more than one token."""
        found = []
        for b, valid in enumerate(self.valid):
            ids = np.where(valid, 1 if self.segments is None else self.segments[b], 0)
            spans = [np.flatnonzero(ids == i) for i in np.unique(ids[ids > 0])]
            found += [(b, int(s[0]), int(s[-1]) + 1) for s in spans if len(s) > 1]
        return found
