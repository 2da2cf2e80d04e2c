"""The figures of `gammalm inspect` as one self-contained HTML page with pictures (experiments/page.py, experiments/plots.py)."""

import math
from collections.abc import Mapping
from html import escape

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.ticker import FuncFormatter

from gammalm.experiments import page, plots
from gammalm.inspection import text

HALF, ONE = "γ = ½", "γ = 1"
MARKED = 24  # layers up to which points are marked
ROWS = 400  # of the table of every matrix


def page_of(found: Mapping) -> str:
    """The page of what `inspect_model` found; nothing in it is outside it."""
    name = str(found["model"]).rstrip("/").rpartition("/")[2] or str(found["model"])
    body = "\n".join([_top(found, name), _short(found), _weights(found), _before(found), _tables(found)])
    return page.PAGE.substitute(title=escape(f"{name}: initialization"), body=body)


def _top(found: Mapping, name: str) -> str:
    state = found.get("state", {}).get("verdict")
    gamma = _gammas(found)
    step = f", step {found['step']:,}" if found["step"] is not None else ""
    tiles = [
        ("what it is", f"{found['family'] or 'model'}, {found['source']}{step}"),
        *([("weights look", state)] if state else []),
        *([("parameters", f"{found['parameters']['total']:,}")] if found["parameters"]["total"] else []),
        *([("layers × width", f"{found['layers'] or '?'} × {found['width']}")] if found["width"] else []),
        *([("γ of the declared std" if not found["matrices"] else "effective γ", gamma)] if gamma else []),
        *([("ε of its norms", f"{found['eps']:g}")] if found["eps"] is not None else []),
        *([("predicted flow", f"{found['outlook']['flow']:.3g}")] if found["outlook"] else []),
        ("risk of sinks", found["sink"]["risk"]),
    ]
    lead = "How its weights begin, σ = d<sub>in</sub><sup>−γ</sup>, how they lie now, and what to expect."
    return f'<header class="top"><h1>{escape(name)}</h1><p class="lead">{lead}</p>{page.facts(tiles)}</header>'


def _gammas(found: Mapping) -> str:
    rows = found["matrices"] or (found["declared"] or {}).get("matrices", ())
    values = [row["gamma"] for row in rows if row["gamma"] is not None]
    return "" if not values else f"{min(values):.2f} – {max(values):.2f}" if max(values) - min(values) > 0.005 else f"{values[0]:.2f}"


def _short(found: Mapping) -> str:
    state = found.get("state")
    said = {"Advice": found["advice"]}
    if state:
        said[f"Why the weights look {text.LOOKS[state['verdict']]}"] = state["reasons"]
    said["Sinks"] = [found["sink"]["why"]]
    if found["unsaid"]:
        said["What cannot be said"] = found["unsaid"]
    if found["notes"] or found["assumed"]:
        assumed = [f"config.json does not say {', '.join(found['assumed'])}: the family's defaults."] if found["assumed"] else []
        said["Taken for granted"] = [*found["notes"], *assumed]
    return page.section("short", "In short", page.findings(said))


def _weights(found: Mapping) -> str:
    if not found["matrices"]:
        return ""
    drawn = [
        _lines(found, "gamma", "Effective γ by layer", "γ", lines={HALF: 0.5, ONE: 1.0}),
        _lines(found, "stable_rank_share", "Stable rank by layer", "share of a random matrix's", lines={"random": 1.0}),
        _lines(found, "near_zero", "Weights near zero by layer", "share of |w| ≤ .1 std", lines={"normal": math.erf(0.1 / math.sqrt(2))}),
        _by_fan(found),
    ]
    note = "Means over experts. Outside: the embedding and what else is in no layer."
    return page.section("weights", "The weights as they are", page.figures(d for d in drawn if d), page.paragraph(note, "note"))


@plots.styled
def _lines(found: Mapping, value: str, title: str, label: str, lines: Mapping[str, float]) -> str:
    """`value` of each kind of matrix by layer."""
    kinds: dict[str, dict] = {}
    for row in found["matrices"]:
        y = _share(row) if value == "stable_rank_share" else row[value]
        if y is not None:
            kinds.setdefault(row["kind"], {}).setdefault(-1 if row["layer"] is None else row["layer"], []).append(y)
    if not kinds:
        return ""
    figure, axes = plots.panel(title, "layer", label, size=(plots.PANEL[0], plots.PANEL[1] + 0.5))
    colour = _colours(list(kinds))
    for i, (kind, by_layer) in enumerate(kinds.items()):
        x = sorted(by_layer)
        y = [sum(by_layer[layer]) / len(by_layer[layer]) for layer in x]
        mark = plots.MARKERS[i % len(plots.MARKERS)] if len(x) <= MARKED else ""
        axes.plot(x, y, mark, ls="-" if len(x) > 1 else "", color=colour[kind], label=kind, ms=5, lw=1.4)
    for name, level in lines.items():
        axes.axhline(level, color="#555b66", lw=1, ls="--", zorder=1)
        axes.annotate(name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8.5, color="#555b66")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "outside" if x == -1 else f"{x:g}" if x >= 0 else ""))
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    means = {kind: sum(map(sum, by.values())) / sum(map(len, by.values())) for kind, by in kinds.items()}
    spoken = "; ".join(f"{kind} {mean:.3g}" for kind, mean in means.items())
    return page.figure(plots.inline(figure, f"by-layer-{value}"), f"{title}. Means: {spoken}.")


def _colours(names: list[str]) -> dict[str, str]:
    """The ten strong colours of Matplotlib's tab20 first, then the pale ones."""
    return {name: to_hex(colormaps["tab20"]((2 * i + i // 10) % 20)) for i, name in enumerate(names)}


def _share(row: Mapping) -> float | None:
    return None if row["stable_rank"] is None else row["stable_rank"] / row["stable_rank_random"]


@plots.styled
def _by_fan(found: Mapping) -> str:
    """std against fan-in, with the lines of γ = ½ and 1."""
    points = {(row["kind"], row["fan_in"], row["std"]) for row in found["matrices"] if row["gamma"] is not None}
    if not points:
        return ""
    figure, axes = plots.panel("Std against fan-in", "fan-in", "std", size=(plots.PANEL[0], plots.PANEL[1] + 0.5))
    kinds = list(dict.fromkeys(row["kind"] for row in found["matrices"]))
    colour = _colours(kinds)
    for i, kind in enumerate(kinds):
        own = [(fan, std) for k, fan, std in points if k == kind]
        if own:
            axes.plot(*zip(*own, strict=True), plots.MARKERS[i % len(plots.MARKERS)], color=colour[kind], label=kind, ms=5, alpha=0.8)
    fans = sorted({fan for _, fan, _ in points})
    ends = [fans[0] * 0.8, fans[-1] * 1.25]
    for name, gamma in ((HALF, 0.5), (ONE, 1.0)):
        axes.plot(ends, [end**-gamma for end in ends], "--", color="#555b66", lw=1, zorder=1)
        axes.annotate(name, (ends[0], ends[0] ** -gamma), ha="left", va="bottom", fontsize=8.5, color="#555b66")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    return page.figure(plots.inline(figure, "by-fan"), f"Std of {len(points)} matrices against fan-in, beside the lines of γ = ½ and 1.")


def _before(found: Mapping) -> str:
    o = found["outlook"]
    if not o:
        return ""
    trained = found.get("state", {}).get("verdict") in ("trained", "just begun")
    lead = "What theory expects of the declared initialization before anything is trained"
    lead += ", not of these trained weights." if trained else "."
    drawn = page.figures([_flow(o), _norms(o)])
    tables = [
        _table(text.choices_table(found), "The declared initialization beside γ = 1"),
        _table(text.norms_table(found), "ε against the variance that enters each norm, over layers; factor: size of what the norm gives"),
    ]
    note = "Flow: what all branches add, over the embedding; about 1 is balance. docs/theory.md says how it is computed."
    return page.section("before", "Before the first step", page.paragraph(lead), drawn, *tables, page.paragraph(note, "note"))


@plots.styled
def _flow(o: Mapping) -> str:
    figure, axes = plots.panel("What each branch adds", "layer", "of the stream it reads")
    layers = range(len(o["layers"]["attention"]))
    mark = len(layers) <= MARKED
    axes.plot(layers, o["layers"]["attention"], "o-" if mark else "-", color="#1d4ed8", label="attention", ms=5)
    axes.plot(layers, o["layers"]["ffn"], "s-" if mark else "-", color=plots.ACCENT, label="feed-forward", ms=5)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    alt = f"What each branch adds to the stream by layer; all together {o['flow']:.3g} of the embedding."
    return page.figure(plots.inline(figure, "flow"), alt)


@plots.styled
def _norms(o: Mapping) -> str:
    figure, axes = plots.panel("ε against variance at each norm", "layer", "ε / variance")
    colour = _colours(list(o["norms"]))
    drawn = {name: norm for name, norm in o["norms"].items() if min(norm["ratio"]) > 0}
    if not drawn:  # ε is 0
        return ""
    last = max(len(norm["ratio"]) for norm in drawn.values())
    for i, (name, norm) in enumerate(drawn.items()):
        x = [last] if len(norm["ratio"]) == 1 else list(range(len(norm["ratio"])))  # the final norm stands behind the last layer
        axes.plot(x, norm["ratio"], plots.MARKERS[i], ls="-" if len(x) > 1 else "", color=colour[name], label=name, ms=5)
    axes.axhline(1.0, color="#555b66", lw=1, ls="--")
    axes.annotate("half hidden", (1, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8.5, color="#555b66")
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return page.figure(plots.inline(figure, "norms"), f"ε = {o['eps']:g} over the variance that enters each norm, by layer.")


def _table(rows: list[tuple], caption: str) -> str:
    first, *rest = rows
    return page.table(first, [[text.shown(cell) for cell in row] for row in rest], caption)


def _tables(found: Mapping) -> str:
    parts = []
    if found["declared"]:
        parts.append(_table(text.declared_table(found), text.declared_line(found)))
    if found["by_kind"]:
        parts.append(_table(text.kinds_table(found), "By kind of matrix: means over layers and experts"))
        parts.append(_table(text.layers_table(found), "By layer: means over its matrices"))
        rows = text.each_table(found)
        more = f"; the first {ROWS} of {len(rows) - 1}, --json has all" if len(rows) > ROWS + 1 else ""
        parts.append(page.details("Every matrix", _table(rows[: ROWS + 1], f"Every matrix as it is stored{more}")))
    return page.section("tables", "All figures", *parts)
