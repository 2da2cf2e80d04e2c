"""One model measured and predicted: the dict that `text` and `page` show and `--json` prints.

Matrices are read one at a time, so memory is that of the largest (stored.py). Nothing here depends on who stored them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gammalm.analysis.freshness import is_moved, judge
from gammalm.analysis.outlook import advice, outlook, sink_risk
from gammalm.analysis.stored import figures
from gammalm.errors import ConfigError
from gammalm.initializers import equivalent_gamma
from gammalm.inspection.subject import Subject, of_config, open_path
from gammalm.models.decoder import Model
from gammalm.progress import Progress

RANKS = ("auto", "all", "some", "none")
BY_GAMMA = ("fan_in", "d_model", "branch_balanced", "mup")  # presets of ours that init.gamma reaches
NORMS = {"post": "post-norm residuals", "deepnorm": "DeepNorm residuals", "none": "no norms", "fixup": "scalars in place of norms"}
MANY = 10**9  # weights from which `auto` looks at the spectra of SOME layers alone: minutes instead of an hour
SOME = 5
SHOWN = ("std", "gamma", "stable_rank", "near_zero", "kurtosis")


def inspect_model(path: str | Path, *, step: int | None = None, ranks: str = "auto", quiet: bool = True) -> dict:
    """Everything that is known of the model at `path`; docs/inspect.md has the fields.

    ranks: whose stable rank is computed, of `all` matrices, of five layers and what is outside them (`some`), of `none`; auto: all up to
    10⁹ weights, then some. quiet: no progress on stderr. Raises ConfigError for what is no model, CheckpointError for damaged files.
    """
    if ranks not in RANKS:
        raise ConfigError(f"--ranks {ranks} is none of {', '.join(RANKS)}.")
    return _inspect(open_path(path, step), ranks, quiet)


def inspect_config(config, name: str) -> dict:
    """The same of a config of ours, which has no weights yet."""
    return _inspect(of_config(config, name), "none", True)


def _inspect(subject: Subject, ranks: str, quiet: bool) -> dict:
    found = {"model": subject.path, "source": subject.source, "step": subject.step}
    found |= _sizes(subject)
    found["declared"] = _declared(subject)
    matrices, vectors = [], []
    if subject.weights is not None:
        matrices, vectors = _measure(subject, ranks, quiet), [_vector(v) for v in subject.weights.vectors]
        found["state"] = judge(matrices, vectors)
    found |= {"matrices": matrices, "vectors": vectors, "by_layer": _by_layer(matrices), "by_kind": _by_kind(matrices)}
    found["outlook"] = outlook(subject.decoder, distinct=subject.distinct, scale=subject.scale) if subject.decoder else None
    facts = _facts(subject, found)
    found["sink"] = sink_risk(facts["gamma"], facts["gated"], facts["sink"])
    found["advice"] = advice(facts)
    found["unsaid"] = subject.unsaid + _unsaid(subject, matrices, vectors)
    found["notes"] = list(subject.weights.notes) if subject.weights else []
    found["assumed"] = list(subject.described.assumed) if subject.described else []
    return found


def _sizes(subject: Subject) -> dict:
    d, weights = subject.described, subject.weights
    whole = weights and not weights.unread  # quantized numbers are packed, so what is unread cannot be counted
    count = sum(m.size for m in weights.matrices) + sum(v.size for v in weights.vectors) if whole else None
    active = None
    if subject.config is not None:
        m = subject.config.model
        model = Model(m)
        count, active = model.parameter_count, model.active_parameter_count
        eps = m.norm_eps if m.norm in ("rms", "layer") else None
        sizes = {"family": "gammalm", "width": m.d_model, "layers": m.n_layers, "vocabulary": m.vocab_size, "eps": eps,
                 "tied": m.tie_embeddings, "gate": m.gate, "norms": NORMS.get(m.norm) or NORMS.get(m.residual, m.residual)}  # fmt: skip
    elif d is not None:
        sizes = {"family": d.model_type, "width": d.width, "layers": d.layers, "vocabulary": d.vocab, "eps": d.eps, "tied": d.tied,
                 "gate": "none" if d.norms else None, "norms": d.norms}  # fmt: skip
    else:
        layers = {m.layer for m in weights.matrices if m.layer is not None}
        table = next((m for m in weights.matrices if m.kind == "embed"), None)
        sizes = {"family": None, "width": table.columns if table else None, "layers": len(layers) or None,
                 "vocabulary": table.rows if table else None, "eps": None, "tied": None, "gate": None, "norms": None}  # fmt: skip
    dtypes = sorted({m.dtype for m in weights.matrices}) if weights else []
    return sizes | {"parameters": {"total": count, "active": active}, "dtypes": dtypes}


def _declared(subject: Subject) -> dict | None:
    """The declared initialization, and what it amounts to in γ by the fan-ins that theory's description lists."""
    if subject.config is not None:
        i = subject.config.init
        found = {"key": "init.gamma", "value": i.gamma if i.preset in BY_GAMMA else None, "preset": i.preset}
    elif subject.described is not None and subject.described.declared:
        found = {"key": subject.described.declared_key, "value": subject.described.declared, "preset": None}
    else:
        return None
    rows = {}
    if subject.decoder is not None:
        d = subject.decoder
        rows["embed"] = (d.d_model, subject.declared("embed", d.d_model, None))  # decoder.embed has positions and a scale in it too
        if d.head is not None:
            rows["head"] = (d.d_model, d.head)
        for stack, stds in zip(d.stacks, d.stds, strict=True):
            rows |= {name: (fan or d.d_model, float(np.mean(stds[name]))) for name, fan in stack.matrices().items()}
    elif subject.described is not None:
        fans = {"width": subject.described.width, "feed-forward": subject.described.ffn}
        rows = {name: (fan, found["value"]) for name, fan in fans.items() if fan}
    table = [{"matrix": name, "fan_in": fan, "std": std, "gamma": _gamma(std, fan)} for name, (fan, std) in rows.items()]
    return found | {"matrices": table}


def _gamma(std: float | None, fan_in: int | None) -> float | None:
    return equivalent_gamma(std, fan_in) if std and std > 0 and fan_in and fan_in > 1 else None


def _measure(subject: Subject, ranks: str, quiet: bool) -> list[dict]:
    matrices = subject.weights.matrices
    total = sum(m.size for m in matrices)
    layers = sorted({m.layer for m in matrices if m.layer is not None})
    chosen = set(layers)
    if ranks == "some" or (ranks == "auto" and total > MANY):
        chosen = {layers[round(i * (len(layers) - 1) / (SOME - 1))] for i in range(SOME)} if layers else set()
    unit, word = (1e6, "million") if total >= 1e8 else (1e3, "thousand")
    progress, rows = Progress("inspect", total / unit, f"{word} weights", quiet=quiet), []
    for m in matrices:
        spectrum = ranks != "none" and (m.layer is None or m.layer in chosen)
        row = {"name": m.name, "kind": m.kind, "layer": m.layer, "expert": m.expert, "dtype": m.dtype, "rows": m.rows, "columns": m.columns,
               "fan_in": m.fan_in, "fan_out": m.fan_out}  # fmt: skip
        row |= figures(m.blocks, m.rows, m.columns, m.fan_in, spectrum=spectrum)
        row["declared"] = subject.declared(m.kind, m.fan_in, m.layer)
        rows.append(row)
        progress.advance(m.size / unit, m.name)
    progress.close(f"{len(matrices)} matrices")
    return rows


def _vector(v) -> dict:
    values = v.values()
    bad = int(values.size - np.count_nonzero(np.isfinite(values)))
    low, high = (None, None) if bad else (float(values.min()), float(values.max()))
    row = {"name": v.name, "kind": v.kind, "layer": v.layer, "size": v.size, "low": low, "high": high, "not_finite": bad}
    return row | {"moved": not bad and is_moved(low, high, v.kind)}


def _mean(values: Iterable) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _by_layer(rows: list[dict]) -> list[dict]:
    """Means over the matrices of each layer; experts count alike. None: outside the layers."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(row["layer"], []).append(row)
    order = sorted(groups, key=lambda layer: (layer is not None, layer or 0))
    return [{"layer": layer, "matrices": len(groups[layer])} | _means(groups[layer]) for layer in order]


def _means(group: list[dict]) -> dict:
    shares = (row["stable_rank"] / row["stable_rank_random"] if row["stable_rank"] is not None else None for row in group)
    return {name: _mean(row[name] for row in group) for name in SHOWN} | {"stable_rank_share": _mean(shares)}


def _by_kind(rows: list[dict]) -> list[dict]:
    """One row per kind and shape: means, and the lowest and highest std and gamma."""
    groups: dict = {}
    for row in rows:
        groups.setdefault((row["kind"], row["fan_in"], row["fan_out"]), []).append(row)
    found = []
    for (kind, fan_in, fan_out), group in groups.items():
        row = {"kind": kind, "count": len(group), "fan_in": fan_in, "fan_out": fan_out} | _means(group)
        for name in ("std", "gamma"):
            values = [r[name] for r in group if r[name] is not None]
            row[f"{name}_range"] = [min(values), max(values)] if values else None
        found.append(row | {"declared": _mean(r["declared"] for r in group)})
    return found


def _facts(subject: Subject, found: Mapping) -> dict:
    d, declared = subject.described, found["declared"]
    width = found["width"]
    own = subject.config is not None
    sink = own and subject.config.model.softmax_sink != "none"
    gammas = [row["gamma"] for row in (declared or {}).get("matrices", ()) if row["gamma"] is not None]
    if not gammas and found.get("state", {}).get("verdict") == "fresh":
        gammas = [row["gamma"] for row in found["matrices"] if row["gamma"] is not None]
    if own:
        eps_key, ffn, norms = "model.norm_eps", None, found["norms"]
    else:
        eps_key, ffn, norms = (d.eps_key, d.ffn, d.norms) if d else (None, None, None)
    scale = subject.scale * math.sqrt(2) if subject.distinct else subject.scale  # positions are as large as the table
    return {
        "width": width, "ffn": ffn, "eps": found["eps"], "eps_key": eps_key, "declared": declared["value"] if declared else None,
        "declared_key": declared["key"] if declared else "initializer_range", "scale": scale, "norms": norms,
        "gated": True if any(row["kind"] == "gate" for row in found["matrices"]) else found["gate"] and found["gate"] != "none",
        "sink": sink, "preset": declared["preset"] if declared else None,
        "verdict": found.get("state", {}).get("verdict"), "own": own, "gamma": statistics.median(gammas) if gammas else None,
    }  # fmt: skip


def _unsaid(subject: Subject, matrices: list[dict], vectors: list[dict]) -> list[str]:
    if subject.weights is None:
        return []
    said = [f"{row['name']} holds {row['not_finite']:,} numbers that are not finite." for row in matrices + vectors if row["not_finite"]]
    said += [f"{m.name}: {m.unsaid}, so it has no gamma." for m in subject.weights.matrices if m.unsaid and m.expert in (None, 0)]
    said += [f"{name} was not read: {why}." for name, why in subject.weights.unread.items()]
    ranked = [row["stable_rank"] is not None for row in matrices if min(row["rows"], row["columns"]) > 1 and not row["not_finite"]]
    if any(ranked) and not all(ranked):
        said.append("Stable ranks are of some layers alone; --ranks all has every one.")
    if len(said) > 12:
        said = [*said[:11], f"And {len(said) - 11} more of this kind."]
    return said
