"""How a mixture of experts at its first step shares out tokens: which experts two tokens have in common.

That depends on the correlation of their logits. Router logits are independent over experts, Gaussian, and correlated over tokens as the
router's input is; biases are zero. Legend: E experts, P points of a table over the correlation, S drawn pairs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.theory.description import Mixture

POINTS = 25
PAIRS = 4096


def shared_gates(mixture: Mixture, variance):
    """Table [P] of E[Σ_e g_e g'_e] over the angle arccos ρ from 0 to π, ρ the correlation of two tokens' router logits.

    variance: of a logit. At ρ = 1 it is E[Σ g²], by which a token's own routed output grows; at ρ = 0 it is 1/E of the squared scale.
    """
    E, keys = mixture.n_experts, jax.random.split(jax.random.key(0))
    first_SE, other_SE = (jax.random.normal(key, (PAIRS, E)) for key in keys)
    gates_SE = _gates(mixture, first_SE, variance)

    def at(angle):
        return jnp.mean(jnp.sum(gates_SE * _gates(mixture, jnp.cos(angle) * first_SE + jnp.sin(angle) * other_SE, variance), axis=-1))

    return jax.lax.map(at, jnp.linspace(0, np.pi, POINTS))


def _gates(mixture: Mixture, z_SE, variance):
    """Gates [S, E], zero for experts not chosen."""
    threshold_S1 = jax.lax.top_k(z_SE, mixture.top_k)[0][:, -1:]
    logits_SE = jnp.sqrt(variance) * z_SE
    score_SE = jax.nn.sigmoid(logits_SE) if mixture.score == "sigmoid" else jax.nn.softmax(logits_SE, axis=-1)
    chosen_SE = jnp.where(z_SE >= threshold_S1, score_SE, 0)
    return mixture.route_scale * chosen_SE / jnp.sum(chosen_SE, axis=-1, keepdims=True)


def look_up(table_P, rho_TT):
    """The table at these correlations, linear in the angle: the chance to share an expert falls as √(1−ρ) near ρ = 1."""
    place = jnp.arccos(rho_TT) * ((POINTS - 1) / np.pi)
    left = jnp.clip(place.astype(jnp.int32), 0, POINTS - 2)
    share = place - left
    return table_P[left] * (1 - share) + table_P[left + 1] * share
