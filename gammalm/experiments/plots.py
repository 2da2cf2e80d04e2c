"""The figures of a report, drawn with Matplotlib without a display: each becomes an SVG text for the page and a PNG file.

A panel is sized for a phone (one column); the page puts several side by side where there is room. Colour and marker both tell γ's apart.
"""

import functools
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from gammalm.experiments.statistics import Best, Difference, Estimate, Losses, estimate

STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555b66",
    "axes.grid": True,
    "grid.color": "#e4e7ec",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": "#1b1f27",
    "axes.labelcolor": "#1b1f27",
    "xtick.color": "#3b414d",
    "ytick.color": "#3b414d",
    "svg.fonttype": "none",  # text stays text: small, sharp, selectable
}
PANEL = (4.4, 3.3)  # inches
Span = tuple[float, float] | None  # of the loss axis; None: as the data say
ACCENT = "#c2410c"  # what is at the best rate
MARKERS = "osD^vPX*<>h"


def styled(function):
    """`function` under our style, whatever the user's own Matplotlib settings are."""

    @functools.wraps(function)
    def inside(*args, **options):
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return function(*args, **options)

    return inside


def colours(gammas: Sequence[float]) -> dict[float, str]:
    """One colour per γ, from dark (small γ) to light, all readable on white."""
    gammas = sorted(set(gammas))
    return {g: to_hex(colormaps["plasma"](0.08 + 0.64 * i / max(1, len(gammas) - 1))) for i, g in enumerate(gammas)}


def markers(gammas: Sequence[float]) -> dict[float, str]:
    """One marker per γ."""
    return {g: MARKERS[i % len(MARKERS)] for i, g in enumerate(sorted(set(gammas)))}


@styled
def save(figure: Figure, folder: Path, name: str) -> str:
    """Writes `folder`/name.png and gives the figure as `inline` does."""
    temporary = folder / f".{name}.png.tmp"
    figure.savefig(temporary, format="png", dpi=160)
    os.replace(temporary, folder / f"{name}.png")
    return inline(figure, name)


@styled
def inline(figure: Figure, name: str) -> str:
    """The figure as inline SVG for a page, its ids made unique by `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans'")
    return re.sub(r' (width|height)="[0-9.]+pt"', "", svg, count=2).replace("<svg ", '<svg aria-hidden="true" ', 1)


def panel(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = PANEL):
    """A figure of one panel, `size` in inches, and its axes."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.tick_params(length=3)
    return figure, axes


def smoothed(values: Sequence[float], share: float = 0.03) -> list[float]:
    """Exponential moving average over about `share` of the points, corrected for its start, so that a constant stays that constant."""
    decay = 1 - 1 / max(1.0, share * len(values))
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(total / weight)
    return out


@styled
def curves(title: str, runs: Sequence, best: Mapping[float, Best]) -> Figure | None:
    """Training loss (smoothed) and validation points of one group's runs against tokens; the best rate of each γ is drawn strong.

    None when no run has logged anything. The frame leaves out the first fifth of training, where every curve falls steeply.
    """
    colour = colours([run.gamma for run in runs])
    marker = markers([run.gamma for run in runs])
    figure, axes = panel(title, "tokens", "loss (nats per token)")
    inside, seen = [], set()
    for run in runs:
        train = [(row["tokens"], row["loss"]) for row in run.metrics["train"] if _finite(row.get("loss"))]
        validation = [(row["tokens"], row["loss"]) for row in run.metrics["validation"] if _finite(row.get("loss"))]
        if not train and not validation:
            continue
        strong = run.gamma not in best or best[run.gamma].rate == run.rate
        look = {"color": colour[run.gamma], "alpha": 1.0 if strong else 0.3, "zorder": 3 if strong else 2}
        if train:
            tokens, losses = zip(*train, strict=True)
            losses = smoothed(losses)
            keep = keep_points(len(tokens))
            axes.plot([tokens[i] for i in keep], [losses[i] for i in keep], lw=1.7 if strong else 0.9, **look)
            inside += [y for x, y in zip(tokens, losses, strict=True) if x >= 0.2 * tokens[-1]]
        if validation:
            x, y = zip(*validation, strict=True)
            axes.plot(x, y, marker[run.gamma], ms=6 if strong else 4, mec="white", mew=0.8, clip_on=False, **look)
            inside += [loss for at, loss in validation if at >= 0.2 * x[-1]]
        seen.add(run.gamma)
    if not inside:
        return None
    margin = 0.06 * (max(inside) - min(inside)) or 0.1
    axes.set_ylim(min(inside) - margin, max(inside) + margin)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    handles = [Line2D([], [], color=colour[g], marker=marker[g], mec="white", lw=1.7, label=f"γ = {g:g}") for g in sorted(seen)]
    axes.legend(handles=handles, loc="upper right", ncols=1 if len(handles) < 6 else 2)
    return figure


@styled
def by_gamma(title: str, table: Mapping[tuple[float, float], Losses], best: Mapping[float, Best], span: Span = None) -> Figure:
    """Final validation loss of one group against γ: {(γ, rate): losses}, a line per rate, and the best rate of each γ on top."""
    figure, axes = panel(title, "γ", "validation loss (nats per token)")
    rates = sorted({rate for _, rate in table})
    handles = []
    for i, rate in enumerate(rates):
        points = {g: estimate(values.values()) for (g, r), values in sorted(table.items()) if r == rate}
        grey = to_hex(colormaps["Greys"](0.45 + 0.4 * i / max(1, len(rates) - 1)))
        look = {"color": grey if len(rates) > 1 else ACCENT, "ls": ("-", "--", ":", "-.")[i % 4]}
        look |= {"marker": MARKERS[i % len(MARKERS)], "ms": 5, "lw": 1.2}
        estimates(axes, points, look)
        handles.append(Line2D([], [], **look, label=f"rate {rate:g}"))
    if len(rates) > 1:
        look = {"color": ACCENT, "lw": 2.2, "marker": "o", "ms": 9, "mfc": "none", "mew": 2}
        axes.plot(sorted(best), [best[g].estimate.mean for g in sorted(best)], **look)
        handles.append(Line2D([], [], **look, label="best rate of each γ"))
    gammas = sorted({g for g, _ in table})
    ticks(axes.xaxis, gammas)
    axes.margins(x=0.12, y=0.15)
    axes.set_ylim(span)
    if len(handles) > 1:
        axes.legend(handles=handles, loc="best")
    return figure


@styled
def by_rate(title: str, table: Mapping[tuple[float, float], Losses], best: Mapping[float, Best], span: Span = None) -> Figure:
    """Final validation loss of one group against the peak learning rate, a line per γ, its best rate ringed: {(γ, rate): losses}."""
    figure, axes = panel(title, "peak learning rate", "validation loss (nats per token)")
    gammas = sorted({g for g, _ in table})
    colour, marker = colours(gammas), markers(gammas)
    for g in gammas:
        points = {rate: estimate(values.values()) for (of, rate), values in sorted(table.items()) if of == g}
        estimates(axes, points, {"color": colour[g], "marker": marker[g], "ms": 6, "lw": 1.7})
        axes.plot([best[g].rate], [best[g].estimate.mean], "o", ms=14, mfc="none", mec=colour[g], mew=1.6)
    axes.set_xscale("log")
    ticks(axes.xaxis, sorted({rate for _, rate in table}))
    axes.margins(x=0.12, y=0.15)
    axes.set_ylim(span)
    handles = [Line2D([], [], color=colour[g], marker=marker[g], ms=6, lw=1.7, label=f"γ = {g:g}") for g in gammas]
    handles.append(Line2D([], [], color="#555b66", marker="o", ms=11, mfc="none", lw=0, label="best rate"))
    axes.legend(handles=handles, loc="best", ncols=1 if len(handles) < 6 else 2)
    return figure


@styled
def differences(title: str, found: Sequence[Difference]) -> Figure:
    """One row per difference: its mean as a dot (filled when its interval excludes zero), its interval as a bar, zero as a line."""
    figure, axes = panel(title, "nats per token", "", (PANEL[0], 1.25 + 0.34 * len(found)))
    dots(axes, [(difference_name(item), item.estimate, ACCENT if item.rate is None else "#334155") for item in found])
    return figure


def dots(axes, found: Sequence[tuple[str, Estimate, str]]) -> None:
    """One row per (name, estimate, colour): its mean as a dot (filled when its interval excludes zero), its interval as a bar, zero as a
    line."""
    for row, (_, e, colour) in enumerate(found):
        if e.low is not None:
            axes.plot([e.low, e.high], [row, row], color=colour, lw=2.4, solid_capstyle="butt")
        axes.plot([e.mean], [row], "o", ms=8, mec=colour, mfc=colour if e.sign else "white", mew=1.8, zorder=3)
    axes.axvline(0, color="#1b1f27", lw=1)
    axes.set_yticks(range(len(found)), [name for name, _, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(signed))
    axes.locator_params(axis="x", nbins=4)


def signed(x: float, _=None) -> str:
    """A number with its sign and a true minus, as a label of an axis that has a zero."""
    return "0" if abs(x) < 1e-12 else f"{x:+.3g}".replace("-", "−")


def difference_name(item: Difference) -> str:
    """`plain, rate 0.01` or `plain, best rates`; a contrast of gaps names the arms instead: `plain → adjusted, rate 0.01`."""
    name = f"{item.first} → {item.second}" if item.rates is None or "→" in item.group else item.group
    return f"{name}, {'best rates' if item.rate is None else f'rate {item.rate:g}'}"


@styled
def domains(title: str, table: Mapping[float, Mapping[str, Estimate]], xlabel: str) -> Figure:
    """One group's loss by domain, a mark per γ: {γ: {domain: estimate}}."""
    names = sorted({name for row in table.values() for name in row})
    figure, axes = panel(title, xlabel, "", (PANEL[0], 1.35 + 0.36 * len(names)))
    colour, marker = colours(list(table)), markers(list(table))
    for i, (g, row) in enumerate(sorted(table.items())):
        shift = 0.3 * ((i + 0.5) / len(table) - 0.5)
        for name, e in row.items():
            y = names.index(name) + shift
            if e.low is not None:
                axes.plot([e.low, e.high], [y, y], color=colour[g], lw=1.6)
            axes.plot([e.mean], [y], marker[g], color=colour[g], ms=6.5, mec="white", mew=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.1)
    handles = [Line2D([], [], color=colour[g], marker=marker[g], lw=0, ms=6.5, label=f"γ = {g:g}") for g in sorted(table)]
    axes.legend(handles=handles, loc="best", ncols=1 if len(handles) < 6 else 2)
    return figure


@styled
def loads(title: str, runs: Mapping[float, Sequence[tuple[Sequence[int], np.ndarray]]], lowest: float) -> Figure:
    """One group's load entropy against tokens, {γ: a (tokens, entropy [T, L]) per run}: strong the mean over layers, thin each layer.

    lowest: the lowest entropy that the axis must show, so that groups compare. Shapes: T logged steps, L mixture layers.
    """
    figure, axes = panel(title, "tokens", "load entropy (1 = even)")
    colour, marker = colours(list(runs)), markers(list(runs))
    axes.axhline(1, color="#1b1f27", lw=1, ls="--")
    for g, curves_ in sorted(runs.items()):
        for tokens, entropy_TL in curves_:
            keep = keep_points(len(tokens))
            x, y_TL = [tokens[i] for i in keep], entropy_TL[keep]
            axes.plot(x, y_TL, color=colour[g], lw=0.7, alpha=0.4)
            look = {"marker": marker[g], "markevery": (len(x) - 1, 1), "ms": 6, "mec": "white", "mew": 0.8, "clip_on": False}
            axes.plot(x, y_TL.mean(axis=1), color=colour[g], lw=1.7, zorder=3, **look)
    margin = 0.06 * (1 - lowest) or 0.01
    axes.set_ylim(lowest - margin, 1 + margin)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    handles = [Line2D([], [], color=colour[g], marker=marker[g], mec="white", lw=1.7, label=f"γ = {g:g}") for g in sorted(runs)]
    axes.legend(handles=handles, loc="best", ncols=1 if len(handles) < 6 else 2)
    return figure


def keep_points(points: int) -> list[int]:
    """Which points of a long line are drawn: about 200 of them, the last among them."""
    return [*range(0, points - 1, max(1, points // 200)), points - 1]


def compact(number: float) -> str:
    """A count for people: 231424 -> 231k, 2457600 -> 2.46M, 36e9 -> 36B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def estimates(axes, points: Mapping[float, Estimate], look: Mapping) -> None:
    """Means against x as a line, their intervals as bars."""
    xs = list(points)
    axes.plot(xs, [points[x].mean for x in xs], **look)
    for x, e in points.items():
        if e.low is not None:
            axes.plot([x, x], [e.low, e.high], color=look["color"], lw=1.2, alpha=0.8)


def ticks(axis, at: Sequence[float]) -> None:
    """Ticks at the values that were run; when many, at most eight of them."""
    at = list(at)[:: math.ceil(len(at) / 8)]
    axis.set_major_locator(FixedLocator(at))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _finite(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
