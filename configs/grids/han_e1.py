"""E1 of the second source: a sweep of the initial standard deviation, 784-64-32-32-10 with ReLU on MNIST.

    gammalm figure han-e1 --workdir W

25 values from 1e-4 to 10, evenly on a logarithmic axis; every matrix of a net has the same. The source does not say how it trains, so two
optimizers are run, plain SGD and Adam, each at one rate for all values: .05 and 1e-3, batches of 64, 5 epochs, chosen before any run.
"""

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Grid, arms, product, values

ARGS = {"scale": "cpu", "seeds": 3, "epochs": 0, "data": ""}  # scale: these nets have one size; data: a prepared folder
STDS = [float(f"{10 ** (-4 + 5 * k / 24):.4g}") for k in range(25)]


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or another scale."""
    args = typed_args(arg, ARGS, where="configs/grids/han_e1.py")
    if args.scale != "cpu":
        raise ConfigError(f"configs/grids/han_e1.py: scale={args.scale!r}: it has one scale, cpu.")
    optimizers = arms("optimizer", sgd={"optimizer": "sgd"}, adam={"optimizer": "adam"})
    cells = product(optimizers, values("std", STDS), values("seed", range(args.seeds)))
    return Grid("han-e1", f"mlp:data=mnist,epochs={args.epochs},path={args.data}", cells)
