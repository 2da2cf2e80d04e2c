"""Largest singular values and stable ranks of stacks of matrices, on the device, without a decomposition of any of them.

Golub-Kahan-Lanczos bidiagonalisation: k products with A and k with its transpose give orthonormal U, V and a bidiagonal B with A V = U B,
whose largest singular value approaches A's from below. The near-equal singular values at the top of a random matrix slow it down little,
where power iteration needs hundreds of products. Vectors of V, the shorter ones, are kept and made orthogonal anew; of U only the last is
kept, as its vectors stay about as orthogonal as those of V (Simon and Zha 2000, doi:10.1137/S1064827597327309).
Shapes of one matrix: w [r, c] as it lies; A [m, n] the same or its transpose, so that m ≥ n; K steps at most; u [m]; V [K + 1, n] one
vector per row, zeros where none is yet; alpha [K] and beta [K] the diagonals of B.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gammalm.models.parts import platform

STEPS = 128  # at most; a matrix whose shorter side has no more is exact by then
STEPS_BETWEEN_LOOKS = 8  # at the error
RELATIVE_ERROR = 3e-5  # at which a matrix is done. At 1e-4 a lower value passed for the largest in 2 of 2,024 large random matrices
EXHAUSTED = 1e-6  # what is left of a vector, below this share, is rounding
SHIFTS, ROUNDS = 64, 4  # of the search for an eigenvalue: 64⁴ = 2²⁴, as many steps as fp32 has in a bracket
PIVOT_MIN = 1e-30  # in place of a pivot of zero, which is none above it. Absolute, as no entry of a matrix is above 1 here

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)  # no bf16 or TF32 products


class Top(NamedTuple):
    """The largest singular value of a matrix: `value`, its unit vectors `left` [r] and `right` [c], and how sure it is.

    `error` = ‖Aᵀu − value·v‖/√2, where A v = value·u: the matrix has a singular value within `error` of `value`, and `value` is never above
    the largest, both beside rounding in fp32, about 1e-6 of the value. That it is the largest and not one just below rests on the random
    start, and on going on until `error` is far smaller than the gaps that matter.
    """

    value: jax.Array
    left: jax.Array
    right: jax.Array
    error: jax.Array


class _Space(NamedTuple):
    steps: jax.Array
    u: jax.Array
    V: jax.Array
    alpha: jax.Array
    beta: jax.Array
    value: jax.Array
    p: jax.Array  # [K], left singular vector of B
    error: jax.Array


@functools.partial(jax.jit, static_argnames="relative_error")
def top_singular(w, relative_error: float = RELATIVE_ERROR) -> Top:
    """The largest singular triple of every matrix of `w` [..., r, c]; the fields of `Top` with the leading axes of `w`.

    A matrix is done when `error` ≤ relative_error · value, or after STEPS steps: look at `error`. Products are fp32 whatever w's dtype, and
    read w where it lies, sharded or not. Zeros give 0, entries that are not finite NaN. On accelerators all matrices go together; on CPU
    one after another, because a matrix then stays in the cache from one product to the next.
    Source: Golub and Kahan 1965, doi:10.1137/0702016.
    """
    if w.ndim == 2:
        return _top(w, relative_error)
    each = functools.partial(top_singular, relative_error=relative_error)
    return jax.lax.map(each, w) if platform() == "cpu" else jax.vmap(each)(w)


def _top(w, relative_error: float) -> Top:
    wide = w.shape[0] < w.shape[1]
    scale = jnp.max(jnp.abs(w)).astype(jnp.float32)
    unit = jnp.where(scale == 0, 0.0, 1 / scale)  # entries of at most 1, as squares of tiny ones would be zero in fp32

    def times(v):  # A v
        return unit * (_dot(v, w) if wide else _dot(w, v))

    def times_transposed(u):  # Aᵀ u
        return unit * (_dot(w, u) if wide else _dot(u, w))

    def step(k, s: _Space) -> _Space:
        x = times(s.V[k])
        u, alpha = _unit(x - s.beta[k - 1] * s.u, jnp.linalg.norm(x))  # at first u and the last of beta are zeros
        x = times_transposed(u)
        v, beta = _unit(_orthogonal(x, s.V), jnp.linalg.norm(x))
        return s._replace(u=u, V=s.V.at[k + 1].set(v), alpha=s.alpha.at[k].set(alpha), beta=s.beta.at[k].set(beta))

    def go_on(s: _Space) -> _Space:
        end = jnp.minimum(s.steps + STEPS_BETWEEN_LOOKS, K)
        s = jax.lax.fori_loop(s.steps, end, step, s)
        # The residual is that of an eigenvector (u, v)/√2 of [[0, A], [Aᵀ, 0]], whose eigenvalues are the singular values of A.
        value, p = _top_of_bidiagonal(s.alpha, jnp.where(jnp.arange(K) < end - 1, s.beta, 0.0))
        return s._replace(steps=end, value=value, p=p, error=s.beta[end - 1] * jnp.abs(p[end - 1]) / 2**0.5)

    def unfinished(s: _Space):
        return (s.steps < K) & (s.error > relative_error * s.value)  # NaN ends it

    n, m = sorted(w.shape)
    K = min(STEPS, n)
    start = jax.random.normal(jax.random.key(0, impl="threefry2x32"), (n,))
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    V = zeros((K + 1, n)).at[0].set(start / jnp.linalg.norm(start))
    s = _Space(jnp.int32(0), zeros(m), V, zeros(K), zeros(K), zeros(()), zeros(K), jnp.float32(jnp.inf))
    s = jax.lax.while_loop(unfinished, go_on, s)
    right, _ = _unit(_dot(s.alpha * s.p + jnp.roll(s.beta * s.p, 1).at[0].set(0.0), s.V[:K]))  # Bᵀp in terms of V
    left, value = _unit(times(right))
    return Top(scale * value, *((right, left) if wide else (left, right)), scale * s.error)


def _orthogonal(x, basis):
    """What of `x` is orthogonal to the rows of `basis`.

    Twice is enough for orthogonality to rounding (Giraud, Langou and Rozložník 2005, doi:10.1016/j.camwa.2005.08.009).
    """
    for _ in range(2):
        x = x - _dot(_dot(basis, x), basis)
    return x


def _unit(x, before=0.0):
    """`x` as a unit vector, and its length; zeros where of a vector that was `before` long nothing but rounding is left."""
    length = jnp.linalg.norm(x)
    length = jnp.where(length <= EXHAUSTED * before, 0.0, length)
    return x * jnp.where(length == 0, 0.0, 1 / length), length


def _top_of_bidiagonal(alpha, beta):
    """Largest singular value and its left vector of the matrix with diagonal `alpha` and beta[:-1] above it, both [K] and not negative.

    The top of T = B Bᵀ, tridiagonal: T - x has a pivot above 0 just where x is below the largest eigenvalue, which is sought among SHIFTS
    values at a time. The vector comes from the pivots of both directions, joined where they fit best (Dhillon and Parlett 2004,
    doi:10.1016/j.laa.2003.12.028). LAPACK's eigh, which finds all of them, leaves BLAS threads spinning beside the products (docs/log.md).
    """
    d = alpha**2 + beta**2
    before = jnp.concatenate([jnp.zeros(1), beta[:-1] * alpha[1:]])  # T[i, i - 1]
    after = jnp.roll(before, -1)  # T[i, i + 1]

    def narrow(_, bracket):
        low, high = bracket
        x = low + (high - low) * jnp.linspace(0, 1, SHIFTS + 1)[1:]
        above = jnp.all(_pivots(d[:, None], before[:, None], x) <= 0, axis=0)  # the largest eigenvalue is at most x
        first = jnp.argmax(above.at[-1].set(True))
        return jnp.where(first == 0, low, x[first - 1]), x[first]

    # Gershgorin: no eigenvalue is above the largest of the sums; nor, with a margin for their rounding, any pivot at its end.
    end = jnp.max(d + before + after) * (1 + 1e-6)
    _, top = jax.lax.fori_loop(0, ROUNDS, narrow, (jnp.max(d), end))
    down, up = _pivots(jnp.stack([d, d[::-1]], 1), jnp.stack([before, after[::-1]], 1), jnp.full(2, top)).T
    up = up[::-1]
    place = jnp.arange(len(d))
    twist = jnp.argmin(jnp.abs(down + up - (d - top)))
    behind = jnp.where(place > twist, -before / up, 1.0)
    ahead = jnp.where(place < twist, -after / down, 1.0)
    p, _ = _unit(jnp.cumprod(behind) * jnp.cumprod(ahead[::-1])[::-1])
    return jnp.sqrt(top), p


def _pivots(d, e, x):
    """Pivots q [K, S] of T - x for each of S shifts: q[i] = d[i] - x - e[i]²/q[i - 1]; d and e [K, 1 or S]."""

    def pivot(q, row):
        d, e = row
        q = d - x - e**2 / q
        q = jnp.where(jnp.abs(q) < PIVOT_MIN, -PIVOT_MIN, q)
        return q, q

    return jax.lax.scan(pivot, jnp.ones(x.shape), (d, e), unroll=16)[1]


@jax.jit
def stable_rank(w):
    """(‖W‖_F² / ‖W‖₂², relative error) of every matrix of `w` [..., r, c]; both have the leading axes of `w`. Zeros give 0.

    Between 1 and min(r, c). The error is that of the singular value, twice: 2 · RELATIVE_ERROR but where STEPS were too few.
    Source: the paper's measure of condensation (science 7).
    """
    top = top_singular(w)
    value = jnp.where(top.value == 0, 1.0, top.value)
    squares = jnp.mean(jnp.mean(jnp.square(w.astype(jnp.float32) / value[..., None, None]), axis=-1), axis=-1)
    return squares * (w.shape[-1] * w.shape[-2]), 2 * top.error / value
