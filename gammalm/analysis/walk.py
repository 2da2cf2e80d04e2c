"""Sums over the tokens of one batch, taken while a decoder walks through its layers, and their totals over a stream of batches.

A measurement is a function `sums(model, params, buffers, batch, eps) -> tree of fp32 sums`, pure, so that it can be jitted anywhere: in
a monitor of training, over a mesh. Batches are those of gammalm.data.load: "tokens" [B, T+1], and where there are any "segments" [B, T+1]
and "weights" [B, T].
Shape legend: models/parts.py.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gammalm.errors import DataError


def inputs_of(batch: dict):
    """(tokens [B, T] that the model reads, their segments or None, which of them count: [B, T] bool).

    All of them count but padding: segment 0, and what only fills the last sequences of a validation split.
    """
    tokens_BT, segments = batch["tokens"][:, :-1], batch.get("segments")
    if segments is not None:
        segments_BT = segments[:, :-1]
        return tokens_BT, segments_BT, segments_BT > 0
    valid_BT = batch["weights"] > 0 if "weights" in batch else jnp.ones(tokens_BT.shape, bool)
    return tokens_BT, None, valid_BT


@functools.lru_cache(maxsize=16)
def _compiled(sums: Callable, model) -> Callable:
    return jax.jit(functools.partial(sums, model))


_whole = jax.jit(lambda a: a, out_shardings=PartitionSpec())


def fetch(tree):
    """The arrays of `tree` on the host, wherever they lie. Of those that lie on devices of several processes, all processes fetch alike,
    within `jax.set_mesh(mesh)`."""

    def reachable(a):
        return not isinstance(a, jax.Array) or a.is_fully_addressable or a.is_fully_replicated

    return jax.device_get(jax.tree.map(lambda a: a if reachable(a) else _whole(a), tree))


def total(sums: Callable, model, params, buffers, batches: Iterable[dict], eps: float | None = None):
    """`sums` of every batch, added up in float64 on the host. `eps`: of the norms; None: the model's own.

    Where `params` lie on a mesh, call it within `jax.set_mesh(mesh)`. Compiled once per model and shape of batch. Raises DataError where
    there is no batch.
    """
    function, found = _compiled(sums, model), None
    eps = np.float32(model.config.norm_eps if eps is None else eps)  # of NumPy: it belongs to no device
    for batch in batches:
        part = jax.tree.map(lambda a: np.asarray(a, np.float64), fetch(function(params, buffers, batch, eps)))
        found = part if found is None else jax.tree.map(np.add, found, part)
    if found is None:
        raise DataError("There is no batch to measure. Give more data.")
    return found


def mean_of(sums, count: float):
    """Every sum over `count`. Raises DataError where nothing was counted."""
    if not count:
        raise DataError("The batches hold nothing that counts here, padding or single tokens alone. Give more data.")
    return jax.tree.map(lambda a: a / count, sums)
