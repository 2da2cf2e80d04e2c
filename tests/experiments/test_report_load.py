"""The report's section on the load of experts: its numbers from made-up counts of tokens, and what it says where there is little.

Shapes: T logged steps, L mixture layers, E experts.
"""

import json
import re

import matplotlib.colors
import numpy as np
import pytest

from gammalm.experiments import plots
from gammalm.experiments.grid import load_grid
from gammalm.experiments.results import append_result
from gammalm.experiments.runner import _row
from gammalm.training.loop import Outcome

from .study import report, write_study

GRID = "grids/tiny_moe:seeds=2,steps=40"
LAYERS, EXPERTS, CHOICES = 3, 8, 4096
KILLED = "balanced-gamma1-seed1"


def counts_of(cell, steps):
    """Tokens of each expert [T, L, E]: more uneven at γ = 1 and in later layers; the unbalanced arm leaves expert 3 of layer 1 idle."""
    rng = np.random.default_rng(len(cell.name) + 7 * cell.labels["seed"])
    uneven = 4.0 * cell.labels["gamma"] * np.arange(1, LAYERS + 1)
    weights = rng.gamma(200 / uneven[None, :, None], size=(steps, LAYERS, EXPERTS))
    counts = np.floor(CHOICES * weights / weights.sum(-1, keepdims=True)).astype(int) + 1
    if cell.labels.get("arm") == "unbalanced":
        counts[1::2, 1, 3] = 0  # in every second step
    return counts


def rows_of(counts, dropped=0):
    """Train rows as a run logs them, of counts [T, L, E]."""
    rows = []
    for step, counts_LE in enumerate(counts, start=1):
        row = {"kind": "train", "step": step, "tokens": 2048 * step, "loss": 5.0}
        row["load_entropy"], row["load_max"], row["load_min"] = (values.round(5).tolist() for values in measures(counts_LE))
        rows.append(row | {"dropped": [float(dropped)] * LAYERS, "balance": [1.0] * LAYERS})
    return rows


def measures(counts):
    """Entropy as a share of ln E, largest and smallest load relative to the mean, of counts [..., E]."""
    mean = counts.mean(-1)
    share = counts / counts.sum(-1, keepdims=True)
    entropy = -np.sum(np.where(share > 0, share * np.log(np.where(share > 0, share, 1)), 0), -1) / np.log(counts.shape[-1])
    return entropy, counts.max(-1) / mean, counts.min(-1) / mean


def write_rows(workdir, cell, rows):
    (workdir / "cells" / cell.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_of(workdir):
    """The section's table as {(group, γ): cells after them}; None where the page has no such section."""
    html = (workdir / "report/index.html").read_text(encoding="utf-8")
    found = re.search(r'<section id="load">.*?</section>', html, re.DOTALL)
    if not found:
        assert 'href="#load"' not in html
        return None
    body = found[0][found[0].index("<tbody>") :]
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in body.split("<tr>")[1:]]
    return {(line[0], float(line[1])): line[2:] for line in lines}


def span(values, digits):
    return f"{min(values):.{digits}f} … {max(values):.{digits}f}"


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """A grid of mixtures of which one run was killed at step 21: folder, page, summary, counts by cell."""
    workdir = tmp_path_factory.mktemp("mixtures")
    grid = write_study(workdir, GRID, skip={KILLED}, curves=False)
    counts = {cell.name: counts_of(cell, 21 if cell.name == KILLED else 40) for cell in grid.cells}
    for cell in grid.cells:
        write_rows(workdir, cell, rows_of(counts[cell.name], dropped=cell.labels["arm"] == "unbalanced"))
    return workdir, *report(workdir), counts


def test_the_table_has_the_numbers_of_the_last_steps(mixtures):
    workdir, _, summary, counts = mixtures
    table, data = table_of(workdir), {(row["group"], row["gamma"]): row for row in summary["expert_loads"]}
    assert list(table) == list(data) == [(arm, g) for arm in ("balanced", "unbalanced") for g in (0.5, 1.0)]
    for (arm, gamma), cells in table.items():
        ends = [counts[f"{arm}-gamma{gamma:g}-seed{seed}"][-2:] for seed in (0, 1)]  # 5 % of 40 steps; of 21: steps 20 and 21
        entropy, largest, smallest = (np.mean([np.mean(measures(end)[i], axis=0) for end in ends], axis=0) for i in range(3))
        assert np.ptp(entropy) > 0.002, "layers must differ for a range to mean something"
        idle = sum(int((end == 0).any(axis=(1, 2)).sum()) for end in ends)
        assert idle == (2 if arm == "unbalanced" else 0)
        dropped = 2 * 40 * LAYERS if arm == "unbalanced" else 0
        steps, idle_of_all = (61, 0) if (arm, gamma) == ("balanced", 1.0) else (80, 40 if arm == "unbalanced" else 0)
        shares = [f"{100 * idle // 4} % of 4", f"{100 * idle_of_all // steps} % of {steps}"]
        assert cells == ["0.01", span(entropy, 3), span(largest, 2), span(smallest, 2), *shares, str(dropped)]
        row = data[arm, gamma]
        assert row["entropy"] == pytest.approx(entropy, abs=1e-5) and row["runs"] == 2
        assert row["idle_ending"] == [idle, 4] and row["idle"] == [idle_of_all, steps]
        assert row["largest"] == pytest.approx(largest, abs=1e-5) and row["smallest"] == pytest.approx(smallest, abs=1e-5)


def test_the_section_says_what_even_means_and_has_a_drawing_per_group(mixtures):
    workdir, page, summary, _ = mixtures
    assert "every expert of a layer is chosen equally often" in page.text and ("a", {"href": "#load"}) in page.tags
    assert {file.name for file in (workdir / "report").glob("load-*.png")} == {"load-1.png", "load-2.png"}
    alts = [attrs["aria-label"] for tag, attrs in page.tags if tag == "figure" and "Load entropy" in attrs["aria-label"]]
    assert len(alts) == 2 and all(f"γ {row['gamma']:g}: {span(row['entropy'], 3)}" in alts[row["group"] == "unbalanced"]
                                  for row in summary["expert_loads"])  # fmt: skip


def test_a_drawing_has_the_mean_over_layers_and_every_layer():
    tokens = np.arange(1, 5) * 1000
    entropy = {0.5: np.array([[0.9, 0.8], [0.8, 0.6], [0.9, 0.7], [0.95, 0.85]]), 1.0: np.array([[0.7, 0.5]] * 4)}
    axes = plots.loads("g", {g: ((list(tokens), values),) for g, values in entropy.items()}, 0.4).axes[0]
    lines = [(matplotlib.colors.to_hex(line.get_color()), line) for line in axes.get_lines() if len(line.get_xdata()) == 4]
    for g, colour in plots.colours(list(entropy)).items():
        own = sorted((line for c, line in lines if c == colour), key=lambda line: -line.get_linewidth())
        assert [line.get_linewidth() > 1 for line in own] == [True, False, False]
        assert own[0].get_marker() == plots.markers(list(entropy))[g] and own[0].get_ydata() == pytest.approx(entropy[g].mean(1))
        assert sorted(line.get_ydata().tolist() for line in own[1:]) == sorted(entropy[g].T.tolist())
        assert all((line.get_xdata() == tokens).all() for line in own)
    assert axes.get_ylim()[0] < 0.4 and axes.get_ylim()[1] > 1
    assert any(np.all(np.asarray(line.get_ydata()) == 1) for line in axes.get_lines()), "a line at even"


def test_many_points_are_thinned_and_the_last_is_kept():
    values = np.linspace(0.5, 0.9, 5001)[:, None]
    axes = plots.loads("g", {1.0: ((list(range(5001)), values),)}, 0.5).axes[0]
    longest = max(axes.get_lines(), key=lambda line: len(line.get_xdata()))
    assert 150 < len(longest.get_xdata()) < 420 and longest.get_xdata()[-1] == 5000 and longest.get_ydata()[-1] == 0.9


def test_a_dense_grid_has_no_such_section(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01")
    page, summary = report(tmp_path)
    assert table_of(tmp_path) is None and summary["expert_loads"] == [] and not list((tmp_path / "report").glob("load*"))
    assert "expert" not in page.text and "active parameter" not in page.text and "dense models" in page.text


def test_runs_killed_before_their_first_row_are_left_out(tmp_path):
    grid = write_study(tmp_path, GRID, skip={cell.name for cell in load_grid(GRID).cells}, curves=False)
    (tmp_path / "cells" / grid.cells[0].name / "metrics.jsonl").write_text("")
    report(tmp_path)
    assert table_of(tmp_path) is None
    only = next(cell for cell in grid.cells if cell.name == "unbalanced-gamma1-seed0")
    write_rows(tmp_path, only, rows_of(counts_of(only, 1)))
    report(tmp_path)
    table = table_of(tmp_path)
    assert list(table) == [("unbalanced", 1.0)] and table["unbalanced", 1.0][-3:] == ["0 % of 1", "0 % of 1", "0"]
    assert [file.name for file in (tmp_path / "report").glob("load-*.png")] == ["load-2.png"]


def test_missing_and_damaged_values_leave_a_dash_or_the_step_out(tmp_path):
    grid = write_study(tmp_path, "grids/tiny_moe:steps=40", curves=False)
    counts = {cell.name: counts_of(cell, 40) for cell in grid.cells}
    for cell in grid.cells:
        rows = rows_of(counts[cell.name])
        for row in rows:
            for key in ("load_max", "load_min", "dropped") if cell.labels["arm"] == "balanced" else ():
                del row[key]
        rows[-1]["load_entropy"] = [0.5, float("nan"), 0.5]
        rows[3]["load_entropy"] = None
        write_rows(tmp_path, cell, rows)
    report(tmp_path)
    table = table_of(tmp_path)
    for (arm, gamma), cells in table.items():
        entropy = measures(counts[f"{arm}-gamma{gamma:g}-seed0"][38])[0]  # step 39 is what is left of the last two
        assert cells[1] == span(entropy, 3)
        assert (cells[2:] == ["–"] * 5) == (arm == "balanced")


def test_only_the_best_rate_of_a_gamma_counts(tmp_path):
    grid = write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    at = {0.003: 0.9, 0.01: 0.8, 0.03: 0.7}
    for cell in grid.cells:
        write_rows(tmp_path, cell, [{"kind": "train", "step": 1, "tokens": 8, "loss": 5.0, "load_entropy": [at[cell.labels["lr"]]] * 2}])
    _, summary = report(tmp_path)
    best = {(row["group"], row["gamma"]): row["rate"] for row in summary["best_rates"]}
    assert len(set(best.values())) > 1
    assert {key: cells[:2] for key, cells in table_of(tmp_path).items()} == {key: [f"{r:g}", f"{at[r]:.3f}"] for key, r in best.items()}


# ---- active parameters -----------------------------------------------------------------------------------------------------------


def test_active_parameters_are_shown_where_rows_have_them(tmp_path):
    grid = write_study(tmp_path, "grids/tiny_moe:steps=40", curves=False)
    page, summary = report(tmp_path)  # rows as they were before active parameters were counted
    assert "active" not in page.text and [row["active_parameters"] for row in summary["scale"]] == [[], []]
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for row in rows[:2]:
        append_result(tmp_path, row | {"parameters": 300_000, "active_parameters": 160_000, "tokens": 400_000})
    for row in rows[2:]:
        append_result(tmp_path, row | {"parameters": 300_000, "active_parameters": 300_000})  # all active: nothing to tell apart
    page, summary = report(tmp_path)
    assert [row["active_parameters"] for row in summary["scale"]] == [[160_000], []]
    assert [row["tokens_per_active_parameter"] for row in summary["scale"]] == [[2.5], []]
    for text in ("160,000", "160k", "tokens per active parameter", "tokens/active parameter"):
        assert text in page.text, text
    assert len(grid.cells) == len(rows) == 4


def test_rows_of_the_runner_count_active_parameters():
    cells = {(cell.labels["size"], cell.labels["arm"]): cell for cell in load_grid("grids/paper_moe").cells}
    row = _row(cells["moe-1.5b-a0.25b", "plain"], Outcome(steps=0, tokens=0, seconds=0.0))
    assert (row["parameters"], row["active_parameters"]) == (1_490_183_168, 244_474_880)  # the paper's 1.5B, 0.25B of them active
    dense = _row(load_grid("grids/quickstart").cells[0], Outcome(steps=0, tokens=0, seconds=0.0))
    assert dense["active_parameters"] == dense["parameters"]
