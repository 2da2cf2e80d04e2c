"""Our adapter against the harness's own `hf` backend on the export of the same checkpoint, request by request, on real items.

    python benchmarks/eval_parity.py --checkpoint runs/tiny --out DIR [--sides hf packed] [--tasks arc_challenge gsm8k] [--max-length N]

Every side answers the same items of the same tasks (`gammalm eval --offline`) in fp32, through the harness from prompt to score: `hf` is
torch on the exported checkpoint, `packed` and `plain` are ours with that layout of rows, `sharded` is ours, packed, over 8 devices made of
the CPU's cores; the last two answer the first `--part` items. What a side answered stays in DIR, and a later command
goes on from it. Then each side is compared with `hf`: log-probabilities, scores, texts; a text may differ from the first token on whose two
largest logits are closer than CLOSE. DIR/parity.json has the figures; the exit status is 1 where sides disagree.

Needs Python 3.11 with the extras `eval` and `parity`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

CHOICE = ("arc_challenge", "hellaswag", "social_iqa", "mmlu")
WRITTEN = ("triviaqa", "gsm8k", "minerva_math500", "bbh_exemplars")
SIDES = ("hf", "packed", "plain", "sharded")
DEVICES = 8
SUBJECTS = 57  # of MMLU, each a task of the harness, which takes so many items of each
APART = 1e-3  # nats that a log-probability may differ by
TOKENS = 2**14  # of a batch of `hf`
CLOSE = 1e-4  # logits this near are a tie

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--checkpoint", required=True, metavar="WORKDIR[:STEP]")
parser.add_argument("--out", required=True, type=Path, metavar="DIR")
parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
parser.add_argument("--tasks", nargs="+", choices=(*CHOICE, *WRITTEN), default=[*CHOICE, *WRITTEN])
parser.add_argument("--choice", type=int, default=200, help="items of each task that scores choices")
parser.add_argument("--written", type=int, default=50, help="items of each task whose answers are written")
parser.add_argument("--part", type=int, default=24, help="items of each task for the sides beside hf and packed")
parser.add_argument("--new", type=int, default=48, help="tokens of a written answer")
parser.add_argument("--max-length", type=int, help="tokens that both models read; default: a training sequence")
parser.add_argument("--answer", choices=SIDES, help=argparse.SUPPRESS)  # one side, in a process of its own


def items_of(args, side: str, task: str) -> int:
    """How many items of each of the harness's tasks in `task` a side answers."""
    most = args.choice if task in CHOICE else args.written
    most = most if side in ("hf", "packed") else min(args.part, most)
    return -(-most // SUBJECTS) if task == "mmlu" else most


def asked_of(side: str, tasks) -> list[str]:
    """The tasks that a side answers: layouts are about likelihoods."""
    return [task for task in tasks if task in CHOICE or side != "plain"]


def answers(args, side: str) -> None:
    """Writes DIR/SIDE/TASK.json for the tasks that it lacks: items with answers, scores, what was cut."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import lm_eval

    from gammalm.cli.harness import opened_lm
    from gammalm.evaluation.harness import handle_non_serializable
    from gammalm.evaluation.offline import offline_tasks
    from gammalm.evaluation.results import rows_of

    manager, _ = offline_tasks()
    with opened_lm(args.checkpoint, layout="plain" if side == "plain" else "packed", max_length=args.max_length, dtype="float32") as ours:
        lm = theirs(args, ours.max_length) if side == "hf" else ours
        for task in asked_of(side, args.tasks):
            file = args.out / side / f"{task}.json"
            if file.exists():
                continue
            begin, before = time.perf_counter(), dict(ours.requests)
            found = lm_eval.simple_evaluate(
                model=lm, tasks=[task], limit=items_of(args, side, task), task_manager=manager, log_samples=True, bootstrap_iters=0,
                gen_kwargs={"max_gen_toks": args.new} if task in WRITTEN else None,
            )  # fmt: skip
            found = json.loads(json.dumps(found, default=handle_non_serializable))
            scores = {f"{row['task']} {row['metric']} {row['filter']}": row["value"] for row in rows_of(found)}
            counts = {name: value - before[name] for name, value in ours.requests.items()}
            said = {"about": ours.about | {"devices": DEVICES if side == "sharded" else 1}, "seconds": time.perf_counter() - begin}
            said |= {"counts": counts if lm is ours else {}, "scores": scores, "samples": found["samples"]}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".part").write_text(json.dumps(said))
            file.with_suffix(".part").replace(file)
            print(f"{side} {task}: {said['seconds']:.0f} s", flush=True)


def theirs(args, max_length: int):
    """The harness's own backend on the exported checkpoint."""
    from lm_eval.models.huggingface import HFLM

    from gammalm.cli.main import main as gammalm
    from gammalm.cli.subject import split_step

    workdir, step = split_step(args.checkpoint)
    exported = args.out / "exported"
    if not exported.exists() and gammalm(
        ["export", "hf", "--checkpoint", str(workdir), "--out", str(exported), *(["--step", str(step)] if step else [])]
    ):
        raise SystemExit(1)
    own_code = {"trust_remote_code": True} if (exported / "modeling_gammalm.py").exists() else {}
    rows = max(1, TOKENS // max_length)
    return HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=rows, max_length=max_length, **own_code)


def compare(args, side: str, task: str, lms: dict) -> dict:
    """One side beside `hf` on the items of both. Raises SystemExit where they were not asked the same."""
    ours, hf = (json.loads((args.out / name / f"{task}.json").read_text()) for name in (side, "hf"))
    found = {"items": 0, "requests": 0, "cut": ours["counts"]["cut"] + ours["counts"]["prompts_cut"]}
    found["cut tokens"] = ours["counts"]["cut_tokens"] + ours["counts"]["prompt_tokens_cut"]
    apart, greedy, other, unlike = 0.0, 0, [], 0
    for name, items in ours["samples"].items():
        other_side = {(item["doc_id"], item["filter"]): item for item in hf["samples"][name]}
        first_filter = items[0]["filter"]
        for item in items:
            same = other_side[item["doc_id"], item["filter"]]
            if any(item[fact] != same[fact] for fact in ("doc_hash", "prompt_hash", "target_hash")):
                raise SystemExit(f"{task}: item {item['doc_id']} of {name} is not the same for {side} and hf.")
            unlike += any(item[metric] != same[metric] for metric in item["metrics"])
            if item["filter"] != first_filter:
                continue  # another reading of the same answer
            found["items"] += 1
            pairs = list(zip(item["resps"], same["resps"], strict=True))
            found["requests"] += len(pairs)
            if task in CHOICE:
                (a, b) = ([(float(one[0][0]), str(one[0][1])) for one in side_] for side_ in zip(*pairs, strict=True))
                apart = max(apart, *(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)))
                greedy += sum(x[1] != y[1] for x, y in zip(a, b, strict=True))
            else:
                other += [item for x, y in pairs if readable(x[0]) != readable(y[0])]
    whole = len(next(iter(ours["samples"].values()))) == len(next(iter(hf["samples"].values())))
    found |= {"scores": ours["scores"], "scores of hf": hf["scores"], "items scored otherwise": unlike}
    agree = not whole or all(abs(value - hf["scores"][name]) < 1e-9 for name, value in ours["scores"].items() if isinstance(value, float))
    if task in CHOICE:
        found |= {"largest difference": apart, "greedy otherwise": greedy, "agree": agree and apart <= APART and not unlike}
    else:
        ties = [parting(args, item, lms) for item in other]
        found |= {"other texts": ties, "same text": found["requests"] - len(ties)}
        found["agree"] = all(tie["gap"] is not None and tie["gap"] < CLOSE for tie in ties) and (agree or bool(ties))
    return found


def readable(text: str) -> str:
    """A text without the difference between two tokenizers that show bytes which are no UTF-8 as other numbers of U+FFFD."""
    return re.sub("\ufffd+", "\ufffd", text)


def parting(args, item: dict, lms: dict) -> dict:
    """Where two answers part: {"token": its place, "gap": between the two largest logits there, in torch's fp32}; None, None where the
    tokens are the same and the texts are not."""
    import torch

    from gammalm.evaluation.generate import Prompt

    if not lms:
        from gammalm.cli.harness import opened_lm

        with opened_lm(args.checkpoint, max_length=args.max_length, dtype="float32") as ours:
            lms |= {"ours": ours, "hf": theirs(args, ours.max_length).model}
    text, _ = item["arguments"][0]
    context = lms["ours"].tok_encode(text)[-(lms["ours"].max_length - args.new) :]
    mine = next(piece.done.tokens for piece in lms["ours"].generator.stream([Prompt(context, args.new)], args.new) if piece.done)
    with torch.no_grad():
        asks = {"input_ids": torch.tensor([context]), "max_new_tokens": args.new, "do_sample": False, "use_cache": True}
        other = lms["hf"].generate(**asks)[0, len(context) :].tolist()
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if place is None:
            return {"token": None, "gap": None}
        top = lms["hf"](torch.tensor([context + other[:place]])).logits[0, -1].topk(2).values
    return {"token": place, "gap": float(top[0] - top[1])}


def main(args) -> int:
    if args.answer:
        answers(args, args.answer)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for side in args.sides:
        if all((args.out / side / f"{task}.json").exists() for task in asked_of(side, args.tasks)):
            continue
        many = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"} if side == "sharded" else {}
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--answer", side], env={**os.environ, **many}, check=True)
    found, lms = {}, {}
    for side in (name for name in SIDES[1:] if (args.out / name).is_dir()):
        for task in (name for name in (*CHOICE, *WRITTEN) if all((args.out / s / f"{name}.json").exists() for s in (side, "hf"))):
            one = found.setdefault(side, {})[task] = compare(args, side, task, lms)
            told = f"largest difference {one['largest difference']:.1e}" if task in CHOICE else f"same text {one['same text']}"
            if task in WRITTEN and one["other texts"]:
                told += f", others part at {[(tie['token'], tie['gap']) for tie in one['other texts']]}"
            told = f"{one['items']} items, {one['requests']:,} requests ({one['cut']:,} cut), {told}"
            print(f"{side:8s}{task:16s}{told}, {one['items scored otherwise']} scored otherwise: {'agree' if one['agree'] else 'DISAGREE'}")
    (args.out / "parity.json").write_text(json.dumps({"max_length": args.max_length, "new": args.new, "sides": found}, indent=1) + "\n")
    return int(not all(one["agree"] for tasks in found.values() for one in tasks.values()))


if __name__ == "__main__":
    raise SystemExit(main(parser.parse_args()))
