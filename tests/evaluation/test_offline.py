"""Tasks without a network: the harness's own definitions over local files, and nothing that a registry does not hold."""

import pytest
import yaml

from gammalm.errors import ConfigError, DataError
from gammalm.evaluation import offline
from tests.data import benchmark_package as package

SAMPLE = {"input": "not True is", "target": "Let us see: not True = False. So the answer is False."}


def fake_harness(folder):
    """The harness's files that the offline tasks include, as far as they are read."""
    names = [task.include for task in offline.TASKS.values() if "{}" not in task.include] + [*offline.GROUPS.values()]
    names += [f"mmlu/default/mmlu_{subject}.yaml" for subject in ("anatomy", "astronomy")] + [f"{offline.BBH}/_cot_fewshot_template_yaml"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("output_type: generate_until\n")
    task = {"description": "Evaluate.\n\n", "fewshot_config": {"samples": [SAMPLE] * 3}}
    (folder / offline.BBH / "boolean_expressions.yaml").write_text(yaml.safe_dump(task))
    (folder / offline.BBH / "_bbh.yaml").write_text("group: bbh\ntask: [x]\n")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package.use(monkeypatch, tmp_path)
    tasks = fake_harness(tmp_path / "tasks")
    monkeypatch.setattr(offline, "harness_tasks", lambda: tasks)
    return offline.offline_folder()


def test_each_task_includes_the_harness_s_and_names_local_files(folder, tmp_path):
    found = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert set(found) == {
        "arc_challenge", "hellaswag", "social_iqa", "triviaqa", "gsm8k", "gsm8k_cot", "minerva_math500", "hendrycks_math500",
        "mmlu_anatomy", "mmlu_astronomy", "mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_other", "mmlu_social_sciences", "bbh_exemplars",
    }  # fmt: skip
    arc = found["arc_challenge"]
    assert arc["include"] == str(tmp_path / "tasks/arc/arc_challenge.yaml") and arc["dataset_path"] == "parquet"
    assert arc["training_split"] is None and (arc["test_split"], arc["validation_split"]) == ("test", "validation")
    for task in found.values():
        for split, path in task.get("dataset_kwargs", {}).get("data_files", {}).items():
            assert path.endswith(".parquet") and (tmp_path / "cache").joinpath(path).is_file(), (split, path)
    assert found["mmlu_astronomy"]["dataset_kwargs"]["data_files"]["dev"].endswith("mmlu/astronomy/dev.parquet")


def test_exemplars_of_bbh_are_items_of_their_own(folder):
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / "bbh_exemplars.parquet").to_pylist()
    assert (
        rows
        == [
            {
                "subtask": "boolean_expressions",
                "description": "Evaluate.\n\n",
                "input": SAMPLE["input"],
                "target": "False",
                "reasoning": SAMPLE["target"],
            }
        ]
        * 3
    )
    assert "no score" in offline.differences()["bbh_exemplars"]["items"]


def test_made_once_and_anew_when_the_harness_changes(folder, tmp_path):
    assert offline.offline_folder() == folder
    other = {"fewshot_config": {"samples": [SAMPLE]}}
    (tmp_path / "tasks" / offline.BBH / "boolean_expressions.yaml").write_text(yaml.safe_dump(other))
    assert offline.offline_folder() != folder
    (tmp_path / "tasks/arc/arc_challenge.yaml").unlink()
    with pytest.raises(DataError, match="has no .*arc_challenge.yaml"):
        offline.offline_folder()


def test_without_the_harness(monkeypatch):
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        offline.harness_tasks()


@pytest.mark.parity
def test_the_harness_reads_them(tmp_path, monkeypatch):
    """The items, prompts and targets that the harness itself makes of the local files."""
    pytest.importorskip("lm_eval")
    tasks = offline.harness_tasks()
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in (tasks / "mmlu/default").glob("mmlu_*.yaml"))
    package.use(monkeypatch, tmp_path, subjects=subjects)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    manager, facts = offline.offline_tasks()
    assert {"arc_challenge", "mmlu", "mmlu_stem", "bbh_exemplars"} <= set(manager.all_tasks) and "bbh" not in manager.all_tasks
    assert len([task for task in manager.all_subtasks if task.startswith("mmlu_")]) == 57 and facts["source"] == "offline"
    loaded = manager.load(["arc_challenge", "hellaswag", "social_iqa", "triviaqa", "gsm8k", "mmlu", "bbh_exemplars"])["tasks"]
    arc = loaded["arc_challenge"]
    doc = arc.eval_docs[1]
    assert len(arc.eval_docs) == 3
    assert (arc.doc_to_text(doc), arc.doc_to_choice(doc)) == (f"Question: {package.ARC[1][0]}\nAnswer:", package.ARC[1][1])
    assert arc.doc_to_target(doc) == 0 or arc.doc_to_target(doc) == "0"
    assert loaded["triviaqa"].doc_to_target(loaded["triviaqa"].eval_docs[2]) == ["N2", "Nobody"]
    anatomy = loaded["mmlu_anatomy"]
    assert len(anatomy.eval_docs) == 6
    assert anatomy.doc_to_text(anatomy.eval_docs[0]) == "Item 0 of anatomy: what is it?\nA. p\nB. q\nC. r\nD. s\nAnswer:"
    assert len(loaded["bbh_exemplars"].eval_docs) == 81
    assert loaded["gsm8k"].config.fewshot_split == "test" and loaded["gsm8k"].config.num_fewshot == 5
    # Of four items three are examples of the fourth: none is its own example.
    trivia = loaded["triviaqa"]
    trivia.set_fewshot_seed(seed=1234)
    for number, doc in enumerate(trivia.eval_docs):
        *examples, asked = trivia.fewshot_context(doc, num_fewshot=3).split("\n\n")
        assert asked == f"Question: Who was number {number}??\nAnswer:"
        assert sorted(e[len("Question: Who was number ")] for e in examples) == [str(n) for n in range(4) if n != number]
    gsm = loaded["gsm8k"]
    gsm.set_fewshot_seed(seed=1234)
    first, asked = gsm.fewshot_context(gsm.eval_docs[1], num_fewshot=1).split("\n\n")
    assert first.startswith(f"Question: {package.GSM[0][0]}") and asked == f"Question: {package.GSM[1][0]}\nAnswer:"
