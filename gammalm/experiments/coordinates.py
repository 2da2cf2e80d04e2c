"""The coordinate check: how the sizes of activations, and what training changes of them, depend on the width of the model.

A ladder of widths is trained for a few steps at one learning rate. Under a parametrization that transfers over widths (μP: Yang et al.
2022, arXiv:2203.03466, section 6 and figure 5) no size grows with the width, and the changes since initialization neither grow nor vanish.
Shape legend: gammalm/models/parts.py; W widths, S seeds, N steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.config import apply_overrides, leaves, validate
from gammalm.errors import ConfigError
from gammalm.training.program import Program
from gammalm.training.step import scalars

# What attention adds, what the feed-forward layer adds, the stream after each layer (all layers together), the logits.
QUANTITIES = ("attention", "ffn", "stream", "logits")
MEASURES = ("mean", "rms", "change")  # mean |x|, root mean square of x, and of x − x at initialization
WITH_WIDTH = ("model.n_heads", "model.n_kv_heads", "model.d_ff", "model.mla.q_rank", "model.mla.kv_rank", "model.moe.d_expert")
# Every step at the peak rate, in fp32 (rounding would hide small changes), on one device.
HELD = {
    "model.dtype": "float32", "model.residual_dtype": "float32", "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
    "train.spike": "off", "mesh.data": 1, "mesh.fsdp": 1, "mesh.expert": 1, "mesh.context": 1, "mesh.tensor": 1, "mesh.dcn_data": 1,
    "mesh.dcn_fsdp": 1,
}  # fmt: skip


def at_width(config, width: int):
    """`config` as wide as `width`: heads keep their size and grow in number with d_model, as do d_ff, the ranks of MLA and the width of
    experts. Raises ConfigError where one of them would be no whole number."""
    known, old = leaves(config), config.model.d_model
    changes = {"model.d_model": width}
    for name in WITH_WIDTH:
        if name in known:
            if known[name] * width % old:
                raise ConfigError(f"width {width}: {name}={known[name]} at d_model={old} would be {known[name] * width / old:g}.")
            changes[name] = known[name] * width // old
    return validate(apply_overrides(config, [*changes.items(), *HELD.items()]))


@dataclasses.dataclass(frozen=True)
class Trend:
    """How one measure of one quantity depends on the width: the slope of its logarithm over that of the width, averaged over seeds, at
    each step [N + 1]; `verdict` is about the last step, in words."""

    quantity: str
    measure: str
    slopes: tuple[float | None, ...]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Sizes by quantity and measure [S, W, N + 1]; step 0 is initialization. `diverged`: widths whose numbers stopped being finite."""

    widths: tuple[int, ...]
    steps: int
    tolerance: float
    sizes: dict[str, dict[str, np.ndarray]]

    @property
    def diverged(self) -> list[int]:
        finite = np.stack([a for sizes in self.sizes.values() for a in sizes.values()])
        return [w for i, w in enumerate(self.widths) if not np.isfinite(finite[:, :, i]).all()]

    def trends(self) -> list[Trend]:
        found = []
        for quantity, measures in self.sizes.items():
            for measure, sizes_SWN in measures.items():
                slopes = tuple(slope(self.widths, sizes_SWN[:, :, n]) for n in range(self.steps + 1))
                found.append(Trend(quantity, measure, slopes, in_words(slopes[-1], self.tolerance)))
        return found

    def verdict(self) -> str:
        """One sentence over all: which changes and sizes grow with the width, which changes shrink."""
        if self.diverged:
            return f"diverged at width {', '.join(map(str, self.diverged))}: no verdict."
        last = {(t.quantity, t.measure): t.slopes[-1] for t in self.trends() if t.slopes[-1] is not None}
        grow = [f"{q} ({m} as d^{s:.2f})" for (q, m), s in last.items() if m != "mean" and s > self.tolerance]
        shrink = [f"{q} (d^{s:.2f})" for (q, m), s in last.items() if m == "change" and s < -self.tolerance]
        said = [f"grows with the width: {', '.join(grow)}"] * bool(grow)
        said += [f"changes less with the width: {', '.join(shrink)}"] * bool(shrink)
        return ("; ".join(said) or f"stable over the widths, within ±{self.tolerance:g} in every slope") + "."

    def row(self) -> dict:
        """JSON-ready."""
        return {
            "widths": list(self.widths), "steps": self.steps, "tolerance": self.tolerance, "verdict": self.verdict(),
            "trends": [dataclasses.asdict(trend) for trend in self.trends()],
            "sizes": {q: {m: _finite(a.tolist()) for m, a in measures.items()} for q, measures in self.sizes.items()},
        }  # fmt: skip


def _finite(value):
    return [_finite(v) for v in value] if isinstance(value, list) else value if np.isfinite(value) else None


def slope(widths: Sequence[int], sizes_SW: np.ndarray) -> float | None:
    """Least squares of ln size over ln width, all seeds together; None where a size is 0 or not finite (no change at initialization)."""
    if not (np.isfinite(sizes_SW).all() and (sizes_SW > 0).all()):
        return None
    return float(np.polyfit(np.log(widths), np.log(sizes_SW).mean(axis=0), 1)[0])


def in_words(slope: float | None, tolerance: float) -> str:
    if slope is None:
        return "no verdict"
    if abs(slope) <= tolerance:
        return "stable"
    return f"{'grows' if slope > 0 else 'shrinks'} as d^{slope:.2f}"


def activations(model, params, buffers, batch, eps) -> dict:
    """QUANTITIES of one batch in fp32: [L, B, T, D] each, the logits [B, T, V]."""
    segments = batch.get("segments")
    tokens_BT, segments_BT = batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]
    decoder = model.bind(params, buffers)

    def look(visit):
        return {"attention": visit.attention_BTD, "ffn": visit.ffn_BTD, "stream": visit.after_BTD}

    layers = decoder.walk(tokens_BT, segments_BT, eps, look)[1]
    found = layers | {"logits": decoder.logits(tokens_BT, segments_BT, eps)}
    return jax.tree.map(lambda a: a.astype(jnp.float32), found)


def check_coordinates(
    config, widths: Sequence[int], batches: Callable[[int], dict], probe: dict, *, steps: int = 5, seeds: int = 1, tolerance: float = 0.15
) -> Coordinates:
    """Trains `config` at every width for `steps` steps of AdamW or Muon at its own peak rate, and measures `probe` before and after each.

    `batches`: step -> training batch, the same for all widths and seeds; `probe`: a batch. Seeds are config.seed and those after it.
    Raises ConfigError: fewer than two widths, or one that does not fit (`at_width`).
    """
    if len(set(widths)) < 2 or steps < 1 or seeds < 1:
        raise ConfigError(f"widths {tuple(widths)}, steps {steps}, seeds {seeds}: two widths, one step and one seed are the least.")
    configs = [at_width(config, width) for width in widths]
    sizes = {q: {m: np.zeros((seeds, len(widths), steps + 1)) for m in MEASURES} for q in QUANTITIES}

    def measured(model, params, buffers, eps, first):
        now = activations(model, params, buffers, probe, eps)
        first = now if first is None else first
        rms = {q: jnp.sqrt(jnp.square(now[q]).mean()) for q in QUANTITIES}
        return {q: (jnp.abs(now[q]).mean(), rms[q], jnp.sqrt(jnp.square(now[q] - first[q]).mean())) for q in QUANTITIES}, now

    for w, c in enumerate(configs):
        program = Program(c, np.zeros(c.model.vocab_size, np.int32), devices=jax.devices()[:1])
        measure = jax.jit(functools.partial(measured, program.model))
        for s in range(seeds):
            seeded = apply_overrides(c, [("seed", c.seed + s)])
            state, traced, first = program.init(seeded), scalars(seeded), None
            for n in range(steps + 1):
                if n:
                    state, _ = program.step(state, program.put([batches(n - 1)]), traced)
                numbers, now = measure(state["params"], state["buffers"], traced["norm_eps"], first)
                first = first or now
                for q, values in jax.device_get(numbers).items():
                    for m, value in zip(MEASURES, values, strict=True):
                        sizes[q][m][s, w, n] = value
    return Coordinates(tuple(widths), steps, tolerance, sizes)


def draw(found: Coordinates, title: str):
    """A Matplotlib figure: size (above) and change since initialization (below) of each quantity against the width, a line per step."""
    from matplotlib.figure import Figure

    from gammalm.experiments.plots import colours, styled

    @styled
    def drawn():
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        panels = figure.subplots(2, len(QUANTITIES), sharex=True)
        figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
        colour = colours(range(found.steps + 1))
        for row, measure in zip(panels, ("rms", "change"), strict=True):
            for axes, quantity in zip(row, QUANTITIES, strict=True):
                trend = next(t for t in found.trends() if (t.quantity, t.measure) == (quantity, measure))
                sizes_WN = found.sizes[quantity][measure].mean(axis=0)
                for n in range(measure == "change", found.steps + 1):
                    axes.plot(found.widths, sizes_WN[:, n], "o-", ms=3.5, color=colour[n], label=f"step {n}")
                axes.set(xscale="log", yscale="log", title=f"{quantity}: {trend.verdict}")
                axes.set_xticks(found.widths, map(str, found.widths))
                axes.xaxis.minorticks_off()
            row[0].set_ylabel({"rms": "root mean square", "change": "change since step 0"}[measure])
        for axes in panels[-1]:
            axes.set_xlabel("width d")
        panels[0][-1].legend(fontsize=7)
        return figure

    return drawn()
