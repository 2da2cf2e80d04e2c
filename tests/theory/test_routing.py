"""What two tokens share of a mixture's gates, against routing written out with loops."""

import numpy as np
import pytest

from gammalm.theory import Mixture
from gammalm.theory.routing import look_up, shared_gates


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_shared_gates(score):
    E, top, variance, scale, pairs = 12, 3, 1.0, 2.0, 6000
    rng = np.random.default_rng(0)
    table = shared_gates(Mixture(E, top, 0, 8, score, scale), variance)

    def gates(z):
        g = np.zeros(E)
        chosen = np.argsort(-z)[:top]
        g[chosen] = np.exp(z[chosen]) if score == "softmax" else 1 / (1 + np.exp(-z[chosen]))
        return scale * g / g.sum()

    for rho in (1.0, 0.9, 0.4, 0.0, -0.6):
        first = rng.normal(size=(pairs, E))
        other = rho * first + np.sqrt(1 - rho**2) * rng.normal(size=(pairs, E))
        expected = np.mean([gates(a) @ gates(b) for a, b in zip(first, other, strict=True)])
        assert float(look_up(table, np.array([rho], np.float32))[0]) == pytest.approx(expected, rel=0.03, abs=0.01), rho
    assert float(look_up(table, np.zeros(1, np.float32))[0]) == pytest.approx(scale**2 / E, rel=0.03)  # unrelated tokens
