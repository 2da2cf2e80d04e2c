"""`gammalm sample`: what a trained model writes after a prompt, shown as it is written."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from gammalm.cli.harness import mesh_sizes
from gammalm.cli.subject import split_step, tokenizer_of
from gammalm.errors import ConfigError, DataError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "sample",
        help="what a trained model writes after a prompt",
        description="Continue prompts with a trained model. One text is shown as it is written, several when each is complete. "
        "docs/evaluation.md says how tokens are chosen.",
        epilog="Example: gammalm sample --checkpoint runs/tiny --prompt 'The model' --temperature 0.8 --top-p 0.95",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="WORKDIR[:STEP]", help="folder of a run, and a step of it; default: the newest"
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated; '' begins a document")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='a prompt per line; of .jsonl files {"prompt": ...} per line')
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts for each prompt. Default: 1")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 takes the likeliest token each time. Default: 1")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; default 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest that hold a share P; default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws. Default: 0")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument(
        "--long",
        choices=["refuse", "left"],
        default="refuse",
        help="a prompt that the model cannot read at once: refuse it (default), or cut it from the left",
    )
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="texts written side by side, which sets the memory. Default: 32")
    parser.add_argument("--mesh", metavar="AXES", help="cut the model up and share texts out, as in data=2,fsdp=4; default: one device")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="SentencePiece model; default: the run's, if it is found")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all texts, their tokens and why each ended")


def run(args: argparse.Namespace) -> int:
    for name in ("samples", "rows", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: choose 1 or more.")
    texts = [text for text in [*args.prompt, *read_prompts(args.prompts)] for _ in range(args.samples)]
    if not texts:
        raise ConfigError("There is no prompt: give --prompt TEXT ('' begins a document), or --prompts FILE.")

    from gammalm.cli.together import keep_compiled
    from gammalm.evaluation.generate import CHUNK, Generator, Prompt
    from gammalm.evaluation.sampling import Sampling
    from gammalm.sharding.mesh import make_mesh, on_mesh
    from gammalm.training.load import load_model

    keep_compiled()
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    mesh = make_mesh(mesh_sizes(args.mesh)) if args.mesh else None
    workdir, step = split_step(args.checkpoint)
    loaded = load_model(workdir, step, mesh)
    tokenizer = tokenizer_of(args.tokenizer, workdir, loaded)
    asked = dict(max_new_tokens=args.max_new_tokens, stops=args.stop, sampling=sampling, long=args.long)
    prompts = [Prompt(tokenizer.encode(text) or [tokenizer.eod_id], **asked) for text in texts]
    c = loaded.config
    generator = Generator(
        loaded.model, loaded.params, loaded.buffers, tokenizer, eps=c.model.norm_eps, max_length=c.data.seq_len, mesh=mesh, rows=args.rows
    )
    start, streamed = time.monotonic(), len(texts) == 1 and not args.json
    with on_mesh(mesh) if mesh else contextlib.nullcontext():
        pieces = generator.stream(prompts, 1 if streamed else CHUNK)
        results = complete(pieces, texts, "nothing" if args.json else "pieces" if streamed else "texts")
    cut = [one.cut for one in results if one.cut]
    if args.json:
        about = {"checkpoint": str(workdir), "step": loaded.step, "sampling": vars(sampling)}
        about |= {"prompts_cut": len(cut), "tokens_cut": sum(cut)}
        print(json.dumps(about | {"texts": [{"prompt": text} | vars(one) for text, one in zip(texts, results, strict=True)]}))
        return 0
    tokens, reasons = sum(len(one.tokens) for one in results), [one.reason for one in results]
    ended = ", ".join(f"{reasons.count(reason)} {REASONS[reason]}" for reason in REASONS if reason in reasons)
    print(f"{tokens:,} tokens in {time.monotonic() - start:.1f} s; ended: {ended}", file=sys.stderr)
    if cut:
        print(f"prompts cut from the left: {len(cut)}, by {sum(cut):,} tokens in all", file=sys.stderr)
    return 0


def complete(pieces: Iterable, texts: list[str], show: str) -> list:
    """The texts written after the prompts `texts`, in their order. Prints on the way: "nothing" | the "pieces" of a single one | whole
    "texts", in order."""
    found, shown = {}, 0
    if show == "pieces":
        print(texts[0], end="", flush=True)
    for piece in pieces:
        if show == "pieces":
            print(piece.text, end="\n" if piece.done else "", flush=True)
        if piece.done:
            found[piece.index] = piece.done
        while show == "texts" and shown in found:
            print(f"--- {shown + 1}\n{texts[shown]}{found[shown].text}", flush=True)
            shown += 1
    return [found[i] for i in range(len(texts))]


REASONS = {
    "end": "with the document", "stop": "before a stop", "length": "at --max-new-tokens", "context": "where the model's context is full",
}  # fmt: skip


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, none without one. Raises DataError where it cannot be read, or a line of it is no prompt."""
    if path is None:
        return []
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {path} cannot be read ({error}). Name a file of UTF-8 text.") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line)["prompt"])
        except (ValueError, TypeError, KeyError):
            found.append(None)
        if not isinstance(found[-1], str):
            raise DataError(f'--prompts {path}, line {number}: no JSON object with a text under "prompt".')
    return found
