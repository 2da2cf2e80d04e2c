"""What an evaluation leaves in its folder, read and written: results.json, and samples/<task>.jsonl where items are kept.

results.json: "format", "checkpoint" (which model), "data" (where the items are from), "rows" (`rows_of`), "requests" (what the model was
asked) and "harness", lm-evaluation-harness's own results. docs/evaluation.md has an example. Standard library only.
"""

import json
import os
from pathlib import Path

from gammalm.errors import DataError
from gammalm.files import read_jsonl, write_json_atomic, write_text_atomic

FORMAT = 1  # of results.json; raised when its meaning changes
RESULTS, SAMPLES = "results.json", "samples"


def rows_of(harness: dict) -> list[dict]:
    """One flat row per task or group, metric and filter of the harness's results, in their order.

    "task", "group" (bool), "metric", "filter", "value", "stderr" (None: none), "higher_is_better" (None: not said), "num_fewshot" (of a
    group that of its tasks, None where they differ), "items" (evaluated), "of" (that there are), "version". Groups without a metric of
    their own have no row.
    """
    rows = []
    for task, numbers in harness["results"].items():
        group, leaves = task in harness["group_subtasks"], leaves_of(harness, task)
        counts = [harness["n-samples"][leaf] for leaf in leaves]
        shots = {harness["n-shot"].get(leaf) for leaf in leaves}
        facts = {
            "num_fewshot": shots.pop() if len(shots) == 1 else None, "items": sum(n["effective"] for n in counts),
            "of": sum(n["original"] for n in counts), "version": harness["versions"].get(task),
        }  # fmt: skip
        for key, value in numbers.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = numbers.get(f"{metric}_stderr,{filter_name}")
            better = harness["higher_is_better"].get(task, {}).get(metric)
            rows.append(
                {"task": task, "group": group, "metric": metric, "filter": filter_name, "value": value}
                | {"stderr": stderr if isinstance(stderr, int | float) else None, "higher_is_better": better, **facts}
            )
    return rows


def numbers_of(rows: list[dict]) -> dict[str, float]:
    """The values of `rows` that are numbers, by "task/metric", or "task/metric/filter" where the filter has a name."""
    named = {"/".join([row["task"], row["metric"], *([row["filter"]] if row["filter"] != "none" else [])]): row["value"] for row in rows}
    return {name: value for name, value in named.items() if isinstance(value, int | float)}


def leaves_of(harness: dict, task: str) -> list[str]:
    """The tasks with items below `task` in the harness's results; a task without others below it is itself one."""
    below = harness["group_subtasks"].get(task)
    return [task] if below is None else list(dict.fromkeys(leaf for child in below for leaf in leaves_of(harness, child)))


def write_results(folder: str | os.PathLike, found: dict, samples: dict[str, list[dict]] | None = None) -> None:
    """Writes `found` without its format as results.json of `folder`, and the items of each task; what they replace is gone.

    The folder must exist. Raises OSError.
    """
    folder = Path(folder)
    if samples is not None:
        (folder / SAMPLES).mkdir(exist_ok=True)
        for old in (folder / SAMPLES).glob("*.jsonl"):
            if old.stem not in samples:
                old.unlink()
        for task, items in samples.items():
            write_text_atomic(folder / SAMPLES / f"{task}.jsonl", "".join(json.dumps(i, ensure_ascii=False) + "\n" for i in items))
    write_json_atomic(folder / RESULTS, {"format": FORMAT, **found})


def read_results(path: str | os.PathLike) -> dict:
    """What `write_results` wrote to `path`, the folder or its results.json. Raises DataError where it is none, or of another format."""
    path = Path(path)
    path = path / RESULTS if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, _ = found["format"], found["rows"]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Name a folder that `gammalm eval --out` wrote.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no results of an evaluation ({error}). Name a folder that `gammalm eval --out` wrote.") from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version}, and this gammalm reads format {FORMAT}. Evaluate again.")
    return found


def samples_of(path: str | os.PathLike, task: str) -> list[dict]:
    """The items of one task as the harness logs them, from the folder or results.json `path`; [] where they were not kept."""
    path = Path(path)
    return read_jsonl((path if path.is_dir() else path.parent) / SAMPLES / f"{task}.jsonl")
