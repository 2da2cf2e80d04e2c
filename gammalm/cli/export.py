"""`gammalm export hf`: the model of a run as a folder that transformers loads."""

import argparse
import json
import sys
from pathlib import Path

from gammalm.cli.subject import find_tokenizer
from gammalm.interop.targets import OWN, TARGETS
from gammalm.interop.tensorfiles import CODES


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a trained model for Hugging Face transformers",
        epilog="Example: gammalm export hf --checkpoint runs/tiny --out exported/tiny",
    )
    forms = parser.add_subparsers(dest="form", required=True, metavar="hf")
    hf = forms.add_parser(
        "hf",
        help="config, safetensors and tokenizer in one folder",
        description="Write the weights of one checkpoint as safetensors with a config.json and the tokenizer. A target represents the "
        "model exactly or is refused with the reasons; docs/huggingface.md lists them.",
        epilog="Example: gammalm export hf --checkpoint runs/tiny --out exported/tiny --dtype bfloat16",
    )
    hf.add_argument("--checkpoint", required=True, type=Path, metavar="WORKDIR", help="folder of a run (the --workdir of `gammalm train`)")
    hf.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; absent or empty")
    hf.add_argument(
        "--target",
        default="auto",
        choices=["auto", *TARGETS, OWN],
        help=f"family of transformers; auto (default): the first that fits. {OWN}: our own modelling file, for what no family has",
    )
    hf.add_argument("--dtype", default="float32", choices=list(CODES), help="of the stored weights; default: float32, every bit")
    hf.add_argument("--step", type=int, metavar="N", help="step of the checkpoint; default: the newest")
    hf.add_argument("--tokenizer", type=Path, metavar="FILE", help="SentencePiece model; default: the run's, if it is found")
    hf.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from gammalm.interop.export import export_hf, require_free
    from gammalm.training.load import load_model

    require_free(args.out)  # before a large checkpoint is read
    loaded = load_model(args.checkpoint, args.step)
    tokenizer = args.tokenizer or find_tokenizer(args.checkpoint, loaded)
    exported = export_hf(
        loaded.config, loaded.params, loaded.buffers, args.out, target=args.target, dtype=args.dtype,
        tokenizer=tokenizer, tokenizer_sha256=loaded.tokenizer_sha256,
    )  # fmt: skip
    if args.json:
        found = {"out": str(args.out), "step": loaded.step, "tokenizer": tokenizer and str(tokenizer)}
        print(json.dumps(found | vars(exported)))
        return 0
    for name, reasons in exported.passed_over.items():
        print(f"not {name}: {'; '.join(reasons)}", file=sys.stderr)
    if tokenizer is None:
        print("no tokenizer: the run does not know one that is here; give it with --tokenizer FILE.", file=sys.stderr)
    print(f"{args.out}: {exported.target}, step {loaded.step}, {exported.tensors} tensors, {exported.bytes:,} bytes of {args.dtype}")
    return 0
