"""The γ grid of `launch/quickstart.sh`: initialization rate × peak learning rate × {plain, adjusted} × seeds, on a model small
enough to be trained on two CPU cores while one waits.

    gammalm grid --config grids/quickstart:seeds=2,steps=1000 --workdir W

Arms (docs/science.md, sections 2 and 3): `plain` has the norm constant ε = 1e-5 and no gate; `adjusted` has ε = 1e-12 and an
elementwise gate, with the FFN narrowed so that the parameter counts agree.

Why these numbers. `nano` has 0.10M parameters (half of them the tied embedding of 1,024 tokens) and sees 500 × 32 × 128 = 2.0M
tokens: 20 tokens per parameter, what is usually taken as compute-optimal. A wider model would fit the time only on fewer tokens, and
so compare how runs start, not what they learn. The learning rate is an axis because each γ has a best rate of its own, so a
comparison at one rate alone can favour either. Warm-up takes 1/15 of the steps: the models' own share would be five steps here, too
few for the highest rate.
"""

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Grid, arms, fixed, numbers, product, values

# Argument -> default. Lists are written a slash apart: gammas=0.5/0.75/1.
ARGS = {
    "arms": "plain/adjusted",
    "gammas": "0.5/1",
    "lrs": "0.003/0.02/0.1",
    "seeds": 1,
    "size": "nano",
    "steps": 500,
    "batch": 32,  # sequences per step
    "seq_len": 128,
    "vocab": 1024,
    "data": "data/open-mix",
    "mixture": "paper_dense",
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown arm."""
    where = "configs/grids/quickstart.py"
    args = typed_args(arg, ARGS, where=where)
    chosen = args.arms.split("/")
    if unknown := [name for name in chosen if name not in ARMS]:
        raise ConfigError(f"{where}: arms={args.arms!r}: {unknown[0]!r} is none of {', '.join(ARMS)}.")
    cells = product(
        arms(**{name: ARMS[name] for name in chosen}),
        values("gamma", numbers(args.gammas, f"{where}: gammas")),
        values("lr", numbers(args.lrs, f"{where}: lrs")),
        values("seed", range(args.seeds)),
        fixed({"optimizer.warmup_steps": max(1, args.steps // 15)}),
    )
    base = (
        f"lm:size={args.size},steps={args.steps},batch={args.batch},seq_len={args.seq_len},"
        f"vocab={args.vocab},data={args.data},mixture={args.mixture}"
    )
    return Grid("quickstart", base, cells)
