"""What a model has to read to score requests, as little as possible of it: cut, merged where equal, what several begin with read once.

A sequence is the tokens that the model reads, as bytes of big-endian uint32: their order is that of the numbers, and one sequence begins
with another exactly if its bytes do. Positions count from 0; what is asked at position p is the token after it. NumPy only.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gammalm.data.packing import best_fit
from gammalm.errors import DataError
from gammalm.evaluation.lengths import bucket

TOKEN = np.dtype(">u4")
ALIKE = 1 / 16  # of a sequence it has to share with the one before, or nothing keeps the two in one row


class Request(NamedTuple):
    """Token ids; the context has at least one, that of the end of a document where a text has none before it."""

    context: Sequence[int]
    continuation: Sequence[int]


class Ask(NamedTuple):
    """`index` of a request, the position before its first target, its targets."""

    index: int
    position: int
    targets: Sequence[int]


@dataclasses.dataclass
class Read:
    """A sequence of tokens (see above) and what is asked of it."""

    tokens: bytes
    asks: list[Ask]

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN.itemsize

    @property
    def asked(self) -> int:
        return sum(len(ask.targets) for ask in self.asks)


def reads_of(requests: Sequence[Request], max_length: int) -> tuple[list[Read], list[int]]:
    """The sequences to be read, in their order as bytes, descending; and how many tokens were cut from the left of each request.

    A request that reads what another reads, or the beginning of it, is asked of the same sequence. Raises DataError for an empty context or
    continuation, or a continuation longer than `max_length`.
    """
    asks: dict[bytes, list[Ask]] = {}
    cut = []
    for index, (context, continuation) in enumerate(requests):
        if not len(context) or not 0 < len(continuation) <= max_length:
            raise DataError(
                f"Request {index} has {len(context)} tokens of context and {len(continuation)} of continuation. The context needs 1 at "
                f"least, the continuation 1 to {max_length}, which is what the model reads at once: leave the item out."
            )
        whole = [*context, *continuation]
        cut.append(max(0, len(whole) - 1 - max_length))
        read = whole[cut[-1] : -1]
        asks.setdefault(np.array(read, TOKEN).tobytes(), []).append(Ask(index, len(read) - len(continuation), continuation))
    found: list[Read] = []
    asked = 0  # of the last of them
    for tokens in sorted(asks, reverse=True):  # what begins with some tokens comes right before what ends there
        for ask in asks[tokens]:
            asked += len(ask.targets)
            # No sequence is asked for more than it may hold tokens, here and in `trees_of`: the logits of a batch stay bounded.
            if not found or not found[-1].tokens.startswith(tokens) or asked > max_length:
                found.append(Read(tokens, []))
                asked = len(ask.targets)
            found[-1].asks.append(ask)
    return found, cut


def trees_of(reads: Sequence[Read], most: int) -> list[tuple[int, list[Read]]]:
    """`reads`, in the order of `reads_of`, in runs of neighbours that begin alike, each with the room it takes in a row: the tokens it has
    if those are read once, or the targets it is asked for where they are more.

    None takes more than `most`, which the longest read may have (but one read alone may be asked for more): where a run would, it is cut
    where little is read again and little of a row left free.
    """
    lengths = np.array([len(read) for read in reads], np.int64)
    asked = np.append(np.cumsum([read.asked for read in reads]), 0)
    alike = np.array([0] + [_alike(one.tokens, other.tokens) for one, other in itertools.pairwise(reads)], np.int64)
    ends = np.append(np.cumsum(lengths - alike), 0)  # at -1: before the first
    loose = np.append(np.flatnonzero(alike < ALIKE * lengths), len(reads))
    found, start = [], 0
    while start < len(reads):
        before = ends[start - 1] - alike[start]
        end = int(loose[np.searchsorted(loose, start, "right")])
        room = [(ends, before), (asked, asked[start - 1])]
        last = max(start + 1, start + min(int(np.searchsorted(used[start:end], none + most, "right")) for used, none in room))
        if last < end:
            cuts = np.arange(start + 1, last + 1)
            end = int(cuts[np.argmin(alike[cuts] - ends[cuts - 1])])
        found.append((int(max(used[end - 1] - none for used, none in room)), list(reads[start:end])))
        start = end
    return found


def packed(reads: Sequence[Read], length: int) -> list[list[Read]]:
    """The same in rows of `length` tokens, which the longest read may have: what each holds, in the order in which it lies there."""
    trees = trees_of(reads, length)
    rows = best_fit(np.array([tokens for tokens, _ in trees]), length)
    return [[read for tree in row for read in trees[tree][1]] for row in rows]


def laid_out(reads: Sequence[Read]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """One row: its tokens, `Tree.until_BT` (models/parts.py) of each, and the places of the tokens of every read.

    Of what a read begins with like the one before it nothing is there twice.
    """
    tokens, until, places, before = [], np.zeros(sum(map(len, reads)), np.int32), [], b""
    end = 0
    for read in reads:
        shared = _alike(before, read.tokens)
        new = np.frombuffer(read.tokens, TOKEN)[shared:]
        places.append(np.concatenate([places[-1][:shared] if shared else np.zeros(0, np.int64), np.arange(end, end + len(new))]))
        tokens.append(new)
        end += len(new)
        until[places[-1]] = end
        before = read.tokens
    return np.concatenate(tokens), until[:end], places


def _alike(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    least = min(len(one), len(other)) // TOKEN.itemsize
    differs = np.frombuffer(one, TOKEN, least) != np.frombuffer(other, TOKEN, least)
    return int(np.argmax(differs)) if differs.any() else least


def row_lengths(lengths: Sequence[int], longest: int, least: int, multiple: int = 1) -> list[int]:
    """Lengths of rows for sequences of these lengths, ascending: few, because each is a program to compile.

    Of those of lengths.py up to `longest`, as multiples of `multiple`, the ones with least padding, where each costs `least` tokens.
    """
    ladder = [bucket(1)]
    while ladder[-1] < longest:
        ladder.append(bucket(ladder[-1] + 1))
    ordered = np.sort(lengths)
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # (sequences held, what they cost, lengths chosen), for the shortest ones
    for size in (-(-min(size, longest) // multiple) * multiple for size in ladder):
        held = int(np.searchsorted(ordered, size, "right"))
        if held > best[-1][0]:
            ways = [(held, cost + size * (held - before) + least, [*chosen, size]) for before, cost, chosen in best]
            best.append(min(ways, key=lambda way: way[1]))
    return best[-1][2]
