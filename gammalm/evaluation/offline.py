"""The harness's own task definitions pointed at local files, for evaluation without a network.

Each task is a small YAML file that includes the harness's and says where the items are and which splits there are; prompts, targets,
filters and metrics stay the harness's. What differs is said by `differences`: a split that no package has, or fewer items. BBH's test items
are in no package: `bbh_exemplars`, the worked examples of its prompts, is for comparing two implementations, and its score means nothing.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import yaml

from gammalm.data.benchmarks import benchmarks_folder, read_manifest, split_files
from gammalm.data.fetch import cache_folder
from gammalm.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class OfflineTask:
    """One of the harness's tasks. include: its file below lm_eval/tasks, `{}` for a subject. splits: the harness's names of splits ->
    ours, None for one that there is not. items, examples: how those differ from the same task with a network, where they do."""

    benchmark: str
    include: str
    splits: dict[str, str | None]
    items: str = ""
    examples: str = ""


_NO_TRAIN = "examples come from the validation items instead of the training items"
_OTHERS = "examples come from the other validation items instead of the training items"
_VALIDATION = {"training_split": None, "validation_split": "validation"}
TASKS = {
    "arc_challenge": OfflineTask("arc_challenge", "arc/arc_challenge.yaml", _VALIDATION | {"test_split": "test"}, examples=_NO_TRAIN),
    "hellaswag": OfflineTask("hellaswag", "hellaswag/hellaswag.yaml", _VALIDATION, examples=_OTHERS),
    "social_iqa": OfflineTask("social_iqa", "siqa/siqa.yaml", _VALIDATION, examples=_OTHERS),
    "triviaqa": OfflineTask(
        "triviaqa",
        "triviaqa/default.yaml",
        _VALIDATION,
        "the 7,993 questions of rc.wikipedia.nocontext, of the 17,944 of rc.nocontext",
        _OTHERS,
    ),
    "mmlu_{}": OfflineTask("mmlu", "mmlu/default/mmlu_{}.yaml", {"fewshot_split": "dev", "test_split": "test"}),
    "gsm8k": OfflineTask(
        "gsm8k",
        "gsm8k/gsm8k.yaml",
        {"training_split": None, "fewshot_split": "test", "test_split": "test"},
        examples="examples come from the other test items instead of the training items",
    ),
    "gsm8k_cot": OfflineTask("gsm8k", "gsm8k/gsm8k-cot.yaml", {"test_split": "test"}),
    "minerva_math500": OfflineTask("math500", "minerva_math/minerva_math500.yaml", {"test_split": "test"}),
    "hendrycks_math500": OfflineTask("math500", "hendrycks_math/hendrycks_math500.yaml", {"test_split": "test"}),
}
GROUPS = {name: f"mmlu/default/_{name}.yaml" for name in ("mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_other", "mmlu_social_sciences")}
EXEMPLARS = "bbh_exemplars"
BBH = "bbh/cot_fewshot"


def differences() -> dict[str, dict[str, str]]:
    """{offline task: {"items", "examples": how those differ from the harness's own with a network}}, of the tasks that differ."""
    found = {EXEMPLARS: {"items": "the worked examples of BBH's prompts: for comparing implementations, no score", "examples": "none"}}
    return found | {name: {"items": t.items, "examples": t.examples} for name, t in TASKS.items() if t.items or t.examples}


def harness_tasks() -> Path:
    """The folder of the harness's task definitions. Raises ConfigError where the harness is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError('Evaluation needs lm-evaluation-harness. Install it: pip install "gammalm[eval]", or pip install lm-eval.')
    return Path(spec.submodule_search_locations[0]) / "tasks"


def offline_folder(note=lambda line: None) -> Path:
    """A folder of task files for the harness's `--include_path`, made anew when the items, the harness or these definitions change.

    `note` receives a line where the items are fetched. Raises DataError where they cannot be had or the harness lacks a task.
    """
    data, tasks = benchmarks_folder(note), harness_tasks()
    files = {f"{name}.yaml": text for name, text in _definitions(data, tasks).items()}
    exemplars = _exemplars(tasks)
    key = hashlib.blake2b(json.dumps([files, exemplars, _exemplar_task(tasks, Path())]).encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "benchmarks" / f"tasks-{key}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as work:
        made = Path(work) / "made"
        made.mkdir()
        _write_exemplars(exemplars, made / f"{EXEMPLARS}.parquet")
        files[f"{EXEMPLARS}.yaml"] = _exemplar_task(tasks, folder / f"{EXEMPLARS}.parquet")
        for name, text in files.items():
            (made / name).write_text(text, "utf-8")
        try:
            os.replace(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def offline_tasks(note=lambda line: None):
    """(the harness's task manager with the offline tasks and no others, facts about the items for the results).

    Raises DataError, ConfigError.
    """
    folder = offline_folder(note)
    from gammalm.evaluation.harness import Tasks  # imports the harness

    manifest = read_manifest(benchmarks_folder())
    facts = {"source": "offline", "package": manifest["package"], "sha256": manifest["sha256"]}
    manager = Tasks(include_path=str(folder), include_defaults=False)
    manager.hint = f"They are in the cache folder {folder.parent}; delete it to fetch them anew."
    return manager, facts | {"differences": differences()}


def _definitions(data: Path, tasks: Path) -> dict[str, str]:
    """{task or group: text of its YAML file}."""
    found = {}
    for name, task in TASKS.items():
        for subject, files in split_files(data, task.benchmark).items():
            include = _existing(tasks / task.include.format(subject))
            used = {ours for ours in task.splits.values() if ours}
            found[name.format(subject)] = yaml.safe_dump(
                {
                    "include": str(include),
                    "task": name.format(subject),
                    "dataset_path": "parquet",
                    "dataset_name": None,
                    "dataset_kwargs": {"data_files": {split: str(files[split]) for split in sorted(used)}},
                }
                | task.splits
            )
    for name, include in GROUPS.items():
        found[name] = yaml.safe_dump({"include": str(_existing(tasks / include)), "group": name})
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"The installed lm-evaluation-harness has no {path}. The offline tasks are those of lm-eval 0.4.13: install it.")
    return path


def _exemplars(tasks: Path) -> list[dict]:
    """BBH's worked examples as items: {"subtask", "description", "input", "target" (the answer), "reasoning"}."""
    found = []
    for path in sorted((tasks / BBH).glob("*.yaml")):
        task = yaml.safe_load(path.read_text("utf-8"))
        for sample in (task.get("fewshot_config") or {}).get("samples", []):
            answer = re.search(r"answer is (.*?)\.?\s*$", sample["target"], re.DOTALL)
            found.append(
                {
                    "subtask": path.stem,
                    "description": task.get("description", ""),
                    "input": sample["input"],
                    "target": answer[1] if answer else "",
                    "reasoning": sample["target"],
                }
            )
    return found


def _write_exemplars(exemplars: list[dict], path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(exemplars), path)


def _exemplar_task(tasks: Path, items: Path) -> str:
    return yaml.safe_dump(
        {
            "include": str(_existing(tasks / BBH / "_cot_fewshot_template_yaml")),
            "task": EXEMPLARS,
            "dataset_path": "parquet",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(items)}},
            "doc_to_text": "{{description}}Q: {{input}}\nA: Let's think step by step.\n",
            "num_fewshot": 0,
        }
    )
