"""Parameter counts of every size, with and without the gate, against sums written out from the shapes of docs/science.md, section 9.

Nothing is allocated: models are abstract.
"""

import pytest

from gammalm.config import load_config
from gammalm.models.decoder import Model

SHAPES = {  # L, d, H, h, F, F under the elementwise gate, V, tied
    "125m": (12, 768, 12, 64, 2048, 1792, 50304, True),
    "350m": (24, 1024, 16, 64, 2752, 2416, 50304, True),
    "760m": (24, 1536, 16, 96, 4096, 3584, 50304, True),
    "1.5b": (24, 2048, 24, 128, 5440, 4416, 50304, True),
    "1.5b-16h": (24, 2048, 16, 128, 5440, 4752, 64000, False),
}


def count(spec):
    return Model(load_config(spec).model).parameter_count


@pytest.mark.parametrize("size", SHAPES)
def test_counts(size):
    L, d, H, h, F, F_gated, V, tied = SHAPES[size]

    def by_hand(F, gate):
        layer = 4 * d * H * h + gate + 3 * d * F + 2 * d
        return L * layer + V * d * (1 if tied else 2) + d

    plain = count(f"lm:size={size},gate=none")
    gated = count(f"lm:size={size},gate=elementwise")
    assert plain == by_hand(F, 0)
    assert gated == by_hand(F_gated, d * H * h)
    assert count(f"lm:size={size},gate=elementwise,match_width=false") == by_hand(F, d * H * h)
    assert count(f"lm:size={size},gate=headwise") == by_hand(F, d * H)
    assert abs(gated / plain - 1) < 0.002, "the narrower FFN pays for the gate"


def test_published_totals():
    assert round(count("lm:size=1.5b,gate=none") / 1e6) == 1509
    assert round(count("lm:size=1.5b-16h,gate=none") / 1e6) == 1467


MIXTURES = {  # L, d, H, h, experts, top-k, d_e, V; total and active parameters as published in docs/science.md, without a gate
    "moe-1.5b-a0.25b": (12, 1024, 16, 64, 96, 8, 384, 64000, 1_490_183_168, 244_474_880),
    "moe-3b-a0.5b": (16, 1536, 12, 128, 96, 8, 384, 64000, 2_997_929_472, 506_512_896),
}


def counts(spec):
    model = Model(load_config(spec).model)
    return model.parameter_count, model.active_parameter_count


@pytest.mark.parametrize("size", MIXTURES)
def test_mixtures(size):
    L, d, H, h, E, K, F, V, total, active = MIXTURES[size]
    assert counts(f"lm:size={size},gate=none") == (total, active)

    def by_hand(attention):
        """One shared expert; the selection bias is no parameter."""
        layer = attention + d * E + 2 * d + 3 * d * F
        return tuple(L * (layer + n * 3 * d * F) + V * d + d for n in (E, K))

    mha, latent, rotated = 4 * d * H * h, d // 4, h // 2
    mla = d * H * (h + rotated) + d * (latent + rotated) + latent + 2 * latent * H * h + H * h * d
    assert by_hand(mha) == (total, active)
    assert counts(f"lm:size={size}") == by_hand(mha + d * H * h)
    assert counts(f"lm:size={size},attention=mla,gate=none") == by_hand(mla)
    assert counts(f"lm:size={size},attention=mla,gate=headwise") == by_hand(mla + d * H)
    assert counts(f"lm:size={size},attention=mla") == by_hand(mla + d * H * h)


def test_the_gate_costs_a_mixture_what_the_docs_say():
    """Mixtures keep the width of their experts: the gate adds 5.1 and 7.5 % to the active parameters."""
    shares = [counts(f"lm:size={size}")[1] / counts(f"lm:size={size},gate=none")[1] - 1 for size in MIXTURES]
    assert [round(100 * share, 1) for share in shares] == [5.1, 7.5]
