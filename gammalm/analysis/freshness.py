"""Whether weights look fresh or trained, from what every initializer in use has and what the first steps of training take away.

Four signs, each with its reason. Moved gains: those of norms are drawn by no usual initializer, they begin as constants, and every one of
them moves from the first step on. (Biases begin as 0 in most models, but torch's own Linears draw theirs: alone they decide nothing.)
Directions: weights drawn independently have a largest singular value within the Tracy–Widom law
about the Marchenko–Pastur edge, whatever their std; training makes some directions longer. Tails: draws in use are normal, truncated or
uniform, so kurtosis is at most 3. Size: the std of a draw is the declared one within 1/√(2n) of itself.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from gammalm.analysis.stored import lowest_random_stable_rank, random_stable_rank

SMALLEST = 16  # shorter side of a matrix from which its spectrum says something
SIGMAS = 6.0  # standard errors beyond which a figure is not the draw's
SHARE = 0.25  # of the matrices that have to show a sign of training


def is_moved(low: float, high: float, kind: str) -> bool:
    """Whether a gain or bias with these extremes has left its constant: a gain all alike (1, or 0 where it is stored centred), a bias 0."""
    return high != low or (kind == "bias" and high != 0)


def signs(row: Mapping) -> dict[str, bool | None]:
    """Of one matrix: directions, tails, size; None where nothing can be said.

    `row`: rows, columns, kurtosis, stable_rank, stable_rank_rows, std, declared (std, or None), as `stored.figures` has them.
    """
    count = row["rows"] * row["columns"]
    found: dict[str, bool | None] = dict.fromkeys(("directions", "tails", "size"))
    if row["stable_rank"] is not None and min(row["stable_rank_rows"], row["columns"]) >= SMALLEST:
        found["directions"] = row["stable_rank"] < lowest_random_stable_rank(row["stable_rank_rows"], row["columns"])
    if row["kurtosis"] is not None:
        found["tails"] = row["kurtosis"] > 3 + SIGMAS * math.sqrt(24 / count)
    if row["std"] is not None and row.get("declared"):
        found["size"] = abs(row["std"] / row["declared"] - 1) > SIGMAS / math.sqrt(2 * count)
    return found


def judge(matrices: Sequence[Mapping], vectors: Sequence[Mapping]) -> dict:
    """{"verdict": fresh | just begun | trained | unclear, "reasons": [...]} of all matrices (see `signs`) and vectors (name, kind, moved).

    trained: a quarter of the matrices have directions or tails that no draw has, or one does and a gain has moved. just begun: gains have
    moved, and no matrix shows it. fresh: none of it, and no bias has moved where there are no gains. Zeros, and what nothing is known of,
    do not count.
    """
    known = [(row, signs(row)) for row in matrices if row["std"]]
    gains, biases = ([v for v in vectors if v["kind"] == kind] for kind in ("gain", "bias"))
    moved, begun = ([v for v in vs if v["moved"]] for vs in (gains, biases))
    shown = [row for row, s in known if s["directions"] or s["tails"]]
    sized = [row for row, s in known if s["size"]]
    reasons = []
    if moved:
        reasons.append(f"{len(moved)} of {len(gains)} norm gains have left the constant that they begin as.")
    elif gains:
        reasons.append(f"All {len(gains)} norm gains are the constants that they begin as.")
    if begun:
        reasons.append(f"{len(begun)} of {len(biases)} biases are not 0: trained, or drawn as torch's own Linears draw them.")
    elif biases:
        reasons.append(f"All {len(biases)} biases are 0, as most begin.")
    ranked = [row for row, s in known if s["directions"] is not None]
    shares = [row["stable_rank"] / random_stable_rank(row["stable_rank_rows"], row["columns"]) for row in ranked]
    long = sum(bool(s["directions"]) for _, s in known)
    if shares:
        reasons.append(
            f"Stable ranks are {statistics.median(shares):.2f} of a random matrix's in the median; {long} of {len(shares)} matrices have a "
            "direction longer than random ones."
        )
    tails = sum(bool(s["tails"]) for _, s in known)
    if known:
        reasons.append(f"{tails} of {len(known)} matrices {'has' if tails == 1 else 'have'} heavier tails than a normal draw.")
    if any(s["size"] is not None for _, s in known):
        count = sum(s["size"] is not None for _, s in known)
        reasons.append(f"{len(sized)} of {count} matrices {'has' if len(sized) == 1 else 'have'} another std than was declared.")
    if shown and (moved or len(shown) >= SHARE * len(known)):
        verdict = "trained"
    elif moved:
        verdict = "just begun"
    elif known and not shown and (gains or not begun):
        verdict = "fresh"
    else:
        verdict = "unclear"
    if verdict == "fresh" and sized:
        reasons.append("They look like a draw, by another std than the declared one.")
    return {"verdict": verdict, "reasons": reasons}
