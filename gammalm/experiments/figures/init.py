"""Figures that need no training: the norm factor against γ, and the residual flow of each kind of branch against the width.

Quantities of their rows; theory has no interval and 0 seeds, measured points have the interval over their draws.

    variance, sensitivity, half point     fig1c: σ²(e) = d^(−2γ); r², what ε leaves of the slope of ln (σ² + ε)^−½ in γ; the γ with σ² = ε
    norm factor, measured norm factor     fig1c, at x = γ: r, in closed form and as our RMSNorm has it
    flow, predicted flow                  fig3a, at x = d: ‖branch‖/‖e‖ as measured, and by the infinite-width recursion
    exponent, measured exponent           fig3a: of d, fitted to the predicted flow over `theory.branches.WIDTHS`, to the measured points

Sections: the paper's 2.1, 2.4 and appendix 5; science 2 and 5. Shape legend: models/parts.py.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gammalm.analysis.flow import residual_flow
from gammalm.config import apply_overrides, load_config
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import UNTRAINED, Drawing, Figure, point
from gammalm.experiments.statistics import Estimate, estimate
from gammalm.initializers import gamma_normal, init_params
from gammalm.models.decoder import Model
from gammalm.models.parts import RMSNorm
from gammalm.theory import half_point, norm_factor
from gammalm.theory.branches import BRANCHES, EXPONENTS, GAMMAS, HEAD, WIDTHS, branch_ratio, fitted_exponent

NORM_WIDTH = 2048
NORM_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
NORM_GAMMAS = tuple(np.linspace(0.25, 2.0, 71).tolist())
T = 64
SEQUENCES = 2  # measured at a time, of T tokens that are all different
DRAWS = 8  # so that the exponent of two linear maps is known within .02
MEASURED_WIDTHS = (128, 256, 512)
NAMES = {"two-linear": "two linear maps", "swiglu": "SwiGLU", "attention": "attention"}


def _exact(value: float) -> Estimate:
    """A number that is no mean."""
    return Estimate(float(value), 0, None, None)


# ---- the norm factor: fig1c ------------------------------------------------------------------------------------------------------------


def measured_norm_factor(gamma: float, eps: float, d: int = NORM_WIDTH, tokens: int = T) -> float:
    """Root mean square of what our RMSNorm (gain 1) makes of `tokens` embeddings of std d^(−γ)."""
    e_TD = gamma_normal(gamma, in_axis=-1, out_axis=-2)(jax.random.key(0), (tokens, d), jnp.float32)
    return float(jnp.sqrt(jnp.mean(jnp.square(_norm(d)(e_TD, eps)))))


def _norm(d: int) -> RMSNorm:
    norm = RMSNorm(d)
    norm.gain = nnx.Param(jnp.ones(d))  # a declared weight holds zeros until it is drawn
    return norm


@plots.styled
def _norm_factor(study, scale: str) -> Drawing:
    title = f"Norm factor against γ, d = {NORM_WIDTH}"
    canvas, axes = plots.panel(title, "γ of the embedding", "RMS behind the first norm, r")
    rows = [point("fig1c", "variance", _exact(NORM_WIDTH ** (-2 * g)), d=NORM_WIDTH, gamma=g) for g in (0.5, 1.0)]
    axes.axhline(0.5**0.5, color="#1b1f27", lw=1, ls=":")
    handles = []
    for eps, (colour, marker) in zip(NORM_EPS, _looks(NORM_EPS), strict=True):
        labels = {"d": NORM_WIDTH, "eps": eps}
        half = float(half_point(eps, NORM_WIDTH))
        factors = [float(norm_factor(g, eps, NORM_WIDTH)) for g in NORM_GAMMAS]
        seen = {g: measured_norm_factor(g, eps) for g in NORM_GAMMAS[::5]}
        rows.append(point("fig1c", "half point", _exact(half), **labels))
        sensitive = {g: norm_factor(g, eps, NORM_WIDTH) ** 2 for g in (0.6, 1.0)}
        rows += [point("fig1c", "sensitivity", _exact(value), **labels, gamma=g) for g, value in sensitive.items()]
        rows += [point("fig1c", "norm factor", _exact(r), **labels, x=g) for g, r in zip(NORM_GAMMAS, factors, strict=True)]
        rows += [point("fig1c", "measured norm factor", Estimate(r, 1, None, None), **labels, x=g) for g, r in seen.items()]
        axes.plot(NORM_GAMMAS, factors, color=colour, lw=1.7)
        axes.plot(list(seen), list(seen.values()), marker, ms=5, color=colour, mec="white", mew=0.6)
        axes.plot([half], [0.5**0.5], "X", ms=9, color=colour, mec="white", zorder=4)
        look = {"color": colour, "marker": marker, "ms": 5, "lw": 1.7}
        handles.append(Line2D([], [], **look, label=f"ε = {_power(eps)}, half at {half:.3f}"))
    axes.set_ylim(-0.03, 1.09)
    axes.set_xlim(NORM_GAMMAS[0] - 0.05, NORM_GAMMAS[-1] + 0.05)
    canvas.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    caption = (
        f"How large an embedding of std d^−γ is behind an RMSNorm with constant ε. Lines: r = (1 + ε·d^2γ)^−½ at d = {NORM_WIDTH}. Marks: "
        f"our RMSNorm on {T} drawn tokens. Crosses on the dotted line: where ε equals the embedding's variance, r² = ½. "
        "Nothing is trained."
    )
    return Drawing(canvas, rows, f"{title}. {caption}")


def _looks(items: Iterable) -> list[tuple[str, str]]:
    """A colour and a marker for each item, in order."""
    numbers = range(len(list(items)))
    return [(plots.colours(numbers)[i], plots.MARKERS[i]) for i in numbers]


# ---- the residual flow: fig3a ----------------------------------------------------------------------------------------------------------


def measured_flows(d: int, gammas=GAMMAS, epsilons=(1e-12, 1e-5), draws: int = DRAWS) -> dict[tuple[str, float, float], list[float]]:
    """(branch, ε, γ) -> ‖branch‖/‖e‖ of each draw at width d, over distinct tokens.

    Attention and SwiGLU are those of a decoder of ours with one layer (`analysis.flow`); SwiGLU with attention's output matrix at zero, so
    that it sees the embedding. No decoder of ours has two linear maps: two of its d×d matrices are applied behind our norm.
    """
    models = {gamma: _config(d, gamma) for gamma in gammas}
    model = Model(models[gammas[0]].model)  # the same for every γ
    batch = {"tokens": np.arange(SEQUENCES * (T + 1), dtype=np.int32).reshape(SEQUENCES, T + 1)}
    found: dict = {}
    for gamma, config in models.items():
        for seed in range(draws):
            params = init_params(model.specs, config.init, seed, d_model=d, n_layers=1)
            layers = params["layers"]
            silent = params | {"layers": layers | {"attn": layers["attn"] | {"out": jnp.zeros_like(layers["attn"]["out"])}}}
            for eps in epsilons:
                ratios = {
                    "attention": residual_flow(model, params, {}, [batch], eps).attention_L[0],
                    "swiglu": residual_flow(model, silent, {}, [batch], eps).ffn_L[0],
                    "two-linear": two_linear_ratio(params, d, eps),
                }
                for branch, ratio in ratios.items():
                    found.setdefault((branch, eps, gamma), []).append(float(ratio))
    return found


def two_linear_ratio(params, d: int, eps: float) -> float:
    """‖W₂ W₁ norm(e)‖/‖e‖ of T embeddings and two square matrices, those of queries and keys, which are independent draws of std d^(−γ)."""
    e_TD, attn = params["embed"]["table"][:T], params["layers"]["attn"]
    y_TD = _norm(d)(e_TD, eps) @ attn["q"].reshape(d, d) @ attn["k"].reshape(d, d)
    return float(jnp.linalg.norm(y_TD) / jnp.linalg.norm(e_TD))


def _config(d: int, gamma: float):
    """One layer of width d in fp32, its kind that of `theory.branches`: heads of 64, F = 8d/3, no gate."""
    sizes = {"d_model": d, "n_layers": 1, "n_heads": d // HEAD, "n_kv_heads": d // HEAD, "head_dim": HEAD, "d_ff": 8 * d // 3}
    fp32 = {"dtype": "float32", "residual_dtype": "float32"}
    config = load_config(f"lm:size=tiny,gate=none,vocab={SEQUENCES * (T + 1)},gamma={gamma}")
    return apply_overrides(config, [(f"model.{name}", value) for name, value in (sizes | fp32).items()])


def predicted_flows(d: int) -> dict[tuple[str, float, float], float]:
    """(branch, ε, γ) -> ‖branch‖/‖e‖ at width d by the recursion, for everything in the table of exponents."""
    return {(branch, eps, gamma): branch_ratio(branch, d, gamma, eps, T) for branch, eps in EXPONENTS for gamma in GAMMAS}


@plots.styled
def _flow(study, scale: str) -> Drawing:
    title = "Residual flow of one branch against the width"
    epsilons = sorted({eps for _, eps in EXPONENTS})
    with ThreadPoolExecutor(2) as pool:  # each width has programs of its own, and compiling them takes most of the time
        widest_first = MEASURED_WIDTHS[::-1]
        measured = pool.map(measured_flows, widest_first)
        lines = dict(zip(WIDTHS, pool.map(predicted_flows, WIDTHS), strict=True))
        seen = dict(zip(widest_first, measured, strict=True))
    canvas = Canvas(figsize=(10.2, 7.0), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    grid = canvas.subplots(len(epsilons), len(BRANCHES))
    rows = []
    for i, eps in enumerate(epsilons):
        for j, branch in enumerate(BRANCHES):
            of = {gamma: {d: seen[d][branch, eps, gamma] for d in MEASURED_WIDTHS} for gamma in GAMMAS}
            predicted = {gamma: {d: lines[d][branch, eps, gamma] for d in WIDTHS} for gamma in GAMMAS}
            rows += _flow_panel(grid[i, j], branch, eps, predicted, of)
            if j == 0:
                grid[i, j].set_ylabel("‖branch‖ / ‖e‖")
            if i == len(epsilons) - 1:
                grid[i, j].set_xlabel("width d")
    caption = (
        "How large what a branch adds is against the embedding e, before training, for one branch behind one norm. Lines: the covariance "
        f"recursion (infinite width), T = {T} distinct tokens. Marks: measured, mean of {DRAWS} draws with 95 % intervals; attention and "
        "SwiGLU on decoders of ours with one layer; two linear maps, which no decoder of ours has, on two of its matrices behind our "
        f"norm. Legends: the exponent of d fitted to the line over d = {WIDTHS[0]} to {WIDTHS[-1]}, and in brackets "
        "that of the table in docs/science.md, section 5. The paper derives 1 − γ for two linear maps and says it of the whole model; "
        "dashed: balance."
    )
    return Drawing(canvas, rows, f"{title}. {caption}")


def _flow_panel(axes, branch: str, eps: float, predicted, measured) -> list[dict]:
    """Draws one branch at one ε, {γ: {d: ratio}} predicted and {γ: {d: ratios}} measured, and gives its rows."""
    colour, marker = plots.colours(GAMMAS), plots.markers(GAMMAS)
    axes.set_title(f"{NAMES[branch]}, ε = {_power(eps)}", fontsize=10, loc="left")
    axes.axhline(1, color="#1b1f27", lw=1, ls="--")
    rows, handles = [], []
    for gamma, table in zip(GAMMAS, EXPONENTS[branch, eps], strict=True):
        labels = {"branch": branch, "eps": eps, "gamma": gamma}
        line = predicted[gamma]
        points = {d: estimate(ratios) for d, ratios in measured[gamma].items()}
        exponent = fitted_exponent(list(line), list(line.values()))
        rows.append(point("fig3a", "exponent", _exact(exponent), **labels))
        of_draws = [fitted_exponent(list(points), [ratios[i] for ratios in measured[gamma].values()]) for i in range(DRAWS)]
        rows.append(point("fig3a", "measured exponent", estimate(of_draws), **labels))
        rows += [point("fig3a", "predicted flow", _exact(ratio), **labels, d=d, x=d) for d, ratio in line.items()]
        rows += [point("fig3a", "flow", e, **labels, d=d, x=d) for d, e in points.items()]
        axes.plot(list(line), list(line.values()), color=colour[gamma], lw=1.5)
        look = {"color": colour[gamma], "marker": marker[gamma], "ms": 5, "lw": 0}
        plots.estimates(axes, points, look)
        handles.append(Line2D([], [], **look | {"lw": 1.5}, label=f"γ = {gamma:g}: {_signed(exponent)} ({_signed(table)})"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plots.ticks(axes.xaxis, WIDTHS)
    # The legend stands above the lines: half of the panel's height more.
    low, high = np.log10(axes.get_ylim())
    axes.set_ylim(10**low, 10 ** (high + 0.62 * (high - low)))
    axes.legend(handles=handles, loc="upper left", fontsize=8, title="exponent of d (table)", title_fontsize=8, alignment="left")
    return rows


def _power(eps: float) -> str:
    return f"{eps:.0e}".replace("e-0", "e-")


def _signed(exponent: float) -> str:
    """-.251 as −0.251; a zero has no sign."""
    text = f"{exponent:.3f}"
    return "0.000" if float(text) == 0 else text.replace("-", "−")


FIGURES = {
    "fig1c": Figure("fig1c", "Norm factor against γ at several ε", "2.1", UNTRAINED, None, _norm_factor),
    "fig3a": Figure("fig3a", "Residual flow against the width", "2.4", UNTRAINED, None, _flow),
}
