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
