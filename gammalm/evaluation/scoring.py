"""How probable a model finds a continuation of a context: batches of few fixed shapes, equal work done once, results as they come.

What the model reads is cut from the left to its context length. Requests that read the same, or of which one reads the beginning of the
other, are one sequence: all one-token choices of a question are. Sequences lie side by side in rows, and what several begin with is read
once (`Tree` in models/parts.py). The output matrix meets the tokens of continuations alone.
Shape legend: models/parts.py; P parts that the rows of a batch are shared out over, C targets of a part.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gammalm.errors import ConfigError, TrainingError
from gammalm.evaluation.batching import Read, Request, laid_out, packed, reads_of, row_lengths
from gammalm.evaluation.lengths import SHORTEST, bucket, program_tokens
from gammalm.models.decoder import Model
from gammalm.models.flops import training_flops_per_token
from gammalm.models.loss import token_scores
from gammalm.models.parts import BATCH_AXES, Tree

TOKENS = 4096  # in a batch on one part of the mesh's batch axes, padding included
# "packed": a row holds several sequences, and what some of them begin with once. "plain": each sequence has a row by itself.
LAYOUTS = ("packed", "plain")


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


class Batch(NamedTuple):
    """`size` rows of `length` tokens in `parts` of equally many, of which each holds rows (lists of sequences) that are asked for at most
    `wide` targets together; rows that a part lacks are empty."""

    length: int
    size: int
    wide: int
    parts: list[list[list[Read]]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """What decides which program it needs."""
        return self.length, self.size, self.wide

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.size * self.length


class Scorer:
    """Scores requests with one model. `max_length`: tokens that it reads at most. `eps`: of its norms. `layout`: see LAYOUTS.

    `mesh`: the arrays lie on it, and rows are shared out over its batch axes; all processes then score the same requests in the same order,
    and all get every score. `tokens`: of a batch on each part of them; `rows`: rows of a batch instead. `counts` goes on over calls.
    Raises ConfigError for a layout that there is not, and for more tokens than learned positions.
    """

    def __init__(
        self, model: Model, params: dict, buffers: dict, *, eps: float, max_length: int, mesh: Mesh | None = None, layout: str = LAYOUTS[0],
        tokens: int = TOKENS, rows: int | None = None,
    ):  # fmt: skip
        shape = {} if mesh is None else mesh.shape
        self._parts = int(np.prod([shape[axis] for axis in BATCH_AXES if axis in shape]))
        self._context = shape.get("context", 1)
        if layout not in LAYOUTS:
            raise ConfigError(f"layout {layout!r}: choose one of {', '.join(LAYOUTS)}.")
        if model.config.positions == "learned" and max_length > model.config.max_positions:
            raise ConfigError(f"max_length={max_length:,}, but model.max_positions={model.config.max_positions:,}. Read no more than that.")
        self.max_length, self.mesh, self.layout = max_length, mesh, layout
        self.counts = Counts()
        self._model = model
        self._worth = self._parts * program_tokens(model.active_parameter_count)  # tokens
        self._tokens, self._rows = tokens, rows
        self.load(params, buffers)

        def scores(params, buffers, tokens_BT, until_BT, places_PC, targets_PC):
            decoder = model.bind(params, buffers)
            x_BTD, _ = decoder.hidden(tokens_BT, None if until_BT is None else Tree(until_BT), eps)
            x_PCD = jnp.take_along_axis(x_BTD.reshape(len(places_PC), -1, x_BTD.shape[-1]), places_PC[:, :, None], axis=1)
            return token_scores(x_PCD, decoder.head_matrix(), targets_PC, cap=decoder.softcap, chunk=decoder.loss_chunk)

        self._program = jax.jit(scores, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))

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

    def _plan(self, reads: list[Read]) -> Iterator[Batch]:
        if not reads:
            return
        rows_of = self._plain(reads) if self.layout == "plain" else self._packed(reads)
        for length in sorted(rows_of, reverse=True):
            # Dealt out so that all parts are asked for about as much: all are padded to the one that is asked for most.
            rows = sorted(rows_of[length], key=lambda row: sum(read.asked for read in row), reverse=True)
            size = self._size(length, len(rows))
            count = -(-len(rows) // size)
            batches = [[rows[first::count][part :: self._parts] for part in range(self._parts)] for first in range(count)]
            most = max(sum(read.asked for row in part for read in row) for batch in batches for part in batch)
            step = max(SHORTEST, bucket(most) // 16) * self._context  # not much more, and the loss can cut it into chunks
            for parts in batches:
                yield Batch(length, size, -(-most // step) * step, parts)

    def _plain(self, reads: list[Read]) -> dict[int, list[list[Read]]]:
        """Rows of one sequence, by their length."""
        longest = -(-self.max_length // self._context) * self._context
        lengths = row_lengths([len(read) for read in reads], longest, self._worth, self._context)
        rows_of: dict[int, list[list[Read]]] = {}
        for read in reads:
            rows_of.setdefault(_at_least(lengths, len(read)), []).append([read])
        return rows_of

    def _packed(self, reads: list[Read]) -> dict[int, list[list[Read]]]:
        """Rows of several, of the length that costs least: longer ones have less padding and read less twice, but attend to more."""
        least, best, found, size = np.inf, 0, [], bucket(max(map(len, reads)))
        while not best or size < min(2 * best, self._tokens + 1):
            length = -(-size // self._context) * self._context
            rows = packed(reads, length)
            together = self._size(length, len(rows))
            cost = -(-len(rows) // together) * together * length * training_flops_per_token(self._model, length)
            if cost < least:
                least, best, found = cost, length, rows
            size = bucket(size + 1)
        return {best: found}

    def _size(self, length: int, rows: int) -> int:
        """How many of so many rows are a batch: a multiple of the parts that they are shared out over, and the last batch nearly full."""
        most = max(1, self._rows // self._parts if self._rows else self._tokens // length) * self._parts
        batches = -(-rows // most)
        return -(-rows // (batches * self._parts)) * self._parts

    def _run(self, batch: Batch):
        """The batch's scores (fp32 log-probabilities, hits) [P, C], on their way."""
        tokens_BT, until_BT = np.zeros((2, batch.size, batch.length), np.int32)
        places_PC, targets_PC = np.zeros((2, self._parts, batch.wide), np.int32)
        for p, part in enumerate(batch.parts):
            at = 0
            for i, row in enumerate(part):
                b = p * batch.size // self._parts + i
                tokens, until, places = laid_out(row)
                tokens_BT[b, : len(tokens)], until_BT[b, : len(until)] = tokens, until
                for read, places_of_read in zip(row, places, strict=True):
                    for _, position, targets in read.asks:
                        here = slice(at, at := at + len(targets))
                        places_PC[p, here] = i * batch.length + places_of_read[position : position + len(targets)]
                        targets_PC[p, here] = targets
        self.counts.tokens += int(np.count_nonzero(until_BT))
        self.counts.computed += batch.tokens
        arrays = [tokens_BT, None if self.layout == "plain" else until_BT, places_PC, targets_PC]
        if self.mesh is None:
            return self._program(*self._weights, *arrays)
        rows = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        with jax.set_mesh(self.mesh):
            placed = [a if a is None else jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in arrays]
            return self._program(*self._weights, *placed)


def _at_least(lengths: Sequence[int], tokens: int) -> int:
    return next(length for length in lengths if length >= tokens)


def _scores(batch: Batch, found) -> Iterator[Score]:
    """The scores of a batch, of which `found` are log-probabilities and hits [P, C]."""
    logprobs_PC, hits_PC = jax.device_get(found)
    for p, part in enumerate(batch.parts):
        at = 0
        for index, _, targets in (ask for row in part for read in row for ask in read.asks):
            here = slice(at, at := at + len(targets))
            logprob = float(np.sum(logprobs_PC[p, here], dtype=np.float64))
            if not np.isfinite(logprob):
                raise TrainingError(f"The log-probability of request {index} is {logprob}. Take a checkpoint before it diverged.")
            yield Score(index, logprob, bool(hits_PC[p, here].all()))
