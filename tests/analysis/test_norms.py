"""The regime of every norm against the float64 decoder, and the first norm at initialization against its closed form."""

import numpy as np
import pytest

from gammalm.analysis.norms import norm_regime
from gammalm.initializers import init_params
from gammalm.models.decoder import Model, fresh_buffers

from ..models.reference import small_config
from .naive import CASES, Case

INNER = {
    "elementwise gate, qk-norm, learned sink": {"q_norm", "k_norm"},
    "compressed mla, a mixture after two dense layers": {"q_norm", "kv_norm"},
    "mla, sink of one": {"kv_norm"},
}
EPS = 1.0  # so large that it matters, and that some tokens lie below it


def variances(case, norm):
    """Mean squares of what `norm` normalises, by layer [L], of all tokens (and heads) that count."""
    rows = [[(x[valid] ** 2).mean(-1).ravel() for x in seen.norms[norm]] for valid, seen in zip(case.valid, case.seen, strict=True)]
    return [np.concatenate(layer) for layer in zip(*rows, strict=True)]


@pytest.mark.parametrize("name, packing", CASES)
def test_every_norm_is_found_and_measured(name, packing):
    case = Case(name, packing, norm_eps=EPS)
    found = norm_regime(*case.model_and_data)
    assert set(found.norms) == {"attn_norm", "ffn_norm", "final_norm"} | INNER.get(name, set())
    assert (found.tokens, found.eps) == (case.valid.sum(), EPS)
    below = []
    for norm, ours in found.norms.items():
        layers = variances(case, norm)
        expected = {
            "variance": [v.mean() for v in layers],
            "ratio": [EPS / v.mean() for v in layers],
            "factor": [np.sqrt(v / (v + EPS)).mean() for v in layers],
            "hidden": [(v < EPS).mean() for v in layers],
        }
        for quantity, values in expected.items():
            np.testing.assert_allclose(getattr(ours, f"{quantity}_L"), values, rtol=2e-4, atol=1e-6, err_msg=f"{norm} {quantity}")
        below += expected["hidden"]
    assert 0 < np.mean(below) < 1


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-4, 1e-3])
def test_the_first_norm_has_the_factor_of_the_closed_form(eps):
    """science.md, section 2: (1 + ε·d^(2γ))^(−1/2) at initialization, here at γ = 1; one program serves every ε."""
    d = 96
    config = small_config(d_model=d, init__gamma=1.0)
    model = Model(config.model)
    params = init_params(model.specs, config.init, 0, d_model=d, n_layers=config.model.n_layers)
    batch = {"tokens": np.random.default_rng(0).integers(0, 50, (8, 33)).astype(np.int32)}
    found = norm_regime(model, params, fresh_buffers(model), [batch], eps)
    assert found.norms["attn_norm"].factor_L[0] == pytest.approx((1 + eps * d**2) ** -0.5, rel=0.03)
    assert found.norms["attn_norm"].ratio_L[0] == pytest.approx(eps * d**2, rel=0.05)
