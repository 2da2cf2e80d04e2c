"""Every run that a figure of the first paper needs, at one of three scales; `gammalm figure ID --scale S` trains the part that it reads.

    gammalm figure all --scale cpu --workdir W
    gammalm grid --config grids/figures:scale=cpu --workdir W        the same runs, with the report of a grid

A ladder of dense sizes and two mixtures of experts, γ .5 and 1 in two arms (docs/science.md, sections 2 and 3); at the largest dense size
a third arm, `eps`, has ε = 1e-12 and no gate; at the smallest γ runs from .5 to 1.5, and γ .5 and 1 are trained at other learning rates
too. A cell without the label `lr` has the rate of its size, as all runs of the paper have; those with it are for verdicts at tuned rates.

Why these numbers at scale cpu. The widths double from nano's; at d = 384 γ = 1 first meets the barrier of ε = 1e-5 (d^−2γ < ε from
d = 317 on). All sizes see the same tokens, as the paper's do: 500 × 16 × 128 = 1.0M, what two cores can give the largest. That is 10
tokens per parameter for the smallest and .25 for the largest, whose runs therefore compare how training starts. Rates are
1e-2·√(48/d), chosen before any run. Warm-up takes 1/15 of the steps at this scale: the models' own share would be five steps.
"""

import dataclasses

from gammalm.config import load_config, typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Grid, arms, chain, fixed, product, values


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes from small to large, tokens and seeds of their runs; factors of the smallest size's learning rate that are
    tried as well."""

    dense: tuple[str, ...]
    mixtures: tuple[str, ...]
    shape: str  # arguments of configs/lm.py that all runs share
    settings: dict  # leaves that all runs share
    seeds: tuple[int, ...]  # how many, of each dense size; the smallest is that of the sweep over γ
    mixture_seeds: int
    gammas: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    rates: tuple[float, ...] = (0.3, 3.0)


SCALES = {
    "cpu": Scale(
        ("nano", "nano-96", "nano-192", "nano-384"), ("tiny-moe", "mini-moe"), "steps=500,batch=16,seq_len=128,vocab=1024",
        {"optimizer.warmup_steps": 33}, (5, 3, 3, 2), 2,
    ),
}  # fmt: skip


EXTREMES = (0.5, 1.0)
ARGS = {"scale": "cpu", "data": "data/open-mix", "mixture": "paper_dense"}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown scale."""
    args = typed_args(arg, ARGS, where="configs/grids/figures.py")
    if args.scale not in SCALES:
        raise ConfigError(f"configs/grids/figures.py: scale={args.scale!r} is none of {', '.join(SCALES)}.")
    scale = SCALES[args.scale]
    smallest, largest = scale.dense[0], scale.dense[-1]

    def runs(size: str, of: dict, gammas: tuple[float, ...], seeds: int, *more):
        return product(_size(size), arms(**of), values("gamma", gammas), *more, values("seed", range(seeds)), fixed(scale.settings))

    cells = [runs(smallest, ARMS, scale.gammas, scale.seeds[0])]
    cells += [runs(size, ARMS, EXTREMES, seeds) for size, seeds in list(zip(scale.dense, scale.seeds, strict=True))[1:]]
    cells += [runs(largest, {"eps": {"eps": 1e-12, "gate": "none"}}, EXTREMES, scale.seeds[-1])]
    cells += [runs(size, ARMS, EXTREMES, scale.mixture_seeds) for size in scale.mixtures]
    rates = [load_config(f"lm:size={smallest}").optimizer.learning_rate * factor for factor in scale.rates]
    cells += [runs(smallest, ARMS, EXTREMES, scale.seeds[0], values("lr", rates))]
    return Grid("figures", f"lm:{scale.shape},data={args.data},mixture={args.mixture}", chain(*cells))


def _size(name: str):
    return arms("size", **{name: {"size": name}})
