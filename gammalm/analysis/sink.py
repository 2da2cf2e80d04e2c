"""Attention sinks: how much softmax weight goes to the first token, by three definitions, without a T x T matrix.

The weight of query t on key 1 is exp(q_t·k_1/√K − lse_t), and the log-sum-exp is what blockwise attention leaves; a gate comes after it and
does not enter. A softmax sink (`model.softmax_sink`) is part of the log-sum-exp: with one the weights of a query sum to less than one.
A unit is what has a first token: the sequence, or with packed documents the document (of one that was cut, each piece).
Shape legend: models/parts.py; U units of a sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.analysis.walk import inputs_of, mean_of, total
from gammalm.models.attention import sink_logits
from gammalm.models.blockwise import BLOCK, causal_attention
from gammalm.models.decoder import positions_of

THRESHOLD = 0.3  # of Gu et al.: a head whose mean weight on the first token is larger is a sink


@dataclasses.dataclass(frozen=True)
class SinkScores:
    """Scores [L, H] of each layer and head; the `uniform` of each is what equal weights on all visible tokens would give.

    later: mean of A[t, 1] over all queries t >= 2 of all units, the seed's score (science.md, section 4). alpha: mean over units of
    α_1 = mean over t >= 1 of A[t, 1], and sinks: share of the units in which α_1 > .3 (Gu et al. 2025, arXiv:2410.10781; their
    Sink_1 is the mean of `sinks`). last: mean over units of A[T, 1], the last query alone (Xiao et al. 2024, arXiv:2309.17453).
    Units of one token, which has nothing else to see, are left out.
    """

    unit: str  # "sequence" | "document": whose first token it is
    units: int
    queries: int  # those of `later`
    later_LH: np.ndarray
    alpha_LH: np.ndarray
    sinks_LH: np.ndarray
    last_LH: np.ndarray
    uniform: dict[str, float]  # of each score by its name

    def by_layer(self) -> dict[str, np.ndarray]:
        """The scores as means over heads, [L] each."""
        return {name: getattr(self, f"{name}_LH").mean(axis=1) for name in ("later", "alpha", "sinks", "last")}

    def row(self) -> dict:
        """JSON-ready: whose first token, counts, the threshold, and each score with its mean and by layer, beside the uniform one."""
        layers = self.by_layer()
        return {
            "first_token_of": self.unit, "units": self.units, "queries": self.queries, "threshold": THRESHOLD, "uniform": self.uniform,
            "mean": {name: float(a_L.mean()) for name, a_L in layers.items()},
            "layers": {name: a_L.tolist() for name, a_L in layers.items()},
        }  # fmt: skip


def log_sum_exps(q_BTGRK, k_BTGK, segments_BT, sink_GR=None):
    """fp32 log-sum-exp [B, G, R, T] of the scaled scores, one block of queries after another in a loop, so that one block is in memory.

    The kernel alone has its blocks side by side in the program, and compilers may hold all of them at once.
    """
    T = q_BTGRK.shape[1]
    size = min(BLOCK, T)

    def blocks(a):
        """[B, T, ...] as [number, B, size, ...]; what fills the last block repeats the last query."""
        a = jnp.pad(a, [(0, 0), (0, -T % size)] + [(0, 0)] * (a.ndim - 2), mode="edge")
        return jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0)

    def one(block):
        q, segments, first = block
        return causal_attention(q, k_BTGK, k_BTGK[..., :1], segments, segments_BT, first, sink_GR)[1]  # values do not matter here

    segments = None if segments_BT is None else blocks(segments_BT)
    lse = jax.lax.map(one, (blocks(q_BTGRK), segments, jnp.arange(0, T, size, dtype=jnp.int32)))
    return jnp.moveaxis(lse, 0, 3).reshape(*lse.shape[1:4], -1)[..., :T]


def first_token_weights(block, x_BTD, angles, segments_BT, positions_BT, eps):
    """fp32 softmax weight [B, H, T] of each query on the first token of its segment; `x_BTD` is the stream before the block."""
    q, k_BTGK = block.attn.queries_keys(block.attention_input(x_BTD, eps), angles, eps)
    B, T, H, K = q.shape
    q_BTGRK = q.reshape(B, T, k_BTGK.shape[2], -1, K)
    lse_BGRT = log_sum_exps(q_BTGRK, k_BTGK, segments_BT, sink_logits(block.attn, *q_BTGRK.shape[2:4]))
    first = k_BTGK[:, :1]
    if segments_BT is not None:
        first = jnp.take_along_axis(k_BTGK, (jnp.arange(T)[None] - positions_BT)[..., None, None], axis=1)
    scores_BTGR = jnp.sum(q_BTGRK.astype(jnp.float32) * first[:, :, :, None].astype(jnp.float32), axis=-1) * K**-0.5
    return jnp.exp(jnp.moveaxis(scores_BTGR, 1, 3) - lse_BGRT).reshape(B, H, T)


def sink_sums(model, params, buffers, batch, eps) -> dict:
    """fp32 sums over one batch: later, alpha, sinks, last [L, H], the uniform ones [], and the numbers of queries and units []."""
    tokens_BT, segments_BT, valid_BT = inputs_of(batch)
    B, T = tokens_BT.shape
    positions_BT = jnp.broadcast_to(positions_of(T, segments_BT), (B, T))
    begins_BT = positions_BT == 0
    unit_BT = jnp.cumsum(begins_BT, axis=1) - 1
    per_row = 1 if segments_BT is None else T

    def by_unit(a_BTN):
        """Sums over the tokens that count of each unit: [B, U, N]."""
        return jax.vmap(lambda a, unit: jax.ops.segment_sum(a, unit, per_row))(a_BTN * valid_BT[..., None], unit_BT)

    length_BU1 = by_unit(jnp.ones((B, T, 1), jnp.float32))
    counts_BU1 = length_BU1 > 1
    later_BT = valid_BT & ~begins_BT
    ends_BT = jnp.pad(begins_BT[:, 1:] | ~valid_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)

    def scores(weights_BNT):
        """The four sums of weights on the first token: [N] each."""
        alpha_BUN = by_unit(jnp.moveaxis(weights_BNT, 1, 2)) / jnp.maximum(length_BU1, 1)
        return {
            "later": jnp.sum(weights_BNT * later_BT[:, None], axis=(0, 2)),
            "alpha": jnp.sum(alpha_BUN * counts_BU1, axis=(0, 1)),
            "sinks": jnp.sum((alpha_BUN > THRESHOLD) & counts_BU1, axis=(0, 1), dtype=jnp.float32),
            "last": jnp.sum(weights_BNT * (later_BT & ends_BT)[:, None], axis=(0, 2)),
        }

    def look(visit):
        return scores(first_token_weights(visit.block, visit.before_BTD, visit.angles, segments_BT, positions_BT, eps))

    return {
        "heads": model.bind(params, buffers).walk(tokens_BT, segments_BT, eps, look)[1],
        "uniform": scores(1 / (1 + positions_BT[:, None].astype(jnp.float32))),
        "queries": jnp.sum(later_BT, dtype=jnp.float32),
        "units": jnp.sum(counts_BU1, dtype=jnp.float32),
    }


def sink_scores(model, params, buffers, batches, eps: float | None = None) -> SinkScores:
    """Scores over all `batches`, each query and unit with the same weight. Arguments and errors: `walk.total`.

    The first token is that of the document where the batches have segments, else that of the sequence.
    """
    units = set()

    def seen():
        for batch in batches:
            units.add("document" if "segments" in batch else "sequence")
            yield batch

    sums = total(sink_sums, model, params, buffers, seen(), eps)
    heads, uniform = sums["heads"], {name: float(a[0]) for name, a in sums["uniform"].items()}
    counts = {"later": sums["queries"], "alpha": sums["units"], "sinks": sums["units"], "last": sums["units"]}
    means = {f"{name}_LH": mean_of(heads[name], count) for name, count in counts.items()}
    floors = {name: uniform[name] / count for name, count in counts.items()}
    return SinkScores(" and ".join(sorted(units)), int(sums["units"]), int(sums["queries"]), **means, uniform=floors)
