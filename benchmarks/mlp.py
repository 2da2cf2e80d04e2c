"""E1's sweep of the second source as one program over its cells, against 25 runs of one compiled program, and against compiling each.

    python benchmarks/mlp.py [--rows 60000] [--rounds 3] [--devices 2] [--compiled 5] [--json]

One epoch of 25 nets (784-64-32-32-10 on MNIST, plain SGD, one seed), with drawing, order and test included. The ways take turns; each is
compiled before, but for the last, which compiles for every run: `--compiled` runs are timed and scaled up to 25. Medians over the rounds.
The test losses of all ways are compared. Digits are made up (`--rows` of them), which a time does not depend on.
"""

import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=60_000, help="training examples")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--devices", type=int, default=os.cpu_count(), help="CPU devices that share the cells out in the second way")
parser.add_argument("--compiled", type=int, default=5, help="runs that are compiled anew, of 25")
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--json", action="store_true")
args = parser.parse_args()
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={args.devices}")

import jax  # noqa: E402  (after the number of devices is set)
import numpy as np  # noqa: E402

from gammalm.config import call  # noqa: E402
from gammalm.data.examples import Examples  # noqa: E402
from gammalm.training.nets import NetProgram, train_nets  # noqa: E402
from gammalm.training.workdir import versions  # noqa: E402


def main():
    rng, tested = np.random.default_rng(0), 10_000
    images = rng.integers(0, 256, (args.rows + tested, 784)).astype(np.uint8)
    examples = Examples(images, rng.integers(0, 10, len(images)).astype(np.int32), 255.0, tested, together=True)
    grid = call("grids/han_e1:seeds=1,epochs=1", "get_grid")
    configs = [cell.config() for cell in grid.cells if cell.labels["optimizer"] == args.optimizer]
    one, all_ = jax.devices()[:1], jax.devices()[: args.devices]
    cells, shared, single = NetProgram(configs[0], one), NetProgram(configs[0], all_), NetProgram(configs[0], one)
    ways = {
        "one program": lambda: train_nets(configs, examples, devices=one, program=cells),
        f"one program, {len(all_)} devices": lambda: train_nets(configs, examples, devices=all_, program=shared),
        "25 runs of one program": lambda: [train_nets([c], examples, devices=one, program=single)[0] for c in configs],
        "25 runs, each compiled": lambda: [train_nets([c], examples, devices=one)[0] for c in configs[: args.compiled]],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            records = way()
            if number:  # the first round compiles
                seconds[name].append((time.perf_counter() - begin) * len(configs) / len(records))
            losses[name] = np.array([record["test_loss"][-1] for record in records])
    median = {name: statistics.median(of) for name, of in seconds.items()}
    first = losses["one program"]
    apart = max(float(np.nanmax(np.abs(of / first[: len(of)] - 1))) for of in losses.values())
    if args.json:
        print(json.dumps({"rows": args.rows, "seconds": seconds, "median": median, "largest_difference": apart, "versions": versions()}))
        return
    for name, spent in median.items():
        print(f"{name:28}{spent:8.2f} s   {spent / median['one program']:.2f} times one program")
    print(f"largest relative difference between test losses of one cell: {apart:.1e}")


if __name__ == "__main__":
    main()
