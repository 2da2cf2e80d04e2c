"""Next-token cross-entropy that never holds all logits: chunks of tokens, fp32 softmax, gradients made on the way forward.

The logits of one chunk are computed once; softmax minus target is at hand there and then, so the backward pass needs no
second product with the V-wide head. Shape legend: parts.py; n tokens of one chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gammalm.models.parts import TOKEN_AXES, TOKENS, mesh_pieces, softcap


def _chunks(x_BTD, *others_BT, chunk: int):
    """Splits the T axis so that one chunk has about `chunk` tokens (a divisor of T, at least one token of each row); B stays whole."""
    B, T = x_BTD.shape[:2]
    wanted = 1 if chunk == 0 else min(T, -(-B * T // chunk))
    n = next(n for n in range(wanted, T + 1) if T % n == 0)
    split = lambda a: jnp.moveaxis(a.reshape(B, n, T // n, *a.shape[2:]), 1, 0)  # noqa: E731
    return split(x_BTD), *(split(a) for a in others_BT)


def _chunk_logits(x_BnD, w_VD, cap):
    logits = jnp.einsum("bnd,vd->bnv", x_BnD, w_VD, preferred_element_type=jnp.float32)
    return softcap(logits, cap)


def _nll(logits_BnV, targets_Bn):
    """Negative log-likelihood and log-sum-exp of each token, fp32."""
    lse = jax.nn.logsumexp(logits_BnV, axis=-1)
    picked = jnp.take_along_axis(logits_BnV, targets_Bn[..., None], axis=-1)[..., 0]
    return lse - picked, lse


def _summed(a):
    """The sum over devices of a number, or of a matrix [V, D], of which each device keeps the part of D that its parameters have."""
    if a.ndim == 0:
        return jax.lax.psum(a, TOKEN_AXES)
    a = jax.lax.psum_scatter(a, "fsdp", scatter_dimension=1, tiled=True)
    return jax.lax.psum(a, tuple(axis for axis in TOKEN_AXES if axis != "fsdp"))


def _each_device_its_tokens(function, summed: tuple[bool, ...]):
    """`function` of (x, w, others [B, T]) on the tokens of each device; its results are [B, T, ...], or sums, added up once at the end.

    Left to the compiler, every chunk would end in an all-reduce of a whole V x D gradient, and chunks would be of the global batch.
    """
    if mesh_pieces(*TOKEN_AXES) == 1:
        return function

    def local(*args):
        found = tuple(_summed(a) if add else a for a, add in zip(function(*args), summed, strict=True))
        # The sums come before whatever follows: left to itself, a TPU's compiler keeps the whole V x D gradient until the last layer.
        return jax.lax.optimization_barrier(found)

    def each(x_BTD, w, *others_BT):
        specs = (TOKENS, PartitionSpec(), *[TOKENS] * len(others_BT))
        lie = {0: PartitionSpec(), 2: PartitionSpec(None, "fsdp")}
        kinds = jax.eval_shape(function, x_BTD, w, *others_BT)
        results = tuple(lie[a.ndim] if add else TOKENS for a, add in zip(kinds, summed, strict=True))
        over = jax.shard_map(local, in_specs=specs, out_specs=results, axis_names=set(TOKEN_AXES), check_vma=False)
        return over(x_BTD, w, *others_BT)

    return each


def _of_tokens(measure, x_BTD, w_VD, targets_BT, cap, chunk):
    """The two numbers [B, T] of each token that `measure` makes of a chunk's logits [B, n, V] and targets [B, n]."""

    def measures(x_BTD, w, targets_BT):
        def one(_, args):
            x, targets = args
            return None, measure(_chunk_logits(x, w, cap), targets)

        _, found = jax.lax.scan(one, None, _chunks(x_BTD, targets_BT, chunk=chunk))
        return tuple(jnp.moveaxis(a, 0, 1).reshape(targets_BT.shape) for a in found)

    return _each_device_its_tokens(measures, (False, False))(x_BTD, w_VD.astype(x_BTD.dtype), targets_BT)


def token_losses(x_BTD, w_VD, targets_BT, *, cap=0.0, chunk=1024):
    """fp32 losses [B, T] in nats and log-sum-exps [B, T], forward only, for validation and measurements."""
    return _of_tokens(_nll, x_BTD, w_VD, targets_BT, cap, chunk)


def token_scores(x_BTD, w_VD, targets_BT, *, cap=0.0, chunk=1024):
    """fp32 log-probabilities [B, T] of the targets in nats, and whether each is what greedy decoding takes (of equals the first), bool."""

    def scores(logits_BnV, targets_Bn):
        return -_nll(logits_BnV, targets_Bn)[0], jnp.argmax(logits_BnV, axis=-1) == targets_Bn

    return _of_tokens(scores, x_BTD, w_VD, targets_BT, cap, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def summed_loss(x_BTD, w_VD, targets_BT, weights_BT, cap=0.0, chunk=1024):
    """Σ weight · loss over all tokens, fp32 nats. Differentiable in x and w; weights are data."""
    losses, _ = token_losses(x_BTD, w_VD, targets_BT, cap=cap, chunk=chunk)
    return jnp.sum(losses * weights_BT)


def _loss_and_gradients(x_BTD, w, targets_BT, weights_BT, *, cap, chunk):
    """The summed loss, its fp32 gradient in w and its gradient in x."""

    def one(carry, args):
        total, d_w = carry
        x, targets, weights = args
        logits = _chunk_logits(x, w, cap)
        loss, lse = _nll(logits, targets)
        hit = targets[..., None] == jnp.arange(w.shape[0])[None, None]
        d_logits = (jnp.exp(logits - lse[..., None]) - hit) * weights[..., None]
        if cap:
            d_logits *= 1 - jnp.square(logits / cap)  # the derivative of cap·tanh(z/cap)
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.einsum("bnv,vd->bnd", d_logits, w)
        d_w += jnp.einsum("bnv,bnd->vd", d_logits, x, preferred_element_type=jnp.float32)
        return (total + jnp.sum(loss * weights), d_w), d_x

    # A zero that the compiler cannot see through: XLA:CPU fails on a bf16 product alone whose fp32 result is then transposed, which is
    # what one chunk and an untied head would come to.
    zero = 0.0 * x_BTD[0, 0, 0].astype(jnp.float32)
    start = (jnp.zeros((), jnp.float32), jnp.broadcast_to(zero, w.shape))
    (total, d_w), d_x = jax.lax.scan(one, start, _chunks(x_BTD, targets_BT, weights_BT, chunk=chunk))
    return total, d_w, jnp.moveaxis(d_x, 0, 1).reshape(x_BTD.shape)


def _summed_loss_forward(x_BTD, w_VD, targets_BT, weights_BT, cap, chunk):
    each = _each_device_its_tokens(functools.partial(_loss_and_gradients, cap=cap, chunk=chunk), (True, True, False))
    total, d_w, d_x = each(x_BTD, w_VD.astype(x_BTD.dtype), targets_BT, weights_BT)
    return total, (d_x, d_w.astype(w_VD.dtype))


def _summed_loss_backward(cap, chunk, saved, gradient):
    d_x, d_w = saved
    return (d_x * gradient).astype(d_x.dtype), d_w * gradient.astype(d_w.dtype), None, None


summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)
