"""Every run that a figure of the first paper needs, at one of three scales; `gammalm figure ID --scale S` trains the part that it reads.

    gammalm figure all --scale cpu --workdir W
    gammalm grid --config grids/figures:scale=cpu --workdir W        the same runs, with the report of a grid
    gammalm figure all --scale paper --grid-args data=data/large,moe_data=data/large-moe

A ladder of dense sizes and two mixtures of experts, γ .5 and 1 in two arms (docs/science.md, sections 2 and 3); at the largest dense size
a third arm, `eps`, has ε = 1e-12 and no gate; at the smallest γ runs from .5 to 1.5, and γ .5 and 1 are trained at other learning rates
too. A cell without the label `lr` has the rate of its size, as all runs of the paper have; those with it are for verdicts at tuned rates.
The runs of the largest dense size with the adjustments, at γ .5 and 1, are measured while they train (config.monitor).

Why these numbers at scale cpu. The widths double from nano's; at d = 384 γ = 1 first meets the barrier of ε = 1e-5 (d^−2γ < ε from
d = 317 on). All sizes see the same tokens, as the paper's do: 500 × 16 × 128 = 1.0M, what two cores can give the largest. That is 10
tokens per parameter for the smallest and .25 for the largest, whose runs therefore compare how training starts. Rates are
1e-2·√(48/d), chosen before any run. Warm-up takes 1/15 of the steps at this scale: the models' own share would be five steps.

Scale gpu: 90 + 12 + 12 + 12 dense runs and 16 of mixtures, 600 × 64 × 512 = 20M tokens each. Model FLOP of a token (models/flops.py), in
units of 1e6: 6.2, 17.7, 56.6, 198 for micro-96 to micro-768, 17.3 and 55.0 for the mixtures. So a run is 1.2e14, 3.5e14, 1.1e15, 3.9e15,
3.4e14, 1.1e15, and all runs are 8.7e16: 6.0e16 for the two larger dense sizes, 2.7e16 for the rest. If a GPU reaches 20 % of its peak for
the former and 5 % for the latter, that is 44 minutes at a peak of 312 TFLOP/s (A100) and 14 at 989 (H100), and compiling some fifteen
programs comes on top. This is arithmetic; nobody has timed it. d = 768 lies well inside the barrier of ε = 1e-5. Rates and warm-up as at
scale cpu.

Scale paper: docs/science.md, section 9, one seed, so no intervals; each size has its own batch, steps and rate. 18 runs of 125m, 4 of 350m,
4 of 760m, 6 of 1.5b, 4 of each mixture: 5.8e21 FLOP, or 7,000 chip-hours at 50 % of the peak of a v5p (459 TFLOP/s). Dense models and
mixtures have tokenizers of their own (50304 and 64000 pieces), so two corpora.
"""

import dataclasses

from gammalm.config import load_config, typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Cell, Grid, arms, chain, fixed, product, values


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
    data: str  # corpus of the dense models, and of the mixtures unless moe_data says otherwise
    moe_settings: dict = dataclasses.field(default_factory=dict)  # leaves of the mixtures' runs
    gammas: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    rates: tuple[float, ...] = (0.3, 3.0)


SCALES = {
    "cpu": Scale(
        ("nano", "nano-96", "nano-192", "nano-384"), ("tiny-moe", "mini-moe"), "steps=500,batch=16,seq_len=128,vocab=1024",
        {"optimizer.warmup_steps": 33}, (5, 3, 3, 2), 2, "data/open-mix",
    ),
    "gpu": Scale(
        ("micro-96", "micro-192", "micro-384", "micro-768"), ("micro-moe", "midi-moe"), "steps=600",
        {"optimizer.warmup_steps": 40}, (5, 3, 3, 2), 2, "data/open-mix-4k",
    ),
    "paper": Scale(
        ("125m", "350m", "760m", "1.5b"), ("moe-1.5b-a0.25b", "moe-3b-a0.5b"), "", {}, (1, 1, 1, 1), 1, "data/large",
        {"data.mixture": "natural"},
    ),
}  # fmt: skip


EXTREMES = (0.5, 1.0)
MONITORED = ("condensation", "weights", "sink", "flow", "norm")
ARGS = {"scale": "cpu", "data": "", "moe_data": "", "mixture": "paper_dense"}  # no data: the scale's own; no moe_data: the same


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown scale."""
    args = typed_args(arg, ARGS, where="configs/grids/figures.py")
    if args.scale not in SCALES:
        raise ConfigError(f"configs/grids/figures.py: scale={args.scale!r} is none of {', '.join(SCALES)}.")
    scale = SCALES[args.scale]
    smallest, largest = scale.dense[0], scale.dense[-1]

    def runs(size: str, of: dict, gammas: tuple[float, ...], seeds: int, *more):
        settings = scale.settings
        if size in scale.mixtures:
            settings = settings | scale.moe_settings | ({"data.path": args.moe_data} if args.moe_data else {})
        return product(_size(size), arms(**of), values("gamma", gammas), *more, values("seed", range(seeds)), fixed(settings))

    cells = [runs(smallest, ARMS, scale.gammas, scale.seeds[0])]
    cells += [runs(size, ARMS, EXTREMES, seeds) for size, seeds in list(zip(scale.dense, scale.seeds, strict=True))[1:]]
    cells += [runs(largest, {"eps": {"eps": 1e-12, "gate": "none"}}, EXTREMES, scale.seeds[-1])]
    cells += [runs(size, ARMS, EXTREMES, scale.mixture_seeds) for size in scale.mixtures]
    rates = [load_config(f"lm:size={smallest}").optimizer.learning_rate * factor for factor in scale.rates]
    cells += [runs(smallest, ARMS, EXTREMES, scale.seeds[0], values("lr", rates))]
    base = f"lm:{scale.shape},data={args.data or scale.data},mixture={args.mixture}"
    return Grid("figures", base, [_monitored(cell, largest) for cell in chain(*cells)])


def _monitored(cell: Cell, largest: str) -> Cell:
    """The cell, measured while it trains if it is one of those for that."""
    if (cell.labels["size"], cell.labels["arm"]) != (largest, "adjusted"):
        return cell
    return dataclasses.replace(cell, overrides={**cell.overrides, "monitor.kinds": MONITORED})


def _size(name: str):
    return arms("size", **{name: {"size": name}})
