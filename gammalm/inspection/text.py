"""The figures of `gammalm inspect` as text for a terminal, and the tables that the page shows too."""

from collections.abc import Mapping

LOOKS = {"fresh": "fresh", "trained": "trained", "just begun": "like training that has just begun", "unclear": "neither fresh nor trained"}
EACH = ("matrix", "layer", "shape", "fan-in", "std", "gamma", "stable rank", "(random)", "near zero", "kurtosis")


def text_of(found: Mapping, each: bool = False) -> str:
    """All that was found, in short; `each`: a line for every matrix."""
    lines = [head(found), ""]
    state = found.get("state")
    if state:
        lines += [f"Weights: they look {LOOKS[state['verdict']]}.", *_bullets(state["reasons"]), ""]
    if found["declared"]:
        lines += [declared_line(found), *aligned(declared_table(found)), ""]
    if found["by_kind"]:
        lines += ["By kind of matrix (means over layers and experts; std and gamma lowest to highest):", *aligned(kinds_table(found)), ""]
        if len(found["by_layer"]) > 1:
            lines += ["By layer (means over its matrices):", *aligned(layers_table(found)), ""]
        lines += ["near zero: |w| at most .1 std, .080 of normal weights, whose kurtosis is 3; share: of a random matrix's stable rank", ""]
    if each:
        lines += [*aligned(each_table(found)), ""]
    if found["outlook"]:
        lines += _outlook(found)
    lines += [f"Sinks: {found['sink']['risk']} risk. {found['sink']['why']}", ""]
    for title, key in (("Advice", "advice"), ("Cannot be said", "unsaid"), ("Notes", "notes")):
        if found[key]:
            lines += [f"{title}:", *_bullets(found[key]), ""]
    if found["assumed"]:
        lines += [f"Taken for granted, since config.json does not say: {', '.join(found['assumed'])}.", ""]
    return "\n".join(lines).rstrip()


def _bullets(texts) -> list[str]:
    return [f"  - {text}" for text in texts]


def head(found: Mapping) -> str:
    """One line: what it is, and its sizes."""
    step = f" at step {found['step']:,}" if found["step"] is not None else ""
    kind = f"{found['family']}, " if found["family"] else ""
    sizes = [
        f"{found['parameters']['total']:,} parameters" if found["parameters"]["total"] else "",
        f"{found['layers']} layers" if found["layers"] else "",
        f"width {found['width']}" if found["width"] else "",
        f"vocabulary {found['vocabulary']:,}" if found["vocabulary"] else "",
        "" if found["tied"] is None else "tied head" if found["tied"] else "untied head",
        f"gate {found['gate']}" if found["gate"] else "",
        {"pre": "norms before branches", "sandwich": "norms before and behind branches", "post": "norms behind branches"}.get(
            found["norms"], found["norms"] or ""
        ),
        f"eps {found['eps']:g}" if found["eps"] is not None else "",
        "/".join(found["dtypes"]),
    ]
    return f"{found['model']}{step}: {kind}{found['source']}; {', '.join(filter(None, sizes))}"


def declared_line(found: Mapping) -> str:
    """What the config says of the initialization."""
    d = found["declared"]
    if d["value"] is None:
        return f"Declared initialization: init.preset {d['preset']}."
    preset = f" ({d['preset']})" if d["preset"] else ""
    return f"Declared initialization: {d['key']} {d['value']:g}{preset}."


def declared_table(found: Mapping) -> list[tuple]:
    """γ that the declared stds amount to."""
    rows = [(row["matrix"], row["fan_in"], row["std"], row["gamma"]) for row in found["declared"]["matrices"]]
    return [("matrix", "fan-in", "std", "gamma"), *rows]


def kinds_table(found: Mapping) -> list[tuple]:
    """A row per kind and shape."""
    rows = []
    for row in found["by_kind"]:
        shape = f"{row['fan_in']} -> {row['fan_out']}" if row["fan_in"] else "not known"
        ranges = [_range(row[f"{name}_range"]) for name in ("std", "gamma")]
        means = (row[name] for name in ("declared", "stable_rank", "stable_rank_share", "near_zero", "kurtosis"))
        rows.append((row["kind"], row["count"], shape, *ranges, *means))
    return [("kind", "count", "in -> out", "std", "gamma", "declared std", "stable rank", "share", "near zero", "kurtosis"), *rows]


def _range(pair) -> str | None:
    if pair is None:
        return None
    low, high = (f"{value:.3g}" for value in pair)
    return low if low == high else f"{low} to {high}"


def layers_table(found: Mapping) -> list[tuple]:
    """A row per layer; "-": outside the layers."""
    names = ("matrices", "std", "gamma", "stable_rank", "stable_rank_share", "near_zero", "kurtosis")
    rows = [("-" if row["layer"] is None else row["layer"], *(row[name] for name in names)) for row in found["by_layer"]]
    return [("layer", "matrices", "std", "gamma", "stable rank", "share", "near zero", "kurtosis"), *rows]


def each_table(found: Mapping) -> list[tuple]:
    """A row per matrix."""
    rows = []
    for row in found["matrices"]:
        name = row["name"] + (f" #{row['expert']}" if row["expert"] is not None else "")
        rows.append((name, row["layer"], f"{row['rows']}x{row['columns']}", row["fan_in"], row["std"], row["gamma"], row["stable_rank"],
                     row["stable_rank_random"], row["near_zero"], row["kurtosis"]))  # fmt: skip
    return [EACH, *rows]


def _outlook(found: Mapping) -> list[str]:
    o = found["outlook"]
    trained = found.get("state", {}).get("verdict") in ("trained", "just begun")
    lines = [
        f"Before the first step{', not as trained' if trained else ''}: all branches together move the stream by {o['flow']:.3g} of the "
        f"embedding, whose entries have std {o['embedding']:.3g}; logits have std {o['logit_std']:.3g}.",
        *aligned(choices_table(found)),
        "",
        "eps against the variance that enters each norm (lowest and highest over layers):",
        *aligned(norms_table(found)),
        "",
    ]
    return lines


def choices_table(found: Mapping) -> list[tuple]:
    """The declared initialization beside γ = 1."""
    names = ("init", "eps", "embedding", "lowest_norm_factor", "flow", "logit_std")
    return [("initialization", "eps", "embedding std", "lowest norm factor", "flow", "logit std"),
            *(tuple(row[name] for name in names) for row in found["outlook"]["choices"])]  # fmt: skip


def norms_table(found: Mapping) -> list[tuple]:
    """Each kind of norm: variance, ε/variance, factor."""
    rows = [
        (name, *(_range([min(norm[key]), max(norm[key])]) for key in ("variance", "ratio", "factor")))
        for name, norm in found["outlook"]["norms"].items()
    ]
    return [("norm", "variance", "eps / variance", "factor"), *rows]


def shown(cell) -> str:
    """A cell of a table: four significant digits, "-" for what is not known."""
    return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def aligned(rows: list[tuple]) -> list[str]:
    """Lines of a table; the first column stands left."""
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]
