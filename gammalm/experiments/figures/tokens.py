"""Figures of gains token by token: the adjusted model of γ = 1 against that of γ = .5, largest dense size, over the whole validation split.

Quantities of their rows. Means over seeds have the interval over seeds; those with the label seed are of one seed, and where they have
an interval it is over documents (jackknife, analysis/tokens.py):

    share                      fig4a, mean over seeds: of the tokens, by `part` (PARTS)
    mean gain, median gain, mean minus median   fig4a, mean over seeds: of Δ^sym p
    histogram                  fig4a, by seed: share of the tokens whose gain is within STEP/2 of `x`
    gain, nats                 fig4b, by `decile` (1: the easiest), mean over seeds: of Δ^sym p, of ℓ_std − ℓ_small
    seed gain, seed nats       the same by seed; difficulty_low, difficulty_high: edges of the decile in nats
    decile contrast            fig4b, mean over seeds: of "gain" | "nats", mean over the deciles `second` minus over those `first`
    peak decile                fig4b, mean over seeds: of "gain" | "nats"
    token gain                 fig4c: of each piece of the example

Sections: the paper's 2.5; science 6.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from scipy.stats import t as student_t

from gammalm.analysis.token_text import FULL, Piece, colour, coloured_text, pieces
from gammalm.analysis.tokens import STEP, Gains, loss_function, measure
from gammalm.data.shards import TOKENIZER
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import ConfigError, GammalmError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import TRAINED, Drawing, Figure, about, largest, point
from gammalm.experiments.figures.cells import cells_of, finished
from gammalm.experiments.grid import Cell, Grid
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import LEVEL, Estimate, estimate
from gammalm.training.load import load_model, validation_batches, validation_split

ARM = "adjusted"
STANDARD, SMALL = 0.5, 1.0
SEQUENCES = 16  # in a batch
MERGED = 5  # bins of the histogram in a bar, so that bars end at ±.1
PARTS = {
    "unchanged": (-0.1, 0.1), "improved": (0.1, 2), "worsened": (-2, -0.1), "much improved": (0.5, 2), "much worsened": (-2, -0.5),
    "unchanged or slightly worsened": (-0.5, 0.1),
}  # fmt: skip
CONTRASTS = {"10": (10,), "1-5": (1, 2, 3, 4, 5)}  # deciles that 6 to 9 are held against
MIDDLE = (6, 7, 8, 9)
EXAMPLE_DOMAIN = "math-en"  # the paper's example is mathematics; without that domain the first of all by name
COLUMNS, LINES, FONT, POINTS = 80, 40, "DejaVu Sans Mono", 9  # of the example's picture


@functools.lru_cache(maxsize=8)
def _compared(small: Path, standard: Path) -> tuple[Gains, str, list[Piece], str]:
    """What three figures show of a pair of runs: gains over the whole split; of the example its domain, pieces and HTML."""
    loaded = {name: load_model(folder) for name, folder in (("small", small), ("standard", standard))}
    split = validation_split(loaded["small"], SEQUENCES)
    losses = {name: loss_function(one.model, one.params, one.buffers, one.config.model.norm_eps) for name, one in loaded.items()}
    gains = measure(losses["small"], losses["standard"], validation_batches(split, 0), split.eod_id).summary()
    domain = EXAMPLE_DOMAIN if EXAMPLE_DOMAIN in split.domains else split.domains[0]
    batch = next(split.validation(domain))
    length = len(batch["tokens"][0])
    if "segments" in batch:
        length = int(np.count_nonzero(batch["segments"][0] == batch["segments"][0, 0]))
    of_each = [np.asarray(losses[name](batch))[0, : length - 1] for name in ("small", "standard")]
    example = (batch["tokens"][0, :length].tolist(), *of_each, Tokenizer.load(split.path / TOKENIZER).decode)
    return gains, domain, list(pieces(*example)), coloured_text(*example)


def pairs_of(study: Study) -> tuple[dict[int, tuple[Run, Run]], list[Run]]:
    """{seed: (small, standard)} of the finished runs, and all of them. Raises ConfigError where no seed has both."""
    runs = finished(study, _reads(study.grid))
    by_seed = {run.seed: {} for run in runs}
    for run in runs:
        by_seed[run.seed][run.gamma] = run
    pairs = {seed: (of[SMALL], of[STANDARD]) for seed, of in sorted(by_seed.items()) if len(of) == 2}
    if not pairs:
        raise ConfigError(f"{study.workdir}: no seed has finished at both γ = {STANDARD:g} and {SMALL:g}, so no tokens can be compared.")
    return pairs, runs


def _gains(study: Study) -> tuple[dict[int, Gains], dict, list[Run], list[str]]:
    """Gains by seed, labels of the rows, the runs, and which seeds could not be read, in sentences."""
    pairs, runs = pairs_of(study)
    found, notes = {}, []
    for seed, (small, standard) in pairs.items():
        try:
            found[seed] = _compared(small.folder, standard.folder)[0]
        except GammalmError as error:
            notes.append(f"Seed {seed} is left out: {error}")
    if not found:
        raise ConfigError(f"No tokens can be compared. {' '.join(notes)}")
    return found, {"size": runs[0].cell.labels["size"], "arm": ARM}, runs, notes


def _over_seeds(gains: Mapping[int, Gains], value: Callable[[Gains], float]) -> Estimate:
    return estimate(value(found) for found in gains.values())


# ---- the histogram: fig4a --------------------------------------------------------------------------------------------------------------


def share(found: Gains, low: float, high: float) -> float:
    """Share of the tokens with a gain from `low` to `high`, both multiples of the histogram's STEP."""
    first, last = (round((edge + 2) / STEP) for edge in (low, high))
    return sum(found.histogram[first:last]) / found.tokens


def median(found: Gains) -> float:
    """Median gain, interpolated inside a bin of the histogram: exact to STEP."""
    after = np.cumsum(found.histogram) / found.tokens
    edges = np.linspace(-2, 2, len(after) + 1)
    return float(np.interp(0.5, np.concatenate([[0.0], after]), edges))


@plots.styled
def _histogram(study: Study, scale: str) -> Drawing:
    gains, labels, runs, notes = _gains(study)
    title = f"Change of each token's probability, {labels['size']}"
    canvas, axes = plots.panel(title, "symmetric change of probability, Δp", "share of tokens per bin", (5.4, 3.6))
    centres = -2 + STEP * (np.arange(round(4 / STEP)) + 0.5)
    parts = {part: _over_seeds(gains, lambda g, s=span: share(g, *s)) for part, span in PARTS.items()}
    rows = [point("fig4a", "share", value, **labels, part=part) for part, value in parts.items()]
    for quantity, value in (
        ("mean gain", lambda g: g.gain),
        ("median gain", median),
        ("mean minus median", lambda g: g.gain - median(g)),
    ):
        rows.append(point("fig4a", quantity, _over_seeds(gains, value), **labels))
    for seed, found in gains.items():
        shares = np.array(found.histogram) / found.tokens
        rows += [
            point("fig4a", "histogram", Estimate(float(y), 1, None, None), **labels, seed=seed, x=round(float(x), 3))
            for x, y in zip(centres, shares, strict=True)
        ]
    seed, found = next(iter(gains.items()))
    wide = np.array(found.histogram).reshape(-1, MERGED).sum(1) / found.tokens
    middles = centres.reshape(-1, MERGED).mean(1)
    bars = axes.bar(middles, wide, width=MERGED * STEP)
    for bar, centre in zip(bars, middles, strict=True):
        bar.set_facecolor(colour(FULL if centre > 0.1 else -FULL if centre < -0.1 else 0))
        bar.set_edgecolor("#8a919d")
        bar.set_linewidth(0.4)
    axes.set_yscale("log")
    axes.set_xlim(-2, 2)
    axes.axvline(found.gain, color="#1b1f27", lw=1.4, label=f"mean {plots.signed(found.gain)}")
    axes.axvline(median(found), color="#1b1f27", lw=1.4, ls=":", label=f"median {plots.signed(median(found))}")
    axes.set_ylim(top=axes.get_ylim()[1] * 6)
    axes.legend(loc="upper left", fontsize=8)
    said = [f"{name} {100 * share(found, *PARTS[name]):.1f} %" for name in ("worsened", "unchanged", "improved")]
    axes.text(0.98, 0.97, "\n".join(said), transform=axes.transAxes, ha="right", va="top", fontsize=8)
    caption = (
        f"Δp = 2(p − q)/(p + q) of {found.tokens:,} validation tokens, p their probability under γ = {SMALL:g} and q under γ = "
        f"{STANDARD:g} (arm {ARM}, seed {seed}); right of 0 γ = {SMALL:g} is better. Bins of {MERGED * STEP:g}, logarithmic axis. "
        "Unchanged: within ±0.1. The numbers hold every seed."
    )
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", notes=notes)


# ---- by difficulty: fig4b --------------------------------------------------------------------------------------------------------------


def _of_decile(found: Gains, name: str, decile: int) -> Estimate:
    """Mean of one decile with its interval over documents."""
    row = found.by_difficulty[decile - 1]
    error = row[f"{name}_se"]
    if error is None:
        return Estimate(row[name], 1, None, None)
    half = float(student_t.ppf(0.5 + LEVEL / 2, found.groups - 1)) * error
    return Estimate(row[name], 1, row[name] - half, row[name] + half)


def _mean_of(found: Gains, name: str, deciles: Sequence[int]) -> float:
    return float(np.mean([found.by_difficulty[decile - 1][name] for decile in deciles]))


def _peak(found: Gains, name: str) -> int:
    """The decile with the largest mean."""
    return 1 + int(np.argmax([row[name] for row in found.by_difficulty]))


def decile_rows(gains: Mapping[int, Gains], labels: Mapping) -> list[dict]:
    """All rows of fig4b."""
    rows, deciles = [], range(1, 11)
    for name in ("gain", "nats"):
        for decile in deciles:
            rows.append(point("fig4b", name, _over_seeds(gains, lambda g, d=decile, n=name: _mean_of(g, n, [d])), **labels, decile=decile))
            for seed, found in gains.items():
                edges = {f"difficulty_{side}": found.by_difficulty[decile - 1][side] for side in ("low", "high")}
                rows.append(point("fig4b", f"seed {name}", _of_decile(found, name, decile), **labels, seed=seed, decile=decile, **edges))
        for first, of in CONTRASTS.items():
            contrast = _over_seeds(gains, lambda g, n=name, of=of: _mean_of(g, n, MIDDLE) - _mean_of(g, n, of))
            rows.append(point("fig4b", "decile contrast", contrast, **labels, of=name, first=first, second="6-9"))
        rows.append(point("fig4b", "peak decile", _over_seeds(gains, lambda g, n=name: _peak(g, n)), **labels, of=name))
    return rows


@plots.styled
def _by_difficulty(study: Study, scale: str) -> Drawing:
    gains, labels, runs, notes = _gains(study)
    title = f"Gain of γ = {SMALL:g} by difficulty of the token, {labels['size']}"
    canvas = Canvas(figsize=(7.6, 3.4), layout="constrained")
    canvas.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    seed, shown = next(iter(gains.items()))
    words = {"gain": "mean Δp, symmetric", "nats": f"ℓ(γ = {STANDARD:g}) − ℓ(γ = {SMALL:g}), nats"}
    for axes, (name, label) in zip(canvas.subplots(1, 2), words.items(), strict=True):
        axes.axhline(0, color="#1b1f27", lw=1)
        look = {"color": plots.ACCENT, "marker": "o", "ms": 5, "lw": 1.5}
        plots.estimates(axes, {decile: _of_decile(shown, name, decile) for decile in range(1, 11)}, look)
        for other, found in gains.items():
            if other != seed:
                axes.plot(range(1, 11), [_mean_of(found, name, [d]) for d in range(1, 11)], "_", ms=8, color="#334155", alpha=0.7)
        axes.set_xticks(range(1, 11))
        axes.set_xlabel("decile of difficulty (10: the hardest)")
        axes.set_ylabel(label)
    caption = (
        f"Mean change over ten bins of equally many validation tokens ({shown.tokens:,} in all), sorted by the mean loss of both models; "
        f"above 0 γ = {SMALL:g} is better (arm {ARM}). Left: symmetric change of probability; right: change of the loss. Marks: seed "
        f"{seed}, with 95 % intervals over documents, which leave out how seeds differ; dashes: other seeds."
    )
    return Drawing(canvas, decile_rows(gains, labels), f"{title}. {caption} {about(runs, scale)}", notes=notes)


# ---- a text: fig4c ---------------------------------------------------------------------------------------------------------------------


def laid_out(found: Sequence[Piece], columns: int = COLUMNS) -> list[tuple[int, int, str, float]]:
    """(line, column, text, gain) of the pieces in lines of `columns` equal places; a piece that does not fit goes on in the next line.

    Characters without a glyph in FONT are shown as □, a tab as two spaces.
    """
    glyphs = get_font(findfont(FONT))
    runs, line, column = [], 0, 0
    for piece in found:
        text = "".join(c if c == "\n" or glyphs.get_char_index(ord(c)) else "□" for c in piece.text.replace("\t", "  "))
        for i, part in enumerate(text.split("\n")):
            if i:
                line, column = line + 1, 0
            while part:
                if column == columns:
                    line, column = line + 1, 0
                fits = part[: columns - column]
                runs.append((line, column, fits, piece.gain))
                part, column = part[len(fits) :], column + len(fits)
    return runs


@plots.styled
def _example(study: Study, scale: str) -> Drawing:
    pairs, runs = pairs_of(study)
    seed, (small, standard) = next(iter(pairs.items()))
    _, domain, found, html = _compared(small.folder, standard.folder)
    size = small.cell.labels["size"]
    title = f"A text coloured by the gain of γ = {SMALL:g}, {size}"
    placed = list(itertools.takewhile(lambda run: run[0] < LINES, laid_out(found)))
    lines = 1 + max(line for line, *_ in placed)
    width, height = COLUMNS * 0.602 * POINTS / 72, 1.5 * POINTS / 72  # inches of a line; the font's advance is .602 em
    canvas = Canvas(figsize=(width + 0.4, height * (lines + 2) + 0.65))
    inches = canvas.get_figheight()
    canvas.text(0.2 / (width + 0.4), 1 - 0.22 / inches, title, fontsize=11, fontweight="bold", va="center")
    axes = canvas.add_axes((0.2 / (width + 0.4), 0.15 / inches, width / (width + 0.4), height * (lines + 2) / inches))
    axes.set(xlim=(0, COLUMNS), ylim=(lines, -2))
    axes.set_axis_off()
    key = [("worse: −1 or less", -FULL), ("−0.5", -FULL / 2), (" 0 ", 0.0), ("+0.5", FULL / 2), ("better: +1 or more", FULL)]
    starts = itertools.accumulate((len(text) + 1 for text, _ in key), initial=0)
    for line, column, text, gain in [*placed, *((-2, at, text, gain) for at, (text, gain) in zip(starts, key, strict=False))]:
        axes.add_patch(Rectangle((column, line + 0.04), len(text), 0.92, facecolor=colour(gain), lw=0))
        axes.text(column, line + 0.5, text, family=FONT, fontsize=POINTS, va="center_baseline", color="#111111", parse_math=False)
    labels = {"size": size, "arm": ARM, "seed": seed, "domain": domain}
    rows = [
        point("fig4c", "token gain", Estimate(piece.gain, 1, None, None), **labels, x=i, text=piece.text, small=piece.small,
              standard=piece.standard)
        for i, piece in enumerate(found)
    ]  # fmt: skip
    caption = (
        f"The first sequence of the validation domain {domain}, whatever it shows (its first {LINES} lines here). Blue: γ = {SMALL:g} "
        f"gives the token more probability, orange: γ = {STANDARD:g} does (symmetric change, arm {ARM}, seed {seed})."
    )
    return Drawing(canvas, rows, f"{title}. {caption} {about(runs, scale)}", html=html)


def _reads(grid: Grid) -> list[Cell]:
    return cells_of(grid, [largest(grid)], [ARM], (STANDARD, SMALL))


FIGURES = {
    "fig4a": Figure("fig4a", "Change of each token's probability", "2.5", TRAINED, _reads, _histogram),
    "fig4b": Figure("fig4b", "Gain by difficulty of the token", "2.5", TRAINED, _reads, _by_difficulty),
    "fig4c": Figure("fig4c", "A text coloured by gain", "2.5", TRAINED, _reads, _example),
}
