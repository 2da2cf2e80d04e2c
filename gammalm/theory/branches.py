"""How ‖branch‖/‖e‖ grows with the width d, for one branch on the embedding alone: the recursion's ratios and the exponent fitted to them.

Branches: "two-linear" (two matrices, d inner units), "swiglu" (8d/3 inner units), "attention" (heads of 64). Tokens are distinct.
Source: science 5. Legend: T tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.errors import ConfigError
from gammalm.theory.description import Dense, Heads, gamma_decoder
from gammalm.theory.mixing import normed, samples_heads
from gammalm.theory.recursion import attention_covariance, dense_covariance

BRANCHES = ("two-linear", "swiglu", "attention")
WIDTHS = (128, 256, 512, 1024, 2048, 4096)
GAMMAS = (0.5, 0.75, 1.0, 1.25)
HEAD = 64  # size of a head
DRAWN = 64  # heads that are drawn where their weights are uneven

# (branch, ε) -> fitted exponents at GAMMAS, over WIDTHS with T = 64: the table of docs/science.md, section 5 [C].
EXPONENTS = {
    ("two-linear", 1e-12): (0.499, 0.249, -0.001, -0.251),
    ("two-linear", 1e-5): (0.494, 0.076, -0.739, -1.451),
    ("swiglu", 1e-12): (0.506, -0.002, -0.497, -0.997),
    ("swiglu", 1e-5): (0.495, -0.349, -1.973, -3.397),
    ("attention", 1e-12): (0.496, 0.251, 0.002, -0.248),
    ("attention", 1e-5): (0.487, 0.078, -0.735, -1.445),
}

_compiled = jax.jit(attention_covariance, static_argnames=("stack", "d", "heads"))


def branch_ratio(branch: str, d: int, gamma: float, eps: float, T: int = 64) -> float:
    """‖branch‖/‖e‖ over a sequence of T distinct tokens at width d, as `predict` has it of a layer's branch on the embedding.

    Compiled only where heads are drawn: over many widths compiling would take longer than computing. ConfigError for an unknown branch.
    """
    if branch not in BRANCHES:
        raise ConfigError(f"theory: branch {branch!r} is none of {', '.join(BRANCHES)}.")
    ffn = Dense(d, "linear") if branch == "two-linear" else Dense(8 * d // 3)
    sizes = {"d_model": d, "vocab_size": T, "n_layers": 1, "attention": Heads(d // HEAD, HEAD), "ffn": ffn}
    decoder = gamma_decoder(**sizes, gamma=gamma, eps=eps)
    (stack,), (std,) = decoder.stacks, decoder.stds
    K_TT = jnp.square(decoder.embed) * jnp.eye(T)
    if branch == "attention":
        heads = DRAWN if samples_heads(stack.attention, std, d, T) else 0
        added = _compiled if heads else attention_covariance
        added_TT = added(stack, std, K_TT, eps, np.zeros(T, np.int32), d, decoder.rope_theta, jax.random.key(0), heads)
    else:
        added_TT = dense_covariance(ffn, std, "ffn/", normed(K_TT, eps), d)
    return float(jnp.sqrt(jnp.trace(added_TT) / jnp.trace(K_TT)))


def fitted_exponent(widths, ratios) -> float:
    """The exponent of d in `ratios`: the slope of a straight line through their logarithms (least squares)."""
    return float(np.polyfit(np.log(widths), np.log(ratios), 1)[0])
