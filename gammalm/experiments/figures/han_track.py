"""E3 of the second source: the standard deviation of every layer's query, key and value weights while a GPT-2 style model trains.

The source's claims as measures, written before any run was made; s_l(t) is the std of layer l's matrix after t of T steps:

    depth      log growth ln s_l(T/10)/s_l(0) against the layer: Spearman's correlation over the layers. The source says that shallow layers
               expand fast and deep ones slowly: negative.
    band       of each layer the lowest and highest s_l over the last quarter of the steps. A layer has settled where that band is at most a
               tenth as wide as the whole run's growth |s_l(T) − s_l(0)|: growth at a steady pace would make it a quarter.
    spread     (largest − smallest)/mean of s_l over the layers, at the start and at the end: "narrow bands" would make the last one small.
    near zero  share of weights within a tenth of the std around 0: .0797 of a normal distribution. The source says that it grows.

Quantities of the rows, over seeds; labels size, arm, lr, matrix (q | k | v):

    std                     at x = step, of a layer; near zero, kurtosis at x = step, mean over the layers
    growth, early growth    s_l(T)/s_l(0) and s_l(T/10)/s_l(0), of a layer
    band low, band high     of a layer, as above
    depth correlation       with the layer, of early growth (at = early) and of growth (at = end)
    settled                 share of the layers
    spread                  at = start | end
    near zero change, kurtosis change    mean over the layers, end minus start
"""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure as Canvas
from scipy.stats import spearmanr

from gammalm.errors import ConfigError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import Drawing, Figure, point
from gammalm.experiments.figures.condense import steps_axis
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import estimate

MATRICES = ("q", "k", "v")
EARLY, LATE, SETTLED = 0.1, 0.75, 0.1
NORMAL_SHARE = 0.0797  # of a normal distribution within a tenth of its std
COLUMNS = {"std": "std", "near zero": "sparsity", "kurtosis": "kurtosis"}
WORDS = {"source": "the source's std .02", "small": "γ = 1"}


class Track:
    """One run: `of[quantity][matrix]` is [N, L], by measured step and layer; `steps` [N]."""

    def __init__(self, run: Run):
        self.run, self.labels = run, {name: run.cell.labels[name] for name in ("size", "arm", "lr", "seed")}
        by_step = {row["step"]: row["matrices"] for row in run.monitors["weights"]}
        self.steps = np.array(sorted(by_step))
        self.of = {
            quantity: {
                name: np.array([[m[column] for m in by_step[step] if m["path"] == f"layers/attn/{name}"] for step in self.steps], float)
                for name in MATRICES
            }
            for quantity, column in COLUMNS.items()
        }

    @property
    def layers(self) -> int:
        return self.of["std"]["q"].shape[1]

    def nearest(self, share: float) -> int:
        """Index of the measured step, above 0, that is nearest to `share` of the run."""
        return 1 + int(np.argmin(np.abs(self.steps[1:] - share * self.steps[-1])))

    def growth(self, matrix: str, share: float = 1.0) -> np.ndarray:
        """s_l after that share of the steps, over s_l(0): [L]."""
        std_NL = self.of["std"][matrix]
        return std_NL[self.nearest(share)] / std_NL[0]

    def band(self, matrix: str) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest std over the last quarter, [L] each."""
        late_NL = self.of["std"][matrix][self.steps >= LATE * self.steps[-1]]
        return late_NL.min(axis=0), late_NL.max(axis=0)

    def measures(self) -> Iterator[tuple[str, dict, float]]:
        """(quantity, labels, value) of everything the figure says of this run, alike for all runs."""
        steps = self.steps.tolist()
        for matrix in MATRICES:
            of = {quantity: values[matrix] for quantity, values in self.of.items()}
            for step, std_L in zip(steps, of["std"], strict=True):
                yield from (("std", {"matrix": matrix, "layer": layer, "x": step}, std) for layer, std in enumerate(std_L))
            for quantity in ("near zero", "kurtosis"):
                mean_N = of[quantity].mean(axis=1)
                yield from ((quantity, {"matrix": matrix, "x": step}, mean) for step, mean in zip(steps, mean_N, strict=True))
                yield f"{quantity} change", {"matrix": matrix}, mean_N[-1] - mean_N[0]
            growths = {"growth": self.growth(matrix), "early growth": self.growth(matrix, EARLY)}
            for quantity, values_L in (growths | dict(zip(("band low", "band high"), self.band(matrix), strict=True))).items():
                yield from ((quantity, {"matrix": matrix, "layer": layer}, value) for layer, value in enumerate(values_L))
            for at, share in (("early", EARLY), ("end", 1.0)):
                yield "depth correlation", {"matrix": matrix, "at": at}, self.depth(matrix, share)
            yield "settled", {"matrix": matrix}, self.settled(matrix)
            for at, n in (("start", 0), ("end", -1)):
                yield "spread", {"matrix": matrix, "at": at}, self.spread(matrix, n)

    def settled(self, matrix: str) -> float:
        """Share of the layers whose band over the last quarter is at most SETTLED times as wide as the whole run's growth."""
        (low_L, high_L), std_NL = self.band(matrix), self.of["std"][matrix]
        return float(np.mean(high_L - low_L <= SETTLED * np.abs(std_NL[-1] - std_NL[0])))

    def spread(self, matrix: str, at: int) -> float:
        """(largest − smallest)/mean over the layers, at the first (0) or last (-1) measured step."""
        std_L = self.of["std"][matrix][at]
        return float(np.ptp(std_L) / std_L.mean())

    def depth(self, matrix: str, share: float) -> float:
        """Spearman's correlation of growth with the layer; NaN where all layers grow alike."""
        growth_L = self.growth(matrix, share)
        return float(spearmanr(np.arange(self.layers), growth_L).statistic) if np.ptp(growth_L) else float("nan")


def rows_of(tracks: Sequence[Track]) -> list[dict]:
    """Everything the figure says of the seeds of one arm at one rate, see the head of this file."""
    own = {name: tracks[0].labels[name] for name in ("size", "arm", "lr")}
    alike = zip(*(track.measures() for track in tracks), strict=True)
    return [point("han-e3", of[0][0], estimate([float(value) for _, _, value in of]), **own, **of[0][1]) for of in alike]


# ---- drawing -------------------------------------------------------------------------------------------------------------------------


@plots.styled
def _draw(study: Study, scale: str) -> Drawing:
    tracks = [Track(run) for run in study.runs if run.status == "done" and run.monitors.get("weights")]
    if not tracks:
        raise ConfigError("han-e3: no run that measured its weights has finished. Run it again without --no-training.")
    groups: dict = {}
    for track in tracks:
        groups.setdefault((track.labels["arm"], track.labels["lr"]), []).append(track)
    first = [of[0] for of in groups.values()]
    title = "Std of query, key and value weights of every layer through training"
    canvas = Canvas(figsize=(3.6 * len(first) + 0.8, 13.0), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    panels = canvas.subplots(5, len(first), squeeze=False)
    layers = max(track.layers for track in first)
    norm = BoundaryNorm(np.arange(layers + 1) - 0.5, colormaps["viridis"].N)
    for track, column in zip(first, panels.T, strict=True):
        column[0].set_title(_said(track), fontsize=10, loc="left")
        for axes, matrix in zip(column, MATRICES, strict=False):
            _curves(axes, track, matrix, norm)
        _profile(column[3], track)
        _near_zero(column[4], track)
    for row in panels[:3]:
        canvas.colorbar(ScalarMappable(norm, "viridis"), ax=list(row), label="layer", pad=0.01, ticks=range(0, layers, 2))
    rows = [row for of in groups.values() for row in rows_of(of)]
    return Drawing(canvas, rows, f"{title}. {_caption(tracks, scale)}", notes=[_found(of) for of in groups.values()])


def _said(track: Track) -> str:
    return f"{WORDS.get(track.labels['arm'], track.labels['arm'])}, rate {track.labels['lr']:g}"


def _curves(axes, track: Track, matrix: str, norm) -> None:
    """Std against the step, a line per layer; the last quarter of the steps shaded."""
    x_N = np.where(track.steps == 0, 0.5, track.steps)
    for layer, std_N in enumerate(track.of["std"][matrix].T):
        axes.plot(x_N, std_N, color=colormaps["viridis"](norm(layer)), lw=1.2)
    axes.axvspan(LATE * track.steps[-1], track.steps[-1], color="#e4e7ec", lw=0, zorder=0)
    steps_axis(axes, track.steps[-1])
    axes.set_ylabel(f"std of {matrix.upper()}")


def _profile(axes, track: Track) -> None:
    """Growth by layer, at the end and dashed after a tenth of the steps."""
    for i, matrix in enumerate(MATRICES):
        look = {"color": colormaps["plasma"](0.1 + 0.35 * i), "marker": plots.MARKERS[i], "ms": 4, "lw": 1.3}
        axes.plot(range(track.layers), track.growth(matrix), **look, label=matrix.upper())
        axes.plot(range(track.layers), track.growth(matrix, EARLY), **look | {"ls": "--", "mfc": "none"})
    plots.ticks(axes.xaxis, range(0, track.layers, 2))
    axes.set_xlabel("layer (dashed: after 1/10 of the steps)")
    axes.set_ylabel("std over its start")
    axes.legend(loc="best")


def _near_zero(axes, track: Track) -> None:
    """Share of weights near zero against the step, mean over layers."""
    x_N = np.where(track.steps == 0, 0.5, track.steps)
    for i, matrix in enumerate(MATRICES):
        axes.plot(x_N, track.of["near zero"][matrix].mean(axis=1), color=colormaps["plasma"](0.1 + 0.35 * i), lw=1.3, label=matrix.upper())
    axes.axhline(NORMAL_SHARE, color="#1b1f27", lw=0.8, ls=":")
    steps_axis(axes, track.steps[-1])
    axes.set_ylabel("share within std/10 of 0")
    axes.legend(loc="best")


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def _caption(tracks: Sequence[Track], scale: str) -> str:
    c, seeds = tracks[0].run.cell.config(), len({track.labels["seed"] for track in tracks})
    return (
        f"Scale {scale}: {c.model.n_layers} layers of width {c.model.d_model}, {c.train.steps:,} steps of {c.batch.sequences} × "
        f"{c.data.seq_len} tokens, AdamW at a constant rate, {seeds} seed(s), the first of them drawn. "
        "Left to right: initialization and rate; the source has std .02 (embeddings Xavier normal) and rate 1e-4. Shaded: the last quarter "
        "of the steps. Dotted: the share of a normal distribution. Length, steps, decay and data are ours; the source does not give them."
    )


def _found(tracks: Sequence[Track]) -> str:
    """The measures of one arm at one rate in a sentence: means over seeds."""
    means = {(row["quantity"], row["matrix"], row.get("at"), row.get("layer"), row.get("x")): row["value"] for row in rows_of(tracks)}
    last, says = int(tracks[0].steps[-1]), []
    for matrix in MATRICES:
        growth_L = [means["growth", matrix, None, layer, None] for layer in range(tracks[0].layers)]
        says.append(
            f"{matrix.upper()} std × {min(growth_L):.3g} to {max(growth_L):.3g}, correlation with depth "
            f"{means['depth correlation', matrix, 'end', None, None]:+.2f} "
            f"(early {means['depth correlation', matrix, 'early', None, None]:+.2f}), "
            f"{means['settled', matrix, None, None, None]:.0%} of the layers settled, spread over layers "
            f"{means['spread', matrix, 'end', None, None]:.2f}, near zero {means['near zero', matrix, None, None, 0]:.3f} "
            f"to {means['near zero', matrix, None, None, last]:.3f}"
        )
    return f"{_said(tracks[0])}: {'; '.join(says)}.".replace("-", "−")


FIGURES = {
    "han-e3": Figure("han-e3", "Weights of attention through training", "E3", ("cpu", "paper"), lambda grid: list(grid.cells), _draw,
                     "grids/han_e3"),
}  # fmt: skip
