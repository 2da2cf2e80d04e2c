"""Every statement of the first paper that a number can support or contradict, and how each is measured (claims.py has the rule).

Statements are in our words, with the paper's figures. A difference is second − first in nats, so "lowers the loss" is below zero. What
the paper leaves open and we had to decide to make a statement testable is said in the limits.
"""

import math

from gammalm.experiments.claims import ABOVE, BELOW, UNCHANGED, Claim
from gammalm.experiments.claims_measures import (
    against_one,
    all_of,
    apart,
    by_matrix,
    climbs,
    each,
    every_size,
    fades,
    falls,
    flow_regimes,
    follows,
    gammas_apart,
    highest,
    largest,
    largest_of_several,
    over_training,
    shrinks,
    smallest,
    starts_random,
    task_gains,
    untrained,
)

SMALL, LARGE = 125e6, 1.5e9  # dense models for which the paper gives an effect
NOT_PAIRED = "The two effects are compared as if they shared no seed."
FEW_TOKENS = "All sizes see the same tokens, so the largest sees the fewest per parameter."
BARELY = "Unchanged means within .01 nats, our reading."
HALF_STEP = "Within half a step of the sweep counts as 1. "
NO_ARM = "The paper does not say which architecture it sweeps."
SCORE = "The score is the mean attention to the first token of a sequence over heads, later positions and layers."
BEFORE_TRAINING = "Measured before training and fitted over widths, with ε = 1e-12; within .02 counts as agreement."
RANKS = ("fig4f", "fig4g", "fig5", "fig6", "fig7", "fig8")
CURVES = "Mean over matrices of one model; the interval is over seeds."
MIXTURES = ("fig2b", "fig2c")
TASKS = "Intervals are over items, of one pair of models: another pair may differ by more. What both models guess resolves nothing."
FOUR = ("TriviaQA", "HellaSwag", "GSM8K", "MATH500")

CLAIMS = (
    # 2.1 small initialization by itself
    Claim("lower-at-all-sizes", "2.1", "γ=1 gives a lower validation loss than γ=.5 at every size of the plain architecture.",
        ("fig1b",), every_size("gap", BELOW, arm="plain")),
    Claim("gain-small", "2.1", "At 0.1B parameters γ=1 lowers the loss by about .05 (plain).",
        ("fig1b",), smallest("gap", BELOW, arm="plain"), (-0.05, SMALL)),
    Claim("gain-large", "2.1", "At 1.5B parameters γ=1 lowers the loss by only .003 (plain).",
        ("fig1b",), largest_of_several("gap", BELOW, arm="plain"), (-0.003, LARGE), FEW_TOKENS),
    Claim("gain-shrinks", "2.1", "The gain of γ=1 over γ=.5 shrinks as models grow (plain).",
        ("fig1b",), shrinks(arm="plain"), None, FEW_TOKENS),
    # 2.1 the norm constant
    Claim("variance", "2.1", "With d = 2048, σ²(h) is 4.8e-4 at γ=.5 and 2.4e-7 at γ=1.", ("fig1c",),
        all_of(untrained("variance", (4.75e-4, 4.95e-4), "γ=.5:", d=2048, gamma=0.5),
               untrained("variance", (2.35e-7, 2.45e-7), "γ=1:", d=2048, gamma=1.0)),
        None, "A closed form, d^−2γ; the first number is 4.88e-4, cut off and not rounded in the paper."),
    Claim("eps-saturates", "2.1", "ε = 1e-5 saturates the norm factor beyond γ = .6, at d = 2048.", ("fig1c",),
        all_of(untrained("sensitivity", (0.9, 1.0), "share of the sensitivity to γ left at γ=.6:", d=2048, eps=1e-5, gamma=0.6),
               untrained("sensitivity", (0.0, 0.1), "at γ=1:", d=2048, eps=1e-5, gamma=1.0),
               untrained("half point", (0.6, 1.0), "half of it is left at γ =", d=2048, eps=1e-5)),
        None, "A closed form. We read it as: at γ = .6 saturation begins (at least .9 is left), at 1 it is reached (at most .1)."),
    Claim("eps-stays-sensitive", "2.1", "ε = 1e-12 keeps the norm factor sensitive to γ over a far wider range.", ("fig1c",),
        all_of(untrained("sensitivity", (0.99, 1.0), "share of the sensitivity to γ left at γ=1:", d=2048, eps=1e-12, gamma=1.0),
               untrained("half point", (1.0, 2.0), "half of it is left at γ =", d=2048, eps=1e-12)), None, "A closed form."),
    Claim("eps-at-small", "2.1", "At γ=1, lowering ε from 1e-5 to 1e-12 lowers the loss by about .038 (1.5B).",
        ("fig1d",), largest("eps effect", BELOW, gamma=1.0), (-0.038, LARGE), "At γ=1 ε = 1e-5 exceeds σ² in models wider than 316."),
    Claim("eps-at-standard", "2.1", "At γ=.5 the same change of ε barely helps, about .001 (1.5B).",
        ("fig1e",), largest("eps effect", UNCHANGED, gamma=0.5), (-0.001, LARGE), BARELY),
    Claim("eps-matters-more-at-small", "2.1", "Lowering ε helps γ=1 more than γ=.5.", ("fig1d", "fig1e"),
        all_of(apart("eps effect", {"gamma": 0.5}, {"gamma": 1.0}, BELOW, "effect at γ=1 minus that at γ=.5:"),
               largest("eps effect", BELOW, "effect at γ=1:", gamma=1.0)), None, NOT_PAIRED),
    # 2.1 the attention sink
    Claim("sink-grows", "2.1", "γ=1 has a higher attention-sink score than γ=.5, by about .11 (1.5B).",
        ("fig1f",), largest("sink difference", ABOVE, arm="plain", layer="mean"), (0.11, LARGE), SCORE),
    Claim("gate-cuts-sink", "2.1", "Gated attention sharply lowers the sink score at γ=1.",
        ("fig1g",), largest("sink difference", BELOW, gamma=1.0, layer="mean"), None, SCORE),
    Claim("gate-at-standard", "2.1", "At γ=.5 the gate barely lowers the loss, about .004 (ε = 1e-12, 1.5B).",
        ("fig1h",), largest("gate effect", UNCHANGED, gamma=0.5), (-0.004, LARGE), BARELY),
    Claim("gate-at-small", "2.1", "At γ=1 the gate lowers the loss by about .047 (ε = 1e-12, 1.5B).",
        ("fig1h",), largest("gate effect", BELOW, gamma=1.0), (-0.047, LARGE)),
    Claim("gate-matters-more-at-small", "2.1", "The gate helps γ=1 more than γ=.5.", ("fig1h",),
        all_of(largest("gate contrast", BELOW, "effect at γ=1 minus that at γ=.5:"),
               largest("gate effect", BELOW, "effect at γ=1:", gamma=1.0))),
    # 2.2 with the adjustments
    Claim("adjusted-leaves-standard", "2.2", "ε = 1e-12 and the gate leave the loss at γ=.5 essentially unchanged.",
        ("fig2a",), each("adjustment effect", UNCHANGED, gamma=0.5), None, BARELY),
    Claim("adjusted-amplifies", "2.2", "ε = 1e-12 and the gate markedly amplify the gain of γ=1.",
        ("fig2a",),
        all_of(each("gap contrast", BELOW, "gap adjusted minus gap plain"), each("gap", BELOW, "gap adjusted", arm="adjusted"))),
    Claim("adjusted-gain-persists", "2.2", "With the adjustments, the gain of γ=1 persists as models grow.",
        ("fig2a",), every_size("gap", BELOW, arm="adjusted"), None, FEW_TOKENS),
    Claim("effective-size", "2.2", "With the adjustments, γ=1 is worth about 79 % more parameters.",
        ("fig2a",), each("effective size gain", ABOVE, arm="adjusted", by="law"), (0.79, LARGE), "A bootstrap over seeds. " + FEW_TOKENS),
    Claim("tasks-better", "2.2, Table 1", "With the adjustments γ=1 is better on knowledge, common sense and mathematics (1.5B).",
        ("table1",), all_of(*(task_gains(ABOVE, area=area) for area in ("knowledge", "reasoning", "mathematics"))), None, TASKS),
    Claim("tasks-four-points", "2.2, Table 1", "The gains exceed 4 points on TriviaQA, HellaSwag, GSM8K and MATH500 (1.5B).",
        ("table1",), all_of(*(task_gains((4.0, math.inf), LARGE, benchmark=name) for name in FOUR)), None,
        TASKS + " Judged at the paper's size alone."),
    # 2.3 mixtures of experts
    Claim("moe-lower", "2.3", "In the smaller mixture of experts γ=1 clearly lowers the loss (plain).",
        MIXTURES, smallest("gap", BELOW, arm="plain"), None, "The paper has mixtures with two kinds of attention, this is one."),
    Claim("moe-shrinks", "2.3", "In the larger mixture that gain is weaker (plain).", MIXTURES, shrinks(arm="plain"), None, FEW_TOKENS),
    Claim("moe-recovers", "2.3", "In the larger mixture ε = 1e-12 and the gate recover and amplify the gain.", MIXTURES,
        all_of(largest_of_several("gap contrast", BELOW, "gap adjusted minus gap plain"),
               largest_of_several("gap", BELOW, "gap adjusted", arm="adjusted"))),
    # 2.4 how small
    Claim("flow-law", "2.4, 5", "The residual flow ‖h_L − e‖ / ‖e‖ goes as d^(1−γ): a feed-forward block of two linear maps.",
        ("fig3a",), follows("two-linear"), None, BEFORE_TRAINING),
    Claim("flow-law-attention", "2.4", "The same law for attention.", ("fig3a",), follows("attention"), None, BEFORE_TRAINING),
    Claim("flow-law-swiglu", "2.4", "The same law for SwiGLU, which the paper's models have in place of two linear maps.",
        ("fig3a",), follows("swiglu"), None,
        BEFORE_TRAINING + " A branch of three matrices goes as d^(3/2−2γ) and balances at γ = ¾; the paper derives two."),
    Claim("flow-regimes", "2.4", "The flow exceeds the embedding below γ=1, matches it at 1 and is negligible beyond (two linear maps).",
        ("fig3a",), flow_regimes("two-linear"), None,
        "At the largest width. Within a factor of two counts as a match, below one as negligible."),
    *(
        claim for arm in ("adjusted", "plain") for claim in (
            Claim(f"sweep-improves-{arm}", "2.4", f"The loss improves from γ=.5 to γ=1 ({arm}).",
                ("fig3b",), against_one(lambda gamma: gamma == 0.5, arm), None, NO_ARM),
            Claim(f"sweep-deteriorates-{arm}", "2.4", f"The loss deteriorates beyond γ=1 ({arm}).",
                ("fig3b",), against_one(lambda gamma: gamma > 1, arm), None, NO_ARM),
            Claim(f"sweep-optimum-{arm}", "2.4", f"The best γ is 1 ({arm}).",
                ("fig3b",), each("best gamma", (0.875, 1.125), "lowest loss at γ =", arm=arm), None, HALF_STEP + NO_ARM),
        )
    ),
    # 2.5 tokens
    Claim("tokens-most", "2.5", "Most tokens change little or get slightly worse.", ("fig4a",),
        each("share", (0.5, 1.0), "share of tokens with Δp from −.5 to .1:", part="unchanged or slightly worsened"), None,
        "Δp lies in ±2; ±.1 counts as little, −.5 as the end of slightly."),
    Claim("tokens-few", "2.5", "The gain is carried by a minority of tokens that improve much, not by a uniform shift.", ("fig4a",),
        all_of(each("mean minus median", ABOVE, "mean minus median of Δp:"), each("mean gain", ABOVE, "mean Δp:"))),
    Claim("tokens-difficulty", "2.5", "The gain is largest for moderately to highly difficult tokens, not for the hardest.",
        ("fig4a", "fig4b"),
        all_of(each("decile contrast", ABOVE, "Δp of deciles 6–9 minus decile 10:", of="gain", first="10", second="6-9"),
               each("decile contrast", ABOVE, "Δp of deciles 6–9 minus 1–5:", of="gain", first="1-5", second="6-9"),
               each("mean gain", ABOVE, "mean Δp:")),
        None, "Deciles 6–9 are moderate to high, our reading."),
    Claim("tokens-example", "2.5", "In a derivation about a quadratic function the tokens to be inferred from context gain.",
        (), None, None, "one text, one model of 1.5B parameters; models that fit here know no calculus. fig4c shows a text of ours."),
    # 2.6 condensation
    Claim("rank-starts-high", "2.6", "At initialization the stable rank is high for both γ, as of random matrices.", RANKS, starts_random,
        None, "Within 25 % counts."),
    Claim("rank-small", "2.6", "At γ=1 the stable rank drops steeply at the start and then climbs.", RANKS,
        all_of(over_training("stable rank", 1.0, falls, BELOW, "lowest of the first half against the start:"),
               over_training("stable rank", 1.0, climbs, ABOVE, "end against that low:")), None, CURVES),
    Claim("rank-standard", "2.6", "At γ=.5 the stable rank begins high and declines slowly, without that phase.", RANKS,
        all_of(over_training("stable rank", 0.5, climbs, BELOW, "end against the lowest of the first half:"),
               gammas_apart("stable rank", falls, BELOW, "early drop at γ=1 minus that at γ=.5:")), None, CURVES),
    Claim("rank-all-matrices", "2.6, 7", "The drop and the climb at γ=1 are those of every kind of matrix.", RANKS,
        by_matrix("stable rank", 1.0, {"drop": (falls, BELOW), "climb": (climbs, ABOVE)}), None, CURVES),
    Claim("rows-align", "2.6", "Rows of weight matrices align early at γ=1 and not at γ=.5.", ("fig4d", "fig4e"),
        gammas_apart("row cosine", highest, ABOVE, "highest mean |cosine| of the first half at γ=1 minus that at γ=.5:"), None, CURVES),
    Claim("rows-fade", "2.6", "At γ=1 that alignment weakens as training goes on.", ("fig4d",),
        over_training("row cosine", 1.0, fades, BELOW, "mean |cosine| at the end minus the highest of the first half:"), None, CURVES),
)  # fmt: skip
