"""Loss against the initialization rate (fig3b): γ = .5, .6, … 1.5 at 125M parameters, 36B tokens and the size's own learning rate.

    gammalm grid --config grids/gamma_sweep:data=data/large --workdir W

The paper does not say with which ε and gate its figure was made. `adjusted` (ε = 1e-12, elementwise gate) is the default here, as
its argument for γ = 1 needs both; `arm=plain` gives ε = 1e-5 without a gate.
"""

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Grid, arms, product, values

GAMMAS = tuple(tenths / 10 for tenths in range(5, 16))

ARGS = {"size": "125m", "arm": "adjusted", "seeds": 1, "data": "data/open-mix"}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown arm."""
    where = "configs/grids/gamma_sweep.py"
    args = typed_args(arg, ARGS, where=where)
    if args.arm not in ARMS:
        raise ConfigError(f"{where}: arm={args.arm!r} is none of {', '.join(ARMS)}.")
    cells = product(
        arms(**{args.arm: ARMS[args.arm]}),
        values("gamma", GAMMAS),
        values("seed", range(args.seeds)),
    )
    return Grid("gamma_sweep", f"lm:size={args.size},data={args.data},mixture=paper_dense,packing=concat", cells)
