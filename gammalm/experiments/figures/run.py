"""From an id to a picture: trains the cells that figures read and that are not done, draws, and writes the page of all figures.

    <workdir>/grid.json  results.jsonl  cells/…          one grid for all figures of the first paper (configs/grids/figures.py)
    <workdir>/han_e1/grid.json  results.jsonl            a grid of its own for each experiment of the second source
    <workdir>/figures/<id>/<id>.png  <id>.svg  numbers.jsonl  caption.txt  [<id>.html]
    <workdir>/figures/index.html                                                      all figures that have been drawn there

Cells that several figures read are trained once. A figure that cannot be drawn is reported, and the others are.
"""

import dataclasses
import json
import math
import re
import traceback
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gammalm.config import call
from gammalm.errors import ConfigError, GammalmError
from gammalm.experiments import page, plots, table1
from gammalm.experiments.figures import catalog
from gammalm.experiments.figures.catalog import ALL, GRID, IDS, TRAINED, UNTRAINED, Drawing, Figure
from gammalm.experiments.grid import Grid
from gammalm.experiments.results import Study, read_rows, read_study
from gammalm.files import write_text_atomic

LISTED = 200  # rows of numbers that the page shows of one figure


@dataclasses.dataclass(frozen=True)
class Made:
    """One figure after an attempt to draw it: its rows, or the error that kept it from being drawn."""

    id: str
    folder: Path
    rows: Sequence[dict] = ()
    error: str | None = None


def choose(id_: str, scale: str | None) -> tuple[list[Figure], str]:
    """The figures that `id_` names ("all": every one there is at `scale`), and the scale of those that are trained.

    Raises ConfigError for an unknown id or scale, and where a figure does not exist at that scale.
    """
    if scale not in (None, *UNTRAINED, *TRAINED):
        raise ConfigError(f"--scale {scale}: none of {', '.join((*UNTRAINED, *TRAINED))}.")
    if id_ == ALL:
        scale = scale or TRAINED[0]
        return [f for f in catalog.load().values() if f.grid == GRID and (f.reads is None or scale in f.scales)], scale
    (figure,) = catalog.load([id_]).values()
    scale = scale or figure.scales[0]
    if scale not in figure.scales:
        raise ConfigError(f"{id_} has no scale {scale}: it is drawn at {', '.join(figure.scales)}. Choose with --scale.")
    return [figure], scale


def grid_of(figures: Sequence[Figure]) -> str:
    """The config of the one grid that these figures read; GRID where none is trained."""
    return next((figure.grid for figure in figures if figure.reads), GRID)


def home_of(figures: Sequence[Figure], workdir: Path) -> Path:
    """The folder of that grid's runs."""
    return next((figure.home(workdir) for figure in figures if figure.reads), workdir)


def refuse_other_scale(figures: Sequence[Figure], workdir: Path, scale: str) -> None:
    """Raises ConfigError where the runs of `workdir` are of other sizes than those of `scale`, which captions would name."""
    held = {cell.labels.get("size") for cell in read_study(home_of(figures, workdir)).grid.cells}
    scales = [of for of in TRAINED if any(of in figure.scales for figure in figures)]
    sizes = {of: {cell.labels.get("size") for cell in call(f"{grid_of(figures)}:scale={of}", "get_grid").cells} for of in scales}
    if not held <= sizes[scale]:
        fits = [f"Give --scale {of}." for of in scales if held <= sizes[of]] or ["Give the --workdir of `gammalm figure`."]
        raise ConfigError(f"{workdir}: its runs are not of scale {scale}: {', '.join(sorted(map(str, held - sizes[scale])))}. {fits[0]}")


def train(figures: Sequence[Figure], grid: Grid, workdir: Path, **how) -> list[dict]:
    """Trains what `figures` read of `grid` and is not done; the rows of these cells. `how` goes to `runner.run_grid`, which see."""
    from gammalm.experiments.runner import run_grid

    names = {cell.name for figure in figures if figure.reads for cell in figure.reads(grid)}
    return run_grid(grid, home_of(figures, workdir), only=lambda cell: cell.name in names, **how) if names else []


def draw(figures: Sequence[Figure], workdir: Path, scale: str) -> list[Made]:
    """Draws `figures` from what `workdir` has, then writes the page. Raises ConfigError where a figure needs a grid and there is none."""
    study = read_study(home_of(figures, workdir)) if any(figure.reads for figure in figures) else None
    made = [_draw(figure, study, workdir / "figures" / figure.id, scale) for figure in figures]
    write_index(workdir)
    return made


def _draw(figure: Figure, study: Study | None, folder: Path, scale: str) -> Made:
    scale = scale if figure.reads else figure.scales[0]
    try:
        drawing = figure.draw(study if figure.reads else None, scale)
        missing = _missing(figure, study) if figure.reads else []
        rows = [_plain({"figure": figure.id, "scale": scale} | row) for row in drawing.rows]
        write_files(figure.id, figure.title, dataclasses.replace(drawing, rows=rows, notes=[*missing, *drawing.notes]), folder)
    except GammalmError as error:
        return Made(figure.id, folder, error=str(error))
    except Exception as error:  # a fault in one figure must not take the others with it
        traceback.print_exc()
        return Made(figure.id, folder, error=f"{type(error).__name__}: {error}")
    return Made(figure.id, folder, rows)


def _missing(figure: Figure, study: Study) -> list[str]:
    """What the figure reads and has no result, in a sentence."""
    names = {cell.name for cell in figure.reads(study.grid)}
    left = [run for run in study.runs if run.cell.name in names and run.loss is None and not run.row.get("diverged_at")]
    failed = [run for run in left if run.status != "unfinished"]
    said = f"Partial: {len(left)} of {len(names)} cells that this figure reads have no result"
    if failed:
        said += f"; {len(failed)} failed, the first {failed[0].cell.name}: {failed[0].row.get('error') or 'its loss is not finite'}"
    return [said + "."] if left else []


def write_files(id_: str, title: str, drawing: Drawing, folder: Path) -> None:
    """Writes a drawn figure into `folder`, each file whole or not at all: <id>.png, <id>.svg, caption.txt, <id>.html where it has text,
    and numbers.jsonl, last, because what lists figures looks for it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / f"{id_}.svg", plots.save(drawing.figure, folder, id_) + "\n")
    write_text_atomic(folder / "caption.txt", "\n".join([drawing.caption, *drawing.notes]) + "\n")
    text = folder / f"{id_}.html"
    if drawing.html is None:
        text.unlink(missing_ok=True)
    else:
        body = page.section(id_, f"{id_}: {title}", drawing.html, page.paragraph(drawing.caption, "note"))
        write_text_atomic(text, page.PAGE.substitute(title=escape(f"{id_}: {title}"), body=body))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in drawing.rows)
    write_text_atomic(folder / "numbers.jsonl", lines)


def _plain(row: dict) -> dict:
    """`row` with None for numbers that JSON has no word for."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


# ---- the page ------------------------------------------------------------------------------------------------------------------------


def write_index(workdir: Path) -> Path:
    """Writes the page of all figures in `workdir`/figures and gives its path."""
    folder = workdir / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    figures = catalog.load([id_ for id_ in IDS if (folder / id_ / "numbers.jsonl").exists()])
    sections = {figure.id: _section(figure, folder / figure.id) for figure in figures.values()}
    if (table := folder / table1.ID / f"{table1.ID}.json").exists():
        sections[table1.ID] = table1.section(json.loads(table.read_text(encoding="utf-8")))
    nav = "".join(f'<a href="#{id_}">{id_}</a>' for id_ in sections)
    lead = "Small initialization, σ = d<sub>in</sub><sup>−γ</sup>: the figures of the paper from runs of this folder, with their numbers."
    body = f'<header class="top"><h1>Figures</h1><p class="lead">{lead}</p><nav>{nav}</nav></header>\n' + "\n".join(sections.values())
    write_text_atomic(folder / "index.html", page.PAGE.substitute(title="Figures of small initialization", body=body))
    return folder / "index.html"


def _section(figure: Figure, folder: Path) -> str:
    svg = (folder / f"{figure.id}.svg").read_text(encoding="utf-8")
    caption, *notes = (folder / "caption.txt").read_text(encoding="utf-8").splitlines()
    rows, _ = read_rows(folder / "numbers.jsonl")
    title = f"{figure.id}: {figure.title}"
    width = float(re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', svg)[1])
    files = [f"{figure.id}.png", f"{figure.id}.svg", "numbers.jsonl"] + [f"{figure.id}.html"] * (folder / f"{figure.id}.html").exists()
    links = ", ".join(f'<a href="{figure.id}/{name}">{name}</a>' for name in files)
    return page.section(
        figure.id,
        title,
        page.wide(page.figure(svg, f"{title}. {caption}", width if width > plots.PANEL[0] * 80 else 0.0), title),
        page.paragraph(caption, "note"),
        "".join(page.paragraph(note, "warn") for note in notes),
        _numbers(rows, title),
        f'<p class="note">{escape(_source(figure))}. Files: {links}</p>',
    )


def _source(figure: Figure) -> str:
    return f"Section {figure.section} of the paper" if figure.grid == GRID else f"Experiment {figure.section} of the second source"


def _numbers(rows: Sequence[dict], title: str) -> str:
    """The rows as a table that opens on demand; where they are many, those of single quantities, without the points of curves."""
    shown = (rows if len(rows) <= LISTED else [row for row in rows if "x" not in row])[:LISTED]
    if not shown:
        return ""
    keys = [key for key in dict.fromkeys(key for row in shown for key in row) if key not in ("figure", "scale")]
    table = page.table(keys, [[_text(row.get(key)) for key in keys] for row in shown], f"Numbers of {title}", left=range(3))
    return page.details("Numbers" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} numbers", table)


def _text(value) -> str:
    return "–" if value is None else f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)
