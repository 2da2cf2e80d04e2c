"""Evaluation with our adapter against the harness's own `hf` backend on torch, same weights, same requests, one after the other.

    python benchmarks/eval.py --checkpoint runs/tiny [--tasks arc_challenge hellaswag] [--limit 100] [--new 64] [--json FILE]

The checkpoint is exported to a temporary folder for the other side; both compute in fp32 on CPU. Likelihoods: all requests of the tasks'
first items, from the registry package (`gammalm eval --offline`). Ours is timed twice: with a compilation of its own, and again. The other
side runs with each batch size of BATCHES and its best time counts. Generation: greedy continuations of the same items' contexts, `--new`
tokens each, contexts cut alike. Answers of both must agree.

Needs Python 3.11 with the extras `eval` and `parity`.
"""

import argparse
import json
import os
import tempfile
import time
import types
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--checkpoint", required=True, metavar="WORKDIR[:STEP]")
parser.add_argument("--tasks", nargs="+", default=["arc_challenge", "hellaswag"])
parser.add_argument("--limit", type=int, default=100, help="items of each task")
parser.add_argument("--prompts", type=int, default=128, help="contexts that are continued")
parser.add_argument("--new", type=int, default=64, help="tokens of each")
parser.add_argument("--layout", default="packed")
parser.add_argument("--json", metavar="FILE", help="write all measurements there")

GOAL = 1.5  # times the other side's requests, and tokens, a second
BATCHES = (8, 32, 128)


def timed(function, *args):
    begin = time.perf_counter()
    found = function(*args)
    return time.perf_counter() - begin, found


def requests_of(names: list[str], limit: int) -> list:
    """The harness's requests for the likelihoods of these tasks."""
    from gammalm.evaluation.offline import offline_tasks

    found = []
    for task in offline_tasks()[0].load(names)["tasks"].values():
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        found += [one for one in task.instances if one.request_type == "loglikelihood"]
    return found


def both(kind: str, ours, theirs, asks: list) -> tuple[dict[str, list], tuple[dict, dict]]:
    """The answers of both sides, and their seconds: ours with a compilation and again, theirs by batch size."""
    answers, seconds, rest = {}, {}, {}
    for name in ("with compilation", "again"):
        seconds[name], answers["ours"] = timed(getattr(ours, kind), asks, True)
    for size in BATCHES:
        theirs.batch_size_per_gpu = size
        rest[size], answers["hf"] = timed(getattr(theirs, kind), asks, True)
    return answers, (seconds, rest)


def compare(ours: dict[str, float], theirs: dict[int, float], amount: int, unit: str) -> dict:
    best = min(theirs.values())
    ratios = {f"times faster, {name}": best / seconds for name, seconds in ours.items()}
    print(f"  ours: {', '.join(f'{amount / s:,.1f} {unit}/s {name}' for name, s in ours.items())}")
    print(f"  hf:   {', '.join(f'{amount / s:,.1f} (batch {size})' for size, s in theirs.items())}")
    print(f"  {', '.join(f'{name}: {ratio:.2f}' for name, ratio in ratios.items())}; goal {GOAL}")
    return {"amount": amount, "unit": unit, "seconds": ours, "hf_seconds": theirs, **ratios}


def main(args: argparse.Namespace) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import numpy as np
    from lm_eval.models.huggingface import HFLM

    from gammalm.cli.harness import opened_lm
    from gammalm.cli.main import main as gammalm
    from gammalm.cli.subject import split_step

    workdir, step = split_step(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder, opened_lm(args.checkpoint, layout=args.layout, dtype="float32") as ours:
        exported = Path(folder) / "hf"
        if gammalm(["export", "hf", "--checkpoint", str(workdir), "--out", str(exported), *(["--step", str(step)] if step else [])]):
            raise SystemExit(1)
        own_code = {"trust_remote_code": True} if (exported / "modeling_gammalm.py").exists() else {}
        theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=BATCHES[0], **own_code)
        requests = requests_of(args.tasks, args.limit)
        found = {"checkpoint": ours.about, "tasks": args.tasks, "items": args.limit, "layout": args.layout}

        print(f"loglikelihood: {len(requests):,} requests of {', '.join(args.tasks)}")
        answers, seconds = both("loglikelihood", ours, theirs, requests)
        apart = float(np.max(np.abs(np.array([a[0] for a in answers["ours"]]) - np.array([a[0] for a in answers["hf"]]))))
        print(f"  largest difference of a log-probability: {apart:.1e}")
        found["loglikelihood"] = compare(*seconds, len(requests), "requests") | {"largest difference": apart, "asked": ours.requests}

        contexts = list(dict.fromkeys(request.args[0] for request in requests))[: args.prompts]
        asks = [types.SimpleNamespace(args=(c, {"until": [], "max_gen_toks": args.new}), task_name="", doc_id=0) for c in contexts]
        print(f"generation: {len(asks)} contexts, {args.new} tokens each")
        answers, seconds = both("generate_until", ours, theirs, asks)
        same = sum(a == b for a, b in zip(answers["ours"], answers["hf"], strict=True))
        print(f"  the same text: {same} of {len(asks)}")
        found["generation"] = compare(*seconds, len(asks) * args.new, "tokens") | {"same": same, "of": len(asks)}
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(parser.parse_args())
