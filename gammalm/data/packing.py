"""Packing indices: which stretches of a group's token stream make up each training sequence.

N = tokens of the stream, T = sequence length; a sequence holds T+1 tokens, of which T are predicted.

concat     sequence k is the stream from k·T to k·T+T: neighbours share one token, so every token is a target once
documents  whole documents side by side; one longer than T+1 is cut into pieces that share a token; what stays free is padding
"""

import dataclasses

import numpy as np

BLOCK = 1 << 16  # pieces packed together


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
    """Sequence w consists of pieces first[w] .. first[w+1]; piece p is `length[p]` tokens of the stream from `start[p]`. int64 arrays."""

    first: np.ndarray
    start: np.ndarray
    length: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """Share of the T+1 places of all sequences that hold tokens."""
        return float(self.length.sum() / max(1, len(self) * (self.seq_len + 1)))


def concat_windows(n_tokens: int, seq_len: int) -> int:
    """Sequences in one epoch of a stream of N tokens: ceil(N / T), the last of which runs on into the stream's beginning."""
    return -(-n_tokens // seq_len)


def pieces(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of the pieces of documents: at most T+1 tokens each, sharing one token with the piece before, so that every token but
    a document's first is predicted exactly once. Documents of one token predict nothing and have no piece."""
    count = np.maximum(-(-(lengths - 1) // seq_len), 0)
    document = np.repeat(np.arange(len(lengths)), count)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    start = starts[document] + number * seq_len
    return start, np.minimum(seq_len + 1, starts[document] + lengths[document] - start)


def pack_documents(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> DocumentIndex:
    """Best-fit decreasing: the longest piece first, each into the fullest sequence that still has room. `starts`, `lengths`: of documents.

    Source: Ding et al. 2024 (arXiv:2404.10830). Pieces are packed in blocks of neighbours, so an index of any size takes bounded time per
    document. Deterministic.
    """
    start, length = pieces(starts, lengths, seq_len)
    order, first = [], [0]
    for begin in range(0, len(start), BLOCK):
        for window in best_fit(length[begin : begin + BLOCK], seq_len + 1):
            order += [begin + p for p in window]
            first.append(len(order))
    order = np.array(order, np.int64)
    return DocumentIndex(np.array(first, np.int64), start[order], length[order], seq_len)


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Windows (lists of piece numbers). Free room is a bit set over 0..capacity, so the fullest one that fits is a bit operation away."""
    windows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free tokens -> windows with exactly so many
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, window = capacity, len(windows)
            windows.append([])
        windows[window].append(piece)
        left = room - size
        if left > 1:  # a piece has at least two tokens
            by_room.setdefault(left, []).append(window)
            rooms |= 1 << left
    return windows
