"""The paper's dense runs at their real size: 36B tokens each (docs/science.md, section 9).

    gammalm grid --config grids/paper_dense:data=data/large --workdir W

4 sizes × γ {.5, 1} × {plain, adjusted} (fig1a, fig1b, fig2a), and 1.5b × γ {.5, 1} with ε = 1e-12 and no gate: the arm between the
two, which makes the ε ablation (fig1d, fig1e: plain against low-eps) and the gate ablation (fig1h: low-eps against adjusted).
Each size keeps its own batch, learning rate and number of steps. The γ sweep (fig3b) is the grid `gamma_sweep`.
"""

from gammalm.config import typed_args
from gammalm.experiments.grid import ARMS, Grid, arms, chain, product, values

SIZES = ("125m", "350m", "760m", "1.5b")
GAMMAS = (0.5, 1.0)

ARGS = {"seeds": 1, "data": "data/open-mix"}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    args = typed_args(arg, ARGS, where="configs/grids/paper_dense.py")
    models = chain(
        product(values("size", SIZES), arms(**ARMS)),
        product(values("size", SIZES[-1:]), arms(**{"low-eps": {"eps": 1e-12, "gate": "none"}})),
    )
    cells = product(models, values("gamma", GAMMAS), values("seed", range(args.seeds)))
    return Grid("paper_dense", f"lm:data={args.data},mixture=paper_dense,packing=concat", cells)
