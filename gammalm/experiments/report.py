"""The report of a grid: `report/index.html`, one self-contained page, with its figures as PNG files and its numbers as summary.json.

It can be written at any time; a grid that has not finished gives a report of what there is.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from gammalm.experiments import page, plots, report_figures
from gammalm.experiments.report_load import load_section
from gammalm.experiments.results import Run, read_study
from gammalm.experiments.summary import (
    PAPER_DENSE,
    PAPER_MIXTURES,
    Summary,
    print_table,
    statements,
    summarise,
    text_table,
    tokens_per_active_parameter,
    tokens_per_parameter,
)
from gammalm.files import write_json_atomic, write_text_atomic

__all__ = ["print_table", "text_table", "write_report"]


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes `workdir`/report and gives the path of its index.html. Raises ConfigError when `workdir` holds no grid."""
    summary = summarise(read_study(workdir))
    folder = Path(workdir) / "report"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):  # a figure that this report does not draw must not stay beside it
        old.unlink()
    sections = {name: draw(summary, folder) for name, draw in SECTIONS.items()}
    body = "\n".join([_top(summary, [name for name, html in sections.items() if html]), *sections.values()])
    title = f"{summary.study.grid.name}: γ grid report"
    write_json_atomic(folder / "summary.json", summary.to_json())
    write_text_atomic(folder / "index.html", page.PAGE.substitute(title=escape(title), body=body))
    return folder / "index.html"


# ---- what was run ----------------------------------------------------------------------------------------------------------------


def _top(summary: Summary, sections: Sequence[str]) -> str:
    done, failed, unfinished = (len(summary.with_status(status)) for status in ("done", "failed", "unfinished"))
    planned = len(summary.study.runs)
    tiles = [
        ("cells finished", f"{done} of {planned}"),
        *([("failed", str(failed))] if failed else []),
        *([("unfinished", str(unfinished))] if unfinished else []),
        ("parameters", _range(summary, "parameters")),
        *([("active parameters", _range(summary, "active_parameters"))] if _active_known(summary) else []),
        ("tokens per cell", _range(summary, "tokens")),
        ("tokens per parameter", _range(summary, "tokens_per_parameter")),
        ("seeds", str(summary.seeds)),
        ("training time", _duration(sum(run.row.get("seconds") or 0 for run in summary.study.runs))),
    ]
    nav = "".join(f'<a href="#{name}">{LINKS[name]}</a>' for name in LINKS if name in sections)
    name = escape(summary.study.grid.name)
    lead = "Small initialization, σ = d<sub>in</sub><sup>−γ</sup>: final validation loss by γ, learning rate and architecture."
    return f'<header class="top"><h1>γ grid: {name}</h1><p class="lead">{lead}</p>{page.facts(tiles)}<nav>{nav}</nav></header>'


def _short(summary: Summary, folder: Path) -> str:
    partial = len(summary.study.runs) - len(summary.with_status("done"))
    warning = f"This report is partial: {partial} of {len(summary.study.runs)} cells have no result. Sentences below may change."
    return page.section(
        "short",
        "What the numbers allow to be said",
        page.paragraph(warning, "warn") if partial else "",
        page.findings(statements(summary)),
        page.paragraph(_scale_note(summary), "note"),
        page.paragraph(READING, "note") if summary.table else "",
    )


READING = (
    "Losses are nats per token on the validation split. Differences are second minus first, paired by seed (runs with one seed share "
    "initial draws and data order), so below zero the second is better. Intervals are 95 % Student t over seeds, each for one "
    "comparison, not corrected for their number. A best rate is chosen on the same losses that are then compared; no interval "
    "contains that choice."
)


def _scale_note(summary: Summary) -> str:
    """How far this is from the scale of the paper, when it is smaller."""
    parameters = [p for row in summary.scale for p in row["parameters"]]
    tokens = [t for row in summary.scale for t in row["tokens"]]
    said, fewest, seen = PAPER_MIXTURES if summary.loads else PAPER_DENSE
    if not parameters or not tokens or (max(parameters) >= fewest and max(tokens) >= seen):
        return ""
    here = f"here the largest has {plots.compact(max(parameters))} and sees at most {plots.compact(max(tokens))}"
    return f"{said}; {here}. What is found at this scale is about this scale."


def _scale(summary: Summary, folder: Path) -> str:
    headers, active = ["", *(row["group"] for row in summary.scale)], _active_known(summary)
    named = [
        ("cells finished", lambda row: f"{row['done']} of {row['cells']}"),
        ("parameters", lambda row: _each(row["parameters"], "{:,}".format)),
        *([("active parameters", lambda row: _each(row["active_parameters"], "{:,}".format))] if active else []),
        ("training tokens", lambda row: _each(row["tokens"], "{:,}".format)),
        ("tokens per parameter", lambda row: _each(row["tokens_per_parameter"], plots.compact)),
        *([("tokens per active parameter", lambda row: _each(row["tokens_per_active_parameter"], plots.compact))] if active else []),
        ("steps", lambda row: _each(row["steps"], "{:,}".format)),
        ("sequences × length", lambda row: f"{_each(row['sequences'])} × {_each(row['seq_len'])}"),
        ("layers × width", lambda row: f"{_each(row['layers'])} × {_each(row['width'])}"),
        ("vocabulary", lambda row: _each(row["vocabulary"], "{:,}".format)),
        ("norm ε", lambda row: _each(row["norm_eps"], "{:g}".format)),
        ("gate", lambda row: _each(row["gate"])),
        ("init preset", lambda row: _each(row["init"])),
        ("mixture, packing", lambda row: f"{_each(row['mixture'])}, {_each(row['packing'])}"),
        ("γ", lambda row: _each(row["gammas"], "{:g}".format)),
        ("peak learning rates", lambda row: _each(row["rates"], "{:g}".format)),
        ("seeds", lambda row: _each(row["seeds"])),
    ]
    rows = [[name, *(read(row) for row in summary.scale)] for name, read in named]
    return page.section(
        "scale",
        "What was run",
        f"<p>Base config: <code>{escape(summary.study.grid.base)}</code></p>",
        page.table(headers, rows, "One column per group of cells", text=range(len(headers))),
        _notices(summary),
    )


def _notices(summary: Summary) -> str:
    return page.paragraph("Reading the results:", "note") + page.bullets(summary.study.notices) if summary.study.notices else ""


# ---- the rest --------------------------------------------------------------------------------------------------------------------


def _init(summary: Summary, folder: Path) -> str:
    parts = []
    for group in summary.groups:
        tables: dict[float, dict[str, dict]] = {}
        for run in summary.study.runs:
            stored = run.file("init_table.json") if run.group == group and run.gamma not in tables else None
            if isinstance(stored, list) and run.gamma is not None:
                tables[run.gamma] = {row["path"]: row for row in stored}
        if tables:
            gammas = sorted(tables)
            first = tables[gammas[0]]
            rows = [
                [path, " × ".join(map(str, row.get("shape", ()))), row.get("fan_in", "–")]
                + [_sigma(tables[g].get(path, {}).get("sigma")) for g in gammas]
                for path, row in first.items()
            ]
            headers = ["parameter", "shape", "fan-in", *(f"σ at γ={g:g}" for g in gammas)]
            parts.append(page.details(group, page.table(headers, rows, "Standard deviation of every parameter at step 0", left=(0, 1))))
    return page.section("init", "Initialization", *parts)


def _sigma(value) -> str:
    """A standard deviation, or the range of one that depends on the layer."""
    if isinstance(value, list):
        return _sigma(value[0]) if len(set(value)) == 1 else f"{min(value):.4g} … {max(value):.4g}, by layer"
    return "–" if value is None else f"{value:.4g}"


def _cells(summary: Summary, folder: Path) -> str:
    failed = [[run.cell.name, run.row.get("error") or "no message"] for run in summary.with_status("failed")]
    unfinished = [[run.cell.name, _progress(run)] for run in summary.with_status("unfinished")]
    ratios = {"tokens/parameter": tokens_per_parameter}
    if _active_known(summary):
        ratios["tokens/active parameter"] = tokens_per_active_parameter
    rows = [
        [run.cell.name, run.status]
        + [_fixed(run.row.get(key), 4) for key in ("loss", "bits_per_byte", "train_loss")]
        + [_fixed(read(run), 1) for read in ratios.values()]
        + [_fixed(run.row.get("seconds"), 1), _speed(run)]
        for run in summary.study.runs
    ]
    headers = ["cell", "status", "loss", "bits/byte", "train loss", *ratios, "seconds", "tokens/s"]
    return page.section(
        "cells",
        "Cells, time and versions",
        page.table(["cell", "error"], failed, "Failed cells", text=(1,)) if failed else "",
        page.table(["cell", "progress"], unfinished, "Unfinished cells", left=(0, 1)) if unfinished else "",
        page.details(f"All {len(rows)} cells", page.table(headers, rows, "In the order of the grid", left=(0, 1))),
        _versions(summary),
    )


def _progress(run: Run) -> str:
    last = (run.metrics["train"] or [None])[-1]
    steps = run.config.get("train", {}).get("steps")
    if last is None:
        return "not started"
    return f"step {last['step']:,}" + (f" of {steps:,}" if steps else "")


def _versions(summary: Summary) -> str:
    """The versions the cells ran with: one column where all agree, else one per set of versions."""
    seen: dict[str, list[str]] = {}
    for run in summary.study.runs:
        versions = run.file("versions.json")
        if isinstance(versions, dict):
            seen.setdefault(json.dumps(versions, sort_keys=True), []).append(run.cell.name)
    if not seen:
        return ""
    sets = [_flat(json.loads(text)) for text in seen]
    keys = list(dict.fromkeys(key for versions in sets for key in versions))
    titles = ["all cells"] if len(sets) == 1 else [f"{len(cells)} cells, first {cells[0]}" for cells in seen.values()]
    warning = "" if len(sets) == 1 else page.paragraph("Not all cells ran with the same versions; compare them with care.", "warn")
    rows = [[key, *(versions.get(key, "–") for versions in sets)] for key in keys]
    return warning + page.details("Versions", page.table(["", *titles], rows, "What the cells ran with", left=range(len(titles) + 1)))


def _flat(tree: Mapping, prefix: str = "") -> dict:
    flat: dict = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


SECTIONS = {
    "short": _short,
    "scale": _scale,
    "curves": report_figures.curves_section,
    "gamma": report_figures.gamma_section,
    "rate": report_figures.rate_section,
    "gap": report_figures.gap_section,
    "domains": report_figures.domains_section,
    "load": load_section,
    "init": _init,
    "cells": _cells,
}
LINKS = {
    "scale": "What was run",
    "curves": "Curves",
    "gamma": "Loss by γ",
    "rate": "Learning rate",
    "gap": "Gap",
    "domains": "Domains",
    "load": "Experts",
    "init": "Initialization",
    "cells": "Cells",
}


# ---- small texts -----------------------------------------------------------------------------------------------------------------


def _each(values: Sequence, say: Callable = str) -> str:
    return ", ".join(say(value) for value in values) or "–"


def _fixed(value, digits: int) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _speed(run: Run) -> str:
    seconds, tokens = run.row.get("seconds"), run.row.get("tokens")
    return f"{tokens / seconds:,.0f}" if seconds and tokens else "–"


def _range(summary: Summary, name: str) -> str:
    values = [value for row in summary.scale for value in row[name]]
    if not values:
        return "–"
    low, high = plots.compact(min(values)), plots.compact(max(values))
    return low if low == high else f"{low} – {high}"


def _active_known(summary: Summary) -> bool:
    """Whether a run's active parameters are known and not simply all: of mixtures, whose rows have them."""
    return any(row["active_parameters"] for row in summary.scale)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
