"""Where small initialization helps: gains in probability, token by token, of one trained model over another, by difficulty."""

import argparse
import dataclasses
from pathlib import Path

from gammalm.cli.subject import add_data, add_output, batches_of, deliver, split_step, table, writing
from gammalm.errors import ConfigError, DataError
from gammalm.files import write_text_atomic

EXAMPLE = "gammalm analyze tokens --small runs/gamma1 --standard runs/gamma0.5 --batches 0 --html gains.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", metavar="WORKDIR[:STEP]", help="run with the small initialization; step: the newest by default")
    parser.add_argument("--standard", metavar="WORKDIR[:STEP]", help="run it is compared with; same tokenizer, sequences and packing")
    add_data(parser)
    parser.add_argument("--part", default="0/1", metavar="I/M", help="only every M-th batch, from the I-th (0 to M-1): shares work out")
    parser.add_argument("--state", type=Path, metavar="FILE", help="write the counts there, for --merge")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add up such files instead of comparing models")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the first sequence, coloured by gain, as a page")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    part = _part(args.part)
    if (args.merge is None) != bool(args.small and args.standard) or (args.merge and (args.small or args.standard or args.html)):
        raise ConfigError("Give --small and --standard, two trained runs, or --merge with files that --state wrote, and not both.")

    from gammalm.analysis.tokens import TokenGains

    page = None
    if args.merge:
        gains, about = TokenGains(), {"merged": [str(path) for path in args.merge]}
        for path in args.merge:
            gains.merge(TokenGains.load(path))
    else:
        gains, about, page = _compare(args, part)
    found = gains.summary()
    if args.state is not None:
        with writing("--state", args.state):
            gains.save(args.state)
    if page is not None:
        with writing("--html", args.html):
            write_text_atomic(args.html, page)
    deliver(args, {"analysis": "tokens", **about, **dataclasses.asdict(found)}, _text(found))
    return 0


def _part(text: str) -> tuple[int, int]:
    try:
        i, m = map(int, text.split("/"))
        if 0 <= i < m:
            return i, m
    except ValueError:
        pass
    raise ConfigError(f"--part {text}: write I/M with I from 0 to M-1, as in 0/4.")


def _compare(args, part):
    """The gains of the models that the command line names, what was compared, and the coloured page or None."""
    from gammalm.analysis.tokens import loss_function, measure
    from gammalm.data.shards import TOKENIZER, read_manifest
    from gammalm.data.tokenizer import Tokenizer
    from gammalm.training.load import load_model

    loaded = {name: load_model(*split_step(getattr(args, name))) for name in ("small", "standard")}
    small, standard = loaded["small"].config, loaded["standard"].config
    for name in ("seq_len", "packing"):
        if small.data[name] != standard.data[name]:
            raise ConfigError(
                f"--small has data.{name} {small.data[name]}, --standard {standard.data[name]}: a token would not have the same context. "
                "Compare runs that agree."
            )
    hashes = {one.tokenizer_sha256 for one in loaded.values()} - {None}
    if len(hashes) > 1:
        raise DataError("--small and --standard were trained with different tokenizers, so their tokens differ. Compare runs of one.")
    losses = {name: loss_function(one.model, one.params, one.buffers, one.config.model.norm_eps) for name, one in loaded.items()}
    folder = Path(args.data or small.data.path)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    eod_id = read_manifest(folder)["tokenizer"]["eod_id"]
    gains = measure(losses["small"], losses["standard"], batches_of(args, loaded["small"]), eod_id, part)
    about = {
        name: {"checkpoint": getattr(args, name), "step": one.step, "gamma": one.config.init.gamma, "norm_eps": one.config.model.norm_eps}
        for name, one in loaded.items()
    } | {"data": str(folder), "seq_len": small.data.seq_len, "packing": small.data.packing, "part": args.part}
    return gains, about, None if args.html is None else _page(args, loaded, losses, tokenizer)


def _page(args, loaded, losses, tokenizer) -> str:
    """The first sequence, or of packed documents the first of them, as a page that needs nothing else."""
    import numpy as np

    from gammalm.analysis.token_text import coloured_text
    from gammalm.experiments.page import PAGE, paragraph, section

    batch = next(batches_of(args, loaded["small"]))
    length = len(batch["tokens"][0])
    if "segments" in batch:
        length = int(np.count_nonzero(batch["segments"][0] == batch["segments"][0, 0]))
    of_each = [np.asarray(losses[name](batch))[0, : length - 1] for name in ("small", "standard")]
    title = "Where the small initialization helps, token by token"
    which = [f"{name}: {getattr(args, name)}, γ = {one.config.init.gamma:g}, step {one.step:,}" for name, one in loaded.items()]
    said = "; ".join(which) + ". The first sequence of the validation text, not a chosen one."
    text = coloured_text(batch["tokens"][0, :length].tolist(), *of_each, tokenizer.decode)
    return PAGE.substitute(title=title, body=section("gains", title, paragraph(said, "note"), text))


def _text(found) -> str:
    def with_error(value, error):
        return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")

    rows = [
        (i, f"{row['low']:.3f} - {row['high']:.3f}", with_error(row["gain"], row["gain_se"]), with_error(row["nats"], row["nats_se"]))
        for i, row in enumerate(found.by_difficulty, 1)
    ]
    rows.append(("all", "", with_error(found.gain, found.gain_se), with_error(found.nats, found.nats_se)))
    return table([("decile", "difficulty, nats", "gain", "l_std - l_small, nats"), *rows]) + (
        f"\n{found.tokens:,} tokens, {100 * found.unchanged:.1f} % of them with a gain within ±0.1; ± one standard error, by documents"
    )
