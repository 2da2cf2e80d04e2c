"""The paper's mixtures of experts at their real size: 100B tokens each (docs/science.md, section 9; fig2b, fig2c).

    gammalm grid --config grids/paper_moe:data=data/large,attention=mla --workdir W

2 sizes × γ {.5, 1} × {plain, adjusted}, with one kind of attention at a time: the paper evaluated mha and mla. The gated arm keeps the
width of its experts, so it has 5.1 and 7.5 % more active parameters: reports give the counts. The bias step against unequal load is the
same in every cell. The mixture of domains is that of the corpus itself.
"""

from gammalm.config import typed_args
from gammalm.experiments.grid import ARMS, Grid, arms, product, values

SIZES = ("moe-1.5b-a0.25b", "moe-3b-a0.5b")
GAMMAS = (0.5, 1.0)

ARGS = {"attention": "mha", "seeds": 1, "data": "data/open-mix"}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    args = typed_args(arg, ARGS, where="configs/grids/paper_moe.py")
    cells = product(values("size", SIZES), arms(**ARMS), values("gamma", GAMMAS), values("seed", range(args.seeds)))
    return Grid("paper_moe", f"lm:attention={args.attention},data={args.data},mixture=natural,packing=concat", cells)
