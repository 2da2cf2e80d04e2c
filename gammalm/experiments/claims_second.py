"""The statements of the second source (docs/second_source.md) that a number can support or contradict; claims.py has the rule.

Statements are in our words, with the source's figures. Where it is vague, all readings are parts of one claim, each with its own verdict;
what we had to decide is said in the limits. Quantities are those of experiments/figures/han_*.py.
"""

import math
from collections.abc import Mapping

from gammalm.experiments.claims import ABOVE, BELOW, SECOND_SOURCE, Claim, Part, Region, Rows, measured
from gammalm.experiments.claims_measures import Measure, all_of, each, untrained
from gammalm.experiments.figures.han_bands import NEAR, RANGES

HALF_DECADE = 0.5  # in log10: how far an end of a band that is given as a power of ten may lie from it
MATCHES: Region = (-0.005, math.inf)  # "matches or slightly exceeds", of an accuracy
OURS = "The source does not say how it trains: the optimizer, its rate and the epochs are ours."
BOTH = (
    "The source says Kaiming normal in one place and uniform in another, and not which wines are of class 1: all are parts. Its 11 inputs "
    "are those of UCI Wine Quality, with no binary label; UCI Wine has 13 and three classes. Intervals stand for one comparison each; "
    "han-e2 has p-values corrected for their number. "
)
OPTIMIZERS = {"sgd": "plain SGD", "adam": "Adam"}  # each a claim of its own, as one need not do what the other does


def _parts(rows: list[Mapping], region: Region, *named: str) -> list[Part]:
    """A part for each row, called by these labels of it."""
    return [Part(", ".join(str(row[name]) for name in named) + ":", measured(row), region, [row]) for row in rows]


def _at_stds(low: float, high: float, region: Region, **labels) -> Measure:
    """Accuracy at each σ of a stretch, minus that at the best σ."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        found = sorted(rows.pick("accuracy below best", rate=rate, **labels), key=lambda row: row["std"])
        return [Part(f"σ={row['std']:g}:", measured(row), region, [row]) for row in found if low <= row["std"] <= high]

    return measure


def _kaiming(quantity: str, region: Region, **labels) -> Measure:
    """Kaiming, normal and uniform, minus Xavier normal, for each kind of label."""

    def measure(rows: Rows, rate: str) -> list[Part]:
        return _parts([
            row for second in ("kaiming_normal", "kaiming_uniform")
            for row in rows.pick(quantity, first="xavier_normal", second=second, rate=rate, **labels)
        ], region, "second", "target")  # fmt: skip

    return measure


def _claims(optimizer: str) -> tuple[Claim, ...]:
    """The statements on training, read for one optimizer."""
    one = {"optimizer": optimizer}

    def claim(id_: str, section: str, statement: str, figure: str, measure: Measure, limits: str = "") -> Claim:
        statement = f"{statement} ({OPTIMIZERS[optimizer]})."
        return Claim(f"{id_}-{optimizer}", section, statement, (figure,), measure, None, limits + OURS, SECOND_SOURCE)

    return (
        claim("std-stable-band", "E1", "For σ from 1e-2 to 1e-1 training is smooth and accuracy at its peak", "han-e1",
            _at_stds(*RANGES["stable"], (-NEAR, math.inf), **one), f"Within {NEAR:g} of the best accuracy of the sweep counts. "),
        claim("std-best", "E1", "The best σ lies from 1e-2 to 1e-1", "han-e1",
            each("log10 best std", (-2.0, -1.0), "log10 of the best σ:", **one)),
        claim("std-band-ends", "E1", "The stable band ends at about 1e-2 and at about 1e-1", "han-e1",
            all_of(each("log10 stable from", (-2 - HALF_DECADE, -2 + HALF_DECADE), "log10 of its lower end:", **one),
                   each("log10 stable to", (-1 - HALF_DECADE, -1 + HALF_DECADE), "log10 of its upper end:", **one)),
            "The source gives powers of ten and no rule: ours is that of han-e1, and an end within half a decade counts. "),
        claim("std-vanishing", "E1", "Up to σ of about 1e-3 updates vanish and accuracy drops", "han-e1",
            _at_stds(*RANGES["vanishing"], (-math.inf, -NEAR), **one), f"More than {NEAR:g} below the best counts as a drop. "),
        claim("std-exploding", "E1", "From σ of about 1 on the loss is unstable, and some runs diverge", "han-e1",
            all_of(each("share", (0.5, math.inf), "share of these σ that explode:", band="exploding", **one),
                   each("share diverged", ABOVE, "share of these runs with numbers that are not finite:", band="exploding", **one)),
            "More than half of these σ has to explode, and any run to diverge. "),
        claim("kaiming-faster", "E2", "Under ReLU, Kaiming needs fewer epochs to a target loss than Xavier", "han-e2",
            _kaiming("difference", BELOW, measure="epochs to target", **one), BOTH),
        claim("kaiming-loss", "E2", "Kaiming's training loss at the end is lower than Xavier's", "han-e2",
            _kaiming("difference", BELOW, measure="final loss", **one), BOTH),
        claim("kaiming-train-accuracy", "E2", "Kaiming's training accuracy is higher than Xavier's", "han-e2",
            _kaiming("difference", ABOVE, measure="train accuracy", **one), BOTH),
        claim("kaiming-test-accuracy", "E2", "Kaiming's validation accuracy matches Xavier's or slightly exceeds it", "han-e2",
            _kaiming("difference", MATCHES, measure="test accuracy", **one), "Down to .005 below counts as a match. " + BOTH),
        claim("kaiming-spread", "E2", "Kaiming's loss varies less between runs than Xavier's", "han-e2",
            _kaiming("log spread ratio", BELOW, **one),
            "ln of the ratio of standard deviations over seeds, training loss at the end, by a bootstrap. " + BOTH),
    )  # fmt: skip


def _tracked(id_: str, statement: str, quantity: str, region: Region, limits: str, **labels) -> Claim:
    """A statement on E3's weights, a part for each of Q, K and V, at the source's initialization and rate."""
    own = {"arm": "source", "lr": 1e-4} | labels
    parts = all_of(*(each(quantity, region, f"{name.upper()}:", matrix=name, **own) for name in "qkv"))
    return Claim(id_, "E3", statement, ("han-e3",), parts, None, f"{limits} {UNSAID}", SECOND_SOURCE)


UNSAID = "The source does not give length, steps, decay or data: these are ours."
TRACKED = (
    _tracked("weights-depth", "Early in training the std of Q, K and V weights grows faster in shallow layers than in deep ones.",
        "depth correlation", BELOW, "Spearman's correlation of growth over the first tenth of the steps with the layer.", at="early"),
    _tracked("weights-settle", "The std of Q, K and V weights of every layer settles.",
        "settled", (0.95, math.inf), "Share of the layers of whose growth the last quarter of the steps has at most a tenth."),
    _tracked("weights-narrow", "In the end the std of Q, K and V weights of all layers lies in a narrow band.",
        "spread", (-math.inf, 0.2), "(Largest − smallest)/mean over layers; the source gives no width, up to .2 counts.", at="end"),
    _tracked("weights-sparser", "After training more Q, K and V weights are near zero.",
        "near zero change", ABOVE, "Near zero: within a tenth of the matrix's own std."),
)  # fmt: skip


def _constants(activation: str, c: Region, d: Region | None) -> Measure:
    """c_φ, and d_φ where the source gives it, at unit variance."""
    given = {"c_phi": c} | ({"d_phi": d} if d else {})
    return all_of(*(untrained(name, region, f"{name}:", activation=activation) for name, region in given.items()))


HALF: Region = (0.5 - 1e-6, 0.5 + 1e-6)
THEORY = (
    Claim("constants-relu", "theory", "For ReLU c_φ = E[φ(z)²]/Var z and d_φ = E[φ'(z)²] are ½.", ("han-e1",),
        _constants("relu", HALF, HALF), None, "A closed form.", SECOND_SOURCE),
    Claim("constants-gelu", "theory", "For GELU c_φ lies from .45 to .5.", ("han-e1",), _constants("gelu", (0.45, 0.5), None), None,
        "A closed form, at unit variance; it falls to ¼ as the variance goes to 0, so small weights do not meet that range either.",
        SECOND_SOURCE),
)  # fmt: skip

SECOND_CLAIMS = THEORY + tuple(claim for optimizer in OPTIMIZERS for claim in _claims(optimizer)) + TRACKED
