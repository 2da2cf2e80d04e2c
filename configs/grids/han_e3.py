"""E3 of the second source: a 12-layer GPT-2 style model from the source's initialization and from γ-initialization, weights tracked.

    gammalm figure han-e3 --workdir W

The source: std .02, embeddings Xavier normal, AdamW at 1e-4, batches of 16 sequences. It does not give data, length, steps, decay or
schedule [R]: the open mix, a constant rate without warm-up, torch's defaults of AdamW (β .9 and .999, decay .01), no clipping. Arm `small`
is the same model at γ = 1. At scale cpu it is 48 wide, reads 64 tokens at a time, and 500 steps of 1e-4 are short for it; so both arms are
also run at 1e-3, which shows in as many steps what comes later. Chosen before any run.

Scale paper: GPT-2's 12 layers of width 768 at sequences of 1,024 tokens, 30,000 steps, the source's rate and one seed alone.
"""

import dataclasses

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Grid, arms, fixed, product, values

ARGS = {"scale": "cpu", "seeds": 0, "steps": 0, "data": ""}  # 0, or empty: the scale's


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size and sequence length of configs/lm.py, steps, seeds, rates, corpus, leaves."""

    size: str
    seq_len: int
    steps: int
    seeds: int
    rates: tuple[float, ...]
    data: str
    settings: dict = dataclasses.field(default_factory=dict)


SCALES = {
    "cpu": Scale("nano", 64, 500, 3, (1e-4, 1e-3), "data/open-mix", {"model.n_layers": 12}),
    "paper": Scale("125m", 1024, 30_000, 1, (1e-4,), "data/large"),
}
SETTINGS = {
    "optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "optimizer.b2": 0.999, "optimizer.weight_decay": 0.01,
    "optimizer.clip": 0.0, "train.validation_batches": 4, "monitor.kinds": ("weights",), "monitor.points": 40,
}  # fmt: skip
ARMS = {
    "source": {"init.preset": "fixed_std", "init.rules": ("embed=xavier_normal",)},
    "small": {"init.preset": "fan_in", "init.gamma": 1.0},
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown scale."""
    args = typed_args(arg, ARGS, where="configs/grids/han_e3.py")
    if args.scale not in SCALES:
        raise ConfigError(f"configs/grids/han_e3.py: scale={args.scale!r} is none of {', '.join(SCALES)}.")
    scale = SCALES[args.scale]
    seeds = values("seed", range(args.seeds or scale.seeds))
    size = arms("size", **{scale.size: {"size": scale.size}})
    cells = product(size, arms(**ARMS), values("lr", scale.rates), seeds, fixed(SETTINGS | scale.settings))
    base = f"lm:style=gpt2,seq_len={scale.seq_len},batch=16,steps={args.steps or scale.steps},data={args.data or scale.data}"
    return Grid("han-e3", base, cells)
