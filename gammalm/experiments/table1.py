"""Table 1: the benchmarks of a model with small initialization beside one with standard initialization, from the results of both.

The gain is small − standard in points (hundredths of the score), as in the paper; its standard error, interval and p are over the items,
paired where the items of both were kept: an exact McNemar test where every score is 0 or 1, else a t-test of the differences. p is also
given after Holm's correction over the benchmarks. None of this covers the variation from one training run to the next: two are compared.
The paper names the harness and no task, metric or number of examples: those of COLUMNS are our choice, and the results record them.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from scipy import stats

from gammalm.errors import DataError
from gammalm.evaluation.results import leaves_of
from gammalm.experiments import page
from gammalm.experiments.grid import ARMS
from gammalm.experiments.statistics import LEVEL
from gammalm.files import write_json_atomic, write_text_atomic

ID = "table1"
GREEN_FROM = 4.0  # points of gain, from the caption of the paper's table
NUMBER = ' class="n"'  # of a table's cell
COLOURS = {"green": "#067647", "red": "#b42318"}


@dataclasses.dataclass(frozen=True)
class Column:
    """One benchmark: the harness's task (or group), metric and filter that stand for it. chance: the score of guessing; 0 where one
    cannot guess."""

    id: str
    title: str
    area: str
    task: str
    metric: str
    filter: str = "none"
    chance: float = 0.0


COLUMNS = (
    Column("arc_c", "ARC-C", "knowledge", "arc_challenge", "acc_norm", chance=0.25),
    Column("triviaqa", "TriviaQA", "knowledge", "triviaqa", "exact_match", "remove_whitespace"),
    Column("mmlu", "MMLU", "knowledge", "mmlu", "acc", chance=0.25),
    Column("hellaswag", "HellaSwag", "reasoning", "hellaswag", "acc_norm", chance=0.25),
    Column("bbh", "BBH", "reasoning", "bbh", "exact_match", "get-answer"),
    Column("social_iqa", "SocialIQA", "reasoning", "social_iqa", "acc", chance=1 / 3),
    Column("gsm8k", "GSM8K", "mathematics", "gsm8k", "exact_match", "flexible-extract"),
    Column("math500", "MATH500", "mathematics", "minerva_math500", "math_verify"),
)
TASKS = tuple(column.task for column in COLUMNS)
OFFLINE_TASKS = tuple(task for task in TASKS if task != "bbh")  # whose items are in no package
Samples = Callable[[str], Sequence[dict]]  # a task's name -> its items as the harness logs them, [] where they were not kept


def compare(small: dict, standard: dict, small_samples: Samples, standard_samples: Samples) -> dict:
    """Table 1 from two results (`gammalm.evaluation.results.read_results`) and what gives their items.

    {"id", "small", "standard": the checkpoints, "rows": [...], "notes": [...]}; scores, gains and errors in points. A row has "benchmark",
    "area", "task", "metric", "filter", "num_fewshot", "items", "of", "small", "small_stderr", "standard", "standard_stderr", "gain",
    "stderr", "low", "high", "p", "p_holm", "paired", "colour", "chance", "at_chance" (which models score no better than guessing). A
    benchmark that one of them lacks is left out and named in the notes. Raises DataError where the two were not asked the same items, or
    share no benchmark.
    """
    if _generation(small) != _generation(standard):
        raise DataError(f"Answers were written under {_generation(small)} and {_generation(standard)}. Evaluate both in the same way.")
    rows, absent = [], []
    for column in COLUMNS:
        found = [_row(results, column) for results in (small, standard)]
        if None in found:
            absent.append(column.title)
            continue
        _same_question(column, *found)
        rows.append(_compared(column, *found, _differences(column, small["harness"], small_samples, standard_samples)))
    if not rows:
        raise DataError(f"No benchmark of table 1 is in both results. Evaluate both models on: {' '.join(TASKS)}.")
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    checkpoints = {"small": small.get("checkpoint", {}), "standard": standard.get("checkpoint", {})}
    return {"id": ID, **checkpoints, "rows": rows, "notes": _notes(rows, absent, small, standard)}


def _generation(results: dict) -> dict:
    """Settings of generation that were given beside the tasks' own."""
    return results["harness"].get("config", {}).get("gen_kwargs") or {}


def _row(results: dict, column: Column) -> dict | None:
    wanted = (column.task, column.metric, column.filter)
    return next((row for row in results["rows"] if (row["task"], row["metric"], row["filter"]) == wanted), None)


def _same_question(column: Column, small: dict, standard: dict) -> None:
    for fact, said in (("num_fewshot", "examples"), ("items", "items"), ("version", "task version")):
        if small[fact] != standard[fact]:
            raise DataError(
                f"{column.title}: the model with small initialization has {said} {small[fact]}, the other {standard[fact]}. "
                "Evaluate both in the same way."
            )


def _differences(column: Column, harness: dict, small: Samples, standard: Samples) -> np.ndarray | None:
    """float64 [items]: small − standard of every item, in the same order; None where the items of one were not kept.

    Raises DataError where the same item stands under two prompts or two texts.
    """
    differences = []
    for task in leaves_of(harness, column.task):
        sides = [
            {item["doc_id"]: item for item in samples(task) if item.get("filter", "none") == column.filter} for samples in (small, standard)
        ]
        if not all(sides) or sides[0].keys() != sides[1].keys():
            return None
        for number, ours in sides[0].items():
            other = sides[1][number]
            if any(ours.get(name) != other.get(name) for name in ("doc_hash", "prompt_hash", "target_hash")):
                raise DataError(f"{column.title}: item {number} of {task} is not the same for both models. Evaluate both on the same data.")
            differences.append(float(ours[column.metric]) - float(other[column.metric]))
    return np.array(differences) if differences else None


def _compared(column: Column, small: dict, standard: dict, differences: np.ndarray | None) -> dict:
    gain = 100 * (small["value"] - standard["value"])
    quantile = float(stats.norm.ppf(0.5 + LEVEL / 2))
    if differences is not None and len(differences) > 1:
        stderr, p = paired_test(differences)
        stderr *= 100
        quantile = float(stats.t.ppf(0.5 + LEVEL / 2, len(differences) - 1))
    else:
        stderr, p = unpaired_test(gain, 100 * (small["stderr"] or math.nan), 100 * (standard["stderr"] or math.nan))
    half = quantile * stderr if stderr else None  # no item on which they differ: no interval
    return {
        "benchmark": column.title,
        "area": column.area,
        **{fact: small[fact] for fact in ("task", "metric", "filter", "num_fewshot", "items", "of")},
        "small": 100 * small["value"],
        "small_stderr": _points(small["stderr"]),
        "standard": 100 * standard["value"],
        "standard_stderr": _points(standard["stderr"]),
        "gain": gain,
        "stderr": stderr,
        "low": None if half is None else gain - half,
        "high": None if half is None else gain + half,
        "p": p,
        "paired": differences is not None,
        "colour": colour(gain),
        "chance": 100 * column.chance,
        "at_chance": [name for name, row in (("small", small), ("standard", standard)) if _at_chance(row, column.chance)],
    }


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value


def colour(gain: float) -> str:
    """`green` from 4 points of gain, as they are printed with one decimal, else `red`."""
    return "green" if round(gain, 1) >= GREEN_FROM else "red"


def paired_test(differences: np.ndarray) -> tuple[float, float]:
    """(standard error of the mean, two-sided p of no difference) of paired differences, float64 [items, at least two].

    Exact McNemar where all are −1, 0 or 1 (the sign test of the items on which the models differ), else Student's t.
    """
    n = len(differences)
    stderr = float(differences.std(ddof=1)) / math.sqrt(n)
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
        return stderr, float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return stderr, float(2 * stats.t.sf(abs(differences.mean()) / stderr, n - 1)) if stderr else float(differences.mean() == 0)


def unpaired_test(gain: float, first: float, second: float) -> tuple[float | None, float | None]:
    """(standard error of the gain, two-sided p) from the standard errors of two independent scores; None where one is unknown."""
    stderr = math.hypot(first, second)
    if not math.isfinite(stderr) or not stderr:
        return None, None
    return stderr, float(2 * stats.norm.sf(abs(gain) / stderr))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values after Holm's step-down correction; None stays None and does not count."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    found: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, ps[i] * (len(order) - rank)))
        found[i] = largest
    return found


def _at_chance(row: dict, chance: float) -> bool:
    """Whether a score's interval holds that of guessing; without an interval only where it equals it."""
    half = float(stats.norm.ppf(0.5 + LEVEL / 2)) * (row["stderr"] or 0.0)
    return row["value"] - half <= chance


def _notes(rows: Sequence[dict], absent: Sequence[str], small: dict, standard: dict) -> list[str]:
    notes = [
        "Standard errors, intervals (95 %) and p are over the items: another pair of training runs would give other numbers, and one pair "
        "does not say how different."
    ]
    if absent:
        notes.append(f"Not in both results, so left out: {', '.join(absent)}.")
    if part := [row["benchmark"] for row in rows if row["items"] < row["of"]]:
        notes.append(f"Only a part of the items was scored: {', '.join(part)}.")
    if loose := [row["benchmark"] for row in rows if not row["paired"]]:
        notes.append(f"The items of both were not kept, so the comparison is unpaired and less sharp: {', '.join(loose)}.")
    if given := _generation(small):
        notes.append(f"Answers were written with {', '.join(f'{name} = {value}' for name, value in given.items())}, not as the tasks say.")
    for name, results in (("small", small), ("standard", standard)):
        if cut := sum(results.get("requests", {}).get(count, 0) for count in ("cut", "prompts_cut")):
            notes.append(f"At least {cut:,} contexts were longer than the model with {name} initialization reads, and cut from the left.")
    for name in ("small", "standard"):
        if guessing := [row["benchmark"] for row in rows if name in row["at_chance"]]:
            notes.append(f"No better than guessing (or, where one cannot guess, than 0), {name} initialization: {', '.join(guessing)}.")
    differing = {task: told for side in (small, standard) for task, told in side.get("data", {}).get("differences", {}).items()}
    for row in rows:
        told = differing.get(row["task"], {})
        notes += [
            f"{row['benchmark']}: {told[fact]}." for fact in ("items", "examples")[: 2 if row["num_fewshot"] else 1] if told.get(fact)
        ]
    return notes + _other_differences(small.get("checkpoint") or {}, standard.get("checkpoint") or {})


def _differ_in(small: Mapping, standard: Mapping) -> list[str]:
    """What sets the two models apart beside γ: names of facts of their checkpoints."""
    how = ("checkpoint", "gamma", "weights_sha256", "layout", "devices")  # the last two change no answer
    return [name for name in small if name in standard and name not in how and small[name] != standard[name]]


def _other_differences(small: Mapping, standard: Mapping) -> list[str]:
    """The same in sentences."""
    notes = []
    gammas = small.get("gamma"), standard.get("gamma")
    if None not in gammas and not gammas[0] > gammas[1]:
        notes.append(f"The model called small has γ = {gammas[0]:g} and the one called standard γ = {gammas[1]:g}: are they exchanged?")
    if small.get("weights_sha256") and small.get("weights_sha256") == standard.get("weights_sha256"):
        notes.append("The two are one and the same model.")
    if others := _differ_in(small, standard):
        told = ", ".join(f"{name} ({small[name]} and {standard[name]})" for name in others)
        notes.append(f"The two models differ in more than γ: {told}.")
    return notes


def format_table(table: dict) -> str:
    """The table as Markdown, with its notes."""
    lines = [_HEADERS, *([*_cells(row)] for row in table["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADERS))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"{_caption(table)}\n\n" + "\n".join(text) + "\n\n" + "".join(f"- {note}\n" for note in table["notes"])


_HEADERS = ["benchmark", "standard", "small", "gain", "colour", "error", "95 %", "p", "p, Holm", "items", "examples", "task, metric"]


def _cells(row: dict) -> list[str]:
    metric = row["metric"] + (f", {row['filter']}" if row["filter"] != "none" else "")
    interval = "–" if row["low"] is None else f"{_signed(row['low'])} to {_signed(row['high'])}"
    items = f"{row['items']:,}" + (f" of {row['of']:,}" if row["items"] < row["of"] else "")
    shots = "–" if row["num_fewshot"] is None else str(row["num_fewshot"])
    scores = [f"{row[side]:.1f}" + "*" * (side in row["at_chance"]) for side in ("standard", "small")]
    certain = [_number(row["stderr"], ".1f"), interval, _number(row["p"], ".2g"), _number(row["p_holm"], ".2g")]
    return [row["benchmark"], *scores, _signed(row["gain"]), row["colour"], *certain, items, shots, f"{row['task']}, {metric}"]


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0: no −0.0


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _caption(table: dict) -> str:
    sides = [f"{name} initialization: {_checkpoint(table[name.lower()])}" for name in ("Small", "standard")]
    return (
        f"Table 1. Scores in points. {'; '.join(sides)}. Gain: small − standard, red below {GREEN_FROM:g} points and green from "
        f"{GREEN_FROM:g}. *: no better than guessing."
    )


def _checkpoint(about: Mapping) -> str:
    told = [f"γ = {about['gamma']:g}" if isinstance(about.get("gamma"), int | float) else "γ unknown"]
    told += [str(about["checkpoint"])] if "checkpoint" in about else []
    return ", ".join(told + ([f"step {about['step']}"] if "step" in about else []))


def write(table: dict, folder: Path) -> None:
    """Writes table1.json, table1.html, caption.txt and numbers.jsonl into `folder`, which is made where it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / f"{ID}.json", table)
    write_text_atomic(folder / f"{ID}.html", page.PAGE.substitute(title="Table 1", body=section(table)))
    write_text_atomic(folder / "caption.txt", "\n".join([_caption(table), *table["notes"]]) + "\n")
    write_text_atomic(folder / "numbers.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in numbers(table)))


def numbers(table: dict) -> list[dict]:
    """The gains as rows of a figure (experiments/figures/catalog.py), which claims read. Their intervals are over items, of one pair.

    "gamma", "standard": of the two models. "arm": that of experiments/grid.py; None where there is none or the two differ in more than γ.
    """
    small, standard = table["small"], table["standard"]
    arm = next((name for name, a in ARMS.items() if (a["eps"], a["gate"]) == (small.get("norm_eps"), small.get("gate"))), None)
    same = {"arm": None if _differ_in(small, standard) else arm, "gamma": small.get("gamma"), "standard": standard.get("gamma")}
    same |= {"parameters": small.get("parameters"), "seeds": 1}
    kept = ("benchmark", "area", "low", "high", "p", "p_holm", "items", "at_chance")
    return [{"figure": ID, "quantity": "gain", **same, "value": row["gain"], **{k: row[k] for k in kept}} for row in table["rows"]]


def section(table: dict) -> str:
    """The table as a section of a page, with coloured gains."""
    lines = []
    for row in table["rows"]:
        cells = dict(zip(_HEADERS, map(escape, _cells(row)), strict=True))
        strong = f' style="color:{COLOURS[cells.pop("colour")]};font-weight:650"'
        kinds = {"benchmark": "", "task, metric": ' class="text" style="min-width:15rem"', "gain": NUMBER + strong}
        lines.append("<tr>" + "".join(f"<td{kinds.get(name, NUMBER)}>{cell}</td>" for name, cell in cells.items()) + "</tr>")
    left = ("benchmark", "task, metric")
    head = "".join(f'<th scope="col"{"" if name in left else NUMBER}>{name}</th>' for name in _HEADERS if name != "colour")
    body = page.wide(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>", "Table 1")
    return page.section(ID, "Table 1: downstream evaluation", page.paragraph(_caption(table), "note"), body, page.bullets(table["notes"]))
