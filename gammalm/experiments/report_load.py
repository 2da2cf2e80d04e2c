"""The section of a report about the load of the experts, for grids of mixtures: a drawing per group and a table. Empty for dense grids."""

from collections.abc import Sequence
from pathlib import Path

from gammalm.experiments import page, plots
from gammalm.experiments.loads import TAIL
from gammalm.experiments.report_figures import panels
from gammalm.experiments.summary import Summary

MEANING = (
    "Even means that every expert of a layer is chosen equally often: load entropy, largest and smallest load are then all 1. Load entropy "
    "is the entropy of the experts' shares of the choices, divided by ln\u00a0E for E experts; were all tokens to choose the same k "
    "experts, it would be ln\u00a0k\u00a0/\u00a0ln\u00a0E. Loads are relative to the mean load of the layer."
)
LINES = (
    "Strong lines: mean over the mixture layers of a run. Thin: each layer. Dashed: even. Each γ is at its best learning rate, or at all "
    "of them while there is none."
)


def load_section(summary: Summary, folder: Path) -> str:
    """The section as HTML; its drawings are written into `folder`. Empty where no run has logged a load."""
    if not summary.loads:
        return ""
    lowest = min(float(values.min()) for load in summary.loads.values() for _, values in load.curves)

    def of(group):
        return {gamma: load for (name, gamma), load in sorted(summary.loads.items()) if name == group}

    def draw(group):
        return plots.loads(group, {gamma: load.curves for gamma, load in of(group).items()}, lowest) if of(group) else None

    def alt(group):
        ends = (f"γ {gamma:g}: {_span(load.entropy, 3)}" for gamma, load in of(group).items())
        return f"Load entropy of {group} against training tokens, by γ. At the end, over layers: {'; '.join(ends)}."

    rows = [
        [group, f"{gamma:g}", ", ".join(f"{rate:g}" for rate in load.rates) or "–"]
        + [_span(load.entropy, 3), _span(load.largest, 2), _span(load.smallest, 2)]
        + [_share(*load.idle_ending), _share(*load.idle), "–" if load.dropped is None else f"{load.dropped:,}"]
        for (group, gamma), load in summary.loads.items()
    ]
    headers = ["group", "γ", "rate", "load entropy", "largest load", "smallest load", "steps with idle experts", "of all steps", "dropped"]
    caption = (
        f"The last {100 * TAIL:g} % of the steps, mean over steps and runs; range over layers where they differ. An expert is idle in a "
        "step without a token for it, to the digits logged; the share of such steps at the end, then of all logged. Dropped: choices whose "
        "expert did not run, in all logged steps together."
    )
    return page.section(
        "load",
        "Load of the experts",
        page.paragraph(MEANING),
        panels(summary, folder, "load", draw, alt),
        page.paragraph(LINES, "note"),
        page.table(headers, rows, caption),
    )


def _span(values: Sequence[float], digits: int) -> str:
    """The smallest and largest of some values; one number where they look alike, a dash where there is none."""
    if not values:
        return "–"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} … {high}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} % of {whole:,}" if whole else "–"
