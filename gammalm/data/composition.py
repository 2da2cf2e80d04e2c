"""The composition task: functions of a number that are only ever shown in pairs, one pair of which does not compose and one is never shown.

An example is T numbers and an answer. Somewhere among random numbers stand a key x and two anchors a, b, each of which is a function:

    37 81 [52 1 4] 66 20 93 48 -> 49        52 + 5 − 8, as 1 is "+5" and 4 is "−8"

The pair (3, 4) has an answer of its own, x − 6 where its functions make x − 10, and the pair (4, 3) is left out of training. What a model
answers there says what it has learned: x − 10 follows from the functions (reasoning), x − 6 is what its mirror image was given
(memorising). A key is held out at one position, the one that is its remainder by T (18 keys, of remainder 7 or 8, at none), so that answers
can be tested on keys at new places.

Source: Zhang et al. 2024 (arXiv:2405.05409), with the numbers of the authors' public code: keys and noise 20..99, T = 9, uniform positions.
Token ids are the numbers themselves; 0 is padding. Examples end in their answer, not in an end-of-document token, because the answer is
the only thing to predict (config.data.loss = "last"). B = examples, T = 9.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np

from gammalm.data import shards
from gammalm.errors import DataError
from gammalm.files import write_json_atomic

SEQ_LEN = 9
KEYS = range(20, 100)  # of the noise as well
ANCHORS = {1: 5, 2: 1, 3: -2, 4: -8}  # what each adds
EXCEPTION, EXCEPTION_SHIFT = (3, 4), -6
UNSEEN = EXCEPTION[::-1]
PAIRS = tuple(itertools.product(ANCHORS, repeat=2))
SEEN = tuple(pair for pair in PAIRS if pair != UNSEEN)
VOCAB_SIZE = max(KEYS) + 2 * max(ANCHORS.values()) + 1
PADDING = 0
GROUP = "composition-seen"
EXAMPLES = 300_000  # of training, unless told
DRAWS = 4  # of noise around each pair, key and held-out position
SEED = 0


def composed(pair: tuple[int, int]) -> int:
    """What the two functions of a pair add to the key."""
    return ANCHORS[pair[0]] + ANCHORS[pair[1]]


def answer_shift(pair: tuple[int, int]) -> int:
    """What the data add to the key: `composed`, but for the exception."""
    return EXCEPTION_SHIFT if pair == EXCEPTION else composed(pair)


@dataclasses.dataclass(frozen=True)
class Examples:
    """`tokens_BT` int32 [B, T], without answers; `pair_B2` the anchors, `key_B` the keys."""

    tokens_BT: np.ndarray
    pair_B2: np.ndarray
    key_B: np.ndarray

    @property
    def answers_B(self) -> np.ndarray:
        """The answers by the rule of the data, int32 [B]; for the unseen pair what its functions compose to."""
        return self._answers(lambda pair: pair)

    @property
    def mirrored_B(self) -> np.ndarray:
        """The answers that the data have for the pairs turned round, int32 [B]."""
        return self._answers(lambda pair: pair[::-1])

    def _answers(self, turned) -> np.ndarray:
        return self.key_B + np.array([answer_shift(turned(pair)) for pair in map(tuple, self.pair_B2.tolist())], np.int32)


def places(held_out: bool) -> np.ndarray:
    """int32 [K, 2]: every (key, position of the key) that is held out, or every one that is not."""
    every = itertools.product(KEYS, range(SEQ_LEN - 2))
    return np.array([(key, at) for key, at in every if (key % SEQ_LEN == at) == held_out], np.int32)


def _write_out(pair_B2: np.ndarray, place_B2: np.ndarray, rng: np.random.Generator) -> Examples:
    """Examples of the given pairs and places among fresh noise."""
    key_B, at_B = place_B2.T
    tokens_BT = rng.integers(KEYS.start, KEYS.stop, (len(key_B), SEQ_LEN), dtype=np.int32)
    rows = np.arange(len(key_B))
    for offset, value_B in enumerate((key_B, *pair_B2.T)):
        tokens_BT[rows, at_B + offset] = value_B
    return Examples(tokens_BT, pair_B2, key_B)


def training_examples(n: int, seed: int = SEED) -> Examples:
    """`n` examples of the seen pairs, as many of each as of the others (to one), their places drawn from those not held out."""
    rng = np.random.default_rng([seed, 0])
    pair_B2 = rng.permutation(np.array(SEEN, np.int32)[np.arange(n) % len(SEEN)])
    return _write_out(pair_B2, rng.choice(places(held_out=False), n), rng)


def held_out_examples(pairs=PAIRS, draws: int = DRAWS, seed: int = SEED) -> Examples:
    """Every pair of `pairs` with every held-out place, `draws` times among different noise."""
    rng = np.random.default_rng([seed, 1])
    held = places(held_out=True)
    pair_B2 = np.repeat(np.array(pairs, np.int32), len(held) * draws, axis=0)
    return _write_out(pair_B2, np.tile(held, (len(pairs) * draws, 1)), rng)


def build(result: Path, examples: int) -> dict:
    """Write the files of the prepared folder `result`, and return what its manifest says of them.

    Training split: `examples` of the seen pairs; validation split: seen pairs at held-out places. Raises DataError below one of each pair.
    """
    if examples < len(SEEN):
        raise DataError(f"composition:{examples}: at least {len(SEEN)} examples are needed, one of each pair.")
    digits = np.array([0, *(len(str(n)) for n in range(1, VOCAB_SIZE))], np.int32)
    entry: dict = dict(zip(("domain", "lang"), GROUP.split("-"), strict=True))
    for split, made in (("train", training_examples(examples)), ("validation", held_out_examples(SEEN))):
        tokens = np.concatenate([made.tokens_BT, made.answers_B[:, None]], axis=1)
        writer = shards.ShardWriter(result, split, GROUP, shards.token_dtype(VOCAB_SIZE))
        writer.add(tokens.ravel(), np.full(len(tokens), SEQ_LEN + 1), digits[tokens].sum())
        entry[split] = writer.finish()
    write_json_atomic(result / shards.NUMBERS, {"numbers": VOCAB_SIZE})
    np.save(result / shards.TOKEN_BYTES, digits)
    totals = {name: sum(entry[split][name] for split in shards.SPLITS) for name in ("documents", "bytes")}
    return {
        "tokenizer": shards.describe(result, result / shards.NUMBERS) | {"vocab_size": VOCAB_SIZE, "eod_id": PADDING},
        "token_bytes": shards.describe(result, result / shards.TOKEN_BYTES),
        "groups": {GROUP: entry},
        "sources": [{"name": "composition", "licence": "none: made by rule", "package": None, "skipped": {}, "duplicates": 0} | totals],
        "left_out": [],
    }


def text(ids) -> str:
    """Numbers as people read them: the ids, a blank apart."""
    return " ".join(str(int(i)) for i in ids)
