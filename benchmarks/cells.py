"""How to train the cells of a grid on this machine: one after another, walked over in one program (map), or side by side (vmap).

    python benchmarks/cells.py [--cells 4] [--size nano] [--devices 2] [--json]

Every contestant is compiled first; then they take turns, one step of all cells at a time, so that all see the same machine.
Tokens per second of all cells together: medians over the rounds. The losses of all contestants after the last round are printed
too: they must agree.
"""

import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, default=4)
parser.add_argument("--size", default="nano")
parser.add_argument("--devices", type=int, default=os.cpu_count(), help="CPU devices that share the cells out in the last contestants")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--json", action="store_true")
args = parser.parse_args()
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={args.devices}")

import jax  # noqa: E402  (after the number of devices is set)
import numpy as np  # noqa: E402

from gammalm.config import load_config  # noqa: E402
from gammalm.training.program import Program  # noqa: E402
from gammalm.training.step import scalars  # noqa: E402
from gammalm.training.workdir import versions  # noqa: E402


class Contestant:
    """All cells, trained in one way; each cell has its own learning rate."""

    def __init__(self, config, mode: str, devices: int):
        self.name = f"{mode}, {devices} device{'s' if devices > 1 else ''}"
        single = mode == "single"
        token_bytes = np.ones(config.model.vocab_size, np.int32)
        how = {} if single else {"cells": args.cells, "mode": mode, "cell_devices": devices}
        self.program = Program(config, token_bytes, devices=jax.devices()[:devices], **how)
        each = [scalars(config) | {"learning_rate": np.float32(1e-3 * (i + 1))} for i in range(args.cells)]
        states = [self.program.init(config) for _ in range(args.cells)]
        groups = [[i] for i in range(args.cells)] if single else [list(range(args.cells))]
        self.parts = [(self.program.stack([states[i] for i in g]), self.program.scalars([each[i] for i in g]), len(g)) for g in groups]

    def step(self, tokens) -> float:
        """One step of every cell; seconds."""
        begin = time.perf_counter()
        losses = []
        for n, (state, scalar, count) in enumerate(self.parts):
            state, metrics = self.program.step(state, self.program.put([{"tokens": tokens}] * count), scalar)
            losses.append(metrics["loss"])
            self.parts[n] = (state, scalar, count)
        self.losses = np.concatenate([np.atleast_1d(loss) for loss in losses]).tolist()  # waits for all, as the loop does a step late
        return time.perf_counter() - begin


def main():
    config = load_config(f"lm:size={args.size}")
    rng = np.random.default_rng(0)
    shape = (config.batch.sequences, config.data.seq_len + 1)
    ways = [("single", 1), ("map", 1), ("vmap", 1)] + ([("map", args.devices), ("vmap", args.devices)] if args.devices > 1 else [])
    contestants = [Contestant(config, *way) for way in ways]
    seconds = {c.name: [] for c in contestants}
    for number in range(args.rounds + 1):
        tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
        for contestant in contestants:
            spent = contestant.step(tokens)
            if number:  # the first round compiles
                seconds[contestant.name].append(spent)
    tokens_per_round = args.cells * config.batch.sequences * config.data.seq_len
    rows = [
        {"way": c.name, "tokens_per_s": round(tokens_per_round / statistics.median(seconds[c.name])), "losses": c.losses}
        for c in contestants
    ]
    spread = max(np.ptp([row["losses"][i] for row in rows]) for i in range(args.cells))
    if args.json:
        print(json.dumps({"cells": args.cells, "size": args.size, "rows": rows, "largest_loss_difference": spread, "versions": versions()}))
        return
    for row in rows:
        print(f"{row['way']:20} {row['tokens_per_s']:>9,} tokens/s  {row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f}")
    print(f"largest difference between the losses of one cell: {spread:.1e}")


if __name__ == "__main__":
    main()
