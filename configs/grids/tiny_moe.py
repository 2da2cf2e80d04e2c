"""A mixture of experts small enough for two CPU cores: γ × {balanced, unbalanced} × seeds.

    gammalm grid --config grids/tiny_moe:attention=mla,steps=600 --workdir W

Arms: `balanced` moves the selection bias against unequal load and adds the sequence-wise balance loss, as the paper-size mixtures do;
`unbalanced` does neither. At γ = 1 router logits start small, so that the bias decides early whom a token goes to (docs/science.md,
section 9): the load entropy of each layer is in every run's metrics.jsonl. With 1,024 tokens `tiny-moe` has 0.32M parameters, 0.17M of
them active; the default 300 steps are 7 tokens per active parameter and show routing, not what the model ends at.
"""

from gammalm.config import typed_args
from gammalm.experiments.grid import Grid, arms, fixed, numbers, product, values

# Leaves are overridden in both arms, so that the two differ in nothing else.
BALANCE = {
    "balanced": {"model.moe.bias_rate": 1e-2, "model.moe.balance_loss": 1e-4},
    "unbalanced": {"model.moe.bias_rate": 0.0, "model.moe.balance_loss": 0.0},
}

ARGS = {
    "attention": "mha",
    "gammas": "0.5/1",
    "seeds": 1,
    "steps": 300,
    "batch": 32,  # sequences per step
    "lr": 0.01,
    "vocab": 1024,
    "data": "data/open-mix",
    "mixture": "natural",
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    where = "configs/grids/tiny_moe.py"
    args = typed_args(arg, ARGS, where=where)
    cells = product(
        arms(**BALANCE),
        values("gamma", numbers(args.gammas, f"{where}: gammas")),
        values("seed", range(args.seeds)),
        fixed({"optimizer.warmup_steps": max(1, args.steps // 15)}),
    )
    base = (
        f"lm:size=tiny-moe,attention={args.attention},steps={args.steps},batch={args.batch},lr={args.lr},"
        f"vocab={args.vocab},data={args.data},mixture={args.mixture}"
    )
    return Grid("tiny_moe", base, cells)
