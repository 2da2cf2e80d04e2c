"""Text from prompts, many at a time: greedy or drawn, until a stop, token by token or all at once.

Prompts go through the model in batches of similar length, padded on the right, over a cache (models/cache.py). A batch is two programs: one
reads the prompts and chooses each row's first token, one chooses up to CHUNK further tokens on the device before the host looks for stops.
Each is compiled once for a number of rows and the lengths of lengths.py. What a prompt gets does not depend on its batch: its tokens do not
see other rows, and draws are its own (sampling.py). Shape legend: models/parts.py; S slots of a cache.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from gammalm.errors import ConfigError, DataError, TrainingError
from gammalm.evaluation.batching import row_lengths
from gammalm.evaluation.lengths import bucket, program_tokens
from gammalm.evaluation.output import Generated, Output
from gammalm.evaluation.sampling import KINDS, Draws, Sampling, draw
from gammalm.models.cache import Cache, extend, layers_of, prefill, refuse_context
from gammalm.models.decoder import Decoder, Model
from gammalm.models.parts import BATCH_AXES, mesh_pieces
from gammalm.trees import flat, nested

CHUNK = 16  # tokens that the device writes before the host looks
NOTHING = -1  # for a token of a row that is done
BROKEN = -2  # for one whose logits are no numbers


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, and what is wanted after them: at most `max_new_tokens`, up to the first of `stops` (texts) or `stop_tokens` (ids).

    `long`: what to do with tokens too many for the model: "refuse" them; or "left": keep the last, so that they and the new ones fit.
    `index`: the number of the sequence, for its draws; None: its place in the list. The end of a document ends every text.
    Raises ConfigError where nothing is asked for, or a stop is empty.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stops: Sequence[str] = ()
    stop_tokens: Sequence[Sequence[int]] = ()
    sampling: Sampling = Sampling()
    long: str = "refuse"
    index: int | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ConfigError(f"{self.max_new_tokens} new tokens are asked for: choose 1 or more.")
        if not all(map(len, (*self.stops, *self.stop_tokens))):
            raise ConfigError("An empty stop would end every text before it begins: leave it out.")


class Piece(NamedTuple):
    """`index` of a prompt in the list, the text that it has got in addition, and once it is complete the whole."""

    index: int
    text: str
    done: Generated | None


class _Job(NamedTuple):
    """A prompt as it runs: its place in the list, the tokens that the model reads, how many were cut, how many it may write."""

    place: int
    prompt: Prompt
    tokens: Sequence[int]
    cut: int
    limit: int
    output: Output


class _State(NamedTuple):
    """A batch between two calls: the cache, the last token of each row (not yet in it), how many it has drawn, whether it is done."""

    cache: Cache
    token_B: jax.Array
    drawn_B: jax.Array
    done_B: jax.Array


class Generator:
    """Writes with one model.

    `tokenizer` has `to_bytes(ids)`, `eod_id` and `vocab_size` (data.tokenizer.Tokenizer); ids of the model beyond it are never chosen.
    `eps`: of the norms. `max_length`: tokens that the model reads at most, prompt included. `rows`: sequences of a batch. `mesh`: the
    arrays lie on it, rows are shared out over its batch axes, and every process asks for the same.
    """

    def __init__(
        self, model: Model, params: dict, buffers: dict, tokenizer, *, eps: float, max_length: int, mesh: Mesh | None = None, rows: int = 32
    ):
        self.model, self.tokenizer, self.max_length, self.mesh = model, tokenizer, max_length, mesh
        with self._on_mesh():
            self._parts = mesh_pieces(*BATCH_AXES)
        self._rows = -(-rows // self._parts) * self._parts
        self._worth = self._parts * program_tokens(model.active_parameter_count)
        self._eps = eps
        self.load(params, buffers)
        self._start = jax.jit(self._start_batch, static_argnames=("slots", "kind"))
        self._go_on = jax.jit(self._continue_batch, static_argnames=("kind",), donate_argnames=("state",))

    def load(self, params: dict, buffers: dict) -> None:
        """Writes with other weights of the same model from now on, placed alike; nothing is compiled anew."""
        self._given, self._weights = (params, buffers), None

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        """What each prompt got, in their order. Errors as of `stream`."""
        found = {piece.index: piece.done for piece in self.stream(prompts, CHUNK) if piece.done}
        return [found[place] for place in range(len(prompts))]

    def stream(self, prompts: Sequence[Prompt], chunk: int = 1) -> Iterator[Piece]:
        """Pieces of text as they become certain, `chunk` (at most CHUNK) tokens of each row of a batch at a time, batch after batch.

        Before anything is computed, raises DataError for a prompt that is empty, no text of the model's vocabulary or too long, ConfigError
        on a mesh with context > 1; TrainingError where the model's logits are not finite.
        """
        jobs = [self._job(place, prompt) for place, prompt in enumerate(prompts)]
        with self._on_mesh():
            refuse_context()
            if self._weights is None:
                self._weights = in_compute_dtype(self.model, self._given[0]), self._given[1]
        return (piece for batch in self._batches(jobs) for piece in self._write(*batch, chunk))

    def _job(self, place: int, prompt: Prompt) -> _Job:
        tokens, most, who = prompt.tokens, self.max_length, f"Prompt {place}"
        if not len(tokens):
            raise DataError(f"{who} is empty. Begin it with the token that ends documents, {self.tokenizer.eod_id}.")
        if not 0 <= min(tokens) <= max(tokens) < self.model.config.vocab_size:
            raise DataError(f"{who} has tokens that the model does not know ({self.model.config.vocab_size:,} ids). Take its tokenizer.")
        cut, limit, at_limit = 0, prompt.max_new_tokens, "length"
        if prompt.long == "left":
            if limit >= most:
                raise DataError(f"{who}: {limit:,} new tokens leave no room for it, as the model reads {most:,} at most. Ask for fewer.")
            cut = max(0, len(tokens) - (most - limit))
        elif len(tokens) > most:
            raise DataError(f"{who} has {len(tokens):,} tokens, and the model reads {most:,} at most. Shorten it, or let it be cut.")
        elif limit > most - len(tokens) + 1:  # the last token that is written is not read
            limit, at_limit = most - len(tokens) + 1, "context"
        t = self.tokenizer
        output = Output(t.to_bytes, t.eod_id, prompt.stops, prompt.stop_tokens, limit, at_limit)
        return _Job(place, prompt, tokens[cut:], cut, limit, output)

    def _batches(self, jobs: list[_Job]) -> Iterator[tuple[list[_Job], tuple[int, int, int]]]:
        """Jobs side by side, and their rows, tokens and slots: B, T, S. The largest first: what does not fit into memory fails at once.

        A length T is two programs to compile, so there are as few as pay for themselves in padding, each with one B and one S.
        """
        lengths = row_lengths([len(job.tokens) for job in jobs], self.max_length, 2 * self._worth)
        for shorter, T in reversed(list(zip([0, *lengths], lengths, strict=False))):
            here = [job for job in jobs if shorter < len(job.tokens) <= T]
            here.sort(key=lambda job: job.limit, reverse=True)  # those that may end together go together
            S = min(bucket(max(len(job.tokens) + job.limit - 1 for job in here)), self.max_length)
            B = min(self._rows, self._parts * 2 ** math.ceil(math.log2(-(-len(here) // self._parts))))
            for i in range(0, len(here), B):
                yield here[i : i + B], (B, T, S)

    def _write(self, jobs: list[_Job], shape: tuple[int, int, int], chunk: int) -> Iterator[Piece]:
        """The pieces of one batch, whose cache is freed before the next one begins."""
        arrays, static = self._arrays(jobs, *shape)
        with self._on_mesh():
            state, found = self._start(*self._weights, **arrays, **static)
        while True:
            tokens_BC = np.asarray(found)
            for job, tokens in zip(jobs, tokens_BC.tolist(), strict=False):  # rows that fill the batch up have no job
                if job.output.reason:
                    continue
                for token in tokens:
                    if token == NOTHING or job.output.reason:
                        break
                    if token == BROKEN:
                        raise TrainingError(f"The logits after prompt {job.place} are not finite. Take a checkpoint before it diverged.")
                    job.output.take(token)
                text, done = job.output.piece(), None
                if job.output.reason:
                    done = Generated(tuple(job.output.tokens), job.output.text(), job.output.reason, job.cut)
                if text or done:
                    yield Piece(job.place, text, done)
            stopped_B = np.ones(len(tokens_BC), bool)
            stopped_B[: len(jobs)] = [job.output.reason != "" for job in jobs]
            if stopped_B.all():
                return
            with self._on_mesh():
                state, found = self._go_on(
                    *self._weights, state=state, stopped_B=stopped_B, steps=np.int32(min(chunk, CHUNK)), draws=arrays["draws"],
                    limits_B=arrays["limits_B"], kind=static["kind"],
                )  # fmt: skip

    def _on_mesh(self):
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _arrays(self, jobs: list[_Job], B: int, T: int, S: int) -> tuple[dict, dict]:
        """The arrays and the static values of a batch. It is filled up with rows that write nothing."""
        tokens_BT, lengths_B, limits_B = np.zeros((B, T), np.int32), np.ones(B, np.int32), np.zeros(B, np.int32)
        draws = Draws(*(np.zeros(B, dtype) for dtype in (np.float32, np.int32, np.float32, np.uint32, np.uint32)))
        for b, job in enumerate(jobs):
            tokens_BT[b, : len(job.tokens)] = job.tokens
            lengths_B[b], limits_B[b] = len(job.tokens), job.limit
            how, index = job.prompt.sampling, job.place if job.prompt.index is None else job.prompt.index
            for array, value in zip(draws, (how.temperature, how.top_k, how.top_p, how.seed, index), strict=True):
                array[b] = value
        kind = max((job.prompt.sampling.kind for job in jobs), key=KINDS.index)
        return dict(tokens_BT=tokens_BT, lengths_B=lengths_B, limits_B=limits_B, draws=draws), dict(slots=S, kind=kind)

    def _start_batch(self, params, buffers, tokens_BT, lengths_B, limits_B, draws, slots, kind):
        """(state, first token of each row [B, 1]) after the prompts."""
        decoder = self.model.bind(params, buffers)
        x_BTD, cache = prefill(decoder, tokens_BT, lengths_B, slots, self._eps)
        x_B1D = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)
        drawn_B = jnp.zeros_like(lengths_B)
        return self._after(decoder, x_B1D, _State(cache, drawn_B, drawn_B, limits_B == 0), draws, limits_B, kind)

    def _continue_batch(self, params, buffers, state, stopped_B, steps, draws, limits_B, kind):
        """(state, tokens [B, CHUNK]) after up to `steps` further tokens of each row; less where all are done."""
        decoder = self.model.bind(params, buffers)
        layers, written = layers_of(decoder), jnp.full((len(limits_B), CHUNK), NOTHING)

        def step(carry):
            i, state, written = carry
            counts_B = (~state.done_B).astype(jnp.int32)
            x_B1D, cache = extend(decoder, layers, state.token_B[:, None], counts_B, state.cache, self._eps)
            state, token_B1 = self._after(decoder, x_B1D, state._replace(cache=cache), draws, limits_B, kind)
            return i + 1, state, jax.lax.dynamic_update_slice(written, token_B1, (0, i))

        state = state._replace(done_B=state.done_B | stopped_B)
        more = lambda carry: (carry[0] < steps) & ~jnp.all(carry[1].done_B)  # noqa: E731
        _, state, written = jax.lax.while_loop(more, step, (jnp.int32(0), state, written))
        return _on_every_device(state), _on_every_device(written)

    def _after(self, decoder: Decoder, x_B1D, state: _State, draws: Draws, limits_B, kind: str):
        """(state, tokens [B, 1]) after one more token of the rows that are not done, whose last hidden states are given."""
        logits_BV = decoder.logits_of(x_B1D)[:, 0]
        known = self.tokenizer.vocab_size
        if known < logits_BV.shape[-1]:
            logits_BV = jnp.where((jnp.arange(logits_BV.shape[-1]) < known)[None], logits_BV, -jnp.inf)
        token_B = jnp.where(jnp.isfinite(jnp.max(logits_BV, axis=-1)), draw(logits_BV, draws, state.drawn_B, kind), BROKEN)
        token_B = jnp.where(state.done_B, NOTHING, token_B)
        drawn_B = state.drawn_B + ~state.done_B
        done_B = state.done_B | (token_B == self.tokenizer.eod_id) | (token_B == BROKEN) | (drawn_B >= limits_B)
        state = _State(state.cache, jnp.maximum(token_B, 0), drawn_B, done_B)
        return _on_every_device(state), _on_every_device(token_B[:, None])


def _on_every_device(tree):
    """Small arrays of a batch, whole on every device of the mesh in use, so that all processes read them; what a cache keeps stays."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    if isinstance(tree, _State):
        cache = tree.cache._replace(lengths_B=_on_every_device(tree.cache.lengths_B))
        return _State(cache, *map(_on_every_device, tree[1:]))
    return jax.lax.with_sharding_constraint(tree, PartitionSpec())


def in_compute_dtype(model: Model, params: dict) -> dict:
    """`params` with every matrix that the model casts to `model.dtype` before each use cast once: the same numbers, read in less time.

    Norms, sinks and routers are computed in fp32, biases are added in whichever dtype; tables are fp32 where the residual stream is.
    """
    c = model.config
    in_fp32 = {"norm", "bias", "sink", "router"} | ({"embed", "position"} if c.residual_dtype != c.dtype else set())
    return nested({path: a if model.specs[path].role in in_fp32 else a.astype(jnp.dtype(c.dtype)) for path, a in flat(params).items()})
