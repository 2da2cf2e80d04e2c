"""Tasks of lm-evaluation-harness over a file of nine items: one of choices, one of answers, and a group of both."""

import json
from pathlib import Path

import yaml

from ..conftest import WORDS

ITEMS = [
    {"question": " ".join(WORDS[i : i + 4]), "choices": [" ".join(WORDS[i + k : i + k + k % 3 + 1]) for k in range(4)], "gold": i % 4}
    for i in range(9)
]
CHOICES = {
    "task": "tiny_choices", "output_type": "multiple_choice", "doc_to_text": "Q: {{question}}\nA:", "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold", "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
    ],
}  # fmt: skip
ANSWERS = {
    "task": "tiny_answers", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def write_tasks(folder: Path, **changes) -> Path:
    """A folder for the harness's `include_path`, in `folder`; `changes` go into both tasks."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "items.json").write_text("\n".join(map(json.dumps, ITEMS)))
    where = {"data_files": {"test": str(tasks / "items.json")}, "cache_dir": str(folder / "cache")}
    data = {"dataset_path": "json", "dataset_kwargs": where, "test_split": "test", "num_fewshot": 0} | changes
    for task in (CHOICES, ANSWERS):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | data))
    (tasks / "group.yaml").write_text(yaml.safe_dump({"group": "tiny_both", "task": ["tiny_choices", "tiny_answers"]}))
    return tasks
