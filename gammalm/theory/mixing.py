"""How attention mixes the covariance of tokens: what a head's weighted average makes of it, by the mean over random heads.

While scores are small the weights are even, and the average is a running mean: exact and quick. Else heads are drawn: a stream of d
channels with the given covariance, and q, k with their own sizes, rotary positions and norms, so nothing of the softmax is approximated.
The stream's width is kept because a key that a query likes carries values like it: over T tokens that adds T/d of what even weights
leave, times the score's variance.
Legend: T queries, S keys, D channels of the stream, K channels of q and k, P of them rotated, C rank of a latent; covariances are per
channel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.theory.description import Heads, Latent

SMALL = 0.004  # variance of the scores, times T/width, below which weights count as even: the relative error that this makes
JITTER = 1e-3  # share of each variance added for the Cholesky factor: tokens that repeat make a covariance singular


def normed(covariance_TT, eps):
    """Covariance behind an RMSNorm of the same width, as that grows."""
    scale_T = jax.lax.rsqrt(jnp.diagonal(covariance_TT) + eps)
    return covariance_TT * scale_T[:, None] * scale_T[None, :]


def narrow_normed(covariance_TT, eps, width: int):
    """The same over few channels: the cosine of two vectors is smaller than their correlation ρ by the share (1−ρ²)/2·width."""
    normed_TT = normed(covariance_TT, eps)
    scale_T = jax.lax.rsqrt(jnp.diagonal(covariance_TT))
    rho_TT = jnp.clip(covariance_TT * scale_T[:, None] * scale_T[None, :], -1.0, 1.0)
    return normed_TT * (1 - (1 - jnp.square(rho_TT)) / (2 * width))


def score_variance(attention: Heads | Latent, std: dict, d: int) -> float:
    """Variance of q·k/√K where the input's mean square is 1, its largest value; `std` by name, the largest over layers."""
    if isinstance(attention, Heads):
        return 1.0 if attention.qk_norm else (d * std["attn/q"] ** 2) * (d * std["attn/k"] ** 2)
    rank, nope, rope = attention.kv_rank, attention.nope_dim, attention.rope_dim
    query = attention.q_rank * std["attn/q_up"] ** 2 if attention.q_rank else d * std["attn/q"] ** 2
    return query * (nope * rank * std["attn/k_up"] ** 2 + rope * d * std["attn/k_rope"] ** 2) / (nope + rope)


def samples_heads(attention: Heads | Latent, std: dict, d: int, T: int) -> bool:
    """Whether weights are uneven enough to draw heads."""
    width = min(d, attention.kv_rank) if isinstance(attention, Latent) else d
    return score_variance(attention, std, d) * max(1.0, T / width) > SMALL


def even_mixing(covariance_TT, start_T):
    """A·C·Aᵀ for weights 1/n over the n tokens from a query's first visible one, `start` [T], to itself."""

    def running_mean(x_TS):
        sums = jnp.concatenate([jnp.zeros((1, x_TS.shape[1]), x_TS.dtype), jnp.cumsum(x_TS, axis=0)])
        here_T = jnp.arange(x_TS.shape[0])
        return (sums[1:] - sums[start_T]) / (here_T - start_T + 1)[:, None].astype(x_TS.dtype)

    return running_mean(running_mean(covariance_TT).T).T


def attended(attention: Heads | Latent, std: dict, covariance_TT, eps, start_T, *, d: int, theta: float, key, heads: int,
             bare: bool = False):  # fmt: skip
    """Covariance of an attention branch's heads before gate and output matrix, per channel of a head, by the stds of one layer.

    heads: how many to draw; 0: weights are even. covariance: of the stream that enters the norm; `bare`: that is read without a norm.
    """
    latent = isinstance(attention, Latent)
    if not heads:
        read_TT = covariance_TT if bare else normed(covariance_TT, eps)
        if latent:
            read_TT = narrow_normed(d * jnp.square(std["attn/kv_down"]) * read_TT, eps, attention.kv_rank)
        mixed_TT = even_mixing(read_TT, start_T)
    else:
        draw = _latent_head if latent else _head
        mixed_TT = _mean_over_heads(draw, attention, std, covariance_TT, eps, start_T, d, theta, key, heads, bare)
    return mixed_TT * (attention.kv_rank * jnp.square(std["attn/v_up"]) if latent else d * jnp.square(std["attn/v"]))


def _mean_over_heads(draw, attention, std, covariance_TT, eps, start_T, d, theta, key, heads, bare):
    T = covariance_TT.shape[0]
    stream_key, heads_key = jax.random.split(key)
    scale_T = jax.lax.rsqrt(jnp.diagonal(covariance_TT))
    correlation_TT = covariance_TT * scale_T[:, None] * scale_T[None, :]
    factor_TT = jnp.linalg.cholesky((correlation_TT + JITTER * jnp.eye(T)) / (1 + JITTER), symmetrize_input=False)
    stream_TD = factor_TT @ jax.random.normal(stream_key, (T, d)) / scale_T[:, None]
    n_TD = stream_TD if bare else _rms(stream_TD, eps)
    here_T = jnp.arange(T)
    visible_TS = (here_T[None, :] <= here_T[:, None]) & (here_T[None, :] >= start_T[:, None])
    rotate = functools.partial(_rotate, positions_T=here_T - start_T, theta=theta)

    def one(total_TT, head_key):
        q_TK, k_SK, values_SC = draw(head_key, attention, std, n_TD, eps, rotate)
        scores_TS = jnp.where(visible_TS, q_TK @ k_SK.T / np.sqrt(q_TK.shape[1]), -jnp.inf)
        y_TC = jax.nn.softmax(scores_TS, axis=-1) @ values_SC
        return total_TT + y_TC @ y_TC.T / y_TC.shape[1], None

    return jax.lax.scan(one, jnp.zeros((T, T)), jax.random.split(heads_key, heads))[0] / heads


def _head(key, attention: Heads, std, n_TD, eps, rotate):
    """q, k [T, K] of a random head, and what its values are a random image of."""
    q_TK, k_TK = (
        n_TD @ jax.random.normal(part, (n_TD.shape[1], attention.size)) * std[name]
        for part, name in zip(jax.random.split(key), ("attn/q", "attn/k"), strict=True)
    )
    if attention.qk_norm:
        q_TK, k_TK = _rms(q_TK, eps), _rms(k_TK, eps)
    return rotate(q_TK), rotate(k_TK), n_TD


def _latent_head(key, attention: Latent, std, n_TD, eps, rotate):
    """The same with a latent of its own for each head: the mean over heads is then over latents too."""
    N, P = attention.nope_dim, attention.rope_dim
    keys = iter(jax.random.split(key, 6))

    def through(x_TI, name, size):
        return x_TI @ jax.random.normal(next(keys), (x_TI.shape[1], size)) * std[name]

    if attention.q_rank:
        q_TK = through(_rms(through(n_TD, "attn/q_down", attention.q_rank), eps), "attn/q_up", N + P)
    else:
        q_TK = through(n_TD, "attn/q", N + P)
    latent_TC = _rms(through(n_TD, "attn/kv_down", attention.kv_rank), eps)
    k_TN, k_TP = through(latent_TC, "attn/k_up", N), rotate(through(n_TD, "attn/k_rope", P))
    q_TK = jnp.concatenate([q_TK[:, :N], rotate(q_TK[:, N:])], axis=1)
    return q_TK, jnp.concatenate([k_TN, k_TP], axis=1), latent_TC


def _rms(x_TI, eps):
    return x_TI * jax.lax.rsqrt(jnp.mean(jnp.square(x_TI), axis=-1, keepdims=True) + eps)


def _rotate(x_TP, *, positions_T, theta):
    """Rotary positions on the pairs (x[p], x[p + P/2])."""
    P = x_TP.shape[1]
    angle = positions_T[:, None] * (theta ** (-np.arange(0, P, 2, dtype=np.float32) / P))[None]
    first, second = jnp.split(x_TP, 2, axis=1)
    return jnp.concatenate([first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], axis=1)
