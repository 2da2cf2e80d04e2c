"""What subcommands share that look at a model: the model, of a run or fresh from a config, its tokenizer, the batches that it
reads, and how results leave."""

import argparse
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from gammalm.cli.options import add_config, config_from
from gammalm.errors import ConfigError
from gammalm.files import write_json_atomic


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the choice of `--checkpoint WORKDIR[:STEP]` or `--config SPEC`."""
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--checkpoint", metavar="WORKDIR[:STEP]", help="folder of a run, and a step of it; default: the newest")
    add_config(choice, required=False)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the text that is read: the validation split of a prepared folder."""
    parser.add_argument("--data", type=Path, metavar="PATH", help="prepared folder whose validation split is read; default: the config's")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="read of each domain; 0: all. Default: 4")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="in a batch, which sets the memory. Default: 8")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object there too")


def add_measured(parser: argparse.ArgumentParser) -> None:
    """All options of a kind that measures a subject over text."""
    add_subject(parser)
    add_data(parser)
    add_output(parser)


def split_step(text: str) -> tuple[Path, int | None]:
    """`runs/tiny:300` as (folder, step); without a step: (folder, None)."""
    found = re.fullmatch(r"(.+):(\d+)", text)
    return (Path(found[1]), int(found[2])) if found else (Path(text), None)


def load_subject(args: argparse.Namespace):
    """The model that the command line asks for, as gammalm.training.load.Loaded. Raises ConfigError, CheckpointError."""
    if args.checkpoint is not None:
        if args.overrides:
            raise ConfigError(f"--config.{args.overrides[0][0]} changes a --config, and --checkpoint has its own.")
        from gammalm.training.load import load_model

        return load_model(*split_step(args.checkpoint))
    config = config_from(args)

    from gammalm.initializers import init_params
    from gammalm.models.decoder import Model, fresh_buffers
    from gammalm.training.load import Loaded

    model = Model(config.model)
    params = init_params(model.specs, config.init, config.seed, d_model=config.model.d_model, n_layers=config.model.n_layers)
    return Loaded(config, model, params, fresh_buffers(model), 0, None)


def find_tokenizer(workdir: Path, loaded) -> Path | None:
    """The tokenizer that the run was trained with, by its hash: in the run's folder, where import puts it, or in that of its data."""
    from gammalm.data.shards import TOKENIZER

    for path in (workdir / TOKENIZER, Path(loaded.config.data.path) / TOKENIZER):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == loaded.tokenizer_sha256:
            return path
    return None


def tokenizer_of(file: Path | None, workdir: Path, loaded):
    """The tokenizer of a trained model (gammalm.data.tokenizer.Tokenizer): the run's own, or that of `file`.

    Raises ConfigError where the run's is not found, where `file` is another, or where it has more tokens than the model.
    """
    from gammalm.data.tokenizer import Tokenizer

    path = file or find_tokenizer(workdir, loaded)
    if path is None:
        raise ConfigError(f"The tokenizer of {workdir} is neither there nor in {loaded.config.data.path}. Name its file with --tokenizer.")
    tokenizer = Tokenizer.load(path)
    if loaded.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ConfigError(f"{path} is another tokenizer than the model was trained with. Name that one.")
    if tokenizer.vocab_size > loaded.config.model.vocab_size:
        raise ConfigError(f"{path} has {tokenizer.vocab_size} tokens, the model {loaded.config.model.vocab_size}: it is another model's.")
    return tokenizer


def batches_of(args: argparse.Namespace, loaded) -> Iterator[dict]:
    """The first `--batches` validation batches of each domain. Raises DataError where the text is not the model's own."""
    from gammalm.training.load import validation_batches, validation_split

    if args.batches < 0 or args.sequences < 1:
        raise ConfigError(f"--batches {args.batches} --sequences {args.sequences}: batches are 0 (all) or more, sequences 1 or more.")
    yield from validation_batches(validation_split(loaded, args.sequences, args.data), args.batches)


def describe_subject(args: argparse.Namespace, loaded) -> dict:
    """What was measured, for the JSON object: checkpoint and step, or config; gamma, eps, packing."""
    c = loaded.config
    name = {"checkpoint": str(split_step(args.checkpoint)[0]), "step": loaded.step} if args.checkpoint else {"config": args.config}
    return name | {
        "gamma": c.init.gamma, "preset": c.init.preset, "norm_eps": c.model.norm_eps, "gate": c.model.gate, "d_model": c.model.d_model,
        "packing": c.data.packing, "seq_len": c.data.seq_len,
    }  # fmt: skip


def deliver(args: argparse.Namespace, found: dict, text: str) -> None:
    """Prints the result `found` as JSON or as `text`, and writes it where `--out` says. Raises ConfigError where that is no place."""
    found = finite(found)
    print(json.dumps(found) if args.json else text)
    if args.out is not None:
        with writing("--out", args.out):
            write_json_atomic(args.out, found)


def finite(value):
    """`value` with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def writing(option: str, file: Path) -> Iterator[None]:
    """Around the writing of the `file` that `option` names. Raises ConfigError where that is no place; a full disk is another matter."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{option} {file} cannot be written ({error.strerror}). Name a file in a folder that exists.") from error


def table(rows: list[tuple]) -> str:
    """Aligned text; the first row is the head. Numbers have four significant digits."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
