"""Which group (domain and language) each sequence of the training stream comes from: chosen when training starts, exact at every step.

    paper_dense   web 13.5 : encyclopaedia 9 : code 4.5 : mathematics 9   (science section 9)
    natural       in proportion to the tokens there are
    web:1,code-zh:2,...   weights by domain, or by domain and language

A domain's weight is shared among its languages in proportion to their tokens.
"""

import numpy as np

from gammalm.errors import DataError

NAMED = {"paper_dense": {"web": 13.5, "encyclopaedia": 9.0, "code": 4.5, "math": 9.0}}
PERIOD = 4096  # sequences after which the pattern of groups repeats; shares are exact to one sequence within it


def group_weights(mixture: str, tokens: dict[str, int]) -> dict[str, float]:
    """Share of each group, summing to 1; groups without weight are absent. `tokens`: training tokens of each group, all positive.

    A named mixture uses those of its domains that the corpus has. Raises DataError for an unknown domain, a weight that is no positive
    number, or a named mixture of which the corpus has no domain.
    """
    domains: dict[str, list[str]] = {}
    for group in tokens:
        domains.setdefault(group.rpartition("-")[0], []).append(group)
    if mixture == "natural":
        weights = dict.fromkeys(domains, 0.0) | {d: float(sum(tokens[g] for g in members)) for d, members in domains.items()}
    elif mixture in NAMED:
        weights = {d: w for d, w in NAMED[mixture].items() if d in domains}
        if not weights:
            raise DataError(
                f"Mixture {mixture!r} is made of {', '.join(NAMED[mixture])}, and the corpus has {', '.join(domains)}. "
                f"Set data.mixture to natural (lm:mixture=natural), or to weights as in {next(iter(domains))}:1."
            )
    else:
        weights = _parse(mixture, domains, tokens)
    shares: dict[str, float] = {}
    for name, weight in weights.items():
        members = [name] if name in tokens else domains[name]
        total = sum(tokens[g] for g in members)
        for group in members:
            shares[group] = shares.get(group, 0.0) + weight * tokens[group] / total
    whole = sum(shares.values())
    return {group: share / whole for group, share in shares.items() if share}


def _parse(text: str, domains: dict, tokens: dict) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = (piece.strip() for piece in part.partition(":"))
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if not colon or not 0 <= weight < float("inf"):
            raise DataError(
                f"Mixture {text!r}: {part!r} is no NAME:WEIGHT with a weight of at least 0. Or use {', '.join(NAMED)}, natural."
            )
        if name not in domains and name not in tokens:
            raise DataError(f"Mixture {text!r}: the corpus has no {name!r} but {', '.join(domains)}, with languages {', '.join(tokens)}.")
        if name in weights:
            raise DataError(f"Mixture {text!r} names {name!r} twice.")
        weights[name] = weight
    if not sum(weights.values()):
        raise DataError(f"Mixture {text!r} gives every domain the weight 0.")
    return weights


class Pattern:
    """Assigns sequence i of the stream to a group, and says the how-many-th of that group it is. A pure function of i.

    Within a period each group's sequences are spread as evenly as its share allows; a group too rare for one place in a period gets one.
    """

    def __init__(self, shares: dict[str, float]):
        self.groups = list(shares)
        share = np.array([shares[g] for g in self.groups])
        counts = np.maximum(np.floor(share * PERIOD).astype(np.int64), 1)
        order = np.argsort(-(share * PERIOD - np.floor(share * PERIOD)), kind="stable")
        for k in range(PERIOD - counts.sum()):  # the places that rounding down left, to the largest remainders
            counts[order[k % len(order)]] += 1
        while counts.sum() > PERIOD:
            counts[np.argmax(counts)] -= 1
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
        owners = np.repeat(np.arange(len(counts)), counts)
        self._owner = owners[np.argsort(places, kind="stable")]
        self._rank = np.zeros(PERIOD, np.int64)
        for k, n in enumerate(counts):
            self._rank[self._owner == k] = np.arange(n)
        self._counts = counts

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(position in `groups`, how many of that group came before) of sequences `indices`, int64 of any shape."""
        period, place = np.divmod(indices, PERIOD)
        owner = self._owner[place]
        return owner, period * self._counts[owner] + self._rank[place]

    def seen(self, n: int) -> dict[str, int]:
        """How many of the first n sequences each group gave."""
        periods, rest = divmod(n, PERIOD)
        part = np.bincount(self._owner[:rest], minlength=len(self.groups))
        return {g: int(periods * self._counts[k] + part[k]) for k, g in enumerate(self.groups)}
