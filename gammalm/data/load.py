"""Token batches by step: a pure function of (prepared folder, settings, step), whatever the number of hosts, restarts or threads.

B = sequences per step over all hosts, T = sequence length, N = tokens of one group's stream, V = vocabulary size.

    tokens    int32 [B, T+1]   inputs are [:, :-1], targets [:, 1:]
    segments  int32 [B, T+1]   packing "documents" alone: 1, 2, ... per document of the sequence, 0 = padding
    weights   float32 [B, T]   validation, and training under loss "last": 1 where a target counts
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np

from gammalm.data import shards
from gammalm.data.mixture import Pattern, group_weights
from gammalm.data.packing import concat_windows, pack_documents
from gammalm.errors import DataError

PACKINGS = ("concat", "documents")
LOSSES = ("all", "last")  # which targets count: every token of a document that has a context, or its last one alone


class GroupTokens:
    """The token stream of one group and split: its shards end to end, memory-mapped. `n_tokens` = N.

    Raises DataError for a damaged shard.
    """

    def __init__(self, root, manifest: dict, group: str, split: str):
        self._shards, self._offsets, starts = [], [], [0]
        for entry in manifest["groups"][group][split]["shards"]:
            tokens, offsets = (_load(Path(root) / entry[kind]["file"], root) for kind in ("tokens_file", "offsets_file"))
            if len(tokens) != entry["tokens"] or len(offsets) != entry["documents"] + 1 or offsets[-1] != len(tokens):
                raise DataError(f"{Path(root) / entry['tokens_file']['file']} does not fit the manifest. Prepare {root} again.")
            self._offsets.append(offsets + starts[-1])
            self._shards.append(tokens)
            starts.append(starts[-1] + len(tokens))
        self._starts = np.array(starts)
        self.n_tokens = starts[-1]

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) of every document in the stream, int64; lengths count the end-of-document token."""
        starts = np.concatenate([o[:-1] for o in self._offsets] or [np.zeros(0, np.int64)])
        ends = np.concatenate([o[1:] for o in self._offsets] or [np.zeros(0, np.int64)])
        return starts, ends - starts

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` with the stream from `start`, which runs on into its beginning."""
        done = 0
        while done < len(out):
            at = (start + done) % self.n_tokens
            k = int(np.searchsorted(self._starts, at, side="right")) - 1 if len(self._shards) > 1 else 0
            local = at - int(self._starts[k])
            part = self._shards[k][local : local + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def read(self, start: int, length: int) -> np.ndarray:
        """int32 [length] of the stream from `start`."""
        out = np.empty(length, np.int32)
        self.read_into(out, start)
        return out


def _load(path: Path, root) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)  # a plain array over the map: slicing a memmap is slow
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged or cannot be read ({error}). Delete {root} and prepare it again.") from error


def open_split(path, split: str, *, seq_len: int, packing: str, mixture: str, seed: int, batch: int, loss: str = "all") -> "Split":
    """Open one split ("train" or "validation") of the prepared folder `path`.

    `seq_len` = T, `packing` concat | documents, `mixture` as in gammalm.data.mixture, `seed` orders the sequences, `batch` = B. `loss`
    all | last: which targets count; last is for documents of at most T+1 tokens (the pieces of a longer one count as documents).
    Raises DataError: no such folder, damaged or truncated files, a tokenizer that is not the corpus's own, an unknown domain, a split
    without documents.
    """
    if split not in shards.SPLITS or packing not in PACKINGS or loss not in LOSSES[: len(LOSSES) if packing == "documents" else 1]:
        raise DataError(
            f"split={split!r}, packing={packing!r}, loss={loss!r}: splits are {shards.SPLITS}, packings {PACKINGS}; of the losses "
            f"{LOSSES} the last needs packing documents."
        )
    if seq_len < 1 or batch < 1:
        raise DataError(f"seq_len={seq_len}, batch={batch}: both are at least 1.")
    manifest = shards.read_manifest(path)
    shards.check_files(path, manifest)
    streams = {g: GroupTokens(path, manifest, g, split) for g, entry in manifest["groups"].items() if entry[split]["documents"]}
    if not streams:
        raise DataError(f"{path} has no {split} documents. Prepare it from more text.")
    return Split(Path(path), manifest, split, streams, seq_len, packing, mixture, seed, batch, loss)


class Split:
    """An open split. See `open_split`.

    `vocab_size`, `eod_id`, `tokenizer_sha256`, `token_bytes` (int32 [V]): of its tokenizer. `domains`: its groups, as in "web-en".
    `shares`: the part each group has in training batches. `fill`: share of places that hold tokens, per group.
    """

    def __init__(self, path, manifest, split, streams, seq_len, packing, mixture, seed, batch, loss):
        self.path, self.split, self.seq_len, self.packing, self.batch_size, self.loss = path, split, seq_len, packing, batch, loss
        self.vocab_size, self.eod_id = manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["eod_id"]
        self.tokenizer_sha256 = manifest["tokenizer"]["sha256"]
        self.token_bytes = _load(path / manifest["token_bytes"]["file"], path)
        self.domains = sorted(streams)
        self._streams = streams
        self._indices = {g: pack_documents(*s.documents(), seq_len) if packing == "documents" else None for g, s in streams.items()}
        self.windows = {g: len(index) if index else concat_windows(streams[g].n_tokens, seq_len) for g, index in self._indices.items()}
        self.fill = {g: index.fill if index else 1.0 for g, index in self._indices.items()}
        if split == "train":
            self.shares = group_weights(mixture, {g: s.n_tokens for g, s in streams.items()})
            self._pattern = Pattern(self.shares)
            self._orders = [_shuffled(self.windows[g], seed, g) for g in self._pattern.groups]

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The batch of training step `step` (from 0), or those of its rows that `rows` picks. A pure function of the step.

        Sources repeat, shuffled anew each time around, so any step exists. Of the training split alone.
        """
        chosen = np.arange(self.batch_size)[slice(None) if rows is None else rows]
        owners, nth = self._pattern(step * self.batch_size + chosen)
        out = self._empty(len(chosen))
        for row, (k, n) in enumerate(zip(owners.tolist(), nth.tolist(), strict=True)):
            self._fill(out, row, self._pattern.groups[k], self._orders[k][n])
        return out if self.loss == "all" else out | {"weights": self._weights(out["segments"])}

    def epochs(self, step: int) -> dict[str, float]:
        """How many times each group has been gone through after `step` steps of training."""
        return {g: n / self.windows[g] for g, n in self._pattern.seen(step * self.batch_size).items()}

    def validation(self, domain: str, rows: slice | np.ndarray | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Batches over the whole of one domain ("web-en") once, in order; every token that has a context is a target with weight 1 exactly
        once, and what only fills the last batch has weight 0. Raises DataError for a domain that is not in `domains`."""
        if domain not in self._streams:
            raise DataError(f"{self.path} has no {self.split} domain {domain!r} but {', '.join(self.domains)}.")
        total = self._streams[domain].n_tokens
        windows = self._validation_windows(domain)
        for begin in range(0, windows, self.batch_size):
            numbers = np.arange(begin, begin + self.batch_size)[slice(None) if rows is None else rows]
            out = self._empty(len(numbers))
            weights = np.zeros((len(numbers), self.seq_len), np.float32)
            for row, number in enumerate(numbers.tolist()):
                if number >= windows:
                    continue
                self._fill(out, row, domain, number)
                if self.packing == "concat":
                    weights[row, : total - 1 - number * self.seq_len] = 1
                else:
                    weights[row] = self._weights(out["segments"][row])
            yield out | {"weights": weights}

    def validation_batches(self, domain: str) -> int:
        """How many batches `validation(domain)` yields."""
        return -(-self._validation_windows(domain) // self.batch_size)

    def _validation_windows(self, domain: str) -> int:
        if self.packing == "documents":
            return self.windows[domain]
        return -(-(self._streams[domain].n_tokens - 1) // self.seq_len)  # the last one is filled up

    def _weights(self, segments: np.ndarray) -> np.ndarray:
        """float32 [..., T]: 1 where the target of packed documents [..., T+1] counts, of one document and, under "last", ending it."""
        counts = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
        if self.loss == "last":
            counts[..., :-1] &= segments[..., 1:-1] != segments[..., 2:]
        return counts.astype(np.float32)

    def _empty(self, rows: int) -> dict[str, np.ndarray]:
        """Batch arrays that hold nothing but padding."""
        out = {"tokens": np.full((rows, self.seq_len + 1), self.eod_id, np.int32)}
        if self.packing == "documents":
            out["segments"] = np.zeros((rows, self.seq_len + 1), np.int32)
        return out

    def _fill(self, out: dict, row: int, group: str, window: int) -> None:
        """Write sequence `window` of a group into a row of padding."""
        stream, index = self._streams[group], self._indices[group]
        if index is None:
            stream.read_into(out["tokens"][row], window * self.seq_len)
            return
        at = 0
        first, last = int(index.first[window]), int(index.first[window + 1])
        for segment, piece in enumerate(range(first, last), start=1):
            size = int(index.length[piece])
            stream.read_into(out["tokens"][row, at : at + size], int(index.start[piece]))
            out["segments"][row, at : at + size] = segment
            at += size


def _shuffled(windows: int, seed: int, group: str) -> grain.MapDataset:
    """Element n: the window that the group's n-th sequence is; each time around in a new order, depending on (seed, group) alone."""
    digest = hashlib.blake2b(f"{seed}/{group}".encode(), digest_size=4).digest()
    return grain.MapDataset.range(windows).seed(int.from_bytes(digest, "little")).shuffle().repeat()
