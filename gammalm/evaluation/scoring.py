"""How probable a model finds a continuation of a context: batches of few fixed shapes, equal work done once, results as they come.

What the model reads is cut from the left to its context length. Requests that read the same, or of which one reads the beginning of the
other, are one sequence: all one-token choices of a question are. Sequences that begin alike read that beginning once, into a cache, and go
on from it side by side. The output matrix meets the tokens of continuations alone.
Shape legend: models/parts.py; C targets of a row; S shared beginnings of a batch, F rows that go on from each.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gammalm.data.packing import best_fit
from gammalm.errors import ConfigError, TrainingError
from gammalm.evaluation.batching import FANS, TOKEN, Group, Read, Request, fan_of, groups_of, reads_of, row_lengths
from gammalm.evaluation.lengths import bucket, program_tokens
from gammalm.models.cache import Cache, extend, prefill
from gammalm.models.decoder import Model
from gammalm.models.loss import token_scores
from gammalm.models.parts import BATCH_AXES

TOKENS = 4096  # in a batch on one part of the mesh's batch axes, padding included
CACHED = 4  # times as many in caches
# "shared": sequences that begin alike read that once. "plain": each has a row by itself. "packed": a row holds several, each a segment with
# positions from 0, as documents are packed in training. "auto": the one of them that computes least, padding and programs counted.
LAYOUTS = ("auto", "shared", "plain", "packed")


class Score(NamedTuple):
    """`index` of a request, the log-probability of its continuation in nats, and whether greedy decoding would write it."""

    index: int
    logprob: float
    greedy: bool


@dataclasses.dataclass
class Counts:
    """What was done so far. `cut` requests lost the beginning of their context, `cut_tokens` tokens in all; `tokens`: read by the model,
    shared beginnings once; `computed`: the same with padding."""

    requests: int = 0
    sequences: int = 0
    cut: int = 0
    cut_tokens: int = 0
    tokens: int = 0
    computed: int = 0


class Row(NamedTuple):
    """Parts of sequences side by side: (sequence, the part's first token)."""

    parts: list[tuple[Read, int]]

    @property
    def tokens(self) -> int:
        return sum(len(read) - first for read, first in self.parts)

    @property
    def asked(self) -> int:
        return sum(read.asked for read, _ in self.parts)


class Batch(NamedTuple):
    """`size` rows of `length` tokens, the first of them `rows`, that are asked for at most `wide` targets each.

    Where `fan`, they go on from the beginnings of `groups`, of at most `before` tokens, `fan` rows (None: empty) from each.
    """

    length: int
    size: int
    wide: int
    rows: list[Row | None]
    fan: int = 0
    before: int = 0
    groups: tuple[Group, ...] = ()
    packed: bool = False

    @property
    def shape(self) -> tuple:
        """What decides which program it needs."""
        return self.length, self.size, self.wide, self.fan, self.before, self.packed

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.size * self.length + (self.size // self.fan * self.before if self.fan else 0)


class Scorer:
    """Scores requests with one model. `max_length`: tokens that it reads at most. `eps`: of its norms. `layout`: see LAYOUTS.

    `mesh`: the arrays lie on it, and rows are shared out over its batch axes; all processes then score the same requests in the same order,
    and all get every score. `tokens`: of a batch on each part of them; `rows`: rows of a batch instead. `counts` goes on over calls.
    Raises ConfigError for a layout that there is not, "shared" on a mesh that cuts sequences up, and more tokens than learned positions.
    """

    def __init__(
        self, model: Model, params: dict, buffers: dict, *, eps: float, max_length: int, mesh: Mesh | None = None, layout: str = "auto",
        tokens: int = TOKENS, rows: int | None = None,
    ):  # fmt: skip
        shape = {} if mesh is None else mesh.shape
        self._parts = int(np.prod([shape[axis] for axis in BATCH_AXES if axis in shape]))
        self._context = shape.get("context", 1)
        if layout not in LAYOUTS:
            raise ConfigError(f"layout {layout!r}: choose one of {', '.join(LAYOUTS)}.")
        if layout == "shared" and self._context > 1:
            raise ConfigError("layout shared: context > 1 cuts sequences up, and a cache does not. Choose layout plain or packed.")
        if model.config.positions == "learned" and max_length > model.config.max_positions:
            raise ConfigError(f"max_length={max_length:,}, but model.max_positions={model.config.max_positions:,}. Read no more than that.")
        self.max_length, self.mesh, self.layout = max_length, mesh, layout
        self.counts = Counts()
        self._worth = self._parts * program_tokens(model.active_parameter_count)  # tokens
        self._tokens, self._rows = tokens, rows
        self.load(params, buffers)

        def found(decoder, x_BTD, positions_BC, targets_BC):
            x_BCD = jnp.take_along_axis(x_BTD, positions_BC[:, :, None], axis=1)
            return token_scores(x_BCD, decoder.head_matrix(), targets_BC, cap=decoder.softcap, chunk=decoder.loss_chunk)

        def alone(params, buffers, tokens_BT, segments_BT, positions_BC, targets_BC):
            decoder = model.bind(params, buffers)
            return found(decoder, decoder.hidden(tokens_BT, segments_BT, eps)[0], positions_BC, targets_BC)

        def shared(params, buffers, before_ST, lengths_S, tokens_BT, counts_B, positions_BC, targets_BC):
            decoder = model.bind(params, buffers)
            fan = tokens_BT.shape[0] // before_ST.shape[0]
            _, cache = prefill(decoder, before_ST, lengths_S, before_ST.shape[1], eps)
            kept = jax.tree.map(lambda a: jnp.repeat(a, fan, axis=1), cache.kept)
            x_BTD, _ = extend(decoder, tokens_BT, counts_B, Cache(kept, jnp.repeat(lengths_S, fan)), eps)
            return found(decoder, x_BTD, positions_BC, targets_BC)

        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._alone, self._shared = (jax.jit(f, out_shardings=whole) for f in (alone, shared))

    def load(self, params: dict, buffers: dict) -> None:
        """Scores with other weights of the same model from now on, placed alike; nothing is compiled anew."""
        self._weights = params, buffers

    def score(self, requests: Sequence[Request]) -> Iterator[Score]:
        """The score of every request, batch by batch, the longest first.

        Raises DataError for an empty context or continuation and for a continuation longer than the model reads, before anything is
        computed; TrainingError where a score is not finite.
        """
        reads, cut = reads_of(requests, self.max_length)
        self.counts.requests += len(requests)
        self.counts.sequences += len(reads)
        self.counts.cut += sum(tokens > 0 for tokens in cut)
        self.counts.cut_tokens += sum(cut)
        pending = None  # read a batch late: the device computes while the host prepares
        for batch in self._plan(reads):
            found = self._run(batch)
            if pending is not None:
                yield from _scores(*pending)
            pending = batch, found
        if pending is not None:
            yield from _scores(*pending)

    def _plan(self, reads: list[Read]) -> list[Batch]:
        """The batches of the layout, or of the cheapest one."""
        layouts = [self.layout] if self.layout != "auto" else ["plain", "packed", *(["shared"] if self._context == 1 else [])]
        plans = [list(self._batches(reads, layout)) for layout in layouts]
        return min(plans, key=lambda plan: sum(b.tokens for b in plan) + self._worth * len({b.shape for b in plan}))

    def _batches(self, reads: list[Read], layout: str) -> Iterator[Batch]:
        if layout == "shared":
            groups = groups_of(reads)
            reads = [group.reads[0] for group in groups if not group.shared]
            fans = {fan: [g for g in groups if g.shared and fan_of(len(g.reads)) == fan] for fan in FANS}
            for fan, groups in fans.items():
                yield from self._fanned(groups, fan)
        rows = [Row([(read, 0)]) for read in reads]
        if layout == "packed" and reads:
            longest = self._lengths([max(map(len, reads))])[-1]
            packed = best_fit(np.array([len(read) for read in reads]), longest)
            rows = [Row([(reads[i], 0) for i in row]) for row in packed]
        if not rows:
            return
        lengths, wides = self._lengths([row.tokens for row in rows]), self._wides([row.asked for row in rows])
        rows.sort(key=lambda row: (_at_least(lengths, row.tokens), _at_least(wides, row.asked)), reverse=True)
        most = self._parts_of(len(rows))
        while rows:
            length = _at_least(lengths, rows[0].tokens)
            size = min(most, self._size(length))
            wide = _at_least(wides, max(row.asked for row in rows[:size]))
            yield Batch(length, size, wide, rows[:size], packed=layout == "packed")
            rows = rows[size:]

    def _fanned(self, groups: list[Group], fan: int) -> Iterator[Batch]:
        """Batches of groups that all have this fan."""
        ends = self._lengths([group.end for group in groups], fan)
        for length in ends:
            here = sorted((g for g in groups if _at_least(ends, g.end) == length), key=lambda g: -g.shared)
            befores, most = self._lengths([group.shared for group in here]), self._parts_of(len(here))
            wide = bucket(max((read.asked for group in here for read in group.reads), default=1))
            while here:
                before = _at_least(befores, here[0].shared)
                # Each row has its copy of the beginning in the cache, which may be of CACHED times as many tokens as a batch.
                size = min(most, self._size(max(before + fan * length, before * fan // CACHED), fan))
                taken, here = here[:size], here[size:]
                rows: list[Row | None] = []
                for group in taken:
                    rows += [Row([(read, group.shared)]) for read in group.reads] + [None] * (fan - len(group.reads))
                yield Batch(length, size * fan, wide, rows, fan, before, tuple(taken))

    def _lengths(self, lengths: list[int], rows: int = 1) -> list[int]:
        """Lengths of rows for these, each of them of `rows` rows."""
        longest = -(-self.max_length // self._context) * self._context
        return row_lengths(lengths, longest, self._worth // rows, self._context)

    def _wides(self, asked: list[int]) -> list[int]:
        """The same for the targets of rows: a target costs about what a token does."""
        return row_lengths(asked, bucket(max(asked)), self._worth)

    def _size(self, length: int, fan: int = 1) -> int:
        """Rows, or beginnings of `fan` rows, of a batch: a multiple of the parts that they are shared out over."""
        wanted = self._rows // fan if self._rows else self._parts * (self._tokens // length)
        return max(1, -(-wanted // self._parts)) * self._parts

    def _parts_of(self, rows: int) -> int:
        """A size of batches that holds all of so many rows: few are not filled up to as many as would fit."""
        return self._parts * 2 ** (-(-rows // self._parts) - 1).bit_length()

    def _run(self, batch: Batch):
        """The batch's scores (fp32 log-probabilities, hits) [B, C], on their way."""
        size, wide = batch.size, -(-batch.wide // self._context) * self._context
        tokens_BT, segments_BT = np.zeros((2, size, batch.length), np.int32)
        positions_BC, targets_BC = np.zeros((2, size, wide), np.int32)
        for b, row in enumerate(batch.rows):
            start = at = 0
            for number, (read, first) in enumerate(row.parts if row else (), 1):
                end = start + len(read) - first
                tokens_BT[b, start:end] = np.frombuffer(read.tokens, TOKEN)[first:]
                segments_BT[b, start:end] = number
                for _, position, targets in read.asks:
                    positions_BC[b, at : at + len(targets)] = start - first + position + np.arange(len(targets))
                    targets_BC[b, at : at + len(targets)] = targets
                    at += len(targets)
                start = end
        self.counts.tokens += int(np.count_nonzero(segments_BT))
        self.counts.computed += batch.tokens
        if not batch.fan:
            segments = segments_BT if batch.packed else None
            return self._call(self._alone, tokens_BT, segments, positions_BC, targets_BC)
        before_ST, lengths_S = np.zeros((size // batch.fan, batch.before), np.int32), np.zeros(size // batch.fan, np.int32)
        for s, group in enumerate(batch.groups):
            before_ST[s, : group.shared] = np.frombuffer(group.reads[0].tokens, TOKEN, group.shared)
            lengths_S[s] = group.shared
        self.counts.tokens += int(lengths_S.sum())
        return self._call(self._shared, before_ST, lengths_S, tokens_BT, (segments_BT > 0).sum(1, dtype=np.int32), positions_BC, targets_BC)

    def _call(self, function, *arrays):
        if self.mesh is None:
            return function(*self._weights, *arrays)
        rows = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        with jax.set_mesh(self.mesh):
            placed = [a if a is None else jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in arrays]
            return function(*self._weights, *placed)


def _at_least(lengths: Sequence[int], tokens: int) -> int:
    return next(length for length in lengths if length >= tokens)


def _scores(batch: Batch, found) -> Iterator[Score]:
    """The scores of a batch, of which `found` are log-probabilities and hits [B, C]."""
    logprobs_BC, hits_BC = jax.device_get(found)
    for b, row in enumerate(batch.rows):
        at = 0
        for index, _, targets in (ask for read, _ in (row.parts if row else ()) for ask in read.asks):
            here = slice(at, at + len(targets))
            at += len(targets)
            logprob = float(np.sum(logprobs_BC[b, here], dtype=np.float64))
            if not np.isfinite(logprob):
                raise TrainingError(f"The log-probability of request {index} is {logprob}. Take a checkpoint before it diverged.")
            yield Score(index, logprob, bool(hits_BC[b, here].all()))
