"""The page of `gammalm compare`: one HTML file that loads nothing from elsewhere, with curves, losses and what differs."""

import math
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gammalm.experiments import page, plots
from gammalm.experiments.compare import Trained, by_domain, differences, letters, losses, standing


def write_page(runs: Sequence[Trained], found: dict) -> str:
    """The page as text. `found`: what `compare(runs)` gave."""
    said, names = found["runs"], letters(runs)
    legend = page.table(("", "workdir"), [(name, run["workdir"]) for name, run in zip(names, said, strict=True)], "", text=(1,))
    body = [
        '<header class="top"><h1>Runs side by side</h1></header>',
        page.section("runs", "Which runs", legend, page.bullets(found["notes"])),
        page.section("loss", "Loss by tokens", _curves(runs), _losses(found, names)),
        page.section("end", "How they stand", page.table(("", *names), standing(said), "As far as each has come."), _domains(said, names)),
        page.section("differs", "What differs", _differs(found["config"], names, "config"), _differs(found["versions"], names, "versions")),
    ]
    title = "Runs side by side: " + ", ".join(run["name"] for run in said)
    return page.PAGE.substitute(title=escape(title), body="\n".join(body))


def _curves(runs: Sequence[Trained]) -> str:
    drawing = curves(runs)
    alt = "Training loss, smoothed, and validation loss against tokens, a line per run."
    return page.figure(plots.inline(drawing, "curves"), alt) if drawing else page.paragraph("Nothing was logged yet.")


@plots.styled
def curves(runs: Sequence[Trained]) -> Figure | None:
    """Training loss (smoothed) and validation points of each run against tokens; None where nothing was logged."""
    if not any(run.train or run.validation for run in runs):
        return None
    figure, axes = plots.panel("", "tokens", "loss (nats per token)")
    colour, marker = plots.colours(range(len(runs))), plots.markers(range(len(runs)))
    names, inside = letters(runs), []
    for i, run in enumerate(runs):
        x, y = [row["tokens"] for row in run.train], plots.smoothed([row["loss"] for row in run.train])
        keep = plots.keep_points(len(x)) if x else []
        axes.plot([x[k] for k in keep], [y[k] for k in keep], lw=1.6, color=colour[i], label=f"{names[i]}  {run.name}")
        points = [(row["tokens"], row["loss"]) for row in run.validation if math.isfinite(row["loss"])]
        if points:
            axes.plot(*zip(*points, strict=True), marker[i], ms=6, mec="white", mew=0.8, color=colour[i], clip_on=False)
        inside += [loss for at, loss in [*zip(x, y, strict=True), *points] if at >= 0.1 * run.tokens]
    if inside:  # the first tenth of training falls too steeply to share a frame with the rest
        margin = 0.06 * (max(inside) - min(inside)) or 0.1
        axes.set_ylim(min(inside) - margin, max(inside) + margin)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: plots.compact(at)))
    axes.legend(loc="upper right")
    return figure


def _losses(found: dict, names: list[str]) -> str:
    caption = "Training loss after the same tokens, the mean over the tenth of them before; then validations that all runs have."
    rows = [(f"{row['tokens']:,}", *losses(row["loss"])) for row in found["at_equal_tokens"]]
    rows += [(f"validation at {row['tokens']:,}", *losses(row["loss"])) for row in found["validation_at_equal_tokens"]]
    return page.table(("tokens", *names, *differences(names)), rows, caption)


def _domains(said: Sequence[dict], names: list[str]) -> str:
    rows = [(name, *losses(values)) for name, values in by_domain(said)]
    caption = "Validation loss by domain, nats per token, the last of each run."
    return page.table(("domain", *names, *differences(names)), rows, caption) if rows else ""


def _differs(table: dict, names: list[str], what: str) -> str:
    if not table:
        return page.paragraph(f"{what}: nothing differs.")
    rows = [(name, *("–" if value is None else str(value) for value in values)) for name, values in table.items()]
    return page.table((what, *names), rows, f"{what}: values that differ; – where a run has none.", left=range(len(names) + 1))
