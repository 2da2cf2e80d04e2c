"""How the loss's gradient grows on its way down a decoder before training: a recursion over its covariance, beside the stream's.

G_ij, the mean over channels of g_i·g_j for the gradient g of the stream at tokens i and j, starts at the end as tokens share a target, and
every branch adds what it hands down, because its matrices are independent of the gradient that arrives. Attention's weights are taken as
even and fixed: what runs through queries and keys is left out, and grows with the scores (small from γ = .75 up). Source: science 10 for a
layer, section 5's recursion for the stream. Legend: T tokens, L layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.errors import ConfigError
from gammalm.theory.activations import covariance_kernel, slope_kernel
from gammalm.theory.description import GATED, Decoder, Dense, Latent, Mixture, Stack
from gammalm.theory.mixing import normed
from gammalm.theory.recursion import attention_covariance, dense_covariance


def stream_gradients(decoder: Decoder, tokens, targets) -> np.ndarray:
    """[L+1], float64: mean square of the gradient of the summed loss (nats) by a channel of the stream before each layer, and at the end.

    tokens, targets: ids [T] of one sequence that is one document. ConfigError for mixtures, whose routing is not in it.
    """
    if any(isinstance(stack.ffn, Mixture) for stack in decoder.stacks):
        raise ConfigError("theory: gradients are predicted for dense feed-forward layers, not for a mixture of experts.")
    if any(stack.norms != "pre" or stack.parallel for stack in decoder.stacks):
        raise ConfigError("theory: gradients are predicted for pre-norm layers whose branches follow each other.")
    tokens_T, targets_T = np.asarray(tokens), np.asarray(targets)
    if tokens_T.ndim != 1 or tokens_T.shape != targets_T.shape:
        raise ConfigError(f"theory: tokens and targets must be [T] alike, not {tokens_T.shape} and {targets_T.shape}.")
    stds = tuple(
        {name: np.broadcast_to(np.asarray(value, np.float32), (stack.depth,)) for name, value in given.items()}
        for stack, given in zip(decoder.stacks, decoder.stds, strict=True)
    )
    numbers = (decoder.embed, decoder.embed if decoder.head is None else decoder.head, decoder.eps)
    found = _gradients(stds, tuple(map(np.float32, numbers)), tokens_T, targets_T, stacks=decoder.stacks, d=decoder.d_model,
                       vocab=decoder.vocab_size, theta=decoder.rope_theta)  # fmt: skip
    return np.asarray(found, np.float64)


@functools.partial(jax.jit, static_argnames=("stacks", "d", "vocab", "theta"))
def _gradients(stds, numbers, tokens_T, targets_T, *, stacks, d, vocab, theta):
    embed_std, head_std, eps = numbers
    T = tokens_T.shape[0]
    start_T = jnp.zeros(T, jnp.int32)
    A_TS = jnp.tril(jnp.ones((T, T))) / jnp.arange(1, T + 1)[:, None]
    K_TT = jnp.square(embed_std) * (tokens_T[:, None] == tokens_T[None, :])
    passed = []
    for stack, std in zip(stacks, stds, strict=True):

        def up(K_TT, std, stack=stack):
            middle_TT = K_TT + attention_covariance(stack, std, K_TT, eps, start_T, d, theta, None, 0)
            return middle_TT + dense_covariance(stack.ffn, std, "ffn/", normed(middle_TT, eps), d), (K_TT, middle_TT)

        K_TT, streams = jax.lax.scan(up, K_TT, std)
        passed.append(streams)
    scale_T = jax.lax.rsqrt(jnp.diagonal(K_TT) + eps)
    shared_TT = (targets_T[:, None] == targets_T[None, :]) - 1 / vocab  # of softmax − target, while logits are small
    G_TT = jnp.square(head_std) * scale_T[:, None] * scale_T[None, :] * shared_TT
    sizes = [_size(G_TT)[None]]
    for stack, std, streams in zip(reversed(stacks), reversed(stds), reversed(passed), strict=True):

        def down(G_TT, layer, stack=stack):
            std, (K_TT, middle_TT) = layer
            G_TT += _behind_norm(_dense(stack.ffn, std, normed(middle_TT, eps), G_TT, d), middle_TT, eps)
            G_TT += _behind_norm(_attention(stack, std, normed(K_TT, eps), G_TT, A_TS, d, eps), K_TT, eps)
            return G_TT, _size(G_TT)

        G_TT, found = jax.lax.scan(down, G_TT, (std, streams), reverse=True)
        sizes.insert(0, found)
    return jnp.concatenate(sizes)


def _size(G_TT):
    return jnp.mean(jnp.diagonal(G_TT))


def _behind_norm(G_TT, K_TT, eps):
    """A gradient by what a norm gives, as one by the stream K that enters it; that the norm takes out one direction of d is left out."""
    scale_T = jax.lax.rsqrt(jnp.diagonal(K_TT) + eps)
    return G_TT * scale_T[:, None] * scale_T[None, :]


def _dense(ffn: Dense, std, C_TT, G_TT, d):
    """Gradient by a feed-forward layer's input of covariance C."""
    inner_TT = ffn.width * d * jnp.square(std["ffn/down"]) * G_TT
    up2 = jnp.square(std["ffn/up"])
    if ffn.activation not in GATED:
        return inner_TT * up2 * slope_kernel(ffn.activation, d * up2 * C_TT)
    gate2 = jnp.square(std["ffn/gate"])
    gate_TT, up_TT = d * gate2 * C_TT, d * up2 * C_TT
    phi = GATED[ffn.activation]
    return inner_TT * (up2 * covariance_kernel(phi, gate_TT) + gate2 * up_TT * slope_kernel(phi, gate_TT))


def _attention(stack: Stack, std, C_TT, G_TT, A_TS, d, eps):
    """Gradient by attention's input of covariance C, through values and gate."""
    inner_TT = stack.attention.matrices()["out"] * d * jnp.square(std["attn/out"]) * G_TT
    if isinstance(stack.attention, Latent):
        latent = d * jnp.square(std["attn/kv_down"]) * _size(C_TT)
        value2 = jnp.square(std["attn/v_up"]) * stack.attention.kv_rank * jnp.square(std["attn/kv_down"]) / (latent + eps)
    else:
        value2 = jnp.square(std["attn/v"])
    if stack.gate == "none":
        return value2 * A_TS.T @ inner_TT @ A_TS
    gate2 = jnp.square(std["attn/gate"])
    gate_TT, mixed_TT = d * gate2 * C_TT, d * value2 * A_TS @ C_TT @ A_TS.T
    through_values_TT = value2 * A_TS.T @ (inner_TT * covariance_kernel("sigmoid", gate_TT)) @ A_TS
    return through_values_TT + gate2 * inner_TT * mixed_TT * slope_kernel("sigmoid", gate_TT)
