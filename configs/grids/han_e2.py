"""E2 of the second source: Xavier against Kaiming, and torch's default and LeCun, 11-16-32-32-1 with ReLU on UCI Wine Quality.

    gammalm figure han-e2 --workdir W

The source names Xavier normal against Kaiming normal in one place and uniform in another, a binary label and not which, ten runs, and
not how it trains: so both forms, both labels (red or white; quality of at least 6), SGD at .05 and Adam at 1e-3 with batches of 32 for 30
epochs, chosen before any run. A seed has one draw per initializer, one split into training and test rows and one order of the examples.
"""

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Grid, arms, product, values

ARGS = {"scale": "cpu", "seeds": 10, "epochs": 0, "data": ""}  # scale: these nets have one size; data: a prepared folder
PRESETS = ("xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform", "lecun_normal", "torch_linear")


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or another scale."""
    args = typed_args(arg, ARGS, where="configs/grids/han_e2.py")
    if args.scale != "cpu":
        raise ConfigError(f"configs/grids/han_e2.py: scale={args.scale!r}: it has one scale, cpu.")
    cells = product(
        arms("optimizer", sgd={"optimizer": "sgd"}, adam={"optimizer": "adam"}),
        arms("target", colour={"data": "wine-red"}, quality={"data": "wine-quality"}),
        arms("preset", **{name: {"preset": name} for name in PRESETS}),
        values("seed", range(args.seeds)),
    )
    return Grid("han-e2", f"mlp:epochs={args.epochs},path={args.data}", cells)
