"""The routed experts of a mixture layer: one function over several backends that give the same numbers.

Shape legend: N rows, A assignments per row, E experts, D d_model, F width of an expert; M = N·A assignments sorted by expert.
"""

import importlib.util

import jax
import jax.numpy as jnp

from gammalm.errors import ConfigError
from gammalm.models.experts_blocked import blocked_ffn


def expert_ffn(x_ND, ids_NA, gates_NA, w, backend: str):
    """y [N, D] = Σ_a gate_a · down(silu(gate x) · up x) by the expert of each assignment, and how many assignments were computed.

    x: bf16 or fp32. ids: int32, where E stands for no expert. gates: fp32. w: {"gate", "up": [E, D, F], "down": [E, F, D]} in fp32, cast
    to the dtype of x. y is summed in fp32 and has the dtype of x. Computed: int32 scalar, counted where the products are made, so that a
    caller measures what was dropped. Differentiable in x, gates and w; with `ragged` and `tokamax` the gradient of w is rounded once to
    the dtype of x on its way to fp32. `backend`: a name in BACKENDS, see `choose_backend`. Raises ConfigError where it is not installed.
    """
    return BACKENDS[backend](x_ND, ids_NA, gates_NA, w)


def choose_backend(name: str, platform: str) -> str:
    """The backend for a `model.moe.backend` on a platform of JAX ("cpu", "gpu", "tpu").

    "auto" is `blocked` on CPUs; elsewhere `tokamax` where that is installed, else `ragged` on TPUs and `blocked` on GPUs, where
    `jax.lax.ragged_dot` has been lowered to every expert on every row (github.com/marin-community/marin/issues/5394). Only the choice
    for CPUs was measured (benchmarks/moe.py). Raises ConfigError for an unknown name and for `tokamax` where it is not installed.
    """
    if name == "auto":
        if platform == "cpu":
            return "blocked"
        if importlib.util.find_spec("tokamax"):
            return "tokamax"
        return "ragged" if platform == "tpu" else "blocked"
    if name not in BACKENDS:
        raise ConfigError(f"model.moe.backend: {name!r} is none of auto, {', '.join(BACKENDS)}.")
    if name == "tokamax":
        _tokamax()
    return name


def _tokamax():
    """The module, which takes seconds to import and is optional."""
    if not importlib.util.find_spec("tokamax"):
        raise ConfigError("model.moe.backend=tokamax: tokamax is not installed. `pip install tokamax`, or set model.moe.backend=auto.")
    import tokamax

    return tokamax


def _dense(x_ND, ids_NA, gates_NA, w):
    """Every expert on every row: the reference, and E/A times the work."""
    chosen_NAE = ids_NA[..., None] == jnp.arange(w["gate"].shape[0])[None, None]
    weight_NE = jnp.sum(jnp.where(chosen_NAE, gates_NA[..., None], 0), axis=1)
    gate, up, down = (w[name].astype(x_ND.dtype) for name in ("gate", "up", "down"))
    gate_NEF = jnp.einsum("nd,edf->nef", x_ND, gate).astype(jnp.float32)
    up_NEF = jnp.einsum("nd,edf->nef", x_ND, up).astype(jnp.float32)
    h_NEF = (jax.nn.silu(gate_NEF) * up_NEF).astype(x_ND.dtype)
    out_NED = jnp.einsum("nef,efd->ned", h_NEF, down).astype(jnp.float32)
    y_ND = jnp.einsum("ned,ne->nd", out_NED, weight_NE)
    return y_ND.astype(x_ND.dtype), jnp.sum(chosen_NAE, dtype=jnp.int32)


def _sorted_rows(dot, x_ND, ids_NA, gates_NA, w):
    """Rows sorted by expert, and a product `dot(rows, weights, sizes of the groups)` of each group with its own weights."""
    flat = ids_NA.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    row_M = order // ids_NA.shape[1]
    sizes_E = jnp.sum(flat[:, None] == jnp.arange(w["gate"].shape[0])[None], axis=0, dtype=jnp.int32)
    computed = jnp.sum(sizes_E)
    # What a product leaves in rows of no group is undefined: `where`, unlike a factor 0, also stops a NaN, here and in the gradients.
    real_M1 = (jnp.arange(flat.size) < computed)[:, None]
    gate, up, down = (w[name].astype(x_ND.dtype) for name in ("gate", "up", "down"))
    rows_MD = jnp.where(real_M1, x_ND[row_M], 0)
    gate_MF, up_MF = (jnp.where(real_M1, dot(rows_MD, kernel, sizes_E), 0).astype(jnp.float32) for kernel in (gate, up))
    h_MF = (jax.nn.silu(gate_MF) * up_MF).astype(x_ND.dtype)
    out_MD = jnp.where(real_M1, dot(h_MF, down, sizes_E), 0).astype(jnp.float32)
    y_ND = jnp.zeros(x_ND.shape, jnp.float32).at[row_M].add(gates_NA.reshape(-1)[order][:, None] * out_MD)
    return y_ND.astype(x_ND.dtype), computed


BACKENDS = {
    "dense": _dense,
    "blocked": blocked_ffn,
    "ragged": lambda *args: _sorted_rows(jax.lax.ragged_dot, *args),
    "tokamax": lambda *args: _sorted_rows(_tokamax().ragged_dot, *args),
}
