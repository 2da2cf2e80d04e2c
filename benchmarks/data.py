"""Tokens per second and core that the data room delivers: whole batches from token shards, packing and document index included.

    python benchmarks/data.py [--data FOLDER] [--json]

Without a folder it prepares Python's standard library first, offline. Counted is CPU time of this process, in which all work is done, so
the figure is per core even on a shared machine; the median of several rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from gammalm.data.load import PACKINGS, open_split
from gammalm.data.prepare import Request, prepare
from gammalm.data.tokenizer import Tokenizer

ROUNDS = 5
ROUND_TOKENS = 4_000_000
SHAPES = ((2048, 64), (512, 64), (128, 32))  # (T, B)


def batches(folder, packing: str, seq_len: int, batch: int) -> dict:
    """Open a split and time its batches. Returns tokens per CPU second, seconds to open, and the fill of its sequences."""
    begin = time.process_time()
    split = open_split(folder, "train", seq_len=seq_len, packing=packing, mixture="natural", seed=0, batch=batch)
    opened = time.process_time() - begin
    steps = ROUND_TOKENS // (seq_len * batch)
    rates = []
    for r in range(ROUNDS):
        begin = time.process_time()
        for step in range(r * steps, (r + 1) * steps):
            split.batch(step)
        rates.append(steps * batch * seq_len / (time.process_time() - begin))
    fill = sum(split.fill[g] * split.shares[g] for g in split.shares)
    return {"packing": packing, "T": seq_len, "B": batch, "tokens_per_s": statistics.median(rates), "open_s": opened, "fill": fill}


def encoding(folder) -> dict:
    """Text encoded per CPU second: this repository's own documents and code, repeated."""
    tok = Tokenizer.load(Path(folder) / "tokenizer.model")
    texts = [p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parents[1].rglob("*.py"))] * 3
    begin = time.process_time()
    tok.encode(texts)
    return {"encode_mb_per_s": sum(len(t.encode()) for t in texts) / 1e6 / (time.process_time() - begin)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a prepared folder; default: one made of Python's standard library")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.data or Path(temporary) / "stdlib"
        if not args.data:
            prepare(Request(("stdlib",), folder, vocab_size=4096))
        rows = [batches(folder, packing, seq_len, batch) for packing in PACKINGS for seq_len, batch in SHAPES]
        speed = encoding(folder)
    if args.json:
        print(json.dumps({"batches": rows, **speed}))
        return
    print("packing      T    B   Mtok/s per core   open, s   fill")
    for row in rows:
        print(f"{row['packing']:10s}{row['T']:5d}{row['B']:5d}{row['tokens_per_s'] / 1e6:18.1f}{row['open_s']:10.2f}{row['fill']:7.3f}")
    print(f"encoding: {speed['encode_mb_per_s']:.1f} MB of text per second and core")


if __name__ == "__main__":
    main()
