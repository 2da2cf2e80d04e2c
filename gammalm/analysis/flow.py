"""Residual flow: how large what each branch adds is next to the embedding output e, and how far the stream moves (science.md, section 5).

Sizes are root mean squares over all tokens and channels, so that ‖u‖/‖e‖ is a ratio of Frobenius norms. Shape legend: models/parts.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from gammalm.analysis.walk import inputs_of, mean_of, total


@dataclasses.dataclass(frozen=True)
class Flow:
    """Sizes in units of ‖e‖, by layer [L]: what attention adds, what the feed-forward layer adds, and ‖h_l − e‖ after the layer."""

    tokens: int
    embedding: float  # root mean square of e: its standard deviation where it is drawn around 0
    attention_L: np.ndarray
    ffn_L: np.ndarray
    moved_L: np.ndarray

    @property
    def ratio(self) -> float:
        """‖h_L − e‖/‖e‖, the model's own; 1 is balance."""
        return float(self.moved_L[-1])

    def row(self) -> dict:
        """JSON-ready: tokens, size of e, ratio, and by layer attention, ffn, moved."""
        layers = {name: getattr(self, f"{name}_L").tolist() for name in ("attention", "ffn", "moved")}
        return {"tokens": self.tokens, "embedding": self.embedding, "ratio": self.ratio, "layers": layers}


def flow_sums(model, params, buffers, batch, eps) -> dict:
    """fp32 sums of squares over the tokens of one batch that count: of e [], of the updates and of h_l − e [L]; and their number []."""
    tokens_BT, segments_BT, valid_BT = inputs_of(batch)
    decoder = model.bind(params, buffers)
    start_BTD = decoder.start(tokens_BT, segments_BT)[0].astype(jnp.float32)

    def squares(x_BTD):
        return jnp.sum(jnp.where(valid_BT[..., None], jnp.square(x_BTD.astype(jnp.float32)), 0))

    def look(visit):
        moved_BTD = visit.after_BTD.astype(jnp.float32) - start_BTD
        return {"attention": squares(visit.attention_BTD), "ffn": squares(visit.ffn_BTD), "moved": squares(moved_BTD)}

    layers = decoder.walk(tokens_BT, segments_BT, eps, look)[1]
    return {"layers": layers, "embedding": squares(start_BTD), "tokens": jnp.sum(valid_BT, dtype=jnp.float32)}


def residual_flow(model, params, buffers, batches, eps: float | None = None) -> Flow:
    """The flow over all `batches`, each token with the same weight. Arguments and errors: `walk.total`.

    What a branch adds is taken before it is rounded to the residual dtype; ‖h_l − e‖ is of the stream as it is.
    """
    sums = total(flow_sums, model, params, buffers, batches, eps)
    embedding = mean_of(sums["embedding"], sums["tokens"])
    ratios = {f"{name}_L": np.sqrt(a / sums["embedding"]) for name, a in sums["layers"].items()}
    return Flow(int(sums["tokens"]), float(np.sqrt(embedding / model.config.d_model)), **ratios)
