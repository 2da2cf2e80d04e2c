"""Is it the sink or the added nonlinearity? The gate beside two remedies that take the attention sink away and add nothing else.

    gammalm grid --config grids/sink_remedies --workdir W
    gammalm grid --config grids/sink_remedies:size=125m,lrs=6e-4,seeds=1,steps=0,batch=0,seq_len=0,vocab=0,data=data/large --workdir W

Arms, all with ε = 1e-12: `none`; the gate `elementwise` (with the narrower FFN that keeps the parameter count) and `headwise`; the
softmax with `one` more in its denominator, and with a `learned` sink logit per head (`model.softmax_sink`, docs/models.md). A gate can
silence a head and also multiplies its output by a function of the input; a softmax sink can only silence it. Where the sink is what costs
loss, `one` and `learned` gain what the gate gains over `none`, and gain more at γ = 1, where the paper finds larger sinks; where they lower
the score and not the loss, the gate's gain is of another kind. Each run records its sink scores (`monitors.jsonl`), so that both are seen.

90 runs of 1.0M tokens by default, with the settings of `grids/figures:scale=cpu`. The learning rate is an axis because each arm may want
its own.
"""

from gammalm.config import typed_args
from gammalm.experiments.grid import Grid, arms, fixed, numbers, product, values

REMEDIES = {
    "none": {"gate": "none"},
    "elementwise": {"gate": "elementwise"},
    "headwise": {"gate": "headwise"},
    "one": {"gate": "none", "model.softmax_sink": "one"},
    "learned": {"gate": "none", "model.softmax_sink": "learned"},
}

# Argument -> default. Lists are written a slash apart; of numbers zero means "as the size says".
ARGS = {
    "gammas": "0.5/1",
    "lrs": "0.003/0.01/0.03",
    "seeds": 3,
    "size": "nano",
    "steps": 500,
    "batch": 16,  # sequences per step
    "seq_len": 128,
    "vocab": 1024,
    "data": "data/open-mix",
    "mixture": "paper_dense",
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    where = "configs/grids/sink_remedies.py"
    args = typed_args(arg, ARGS, where=where)
    warmup = {"optimizer.warmup_steps": max(1, args.steps // 15)} if args.steps else {}
    cells = product(
        arms(**REMEDIES),
        values("gamma", numbers(args.gammas, f"{where}: gammas")),
        values("lr", numbers(args.lrs, f"{where}: lrs")),
        values("seed", range(args.seeds)),
        fixed({"eps": 1e-12, "monitor.kinds": ("sink",), "monitor.points": 8} | warmup),
    )
    sizes = f"size={args.size},steps={args.steps},batch={args.batch},seq_len={args.seq_len},vocab={args.vocab}"
    return Grid("sink_remedies", f"lm:{sizes},data={args.data},mixture={args.mixture}", cells)
