"""Where small initialization helps, token by token: the gains of one model over another by the difficulty of the token.

    l_small, l_standard   fp32 losses of both models on the same token, in nats
    gain                  symmetric change of its probability, 2 (p_small - p_std) / (p_small + p_std) = 2 tanh((l_std - l_small) / 2)
    difficulty            (l_small + l_std) / 2
    block                 number of what a token stands in, its document: tokens of one block are not independent

`TokenGains` takes any number of tokens in 21 MB. All its sums are whole numbers, so parts can be added up in any order and the outcome
is the same to the bit. Source: the first seed's token-level figure; science 6, [R] for the formula. Shapes: n tokens, B sequences, T
tokens of each, K buckets of difficulty (buckets.py), J groups of blocks.
"""

import dataclasses
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from gammalm.analysis.buckets import K, bucket_of, quantiles
from gammalm.errors import DataError, TrainingError
from gammalm.files import write_bytes_atomic

J = 32  # groups that blocks are dealt into, a power of two; standard errors have J - 1 degrees of freedom
STEP = 0.02  # width of the histogram's bins over gains from -2 to 2
# Sums are kept in multiples of 2^-28 (gains) and 2^-22 (nats): far below what fp32 losses resolve, and 2^33 tokens fit into 63 bits.
GAIN_UNIT, NATS_UNIT = 2.0**-28, 2.0**-22
FORMAT = 1  # of a saved state; raised when its meaning changes


def symmetric_gain(small_n, standard_n) -> np.ndarray:
    """The gain of each token, float64 in [-2, 2], from both models' losses in nats; above 0 where `small` gives it more probability."""
    return 2 * np.tanh((np.asarray(standard_n, np.float64) - np.asarray(small_n, np.float64)) / 2)


@dataclasses.dataclass(frozen=True)
class Gains:
    """What `TokenGains.summary` says; gains without unit, nats per token.

    `tokens`, `groups`: how many tokens, in how many groups of blocks. `gain`, `nats`: means over all tokens of the symmetric gain and
    of l_std - l_small. `by_difficulty`: one row per bin, the easiest first, with "low" and "high" (difficulty in nats), "tokens",
    "gain", "gain_se", "nats", "nats_se". `*_se`: standard errors, None with fewer than two groups.
    `histogram`: tokens per bin of `STEP` over gains from -2 to 2; `unchanged`: share of tokens with a gain within ±0.1.
    """

    tokens: int
    groups: int
    gain: float
    gain_se: float | None
    nats: float
    nats_se: float | None
    by_difficulty: tuple[dict, ...]
    histogram: tuple[int, ...]
    unchanged: float


class TokenGains:
    """Counts and sums of the gains of any number of tokens, in memory that does not grow; `add`, `merge`, `save`, `summary`."""

    def __init__(self):
        self.count_JK = np.zeros((J, K), np.int64)
        self.gain_JK = np.zeros((J, K), np.int64)
        self.nats_JK = np.zeros((J, K), np.int64)
        self.histogram = np.zeros(round(4 / STEP), np.int64)

    @property
    def tokens(self) -> int:
        return int(self.count_JK.sum())

    def add(self, small_n, standard_n, blocks_n) -> None:
        """Takes in n tokens: fp32 losses of both models, and the number of the block that each stands in (whole numbers from 0).

        Raises TrainingError where a loss is not finite: a model that gives a token no probability has no gain to speak of.
        """
        small_n, standard_n = (np.asarray(a, np.float32).ravel() for a in (small_n, standard_n))
        for name, losses_n in (("small", small_n), ("standard", standard_n)):
            if bad := int(np.count_nonzero(~np.isfinite(losses_n))):
                raise TrainingError(f"Token gains: {bad} losses of the {name} model are not finite. Take a checkpoint before it diverged.")
        gain_n = symmetric_gain(small_n, standard_n)
        nats_n = standard_n.astype(np.float64) - small_n
        difficulty_n = ((standard_n.astype(np.float64) + small_n) / 2).astype(np.float32)
        cell_n = _group_of(np.asarray(blocks_n).ravel()) * K + bucket_of(difficulty_n)
        np.add.at(self.count_JK.reshape(-1), cell_n, 1)
        np.add.at(self.gain_JK.reshape(-1), cell_n, np.rint(gain_n / GAIN_UNIT).astype(np.int64))
        np.add.at(self.nats_JK.reshape(-1), cell_n, np.rint(nats_n / NATS_UNIT).astype(np.int64))
        bins = len(self.histogram)
        np.add.at(self.histogram, np.clip(np.floor((gain_n + 2) / STEP).astype(np.int64), 0, bins - 1), 1)

    def merge(self, other: "TokenGains") -> None:
        """Adds what `other` has seen. A block may be split between the two: its number alone says which group it is of."""
        for name in ("count_JK", "gain_JK", "nats_JK", "histogram"):
            getattr(self, name).__iadd__(getattr(other, name))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state to `path`, a compressed NumPy file. Raises OSError where it cannot be written."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, format=FORMAT, **vars(self))
        write_bytes_atomic(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TokenGains":
        """The state that `save` wrote. Raises DataError where `path` is none."""
        state = cls()
        try:
            with np.load(path, allow_pickle=False) as saved:
                if int(saved["format"]) != FORMAT:
                    raise DataError(f"{path} has format {int(saved['format'])}, and this gammalm reads {FORMAT}. Measure again.")
                for name, empty in vars(state).items():
                    empty[...] = saved[name]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} holds no state of token gains ({error}). Name a file that `gammalm analyze tokens` saved.") from error
        return state

    def summary(self, bins: int = 10) -> Gains:
        """Gains over all tokens and in `bins` bins of difficulty that hold equally many of them.

        The edges are exact to 2^-10 of themselves (see buckets.quantiles). Tokens of the one bucket that an edge falls into, ties among
        them, are shared out between the two bins in proportion, so every bin holds tokens / bins to the token.
        Standard errors: a jackknife that leaves out one of J groups of blocks at a time and cuts the bins anew.
        Raises DataError without tokens.
        """
        if not self.tokens:
            raise DataError("Token gains: no token has been compared. Give data with a validation split, or more batches.")
        count_K, gain_K, nats_K = (a.sum(0) for a in (self.count_JK, self.gain_JK, self.nats_JK))
        means = _means(count_K, gain_K, nats_K, bins)
        left_out = [
            _means(count_K - self.count_JK[j], gain_K - self.gain_JK[j], nats_K - self.nats_JK[j], bins)
            for j in range(J)
            if 0 < self.count_JK[j].sum() < self.tokens
        ]
        errors = _jackknife_errors(left_out) if left_out else np.full_like(means, np.nan)
        low = quantiles(count_K, bins)
        rows = [
            {"low": float(low[i]), "high": float(low[i + 1]), "tokens": self.tokens / bins}
            | {name: float(means[k, i]) for k, name in enumerate(("gain", "nats"))}
            | {f"{name}_se": _or_none(errors[k, i]) for k, name in enumerate(("gain", "nats"))}
            for i in range(bins)
        ]
        near = round(0.1 / STEP)
        middle = len(self.histogram) // 2
        return Gains(
            tokens=self.tokens, groups=max(1, len(left_out)),
            gain=float(means[0, bins]), gain_se=_or_none(errors[0, bins]), nats=float(means[1, bins]), nats_se=_or_none(errors[1, bins]),
            by_difficulty=tuple(rows), histogram=tuple(self.histogram.tolist()),
            unchanged=float(self.histogram[middle - near : middle + near].sum() / self.tokens),
        )  # fmt: skip


def _group_of(blocks_n: np.ndarray) -> np.ndarray:
    """The group of each block, int64 [n]: multiplication by the golden ratio deals neighbours out evenly."""
    return ((blocks_n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(65 - J.bit_length())).astype(np.int64)


def _means(count_K, gain_K, nats_K, bins: int) -> np.ndarray:
    """Mean gain and nats of each of `bins` equal-count bins and, last, of all tokens: float64 [2, bins+1].

    A sum over the easiest r tokens is linear in r inside a bucket, which is what sharing a bucket out in proportion means.
    """
    held = count_K > 0
    ranks = np.concatenate([[0], np.cumsum(count_K[held])])
    wanted = np.linspace(0, ranks[-1], bins + 1)
    means = []
    for sums_K, unit in ((gain_K, GAIN_UNIT), (nats_K, NATS_UNIT)):
        upto = np.concatenate([[0.0], np.cumsum(sums_K[held] * unit)])
        means.append([*(np.diff(np.interp(wanted, ranks, upto)) * bins / ranks[-1]), upto[-1] / ranks[-1]])
    return np.array(means)


def _jackknife_errors(left_out: list[np.ndarray]) -> np.ndarray:
    """Standard errors from the estimates with one group left out each: sqrt((J-1)/J · Σ (θ_j - mean)²)."""
    theta = np.stack(left_out)
    return np.sqrt((len(theta) - 1) / len(theta) * np.sum((theta - theta.mean(0)) ** 2, 0))


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def loss_function(model, params, buffers, norm_eps: float) -> Callable[[Mapping], jax.Array]:
    """batch -> fp32 losses [B, T] of a model (models.decoder.Model), compiled once per shape; the batch as data.load gives it."""

    @jax.jit
    def losses(params, buffers, tokens, segments):
        segments = None if segments is None else segments[:, :-1]
        return model.bind(params, buffers).token_losses(tokens[:, :-1], tokens[:, 1:], segments, norm_eps)[0]

    return lambda batch: losses(params, buffers, batch["tokens"], batch.get("segments"))


def document_numbers(batch: Mapping, eod_id: int, start: int) -> tuple[np.ndarray, int]:
    """The number of the document that each target stands in, int64 [B, T], counted on from `start`; and where the next batch goes on.

    Under packing "documents" the pieces of a document longer than a sequence count as documents of their own.
    """
    if "segments" in batch:
        segments = batch["segments"]
        new = np.concatenate([np.ones((len(segments), 1), bool), segments[:, 1:] != segments[:, :-1]], 1)[:, :-1]
    else:
        new = batch["tokens"][:, :-1] == eod_id
    numbers = start + np.cumsum(new.ravel(), dtype=np.int64).reshape(new.shape)
    return numbers, int(numbers[-1, -1])


def measure(
    small: Callable[[Mapping], jax.Array],
    standard: Callable[[Mapping], jax.Array],
    batches: Iterable[Mapping],
    eod_id: int,
    part: tuple[int, int] = (0, 1),
) -> TokenGains:
    """The gains of one model over another on `batches` of the data (with "weights"), read as they come.

    `small`, `standard`: batch -> losses [B, T], see `loss_function`. `part` (i, m): of m parts that split the batches between them, part
    i alone is evaluated; documents are numbered alike in all, so their merged states are the state of one part.
    """
    gains, number = TokenGains(), 0
    pending = None  # read a batch late: the device computes while the host counts
    for index, batch in enumerate(batches):
        numbers, number = document_numbers(batch, eod_id, number)
        if index % part[1] != part[0]:
            continue
        found = (small(batch), standard(batch), batch["weights"] > 0, numbers)
        _take(gains, pending)
        pending = found
    _take(gains, pending)
    return gains


def _take(gains: TokenGains, found: tuple | None) -> None:
    if found is not None:
        small, standard, counted, numbers = found
        gains.add(np.asarray(small)[counted], np.asarray(standard)[counted], numbers[counted])
