"""`gammalm import hf`: a model folder of transformers as a run at step 0, to measure, to evaluate, or to train on."""

import argparse
import json
import math
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "import",
        help="read a model of Hugging Face transformers",
        epilog="Example: gammalm import hf --model exported/tiny --workdir runs/imported",
    )
    forms = parser.add_subparsers(dest="form", required=True, metavar="hf")
    hf = forms.add_parser(
        "hf",
        help="a folder with config.json and safetensors",
        description="Read a model that transformers saved and write it as a run at step 0. Families, and what is refused: "
        "docs/huggingface.md. Pickles are never opened, and no code of the folder is run.",
        epilog="Example: gammalm import hf --model exported/tiny --workdir runs/imported",
    )
    hf.add_argument("--model", required=True, type=Path, metavar="DIR", help="folder of the model, on this machine")
    hf.add_argument("--workdir", required=True, type=Path, help="folder of the run to write; it must hold none")
    hf.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from gammalm.data.shards import TOKENIZER
    from gammalm.interop.export import OUR_CONFIG
    from gammalm.interop.import_ import import_hf
    from gammalm.interop.tokenizer import read_tokenizer
    from gammalm.training.load import require_no_run, save_model
    from gammalm.trees import flat

    require_no_run(args.workdir)  # before a large model is read
    found = import_hf(args.model)
    # Only an export of ours: a SentencePiece model of another's may be used in ways that our tokenizer does not know.
    tokenizer = args.model / TOKENIZER
    if (args.model / OUR_CONFIG).is_file() and tokenizer.is_file():
        read_tokenizer(tokenizer, vocab_size=found.config.model.vocab_size)  # refuses what is not the model's
    else:
        tokenizer = None
    count = sum(math.prod(array.shape) for array in flat(found.params).values())
    to_device(found.params)
    to_device(found.buffers)
    save_model(args.workdir, found.config, found.params, found.buffers, tokenizer)
    if args.json:
        said = {"workdir": str(args.workdir), "model_type": found.model_type, "parameters": count, "tokenizer": tokenizer is not None}
        print(json.dumps(said))
        return 0
    print(f"{args.workdir}: {count:,} parameters from {found.model_type}{', with its tokenizer' if tokenizer else ', without a tokenizer'}")
    return 0


def to_device(tree: dict) -> None:
    """Puts each array of a nested dict on the device, leaf by leaf, so that no more than one leaf exists twice."""
    import jax.numpy as jnp

    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            to_device(leaf)
        else:
            tree[name] = jnp.asarray(leaf)
