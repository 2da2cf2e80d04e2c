"""Questions beyond the first paper, one grid each, on models that two CPU cores train while one waits: `study=` names the question.

    gammalm grid --config grids/beyond:study=balanced --workdir W
    gammalm grid --config grids/beyond:study=learning_rate,sizes=nano/nano-96,seeds=5 --workdir W

| study | question | cells | minutes |
|---|---|---|---|
| learning_rate | how do the best rates of γ .5 and 1 move with width, and what gain is left at tuned rates? both architectures | 120 | 60 |
| balanced | is the preset branch_balanced (attention 1, SwiGLU ¾) better than one γ for all? its γ is the embedding's | 54 | 12 |
| embedding | is the barrier of ε the embedding's γ alone, or the body's too? no gate; at 192^−2.5 = 2e-6 < 1e-5 | 24 | 20 |
| depth_scale | what do outputs divided by √(2L) change at each γ? 8 layers | 36 | 25 |
| muon | is γ worth as much under Muon as under AdamW? | 60 | 15 |
| length | does the gain of γ = 1 come with longer runs? one, three and nine times the steps, both architectures, 2 seeds | 48 | 45 |
| sinks | is it the sink or the added nonlinearity? gates beside a softmax with one more, or a learned logit, in its denominator | 90 | 20 |
| mup | does the best rate stay put over widths under the preset mup, where fan_in's moves? | 60 | 30 |

Minutes are estimates for two cores from seconds per cell: 13 for nano (about 40 with 8 layers), 25 for nano-96, 50 for nano-192. Every run
has 500 × 16 × 128 = 1.0M tokens (under `length` that, 3.1M and 9.2M) and the settings of `grids/figures:scale=cpu`; the architecture is
`adjusted` (ε = 1e-12, elementwise gate) where the question is not about it. Rates are axes where a verdict could rest on them: each γ has a
best one of its own.
"""

import dataclasses
from collections.abc import Callable, Mapping

from gammalm.config import typed_args
from gammalm.errors import ConfigError
from gammalm.experiments.grid import ARMS, Grid, arms, fixed, numbers, product, values

# Argument -> default. Empty or zero: what the study has, or else the size. Lists are written a slash apart.
ARGS = {
    "study": "learning_rate",
    "sizes": "",
    "lrs": "",
    "seeds": 0,
    "steps": 500,
    "batch": 16,  # sequences per step
    "seq_len": 128,
    "vocab": 1024,
    "data": "data/open-mix",
    "mixture": "paper_dense",
}
NO_GATE = {"eps1e-5": ARMS["plain"], "eps1e-12": {"eps": 1e-12, "gate": "none"}}
HEADS = {"model.n_heads": 8, "model.n_kv_heads": 8, "model.head_dim": 24}  # of nano-192, as large as those of the smaller sizes
LADDER = "nano/nano-96/nano-192"


@dataclasses.dataclass(frozen=True)
class Study:
    """The cells of one question but for size, rate and seed; and the defaults of these. No rates: each size's own, without a label."""

    cells: Callable[[], list]
    sizes: str = "nano"
    lrs: str = "0.003/0.01/0.03"
    seeds: int = 3
    shapes: Mapping[str, dict] = dataclasses.field(default_factory=dict)  # leaves of a size that are others here
    lengths: tuple[int, ...] = (1,)  # of its runs, in multiples of the argument `steps`; a label where there are several


def _both_arms():
    return product(arms(**ARMS), values("gamma", (0.5, 1.0)))


def _balanced():
    presets = {"fan_in": {"init.preset": "fan_in"}, "balanced": {"init.preset": "branch_balanced"}}
    return product(arms(**presets), values("gamma", (0.5, 0.75, 1.0)), fixed(ARMS["adjusted"]))


def _embedding():
    """Label gamma: of the body. The tied head has the embedding's."""
    cells = []
    for embedding in (0.5, 1.25):
        for body in (0.5, 1.25):
            groups = {"init.preset": "groups", "init.group_gammas": (embedding, body, body, body)}
            cells += product(arms("embedding", **{f"embedding{embedding:g}": groups}), arms(**NO_GATE), values("gamma", (body,)))
    return cells


def _depth_scale():
    scaled = {"unscaled": {"init.depth_scale": False}, "scaled": {"init.depth_scale": True}}
    return product(arms(**scaled), values("gamma", (0.5, 1.0)), fixed(ARMS["adjusted"] | {"model.n_layers": 8}))


def _muon():
    optimizers = {kind: {"optimizer.kind": kind} for kind in ("adamw", "muon")}
    return product(arms(**optimizers), values("gamma", (0.5, 1.0)), fixed(ARMS["adjusted"]))


def _sinks():
    """A gate can silence a head and also multiplies its output by a function of the input; a softmax sink can only silence it. Where the
    sink is what costs loss, `one` and `learned` gain what a gate gains over `none`; where they lower the score and not the loss, the gate's
    gain is of another kind. Scores are measured on the way (monitors.jsonl)."""
    remedies = {
        "none": {"gate": "none"},
        "elementwise": {"gate": "elementwise"},
        "headwise": {"gate": "headwise"},
        "one": {"gate": "none", "model.softmax_sink": "one"},
        "learned": {"gate": "none", "model.softmax_sink": "learned"},
    }
    shared = {"eps": 1e-12, "monitor.kinds": ("sink",), "monitor.points": 8}
    return product(arms(**remedies), values("gamma", (0.5, 1.0)), fixed(shared))


def _mup():
    """At nano's width, 48, both arms are one model. Heads keep their size and grow in number, as mup needs it."""
    presets = {"fan_in": {"init.preset": "fan_in"}, "mup": {"init.preset": "mup", "init.base_width": 48}}
    return product(arms(**presets), values("gamma", (0.5, 1.0)), fixed(ARMS["adjusted"]))


STUDIES = {
    "learning_rate": Study(_both_arms, LADDER, "0.001/0.003/0.01/0.03/0.1", 2),
    "balanced": Study(_balanced),
    "embedding": Study(_embedding, "nano-192", ""),
    "depth_scale": Study(_depth_scale),
    "muon": Study(_muon, lrs="0.001/0.003/0.01/0.03/0.1"),
    "length": Study(_both_arms, lrs="0.003/0.01", seeds=2, lengths=(1, 3, 9)),
    "sinks": Study(_sinks),
    "mup": Study(_mup, LADDER, "0.001/0.003/0.01/0.03/0.1", 1, {"nano-192": HEADS}),
}


def get_grid(arg: str = "") -> Grid:
    """The grid; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name, a wrong type or an unknown study."""
    where = "configs/grids/beyond.py"
    args = typed_args(arg, ARGS, where=where)
    if args.study not in STUDIES:
        raise ConfigError(f"{where}: study={args.study!r} is none of {', '.join(STUDIES)}.")
    study = STUDIES[args.study]
    if len(study.lengths) > 1 and not args.steps:
        raise ConfigError(f"{where}: study={args.study} compares multiples of `steps`; give it a number above 0.")
    sizes = {size: {"size": size} | study.shapes.get(size, {}) for size in (args.sizes or study.sizes).split("/")}
    rates = args.lrs or study.lrs
    lengths = [args.steps * n for n in study.lengths]
    cells = product(
        arms("size", **sizes),
        *([arms("length", **{f"{n}steps": _of_length(n) for n in lengths})] if len(lengths) > 1 else [fixed(_of_length(*lengths))]),
        study.cells(),
        *([values("lr", numbers(rates, f"{where}: lrs"))] if rates else []),
        values("seed", range(args.seeds or study.seeds)),
    )
    base = f"lm:batch={args.batch},seq_len={args.seq_len},vocab={args.vocab},data={args.data},mixture={args.mixture}"
    return Grid(args.study, base, cells)


def _of_length(steps: int) -> dict:
    return {"steps": steps} | ({"optimizer.warmup_steps": max(1, steps // 15)} if steps else {})
