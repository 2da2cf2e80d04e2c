"""A config of ours as inspection needs it: its description for theory, the declared std of every matrix, and exports in our own names."""

from collections.abc import Iterator

import numpy as np

from gammalm.analysis.weights import copies_of, matrix_paths, outputs_first
from gammalm.initializers import init_table
from gammalm.interop.layouts import Weights, piece, vector
from gammalm.interop.mapped import Tensor
from gammalm.interop.portable import tensor_names
from gammalm.theory import Decoder, Dense, Heads, Latent, Mixture, Stack

KINDS = {  # last part of a path -> kind of a matrix (interop/layouts.py); of the feed-forward layer its own
    "table": "embed", "positions": "position", "kernel": "head", "k_rope": "kv_down", "k_up": "kv_up", "v_up": "kv_up",
}  # fmt: skip


def kind_of(path: str) -> str:
    """`layers/ffn/experts/gate` -> ffn_gate, `layers/attn/q` -> q."""
    last = path.rpartition("/")[2]
    return "ffn_" + last if "/ffn/" in path and last != "router" else KINDS.get(last, last)


def declared_table(specs, config) -> dict[tuple[str, int, int | None], float]:
    """(kind, fan-in, layer) -> std that `config` draws with."""
    m, found = config.model, {}
    rows = {row["path"]: row for row in init_table(specs, config.init, d_model=m.d_model, n_layers=m.n_layers)}
    for path in matrix_paths(specs):
        for index, names in copies_of(specs[path]):
            sigma = rows[path]["sigma"]
            found[kind_of(path), rows[path]["fan_in"], names["layer"]] = sigma[index[0]] if isinstance(sigma, list) else sigma
    return found


def _misfits(m) -> Iterator[str]:
    """What of `config.model` theory does not know."""
    if m.softmax_sink != "none":
        yield f"a softmax sink ({m.softmax_sink})"
    if m.residual != "pre":
        yield f"{m.residual} residuals"
    if m.norm not in ("rms", "layer"):
        yield f"norm={m.norm}"


def decoder_of(specs, config) -> tuple[Decoder | None, str]:
    """(description of `config` for theory, "") or (None, why there is none)."""
    m = config.model
    if misfits := list(_misfits(m)):
        return None, f"Theory knows no decoder with {' and '.join(misfits)}, so no residual flow is predicted."
    rows = {row["path"]: row for row in init_table(specs, config.init, d_model=m.d_model, n_layers=m.n_layers)}
    first = m.moe.first_k_dense if m.ffn == "moe" else 0
    attention = Latent(m.n_heads, **dict(m.mla)) if m.attention == "mla" else Heads(m.n_heads, m.head_dim, m.qk_norm)
    stacks, stds = [], []
    for name, depth in (("dense_layers", first), ("layers", m.n_layers - first)):
        if not depth:
            continue
        ffn = Dense(m.d_ff, m.activation) if m.ffn == "mlp" else Dense(m.d_ff)
        if m.ffn == "moe" and name == "layers":
            e = m.moe
            ffn = Mixture(e.n_experts, e.top_k, e.n_shared, e.d_expert, e.score, e.route_scale)
        stack = Stack(depth, attention, ffn, m.gate)
        stacks.append(stack)
        stds.append({matrix: rows[f"{name}/{matrix}"]["sigma"] for matrix in stack.matrices()})
    embed = rows["embed/table"]["sigma"]
    head = None if m.tie_embeddings else rows["head/kernel"]["sigma"]
    if m.positions == "learned":
        embed = (embed**2 + rows["embed/positions"]["sigma"] ** 2) ** 0.5
        head = rows["embed/table"]["sigma"] if head is None else head
    if not all(np.min(std) > 0 for std in (embed, *(std for group in stds for std in group.values()))):
        return None, "A matrix begins at 0, and theory takes every matrix as drawn, so no residual flow is predicted."
    theta = m.rope_theta if m.positions == "rope" else 1e30  # so slow that nothing turns
    return Decoder(m.d_model, m.vocab_size, tuple(stacks), tuple(stds), embed, head, m.norm_eps, theta, m.logit_softcap), ""


def own_weights(tensors: list[Tensor], specs) -> Weights:
    """The matrices and vectors of an export in our own names and layouts (interop/portable.py), one tensor per layer."""
    found, by_name = Weights([], [], {}, []), {tensor.name: tensor for tensor in tensors}
    for path, spec in specs.items():
        for i, name in enumerate(tensor_names(path, spec.shape[0])):
            if name not in by_name:
                found.unread[name] = "it is missing"
                continue
            tensor, layer = by_name.pop(name), spec.first_layer + i if spec.layers else None
            if not spec.fan_in:
                found.vectors.append(vector(tensor, layer, vector_kind(path, spec)))
                continue
            side = "columns" if outputs_first(spec) else "rows"
            rows = spec.fans()[1] if outputs_first(spec) else spec.fans()[0]
            experts = spec.layer_shape[0] if "experts" in spec.layer_axes else 0
            for expert in range(experts) if experts else [None]:
                at = () if expert is None else (expert,)
                found.matrices.append(piece(tensor, name, kind_of(path), inputs=side, layer=layer, expert=expert, at=at, rows=rows))
    found.unread |= dict.fromkeys((name for name in by_name if not name.endswith("ffn.bias")), "no such parameter is known")
    return found


def vector_kind(path: str, spec) -> str:
    """Whether a parameter without fans is a gain, a bias or something else."""
    return "gain" if path.endswith("gain") else "bias" if spec.role == "bias" else "other"
