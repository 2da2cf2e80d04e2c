"""The next token from logits: the likeliest, or drawn at a temperature from the k likeliest, or from the fewest that hold a share p.

A draw is a function of its sequence's seed and number and of how many tokens that sequence has drawn before: whatever is generated
beside it in the batch, and in which order, its text is the same. Shape legend: models/parts.py.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gammalm.errors import ConfigError

COLDEST = 1e-4  # the lowest temperature: below it logits overflow, and what is drawn is the likeliest token anyway


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0: the likeliest (of equals the first). `top_k` 0, `top_p` 1: from all.

    First the temperature divides the logits, then the k likeliest stay, then of these the fewest whose probabilities sum to at least
    `top_p` (Holtzman et al. 2020, arXiv:1904.09751). Tokens as likely as the last that stays stay too. Raises ConfigError for other values.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        t = self.temperature
        if not (t == 0 or COLDEST <= t and math.isfinite(t)):
            raise ConfigError(f"temperature {t:g}: choose 0, which takes the likeliest token, or a finite number of at least {COLDEST:g}.")
        if self.top_k < 0:
            raise ConfigError(f"top-k {self.top_k}: choose a number of tokens, or 0 for all of them.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p:g}: choose a share above 0 and at most 1, which takes all tokens.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed {self.seed}: choose a whole number from 0 to {2**32 - 1}.")

    @property
    def kind(self) -> str:
        """What a batch has to compute for it: greedy | free | filtered, each more than the one before."""
        if self.temperature == 0:
            return KINDS[0]
        return KINDS[1] if self.top_k == 0 and self.top_p == 1 else KINDS[2]


KINDS = ("greedy", "free", "filtered")


class Draws(NamedTuple):
    """How each row of a batch draws: fp32 temperature and top_p, int32 top_k, uint32 seed and number of its sequence."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    seed_B: jax.Array
    index_B: jax.Array


def draw(logits_BV, draws: Draws, drawn_B, kind: str):
    """The next token of each row, int32 [B], of fp32 logits; drawn_B tokens were drawn before. `kind`: the most that a row needs."""
    likeliest_B = first_of_largest(logits_BV)
    if kind == "greedy":
        return likeliest_B
    hot_B = draws.temperature_B > 0
    scaled_BV = logits_BV / jnp.where(hot_B, draws.temperature_B, 1.0)[:, None]
    if kind == "filtered":
        scaled_BV = only_likely(scaled_BV, draws.top_k_B, draws.top_p_B)

    def one(logits_V, seed, index, drawn):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), drawn)
        return jax.random.categorical(key, logits_V).astype(jnp.int32)

    return jnp.where(hot_B, jax.vmap(one)(scaled_BV, draws.seed_B, draws.index_B, drawn_B), likeliest_B)


def first_of_largest(x_BV):
    """Of each row, int32 [B], as `jnp.argmax` for numbers: in a loop of XLA:CPU that one is a scalar at a time, and six times slower."""
    places_BV = jnp.broadcast_to(jnp.arange(x_BV.shape[-1], dtype=jnp.int32), x_BV.shape)
    return jnp.min(jnp.where(x_BV == jnp.max(x_BV, axis=-1, keepdims=True), places_BV, x_BV.shape[-1]), axis=-1)


def only_likely(logits_BV, top_k_B, top_p_B):
    """The logits of the tokens that `Sampling` leaves, -inf for the others."""
    ranked_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    place_B1 = jnp.clip(top_k_B - 1, 0, logits_BV.shape[-1] - 1)[:, None]
    least_B1 = jnp.where(top_k_B[:, None] > 0, jnp.take_along_axis(ranked_BV, place_B1, axis=-1), -jnp.inf)
    shares_BV = jax.nn.softmax(jnp.where(ranked_BV >= least_B1, ranked_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
    # With top_p = 1 nothing may go, and a sum of many shares may round up to more than 1.
    stays_BV = (before_BV < top_p_B[:, None]) | (top_p_B == 1)[:, None]
    least_B1 = jnp.maximum(least_B1, jnp.min(jnp.where(stays_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True))
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
