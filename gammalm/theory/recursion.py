"""The variance of everything in a decoder before its first step, from a recursion over the covariance of the actual tokens.

K_ij, the mean over channels of h_i·h_j for the stream h at tokens i and j, starts as the embedding's variance where tokens are equal and 0
elsewhere. A branch adds the covariance of its output, because its last matrix is independent of the stream. Exact as the width grows; the
largest terms in T/d are kept (activations.power_kernel, mixing.py). Source: science 5 [C]. Legend: B sequences, T tokens, L layers.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.errors import ConfigError
from gammalm.theory.activations import correlation, covariance_kernel, hermite_amplitudes, power_kernel, second_moment
from gammalm.theory.description import GATED, Decoder, Dense, Latent, Mixture, Stack
from gammalm.theory.mixing import attended, normed, samples_heads
from gammalm.theory.routing import look_up, shared_gates


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Mean squares per channel, averaged over tokens, float64; [L] arrays count the layers of all stacks.

    norms: where they stand (description.Stack). embed: of the embedding. attn_in, ffn_in [L]: of the stream that each branch reads.
    attn_added, ffn_added [L]: of what the branch adds. final: of the stream after the last block. final_T [T]: the same by position.
    latents: of what enters MLA's norms, by name, [L]. behind: of what enters the norms behind the branches, by name, [L]. logit_std: root
    mean square of the logits over tokens and vocabulary. own_logit: mean logit of the token itself; 0 unless the head is the table.
    """

    eps: float
    norms: str
    embed: float
    attn_in: np.ndarray
    attn_added: np.ndarray
    ffn_in: np.ndarray
    ffn_added: np.ndarray
    final: float
    final_T: np.ndarray
    latents: Mapping[str, np.ndarray]
    behind: Mapping[str, np.ndarray]
    logit_std: float
    own_logit: float
    log_sum_exp_excess: float  # mean log-sum-exp of the logits − ln V in nats, for a large vocabulary

    @property
    def flow(self) -> float:
        """‖h_L − e‖ / ‖e‖ over all tokens."""
        return float(np.sqrt((self.attn_added.sum() + self.ffn_added.sum()) / self.embed))

    @property
    def attn_update(self) -> np.ndarray:
        """‖branch‖ / ‖stream‖ of each attention branch, [L]."""
        return np.sqrt(self.attn_added / self.attn_in)

    @property
    def ffn_update(self) -> np.ndarray:
        """The same of each feed-forward branch."""
        return np.sqrt(self.ffn_added / self.ffn_in)

    def norm_inputs(self) -> dict[str, np.ndarray]:
        """Mean square of what enters every norm, by name: [L], final_norm [1]."""
        before = {} if self.norms == "post" else {"attn_norm": self.attn_in, "ffn_norm": self.ffn_in}
        return {**before, **self.latents, **self.behind, "final_norm": np.array([self.final])}

    def eps_share(self) -> dict[str, np.ndarray]:
        """ε / mean square at every norm, by name: far below 1 the norm sees the stream, far above it sees ε. [L], final [1]."""
        return {name: self.eps / variance for name, variance in self.norm_inputs().items()}


def predict(decoder: Decoder, tokens, segments=None, *, heads: int | None = None, seed: int = 0) -> Prediction:
    """The prediction for token ids [T] or [B, T], whole sequences without padding; segments of the same shape keep documents apart.

    heads: how many are drawn per layer where scores are not small (mixing.py), with `seed`; more make the mean more certain. None: two, or
    as many as make 4,096 queries of a sequence. A second prediction of the same sizes compiles nothing. ConfigError for shapes that do
    not fit.
    """
    tokens_BT = np.atleast_2d(np.asarray(tokens))
    segments_BT = np.zeros_like(tokens_BT) if segments is None else np.atleast_2d(np.asarray(segments))
    if tokens_BT.ndim != 2 or segments_BT.shape != tokens_BT.shape:
        raise ConfigError(f"theory: tokens and segments must be [T] or [B, T] alike, not {tokens_BT.shape} and {segments_BT.shape}.")
    T = tokens_BT.shape[1]
    heads = max(2, 4096 // T) if heads is None else heads
    drawn, stds = [], []
    for stack, given in zip(decoder.stacks, decoder.stds, strict=True):
        stds.append({name: np.broadcast_to(np.asarray(value, np.float32), (stack.depth,)) for name, value in given.items()})
        largest = {name: float(value.max()) for name, value in stds[-1].items()}
        drawn.append(heads if samples_heads(stack.attention, largest, decoder.d_model, T) else 0)
    tied = decoder.head is None
    numbers = tuple(np.float32(value) for value in (decoder.embed, decoder.embed if tied else decoder.head, decoder.eps, tied))
    found = _predict(tuple(stds), numbers, tokens_BT, _starts(segments_BT), jax.random.key(seed), stacks=decoder.stacks, drawn=tuple(drawn),
                     d=decoder.d_model, vocab=decoder.vocab_size, theta=decoder.rope_theta, softcap=decoder.softcap)  # fmt: skip
    found = jax.tree.map(lambda x: np.asarray(x, np.float64).mean(axis=0), found)
    scalars = {name: float(found.pop(name)) for name in ("embed", "final", "logit_std", "own_logit", "log_sum_exp_excess")}
    return Prediction(eps=decoder.eps, norms=decoder.stacks[0].norms, **scalars, **found)


def _starts(segments_BT):
    """Index of the first token of each token's document."""
    T = segments_BT.shape[1]
    new_BT = np.concatenate([np.ones_like(segments_BT[:, :1], bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    return np.maximum.accumulate(np.where(new_BT, np.arange(T)[None], 0), axis=1).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("stacks", "drawn", "d", "vocab", "theta", "softcap"))
def _predict(stds, numbers, tokens_BT, start_BT, key, *, stacks, drawn, d, vocab, theta, softcap):
    """Fields of `Prediction` with a leading B."""
    embed_std, head_std, eps, tied = numbers

    def sequence(index_tokens_start):
        index, tokens_T, start_T = index_tokens_start
        K_TT = jnp.square(embed_std) * (tokens_T[:, None] == tokens_T[None, :])
        found = {"embed": _mean_variance(K_TT)}
        layers = []
        for number, (stack, std, heads) in enumerate(zip(stacks, stds, drawn, strict=True)):
            keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, index), number), stack.depth)
            step = functools.partial(_layer, stack=stack, eps=eps, start_T=start_T, d=d, theta=theta, heads=heads)
            K_TT, measured = jax.lax.scan(lambda K, x, step=step: step(K, *x), K_TT, (std, keys))
            layers.append(measured)
        found |= jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers)
        final_T = jnp.diagonal(K_TT)
        return found | {"final": final_T.mean(), "final_T": final_T} | logits(final_T)

    def logits(final_T):
        variance_T = d * jnp.square(head_std) * final_T / (final_T + eps)
        own_T = tied * d * jnp.square(embed_std) * jax.lax.rsqrt(final_T + eps)  # e·h has d equal products, other rows none
        if softcap:
            variance_T = softcap**2 * second_moment("tanh", variance_T / softcap**2)
            own_T = softcap * jnp.tanh(own_T / softcap)
        return {
            "logit_std": jnp.sqrt(jnp.mean(variance_T + jnp.square(own_T) / vocab)),
            "own_logit": own_T.mean(),
            "log_sum_exp_excess": jnp.mean(variance_T / 2 + jnp.log1p(jnp.expm1(own_T) / vocab)),
        }

    return jax.lax.map(sequence, (jnp.arange(tokens_BT.shape[0]), tokens_BT, start_BT))


def _mean_variance(K_TT):
    return jnp.mean(jnp.diagonal(K_TT))


def _layer(K_TT, std, key, *, stack: Stack, eps, start_T, d, theta, heads):
    """The covariance after one layer, and the mean squares that it passes through."""
    attn_TT = attention_covariance(stack, std, K_TT, eps, start_T, d, theta, key, heads)
    behind = {}
    if stack.norms != "pre":
        behind["attn_behind"] = _mean_variance(attn_TT)
        attn_TT = normed(attn_TT, eps)
    middle_TT = K_TT + attn_TT
    read_TT = K_TT if stack.parallel else middle_TT
    C_TT = read_TT if stack.norms == "post" else normed(read_TT, eps)
    ffn_TT = _mixture(stack.ffn, std, C_TT, d) if isinstance(stack.ffn, Mixture) else dense_covariance(stack.ffn, std, "ffn/", C_TT, d)
    if stack.norms != "pre":
        behind["ffn_behind"] = _mean_variance(ffn_TT)
        ffn_TT = normed(ffn_TT, eps)
    pairs = {"attn_in": K_TT, "attn_added": attn_TT, "ffn_in": read_TT, "ffn_added": ffn_TT}
    measured = {name: _mean_variance(value) for name, value in pairs.items()}
    read = _mean_variance(K_TT if stack.norms == "post" else normed(K_TT, eps))
    latents = {}
    if isinstance(stack.attention, Latent):
        latents["kv_norm"] = d * jnp.square(std["attn/kv_down"]) * read
        if stack.attention.q_rank:
            latents["q_norm"] = d * jnp.square(std["attn/q_down"]) * read
    return middle_TT + ffn_TT, measured | {"latents": latents, "behind": behind}


def attention_covariance(stack: Stack, std, K_TT, eps, start_T, d, theta, key, heads):
    """Covariance of what the attention branch gives, before a norm behind it."""
    bare = stack.norms == "post"
    y_TT = attended(stack.attention, std, K_TT, eps, start_T, d=d, theta=theta, key=key, heads=heads, bare=bare)
    if stack.gate != "none":
        read_TT = K_TT if bare else normed(K_TT, eps)
        y_TT *= covariance_kernel("sigmoid", d * jnp.square(std["attn/gate"]) * read_TT)
    return stack.attention.matrices()["out"] * jnp.square(std["attn/out"]) * y_TT


def dense_covariance(ffn: Dense, std, prefix: str, C_TT, d):
    """Covariance of a feed-forward branch's output for an input of covariance C."""
    if ffn.activation in GATED:
        gate_T, up_T = (d * jnp.square(std[prefix + name]) * jnp.diagonal(C_TT) for name in ("gate", "up"))
        b_TN = hermite_amplitudes(GATED[ffn.activation], gate_T) * jnp.sqrt(up_T)[:, None]
        b_TN = jnp.concatenate([jnp.zeros_like(b_TN[:, :1]), b_TN], axis=1)  # the other factor is linear: one more power of ρ
        hidden_TT = power_kernel(b_TN, correlation(C_TT), d)
    else:
        hidden_TT = covariance_kernel(ffn.activation, d * jnp.square(std[prefix + "up"]) * C_TT, d)
    return ffn.width * jnp.square(std[prefix + "down"]) * hidden_TT


def _mixture(ffn: Mixture, std, C_TT, d):
    """The same of a mixture: what two tokens have in common passes through the experts that both chose."""
    table_P = shared_gates(ffn, d * jnp.square(std["ffn/router"]) * _mean_variance(C_TT))
    y_TT = look_up(table_P, correlation(C_TT)) * dense_covariance(Dense(ffn.d_expert), std, "ffn/experts/", C_TT, d)
    return y_TT + dense_covariance(ffn.shared, std, "ffn/shared/", C_TT, d) if ffn.shared else y_TT
