"""What a model has to read to score requests, as little as possible of it: cut, merged where equal, grouped where they begin alike.

A sequence is the tokens that the model reads, as bytes of big-endian uint32: their order is that of the numbers, and one sequence begins
with another exactly if its bytes do. Positions count from 0; what is asked at position p is the token after it. NumPy only.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gammalm.errors import DataError
from gammalm.evaluation.lengths import bucket

TOKEN = np.dtype(">u4")
FANS = (2, 4, 6, 8, 12, 16)  # rows that may go on from one shared beginning
WORTH = 0.25  # of a group's tokens have to be saved, or its sequences stay by themselves


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

    @property
    def first(self) -> int:
        """The first position of which something is asked."""
        return min(ask.position for ask in self.asks)


class Group(NamedTuple):
    """Sequences whose first `shared` tokens are the same; nothing is asked of those. 0: one sequence by itself."""

    shared: int
    reads: list[Read]

    @property
    def end(self) -> int:
        """Tokens of the longest after those."""
        return max(map(len, self.reads)) - self.shared


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
    for tokens in sorted(asks, reverse=True):  # what begins with some tokens comes right before what ends there
        for ask in asks[tokens]:
            # No sequence is asked for more than it may hold tokens: the logits of a batch stay bounded.
            if not found or not found[-1].tokens.startswith(tokens) or found[-1].asked + len(ask.targets) > max_length:
                found.append(Read(tokens, []))
            found[-1].asks.append(ask)
    return found, cut


def groups_of(reads: list[Read]) -> list[Group]:
    """`reads`, in the order of `reads_of`, in groups that share their beginnings, so that most tokens are saved.

    Neighbours that begin alike are the leaves of a tree whose nodes are what they begin with. Walking up it, a node takes all its leaves
    for one group, or for several where they are many, if that saves more than the groups below it do.
    """
    open_nodes: list[tuple[int, list]] = [(0, [])]  # tokens shared, what is below
    for i, read in enumerate(reads):
        below = 0, [Group(0, [read])]
        alike = _alike(read.tokens, reads[i + 1].tokens) if i + 1 < len(reads) else 0
        while open_nodes[-1][0] > alike:
            shared, nodes = open_nodes.pop()
            below = _joined(shared, [*nodes, below])
        if open_nodes[-1][0] < alike:
            open_nodes.append((alike, []))
        open_nodes[-1][1].append(below)
    return [group for _, groups in open_nodes[0][1] for group in groups]


def _joined(shared: int, nodes: list[tuple[int, list[Group]]]) -> tuple[int, list[Group]]:
    """(tokens saved, groups) of a node whose sequences share that many tokens, from those of the nodes below it."""
    reads = [read for _, groups in nodes for group in groups for read in group.reads]
    shared = min(shared, *(read.first for read in reads))
    many = -(-len(reads) // FANS[-1])
    here, below = (len(reads) - many) * shared, sum(saved for saved, _ in nodes)
    if here <= below or here < WORTH * sum(map(len, reads)):
        return below, [group for _, groups in nodes for group in groups]
    size = -(-len(reads) // many)
    return here, [Group(shared, reads[i : i + size]) for i in range(0, len(reads), size)]


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


def fan_of(rows: int) -> int:
    """The smallest fan that holds as many rows."""
    return next(fan for fan in FANS if fan >= rows)
