"""The regime of every norm: ε next to the variance of what is normalised (science.md, section 2).

A norm gives x·(variance + ε)^(−1/2); of a LayerNorm x and its variance are about the mean. Where ε is small against the variance, it
takes the scale of x away; where it is large, the scale stays, and the output shrinks to r = (1 + ε/variance)^(−1/2) of a unit one.
Shape legend: models/parts.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from gammalm.analysis.walk import inputs_of, mean_of, total
from gammalm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Norm:
    """One kind of norm by layer [L] ([1]: the final one); means over tokens, and over heads where each has its own."""

    variance_L: np.ndarray  # mean square of what is normalised (of a LayerNorm about its mean), without ε
    ratio_L: np.ndarray  # ε over that mean
    factor_L: np.ndarray  # r, root mean square of the output before its gain: 1 where ε does nothing
    hidden_L: np.ndarray  # share of tokens with ε > variance


@dataclasses.dataclass(frozen=True)
class NormRegime:
    """`norms` by name: attn_norm, ffn_norm, of pre-norm models final_norm; q_norm, k_norm (QK-norm) or kv_norm, q_norm (latents) where
    there are any."""

    tokens: int
    eps: float
    norms: dict[str, Norm]

    def row(self) -> dict:
        """JSON-ready: tokens, and by norm its variance, ratio, factor, hidden, a list over layers each."""
        columns = ("variance", "ratio", "factor", "hidden")
        norms = {name: {column: getattr(norm, f"{column}_L").tolist() for column in columns} for name, norm in self.norms.items()}
        return {"tokens": self.tokens, "norms": norms}


def norm_sums(model, params, buffers, batch, eps) -> dict:
    """fp32 sums over the tokens of one batch that count, [L] for each norm: variance, factor, hidden; and their number []."""
    tokens_BT, segments_BT, valid_BT = inputs_of(batch)
    decoder = model.bind(params, buffers)
    c = model.config
    if c.norm not in ("rms", "layer"):
        raise ConfigError(f"model.norm={c.norm!r} normalises nothing, so there is no norm to measure.")

    def of(x, centred=c.norm == "layer"):
        x = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x - jnp.mean(x, axis=-1, keepdims=True) if centred else x), axis=-1)
        found = {
            "variance": variance,
            "factor": jnp.sqrt(variance / jnp.maximum(variance + eps, jnp.finfo(jnp.float32).tiny)),
            "hidden": (variance < eps).astype(jnp.float32),
        }
        per_token = {name: a.reshape(*valid_BT.shape, -1).mean(axis=-1) for name, a in found.items()}
        return {name: jnp.sum(jnp.where(valid_BT, a_BT, 0)) for name, a_BT in per_token.items()}

    def look(visit):
        block = visit.block
        inner = block.attn.norm_inputs(block.attention_input(visit.before_BTD, eps))
        entered = {"attn_norm": (visit.before_BTD, visit.attention_BTD), "ffn_norm": (visit.between_BTD, visit.ffn_BTD)}
        outer = {name: of(block.normalised(*stream_and_branch)) for name, stream_and_branch in entered.items()}
        return outer | {name: of(x, centred=False) for name, x in inner.items()}  # these are always RMSNorms

    stream_BTD, norms = decoder.walk(tokens_BT, segments_BT, eps, look)
    final = {"final_norm": {name: a[None] for name, a in of(stream_BTD).items()}} if c.residual == "pre" else {}
    return {"norms": norms | final, "tokens": jnp.sum(valid_BT, dtype=jnp.float32)}


def norm_regime(model, params, buffers, batches, eps: float | None = None) -> NormRegime:
    """The regime over all `batches`, each token with the same weight. Arguments and errors: `walk.total`."""
    sums = total(norm_sums, model, params, buffers, batches, eps)
    eps = float(model.config.norm_eps if eps is None else eps)
    means = mean_of(sums["norms"], sums["tokens"])
    norms = {
        name: Norm(m["variance"], eps / np.maximum(m["variance"], np.finfo(np.float64).tiny), m["factor"], m["hidden"])
        for name, m in means.items()
    }
    return NormRegime(int(sums["tokens"]), eps, norms)
