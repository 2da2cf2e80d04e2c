"""The sections of a report that show figures: curves, loss by γ, loss by learning rate, gaps, domains, each with its table.

Each is `(summary, folder) -> HTML`, writes its PNG files into `folder`, and is empty while there is nothing to show.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gammalm.experiments import page, plots, statistics
from gammalm.experiments.statistics import Difference, Estimate
from gammalm.experiments.summary import Summary, best_note, finding, gap_finding, interval, number


def panels(summary: Summary, folder: Path, name: str, draw: Callable, alt: Callable) -> str:
    """One drawing per group that has something to draw."""
    drawn = []
    for number_, group in enumerate(summary.groups, start=1):
        drawing = draw(group)
        if drawing is not None:
            drawn.append(page.figure(plots.save(drawing, folder, f"{name}-{number_}"), alt(group)))
    return page.figures(drawn) if drawn else ""


def _group_table(summary: Summary, group: str) -> dict:
    return {(gamma, rate): values for (of, gamma, rate), values in summary.table.items() if of == group}


def _group_best(summary: Summary, group: str) -> dict:
    return {gamma: best for (of, gamma), best in summary.best.items() if of == group}


def _common_range(summary: Summary) -> tuple[float, float] | None:
    """One loss axis for all groups, so that panels compare; None where the groups lie so far apart that each would be squashed."""
    spans: dict[str, list[float]] = {}
    for (group, *_), values in summary.table.items():
        e = statistics.estimate(values.values())
        spans.setdefault(group, []).extend(v for v in (e.mean, e.low, e.high) if v is not None)
    low, high = min(map(min, spans.values())), max(map(max, spans.values()))
    widest = max(max(span) - min(span) for span in spans.values())
    return (low - 0.08 * (high - low), high + 0.08 * (high - low)) if 0 < high - low <= 2.5 * widest else None


def _spoken(summary: Summary, group: str) -> str:
    """The group's means for those who do not see the figure."""
    means = [(g, rate, statistics.estimate(values.values()).mean) for (g, rate), values in sorted(_group_table(summary, group).items())]
    return "; ".join(f"γ {g:g} at rate {rate:g}: {mean:.3f}" for g, rate, mean in means)


def curves_section(summary: Summary, folder: Path) -> str:
    def draw(group):
        runs = [run for run in summary.study.runs if run.group == group and run.gamma is not None]
        return plots.curves(group, runs, _group_best(summary, group))

    def alt(group):
        return f"Loss curves of {group} against training tokens, by γ. Final validation losses: {_spoken(summary, group) or 'none yet'}."

    drawn = panels(summary, folder, "curves", draw, alt)
    note = (
        "Lines: training loss, smoothed. Marks: validation loss. Strong: the best learning rate of each γ (all runs while there is none); "
        "faint: the other rates. The steep first fifth of training is above the frame. Training batches follow the training mixture, "
        "validation the whole split, so line and mark need not meet."
    )
    return page.section("curves", "Loss curves", drawn and drawn + page.paragraph(note, "note"))


def gamma_section(summary: Summary, folder: Path) -> str:
    def draw(group):
        table = _group_table(summary, group)
        return plots.by_gamma(group, table, _group_best(summary, group), _common_range(summary)) if table else None

    drawn = panels(summary, folder, "gamma", draw, lambda group: f"Validation loss of {group} by γ: {_spoken(summary, group)}.")
    rows = []
    for (group, gamma, rate), values in summary.table.items():
        e = statistics.estimate(values.values())
        chosen = summary.best[group, gamma]
        best = "" if chosen.rate != rate else "only one" if chosen.edge == "only" else "best"
        rows.append([group, f"{gamma:g}", f"{rate:g}", f"{e.mean:.4f}", bounds(e), e.n, best])
    headers = ["group", "γ", "rate", "loss", "95 % interval", "seeds", "rate of this γ"]
    table = page.table(headers, rows, "Final validation loss (nats per token), mean over seeds", left=(0, 6)) if rows else ""
    arms = [_difference_row(item, finding) for item in summary.arms]
    arms_table = _differences_table(arms, "Architectures against each other at one γ, paired by seed (loss)") if arms else ""
    return page.section("gamma", "Final validation loss by γ", drawn, table, arms_table)


def rate_section(summary: Summary, folder: Path) -> str:
    def draw(group):
        table = _group_table(summary, group)
        several = len({rate for _, rate in table}) > 1
        return plots.by_rate(group, table, _group_best(summary, group), _common_range(summary)) if several else None

    drawn = panels(
        summary, folder, "rate", draw, lambda group: f"Validation loss of {group} by peak learning rate: {_spoken(summary, group)}."
    )
    rows = [
        [group, f"{gamma:g}", f"{best.rate:g}", f"{best.estimate.mean:.4f}", bounds(best.estimate), best_note(best) or "inside the scan"]
        for (group, gamma), best in summary.best.items()
    ]
    headers = ["group", "γ", "best rate", "loss", "95 % interval", "note"]
    table = page.table(headers, rows, "The learning rate with the lowest mean loss, for each γ", left=(0, 5)) if drawn else ""
    single = "Every group has results at one learning rate, so these losses say nothing about other rates." if rows and not drawn else ""
    return page.section("rate", "Loss against learning rate", drawn, table, page.paragraph(single))


def gap_section(summary: Summary, folder: Path) -> str:
    pair = statistics.gamma_pair(gamma for _, gamma, _ in summary.table)
    if pair is None:
        return ""
    titles = tuple(f"γ={g:g}" for g in pair)
    drawings = []
    for name, title, found in (
        ("gap", f"Loss at {titles[1]} minus loss at {titles[0]}", summary.gaps),
        ("gap-arms", "That gap in the second arm minus in the first", summary.contrasts),
    ):
        found = [item for item in found if (item.first, item.second) == titles or f"{titles[0]} → {titles[1]}" in item.group]
        if found:
            alt = "; ".join(f"{plots.difference_name(item)}: {number(item.estimate.mean)}" for item in found)
            drawing = plots.differences(title, found)
            drawings.append(page.figure(plots.save(drawing, folder, name), f"{title}, in nats per token: {alt}."))
    drawn = page.figures(drawings) + page.paragraph(DOTS, "note") if drawings else ""
    rows = [_difference_row(item, finding) for item in summary.gaps]
    tables = [_differences_table(rows, "Each γ against the first, paired by seed (nats per token)")] if rows else []
    if summary.contrasts:
        rows = [_difference_row(item, gap_finding) for item in summary.contrasts]
        tables.append(_differences_table(rows, "How much the gap differs between architectures: gap of the second minus gap of the first"))
    return page.section("gap", f"The gap γ {pair[0]:g} → {pair[1]:g}", drawn, *tables)


DOTS = "Left of zero, the second is lower. Filled: the interval excludes zero. Open: it does not, or there is one seed and no interval."


def _difference_row(item: Difference, say: Callable) -> list:
    rate = f"{item.rate:g}" if item.rate is not None else "best" if item.rates is None else f"best ({item.rates[0]:g}, {item.rates[1]:g})"
    e = item.estimate
    return [item.group, f"{item.first} → {item.second}", rate, number(e.mean), bounds(e), e.n, say(item)]


def _differences_table(rows: Sequence, caption: str) -> str:
    return page.table(["", "from → to", "rate", "difference", "95 % interval", "seeds", "in words"], rows, caption, left=(0, 1, 6))


def domains_section(summary: Summary, folder: Path) -> str:
    if not summary.domains:
        return ""

    def draw(group):
        bits = {
            gamma: {name: row["bits_per_byte"] for name, row in rows.items() if "bits_per_byte" in row}
            for (of, gamma), rows in summary.domains.items()
            if of == group
        }
        return plots.domains(group, bits, "bits per byte, at the best rate of each γ") if any(bits.values()) else None

    def alt(group):
        parts = [
            f"γ {gamma:g}: " + ", ".join(f"{name} {row['loss'].mean:.3f}" for name, row in rows.items() if "loss" in row)
            for (of, gamma), rows in summary.domains.items()
            if of == group
        ]
        return f"Losses of {group} by domain. {'; '.join(parts)}."

    parts = [panels(summary, folder, "domains", draw, alt)]
    for group in summary.groups:
        by_gamma = {gamma: rows for (of, gamma), rows in summary.domains.items() if of == group}
        if by_gamma:
            parts.append(_domain_table(group, by_gamma, summary.domain_gaps.get(group, {})))
    return page.section("domains", "Losses by domain", *parts)


def _domain_table(group: str, by_gamma: Mapping[float, Mapping], gap: Mapping[str, Difference]) -> str:
    gammas = sorted(by_gamma)
    names = sorted({name for rows in by_gamma.values() for name in rows})
    titles = next(((item.first, item.second) for item in gap.values()), None)
    headers = ["domain", *(f"γ={g:g}" for g in gammas), *([f"{titles[0]} → {titles[1]}", "95 % interval"] if titles else [])]
    rows = []
    for name in names:
        row = [name]
        for g in gammas:
            kinds = by_gamma[g].get(name, {})
            row.append(" / ".join(f"{kinds[kind].mean:.3f}" if kind in kinds else "–" for kind in ("loss", "bits_per_byte")))
        if titles:
            row += [number(gap[name].estimate.mean, 3), interval(gap[name].estimate)] if name in gap else ["–", "–"]
        rows.append(row)
    caption = f"{group}: nats per token / bits per byte, each γ at its best rate; difference in nats, paired by seed"
    return page.table(headers, rows, caption)


def bounds(e: Estimate) -> str:
    """The bounds of an interval for a table; a dash where there is none."""
    return "–" if e.low is None else f"{e.low:.4f} … {e.high:.4f}".replace("-", "−")
