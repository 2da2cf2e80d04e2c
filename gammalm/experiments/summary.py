"""A grid's results as figures and sentences: what `report/summary.json` holds, the page shows and the grid command prints.

Every sentence is made from the numbers it speaks of. An interval that includes zero is "not resolved", one seed has no interval, a best
rate at the edge of the scanned ones "may lie outside", and a grid that is not finished says what is missing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gammalm.experiments import statistics
from gammalm.experiments.loads import Load, expert_loads
from gammalm.experiments.results import Run, Study, group_name
from gammalm.experiments.statistics import Best, Difference, Estimate

# What the paper trained, and the fewest parameters and the tokens of it.
PAPER_DENSE = ("The paper's dense models have 125M to 1.5B parameters and see 36B tokens", 125e6, 36e9)
PAPER_MIXTURES = ("The paper's mixtures have 1.5B and 3B parameters, 0.25B and 0.5B of them active, and see 100B tokens", 1.49e9, 100e9)


@dataclasses.dataclass(frozen=True)
class Summary:
    """All statistics of one study. Keys: (group, γ, rate) in `table`, (group, γ) in `best`, `domains` and `loads`."""

    study: Study
    table: Mapping[tuple[str, float, float], Mapping[int, float]]
    best: Mapping[tuple[str, float], Best]
    gaps: Sequence[Difference]
    arms: Sequence[Difference]
    contrasts: Sequence[Difference]
    domains: Mapping[tuple[str, float], Mapping[str, dict[str, Estimate]]]  # domain -> {"loss", "bits_per_byte"}
    domain_gaps: Mapping[str, Mapping[str, Difference]]  # group -> domain -> headline γ's at the best rate of each
    loads: Mapping[tuple[str, float], Load]  # of mixtures; empty for dense grids
    scale: Sequence[dict]

    @property
    def groups(self) -> list[str]:
        """Groups in the grid's order, those without a result included."""
        return list(dict.fromkeys(run.group for run in self.study.runs))

    @property
    def seeds(self) -> int:
        """The largest number of seeds that any mean rests on."""
        return max((len(values) for values in self.table.values()), default=0)

    def with_status(self, status: str) -> list[Run]:
        """The runs that are done, failed or unfinished."""
        return [run for run in self.study.runs if run.status == status]

    def to_json(self) -> dict:
        """Plain data: what was run, the statistics, and the sentences about them."""
        return {
            "grid": self.study.grid.name,
            "base": self.study.grid.base,
            "cells": {
                "planned": len(self.study.runs),
                "done": [run.cell.name for run in self.with_status("done")],
                "failed": {run.cell.name: run.row.get("error") for run in self.with_status("failed")},
                "unfinished": [run.cell.name for run in self.with_status("unfinished")],
            },
            "scale": list(self.scale),
            "seconds": sum(run.row.get("seconds") or 0 for run in self.study.runs),
            "interval_level": statistics.LEVEL,
            "losses": [
                {"group": group, "gamma": gamma, "rate": rate, **_plain(statistics.estimate(values.values())), "by_seed": dict(values)}
                for (group, gamma, rate), values in self.table.items()
            ],
            "best_rates": [
                {"group": group, "gamma": gamma, "rate": best.rate, **_plain(best.estimate), "note": best_note(best)}
                for (group, gamma), best in self.best.items()
            ],
            "gaps": [_plain_difference(item) for item in self.gaps],
            "arm_differences": [_plain_difference(item) for item in self.arms],
            "gap_contrasts": [_plain_difference(item, gap_finding) for item in self.contrasts],
            "domains": [
                {"group": group, "gamma": gamma, "domain": name, **{kind: _plain(e) for kind, e in row.items()}}
                for (group, gamma), rows in self.domains.items()
                for name, row in rows.items()
            ],
            "domain_gaps": [
                {"domain": name, **_plain_difference(item)} for rows in self.domain_gaps.values() for name, item in rows.items()
            ],
            "expert_loads": [{"group": group, "gamma": gamma, **load.to_json()} for (group, gamma), load in self.loads.items()],
            "statements": statements(self),
            "notices": list(self.study.notices),
        }


def summarise(study: Study) -> Summary:
    """The statistics of a study, complete or not."""
    table = statistics.losses(study)
    planned: dict = {}
    for run in study.runs:
        if run.rate is not None:
            planned.setdefault((run.group, run.gamma), set()).add(run.rate)
    best = statistics.best_rates(table, planned)
    arms = {run.group: _arm(run.cell.labels) for run in study.runs if "arm" in run.cell.labels}
    gaps = statistics.gaps(table, best)
    domains, domain_gaps = _domains(study, best, gaps)
    return Summary(
        study=study,
        table=table,
        best=best,
        gaps=gaps,
        arms=statistics.arm_differences(table, best, arms),
        contrasts=statistics.gap_contrasts(gaps, arms),
        domains=domains,
        domain_gaps=domain_gaps,
        loads=expert_loads(study, best),
        scale=[_scale(group, [run for run in study.runs if run.group == group]) for group in dict.fromkeys(r.group for r in study.runs)],
    )


def _arm(labels: Mapping) -> tuple[str, str]:
    """What a cell shares with those it is compared with, and the name of its arm."""
    rest = {key: value for key, value in labels.items() if key != "arm"}
    return group_name(rest, nothing=""), str(labels["arm"])


def _domains(study: Study, best: Mapping, gaps: Iterable[Difference]) -> tuple[dict, dict]:
    """Losses by domain at the best rate of each γ, and the headline gap in each domain at those rates."""
    losses: dict = {}  # (group, γ) -> domain -> kind -> seed -> loss
    for run in study.done():
        if best[run.group, run.gamma].rate == run.rate:
            for name, row in (run.row.get("domains") or {}).items():
                for kind in ("loss", "bits_per_byte"):
                    if row.get(kind) is not None:
                        by_domain = losses.setdefault((run.group, run.gamma), {})
                        by_domain.setdefault(name, {}).setdefault(kind, {})[run.seed] = row[kind]
    estimates = {
        key: {
            name: {kind: statistics.estimate(values.values()) for kind, values in kinds.items()} for name, kinds in sorted(rows.items())
        }
        for key, rows in losses.items()
    }
    pair = statistics.gamma_pair(gamma for _, gamma in best)
    found: dict = {}
    for item in statistics.headline(gaps):
        if (item.first, item.second) == tuple(f"γ={g:g}" for g in pair):
            sides = [losses.get((item.group, g), {}) for g in pair]
            for name in sorted(set(sides[0]) & set(sides[1])):
                both = [side[name].get("loss", {}) for side in sides]
                by_seed = {seed: both[1][seed] - both[0][seed] for seed in sorted(both[0]) if seed in both[1]}
                if by_seed:
                    estimate = statistics.estimate(by_seed.values())
                    row = dataclasses.replace(item, estimate=estimate, by_seed=by_seed)
                    found.setdefault(item.group, {})[name] = row
    return estimates, found


def _scale(group: str, runs: Sequence[Run]) -> dict:
    """What was run in one group: every value that its cells have, as a sorted list."""

    def every(read: Callable[[Run], Any]) -> list:
        found = {value for value in map(read, runs) if value is not None}
        return sorted(found, key=lambda v: (str(type(v)), v))

    def leaf(group: str, name: str) -> list:
        return every(lambda run: run.config.get(group, {}).get(name))

    return {
        "group": group,
        "cells": len(runs),
        "done": sum(run.status == "done" for run in runs),
        "parameters": every(lambda run: run.row.get("parameters")),
        "active_parameters": every(active_parameters),
        "tokens": every(lambda run: run.row.get("tokens") if run.status == "done" else None),
        "tokens_per_parameter": every(tokens_per_parameter),
        "tokens_per_active_parameter": every(tokens_per_active_parameter),
        "steps": every(lambda run: run.row.get("steps") if run.status == "done" else None),
        "seq_len": leaf("data", "seq_len"),
        "sequences": leaf("batch", "sequences"),
        "layers": leaf("model", "n_layers"),
        "width": leaf("model", "d_model"),
        "vocabulary": leaf("model", "vocab_size"),
        "norm_eps": leaf("model", "norm_eps"),
        "gate": leaf("model", "gate"),
        "mixture": leaf("data", "mixture"),
        "packing": leaf("data", "packing"),
        "init": leaf("init", "preset"),
        "gammas": every(lambda run: run.gamma),
        "rates": every(lambda run: run.rate),
        "seeds": every(lambda run: run.seed),
    }


def tokens_per_parameter(run: Run) -> float | None:
    """Training tokens of a finished run per parameter; None where either is not known."""
    return _tokens_per(run, run.row.get("parameters"))


def tokens_per_active_parameter(run: Run) -> float | None:
    """The same per parameter that one token meets; None for dense runs."""
    return _tokens_per(run, active_parameters(run))


def active_parameters(run: Run) -> int | None:
    """Parameters that one token meets; None for dense runs, where it is all of them, and for rows that do not have it."""
    active = run.row.get("active_parameters")
    return None if active == run.row.get("parameters") else active


def _tokens_per(run: Run, parameters: int | None) -> float | None:
    tokens = run.row.get("tokens")
    return tokens / parameters if run.status == "done" and tokens and parameters else None


# ---- sentences -------------------------------------------------------------------------------------------------------------------


def number(value: float, digits: int = 4) -> str:
    """A signed number with a true minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(e: Estimate) -> str:
    """`[−0.0312, −0.0102]`, or why there is none."""
    return "one seed: no interval" if e.low is None else f"[{number(e.low)}, {number(e.high)}]"


def finding(item: Difference) -> str:
    """What one difference allows to be said, in a few words: which side is lower, or that this is not resolved."""
    e = item.estimate
    if e.sign == 0:
        return "not resolved"
    way = "equal to" if e.mean == 0 else "lower than" if e.mean < 0 else "higher than"
    return f"{item.second} {way} {item.first}" + (", one seed" if e.low is None else "")


def gap_finding(item: Difference) -> str:
    """The same for a difference of two gaps: whose gap lies lower, which is more in favour of the second γ."""
    e = item.estimate
    if e.sign == 0:
        return "not resolved"
    way = "equal to" if e.mean == 0 else "lower than" if e.mean < 0 else "higher than"
    return f"gap of {item.second} {way} gap of {item.first}" + (", one seed" if e.low is None else "")


def verdict(item: Difference, say: Callable[[Difference], str] = finding) -> str:
    """`say(item)` with the numbers it rests on."""
    e = item.estimate
    if e.low is None:
        return f"{say(item)}: {number(e.mean)}, no interval"
    return f"{say(item)}: {number(e.mean)}, interval {interval(e)}{' includes zero' if e.sign == 0 else ''}, {e.n} seeds"


def best_note(best: Best) -> str:
    """What keeps a best rate from being the best: empty when it lies inside the scanned rates and all of them have a result."""
    notes = []
    if best.edge == "only":
        notes.append("one rate has a result: nothing to choose from")
    elif best.edge:
        notes.append(f"the {best.edge} rate with a result: the best may lie outside the scanned rates")
    if best.missing:
        notes.append(f"no result at {', '.join(f'{rate:g}' for rate in best.missing)}")
    if best.uneven:
        notes.append("not every rate has every seed")
    return ", ".join(notes)


def statements(summary: Summary) -> dict[str, list[str]]:
    """The findings in sentences: subject (a group, or a comparison of gaps) -> what can be said of it."""
    pair = statistics.gamma_pair(gamma for _, gamma, _ in summary.table)
    if pair is None:
        return {"all cells": ["Not enough has finished to compare two initialization rates."]}
    titles = tuple(f"γ={g:g}" for g in pair)
    said: dict[str, list[str]] = {}
    for group in summary.groups:
        found = [item for item in summary.gaps if item.group == group and (item.first, item.second) == titles]
        if not found:
            said[group] = [f"No seed has finished at both {titles[0]} and {titles[1]}, so nothing is compared."]
            continue
        said[group] = [_fixed(found, titles)]
        for item in found:
            if item.rate is None:
                where = f"{item.first} at {item.rates[0]:g}, {item.second} at {item.rates[1]:g}"
                said[group].append(f"Each γ at its best rate ({where}): {verdict(item)}.")
                said[group] += _edges(summary, group, pair)
        said[group] += _lowest(summary, group)
    for item in statistics.headline(summary.contrasts):
        if f"{titles[0]} → {titles[1]}" in item.group:
            where = "Each γ and arm at its best rate" if item.rate is None else f"At rate {item.rate:g}"
            subject = f"Gap {item.group}, {item.second} against {item.first}"
            said[subject] = [f"{where}: {verdict(item, gap_finding)}."]
    return said


def _fixed(found: Sequence[Difference], titles: tuple[str, str]) -> str:
    """The gap at fixed rates in one sentence: the verdict itself at one rate, a count at several."""
    fixed = [item for item in found if item.rate is not None]
    if not fixed:
        return f"At a fixed rate: no rate has a result for both {titles[0]} and {titles[1]}."
    if len(fixed) == 1:
        return f"At the one rate both have ({fixed[0].rate:g}): {verdict(fixed[0])}."
    kinds = {
        f"{titles[1]} lower": [item for item in fixed if item.estimate.mean < 0 and item.estimate.sign != 0],
        f"{titles[1]} higher": [item for item in fixed if item.estimate.mean > 0 and item.estimate.sign != 0],
        "not resolved": [item for item in fixed if item.estimate.sign == 0],
        "equal": [item for item in fixed if item.estimate.mean == 0 and item.estimate.sign is None],
    }
    at = {kind: ", ".join(f"{item.rate:g} ({number(item.estimate.mean)})" for item in items) for kind, items in kinds.items()}
    told = [f"{kind} at {rates}" for kind, rates in at.items() if rates]
    single = " One seed: no interval." if all(item.estimate.n == 1 for item in fixed) else ""
    return f"At a fixed rate: {'; '.join(told)}.{single}"


def _edges(summary: Summary, group: str, pair: tuple[float, float]) -> list[str]:
    notes = [(g, best_note(summary.best[group, g])) for g in pair if (group, g) in summary.best]
    return [f"Best rate of γ={g:g}: {note}." for g, note in notes if note]


def _lowest(summary: Summary, group: str) -> list[str]:
    """Where three γ's or more were run: which has the lowest loss at its best rate, and whether it lies at the edge."""
    best = {gamma: value for (of, gamma), value in summary.best.items() if of == group}
    if len(best) < 3:
        return []
    low = min(best, key=lambda gamma: best[gamma].estimate.mean)
    edge = " It is the outermost γ with a result: the lowest loss may lie beyond it." if low in (min(best), max(best)) else ""
    second = min((g for g in best if g != low), key=lambda g: best[g].estimate.mean)
    first = f"Of {len(best)} γ's, the lowest mean is at γ={low:g} ({best[low].estimate.mean:.4f}, rate {best[low].rate:g})"
    keys = [(group, g, best[g].rate) for g in (low, second)]
    e = statistics.paired(*(summary.table[key] for key in keys))
    gap = f"; γ={second:g} is next, {best[second].estimate.mean - best[low].estimate.mean:.4f} higher"
    how = ""
    if e is not None:
        how = f" ({interval(e)})" if e.low is None else f" (paired interval {interval(e)}{', not resolved' if e.sign == 0 else ''})"
    return [first + gap + how + "." + edge]


# ---- the table on the terminal ---------------------------------------------------------------------------------------------------


def text_table(rows: Iterable[Mapping], times: bool = True) -> str:
    """Rows of results.jsonl as an aligned text table, in the order given; `times=False` leaves out what differs from run to run."""
    rows = list(rows)
    labels = list(dict.fromkeys(key for row in rows for key in row.get("labels", {})))
    header = [*labels, "loss", "bits/byte", "tokens", "status", *(["seconds"] if times else [])]
    lines = [header]
    for row in rows:
        cells = [_short(row.get("labels", {}).get(key)) for key in labels]
        cells += [_decimals(row.get("loss")), _decimals(row.get("bits_per_byte")), _short(row.get("tokens")), row.get("status", "?")]
        lines.append(cells + ([_decimals(row.get("seconds"), 1)] if times else []))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [i >= len(labels) and name != "status" for i, name in enumerate(header)]
    return "\n".join(
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)).rstrip() for line in lines
    )


def print_table(rows: Iterable[Mapping], times: bool = True) -> None:
    """Prints `text_table(rows)`."""
    print(text_table(rows, times), flush=True)


def _short(value) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _decimals(value, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _plain(e: Estimate) -> dict:
    return dataclasses.asdict(e)


def _plain_difference(item: Difference, say: Callable[[Difference], str] = finding) -> dict:
    return {
        "group": item.group,
        "first": item.first,
        "second": item.second,
        "rate": item.rate,
        "rates": item.rates,
        **_plain(item.estimate),
        "by_seed": dict(item.by_seed),
        "finding": say(item),
    }
