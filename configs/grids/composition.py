"""The composition task (docs/composition.md): does a small initialization make a model compose two functions, a large one memorise?

    gammalm data prepare --source composition
    gammalm grid --config grids/composition --workdir W
    gammalm analyze composition --workdir W

γ × {plain, adjusted} × peak learning rate × seeds. Settings from the authors' public code where it has them: T = 9, AdamW with b2 = .999
and weight decay .01, gradient norm 1, warm-up and cosine, the loss of the answer alone. Their models are wider (400) and see hundreds of
times as many examples at lower rates. Width, steps and rates here are for two cores: 1,200 × 128 examples with two layers of width 96 take
about 45 seconds of one core. At rate .003 γ = .5 fits the seen pairs in these steps; γ = 1 does in some seeds, and needs more with the
gate.
"""

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Grid, arms, fixed, numbers, product, values

# Argument -> default. Lists are written a slash apart: gammas=0.5/0.75/1.
ARGS = {
    "arms": "plain/adjusted",
    "gammas": "0.5/0.75/1",
    "lrs": "0.001/0.003",
    "seeds": 3,
    "size": "nano-96",
    "layers": 2,
    "steps": 1200,
    "batch": 128,  # examples per step
    "data": "data/composition",
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown arm."""
    where = "configs/grids/composition.py"
    args = typed_args(arg, ARGS, where=where)
    chosen = args.arms.split("/")
    if unknown := [name for name in chosen if name not in ARMS]:
        raise ConfigError(f"{where}: arms={args.arms!r}: {unknown[0]!r} is none of {', '.join(ARMS)}.")
    cells = product(
        arms(**{name: ARMS[name] for name in chosen}),
        values("gamma", numbers(args.gammas, f"{where}: gammas")),
        values("lr", numbers(args.lrs, f"{where}: lrs")),
        values("seed", range(args.seeds)),
        fixed({
            "data.loss": "last", "model.n_layers": args.layers, "optimizer.b2": 0.999, "optimizer.weight_decay": 0.01,
            "optimizer.warmup_steps": max(1, args.steps // 20),
        }),
    )  # fmt: skip
    base = (
        f"lm:size={args.size},steps={args.steps},batch={args.batch},vocab=110,seq_len=9,packing=documents,mixture=natural,data={args.data}"
    )
    return Grid("composition", base, cells)
