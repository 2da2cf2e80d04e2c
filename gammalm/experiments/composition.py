"""The composition task over a grid: what every finished run answers, the means over seeds as rows, and the figure of them.

Quantities of the rows, shares from 0 to 1 with their 95 % interval over seeds; labels: arm (the cell's group), gamma, lr.

    seen        right answers on the pairs that were shown, keys at held-out places
    composed    answers on the unseen pair that follow from its functions (reasoning)
    mirrored    answers on it that repeat what its mirror image was given (memorising)
    other       answers on it that are neither
    composed gap, mirrored gap    that share at γ less that at the grid's smallest γ (`against`), paired by seed, at one rate

A row counts the runs that have learned the task at all, and says how many have not (`unfit`): their answers on an unseen pair say nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from gammalm.analysis.composition import Answers, answer, judge
from gammalm.data import composition as task
from gammalm.errors import ConfigError
from gammalm.experiments import plots
from gammalm.experiments.figures.catalog import Drawing, point
from gammalm.experiments.figures.run import write_files
from gammalm.experiments.results import Run, Study
from gammalm.experiments.statistics import estimate, paired
from gammalm.training.load import Loaded, load_model

FIT = 0.95  # of the seen pairs' answers: a run below has not learned the task
SHARES = ("seen", "composed", "mirrored", "other")
LOOKS = {"seen": ("#94a3b8", "o", ":"), "composed": ("#0e7490", "s", "-"), "mirrored": (plots.ACCENT, "^", "--")}


def answers_of(loaded: Loaded) -> Answers:
    """What a trained model answers to all pairs at held-out places. Raises ConfigError where it was not made for this task."""
    c = loaded.config
    if c.data.seq_len != task.SEQ_LEN or c.model.vocab_size < task.VOCAB_SIZE:
        raise ConfigError(
            f"a model of data.seq_len={c.data.seq_len} and model.vocab_size={c.model.vocab_size} was not trained on the composition task, "
            f"which has {task.SEQ_LEN} tokens before the answer and {task.VOCAB_SIZE} numbers. See configs/grids/composition.py."
        )
    asked = task.held_out_examples()
    given_B = answer(loaded.model, loaded.params, loaded.buffers, asked.tokens_BT)
    return judge(given_B, asked.pair_B2, task.UNSEEN, asked.answers_B, asked.mirrored_B)


def answers_of_grid(study: Study) -> list[tuple[Run, Answers]]:
    """Every finished run of the grid with its answers. Raises ConfigError when there is none."""
    runs = study.done()
    if not runs:
        raise ConfigError(f"{study.workdir}: no run has finished. Train some with gammalm grid --config grids/composition.")
    return [(run, answers_of(load_model(run.folder))) for run in runs]


def rows_of(found: Sequence[tuple[Run, Answers]]) -> list[dict]:
    """The rows described above, by arm, rate and γ in the grid's order."""
    table: dict = {}
    for run, answers in found:
        table.setdefault((run.group, run.rate), {}).setdefault(run.gamma, {})[run.seed] = answers
    rows = []
    for (arm, rate), by_gamma in table.items():
        smallest = min(by_gamma)
        for gamma, by_seed in sorted(by_gamma.items()):
            fit = _fit(by_seed)
            labels = {"arm": arm, "gamma": gamma, "lr": rate, "unfit": len(by_seed) - len(fit)}
            for name in SHARES:
                if e := estimate(getattr(a, name) for a in (by_seed if name == "seen" else fit).values()):
                    rows.append(point("composition", name, e, **labels))
            for name in ("composed", "mirrored") if gamma > smallest else ():
                sides = [{seed: getattr(a, name) for seed, a in side.items()} for side in (_fit(by_gamma[smallest]), fit)]
                if e := paired(*sides):
                    rows.append(point("composition", f"{name} gap", e, **labels, against=smallest))
    return rows


def _fit(by_seed: dict[int, Answers]) -> dict[int, Answers]:
    return {seed: answers for seed, answers in by_seed.items() if answers.seen >= FIT}


@plots.styled
def draw(found: Sequence[tuple[Run, Answers]], rows: Sequence[dict]) -> Canvas:
    """One panel per arm and rate: shares against γ, the mean over seeds as a line with its interval and every run as a dot."""
    keys = list(dict.fromkeys((run.group, run.rate) for run, _ in found))
    columns = min(len(keys), 2)
    lines = -(-len(keys) // columns)
    canvas = Canvas(figsize=(plots.PANEL[0] * columns, plots.PANEL[1] * lines), layout="constrained")
    panels = canvas.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    for (arm, rate), axes in zip(keys, panels, strict=False):
        axes.set_title(f"{arm}, rate {rate:g}", loc="left")
        axes.set_xlabel("γ")
        axes.set_ylabel("share of answers")
        axes.set_ylim(-0.04, 1.04)
        for i, (name, (colour, marker, dashes)) in enumerate(LOOKS.items()):
            points = sorted((r["gamma"], r["value"], r["low"], r["high"]) for r in rows
                            if (r["quantity"], r["arm"], r["lr"]) == (name, arm, rate))  # fmt: skip
            axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker, ls=dashes, ms=6, lw=1.7)
            for gamma, _, low, high in points:
                if low is not None:
                    axes.plot([gamma, gamma], [max(low, 0), min(high, 1)], color=colour, lw=1.2, alpha=0.8)
            dots = [(run.gamma, getattr(a, name)) for run, a in found if (run.group, run.rate) == (arm, rate)]
            axes.plot([x + 0.012 * (i - 1) for x, _ in dots], [y for _, y in dots], ".", color=colour, ms=4, alpha=0.6)
        plots.ticks(axes.xaxis, sorted({run.gamma for run, _ in found}))
    words = {"seen": "seen pairs, right", "composed": "unseen pair, composed", "mirrored": "unseen pair, mirrored"}
    handles = [Line2D([], [], color=c, marker=m, ls=d, ms=6, lw=1.7, label=words[name]) for name, (c, m, d) in LOOKS.items()]
    panels[0].legend(handles=handles, loc="best")
    return canvas


def caption(study: Study, found: Sequence[tuple[Run, Answers]]) -> str:
    """What the figure shows, at which scale, from how many runs."""
    counts = {name: " or ".join(f"{n:,}" for n in sorted({run.row[name] for run, _ in found})) for name in ("parameters", "tokens")}
    unfit = sum(a.seen < FIT for _, a in found)
    return (
        f"Answers to the pair {task.UNSEEN} of functions, which no training example shows, against γ: composed of its two functions, or "
        f"those of its mirror image {task.EXCEPTION}. {len(found)} of {len(study.runs)} runs, {counts['parameters']} parameters, "
        f"{counts['tokens']} tokens each; means over seeds with 95 % intervals, a dot per run. {unfit} runs answer less than "
        f"{FIT:.0%} of the seen pairs rightly and are left out of the means for the unseen one."
    )


def write(study: Study, found: Sequence[tuple[Run, Answers]], rows: Sequence[dict]) -> Path:
    """Draws into `workdir`/figures/composition/{composition.png, composition.svg, numbers.jsonl, caption.txt} and gives that folder."""
    folder = study.workdir / "figures" / "composition"
    drawing = Drawing(draw(found, rows), list(rows), caption(study, found))
    write_files("composition", "Composing or repeating", drawing, folder)
    return folder
