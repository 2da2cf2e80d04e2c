"""The report of made-up grids whose effects are known: its numbers, its wording, what it says of missing things, and the page itself."""

import json
import math
import re
import shutil

import numpy as np
import pytest

from gammalm.cli.main import main
from gammalm.errors import ConfigError
from gammalm.experiments import plots
from gammalm.experiments.report import write_report
from gammalm.experiments.results import append_result, group_name, read_results, read_study
from gammalm.experiments.statistics import Best, Difference, estimate
from gammalm.experiments.summary import best_note, finding, gap_finding, summarise, text_table, verdict

from .study import loss_of, report, write_study


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("full")
    write_study(workdir)
    return workdir, *report(workdir)


def test_the_numbers_are_those_of_the_known_effects(tmp_path):
    write_study(tmp_path, noise=0.0, curves=False)
    summary = summarise(read_study(tmp_path)).to_json()
    found = {(d["group"], d["rate"]): d for d in summary["gaps"]}
    best = {}
    for arm in ("plain", "adjusted"):
        losses = {(g, r): loss_of({"arm": arm, "gamma": g, "lr": r, "seed": 0}) for g in (0.5, 1.0) for r in (0.003, 0.01, 0.03)}
        for rate in (0.003, 0.01, 0.03):
            assert found[arm, rate]["mean"] == pytest.approx(losses[1.0, rate] - losses[0.5, rate], abs=1e-12)
            assert found[arm, rate]["n"] == 3
        best[arm] = [min((losses[g, r], r) for r in (0.003, 0.01, 0.03)) for g in (0.5, 1.0)]
        assert found[arm, None]["mean"] == pytest.approx(best[arm][1][0] - best[arm][0][0], abs=1e-12)
        assert found[arm, None]["rates"] == (best[arm][0][1], best[arm][1][1])
    tuned = next(d for d in summary["gap_contrasts"] if d["rate"] is None)
    expected = (best["adjusted"][1][0] - best["adjusted"][0][0]) - (best["plain"][1][0] - best["plain"][0][0])
    assert tuned["mean"] == pytest.approx(expected, abs=1e-12)
    assert all(d["mean"] == pytest.approx(expected_arm(d), abs=1e-12) for d in summary["arm_differences"])
    gap = next(d for d in summary["domain_gaps"] if d["group"] == "plain" and d["domain"] == "code-en")
    assert gap["mean"] == pytest.approx(found["plain", None]["mean"] + 0.01, abs=1e-12)  # domains add .02·(γ − .5)


def expected_arm(difference):
    gamma = float(difference["group"].removeprefix("γ="))
    rates = difference["rates"]
    sides = zip(("plain", "adjusted"), rates, strict=True)
    plain, adjusted = (loss_of({"arm": arm, "gamma": gamma, "lr": rate, "seed": 0}) for arm, rate in sides)
    return adjusted - plain


def test_what_was_run_is_on_the_page(full):
    _, page, summary = full
    scale = ("36 of 36", "231,552", "2,048,000", "8.8", "32 × 128", "1e-12", "elementwise", "0.003, 0.01, 0.03", "paper_dense, concat")
    for text in scale:
        assert text in page.text, text
    assert summary["scale"][0]["tokens_per_parameter"] == [2_048_000 / 231_552]
    assert "125M to 1.5B parameters" in page.text and "232k" in page.text  # far below the paper's scale, said so
    assert "devices.kind" in page.text and "0.12.0" in page.text
    assert "0.1443" in page.text and "0.1768 … 0.5" not in page.text and ", by layer" in page.text  # σ = 48^(−½); a list per layer


def test_every_mean_and_interval_of_the_summary_is_on_the_page(full):
    _, page, summary = full
    for row in summary["losses"]:
        assert f"{row['mean']:.4f}" in page.text and f"{row['low']:.4f} … {row['high']:.4f}" in page.text
    for row in summary["gaps"] + summary["gap_contrasts"] + summary["arm_differences"]:
        assert f"{row['mean']:+.4f}".replace("-", "−") in page.text
    for sentences in summary["statements"].values():
        assert all(sentence in page.text for sentence in sentences)


def test_the_page_needs_nothing_from_outside_and_is_well_formed(full):
    workdir, page, _ = full
    html = (workdir / "report/index.html").read_text(encoding="utf-8")
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in page.tags}
    links = [attrs[key] for _, attrs in page.tags for key in ("href", "src", "xlink:href") if key in attrs]
    assert links and all(link.startswith("#") for link in links)
    assert "@import" not in html and set(re.findall(r"url\((.)", html)) == {"#"}
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)  # navigation, and clip paths and markers inside each drawing
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    assert ("viewport", "width=device-width, initial-scale=1") in [(a.get("name"), a.get("content")) for t, a in page.tags if t == "meta"]
    assert len(html) < 1_000_000


def test_every_drawing_has_a_text_that_gives_its_numbers_and_a_png(full):
    workdir, page, summary = full
    alts = [attrs.get("aria-label", "") for tag, attrs in page.tags if tag == "figure"]
    drawings = sum(tag == "svg" for tag, _ in page.tags)
    assert drawings == len(alts) == len(list((workdir / "report").glob("*.png"))) == 2 * 4 + 2
    assert all(re.search(r"\d\.\d{3}", alt) for alt in alts)
    plain = next(row for row in summary["losses"] if (row["group"], row["gamma"], row["rate"]) == ("plain", 0.5, 0.003))
    assert f"γ 0.5 at rate 0.003: {plain['mean']:.3f}" in alts[0]


def test_the_report_does_not_depend_on_the_order_in_which_cells_finished(tmp_path):
    pages = []
    for name, order in (("a", range(12)), ("b", [7, 3, 11, 0, 5, 1, 10, 2, 9, 4, 8, 6])):
        write_study(tmp_path / name, "grids/quickstart:lrs=0.003/0.01/0.03", order=order, curves=False)
        pages.append([write_report(tmp_path / name).read_text(), (tmp_path / name / "report/summary.json").read_text()])
        pages[-1].append(text_table(run.row for run in read_study(tmp_path / name).runs))
    assert pages[0] == pages[1]


def test_a_partial_grid_says_what_is_missing(tmp_path):
    skipped, failed = {"plain-gamma1-lr0.03-seed0", "adjusted-gamma0.5-lr0.003-seed0"}, {"plain-gamma0.5-lr0.03-seed0"}
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", skip=skipped, fail=failed)
    page, summary = report(tmp_path)
    assert set(summary["cells"]["unfinished"]) == skipped and set(summary["cells"]["failed"]) == failed
    assert "partial: 3 of 12 cells have no result" in page.text
    assert "loss is not finite at step 212; first bad layer: layers/attn/q[1]" in page.text
    assert "step 200 of 500" in page.text
    assert "no result at 0.03" in page.text and "one seed" in page.text and "no interval" in page.text
    assert not re.search(r"interval \[", page.text)
    assert ("plain", 0.03) not in {(d["group"], d["rate"]) for d in summary["gaps"]}


def test_a_grid_without_any_result_makes_a_report_too(tmp_path):
    grid = write_study(tmp_path, "grids/gamma_sweep", skip={f"adjusted-gamma{g / 10:g}-seed0" for g in range(5, 16)}, curves=False)
    page, summary = report(tmp_path)
    assert f"0 of {len(grid.cells)}" in page.text and "not started" in page.text
    assert summary["statements"] == {"all cells": ["Not enough has finished to compare two initialization rates."]}
    assert {attrs["href"][1:] for tag, attrs in page.tags if tag == "a"} <= set(page.ids())


def test_many_gammas_name_the_lowest_and_warn_at_the_edge(tmp_path):
    write_study(tmp_path, "grids/gamma_sweep:seeds=2", noise=0.0, curves=False)
    page, summary = report(tmp_path)
    assert "Of 11 γ's, the lowest mean is at γ=1.5" in page.text and "outermost γ" in page.text
    assert "results at one learning rate" in page.text
    assert [d["second"] for d in summary["gaps"]] == [f"γ={g / 10:g}" for g in range(6, 16)]


def test_an_error_text_cannot_become_markup(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    append_result(tmp_path, {"cell": "plain-gamma1-lr0.03-seed0", "status": "failed", "error": "<script>alert(1)</script> & more"})
    page, _ = report(tmp_path)
    assert "script" not in {tag for tag, _ in page.tags} and "<script>alert(1)</script> & more" in page.text


# ---- wording ---------------------------------------------------------------------------------------------------------------------


def difference(*values):
    return Difference("plain", "γ=0.5", "γ=1", 0.01, (0.01, 0.01), estimate(values), dict(enumerate(values)))


def test_wording_follows_the_numbers():
    assert finding(difference(-0.1, -0.11, -0.12)) == "γ=1 lower than γ=0.5"
    assert finding(difference(0.1, 0.11, 0.12)) == "γ=1 higher than γ=0.5"
    assert finding(difference(-0.1, 0.11, 0.02)) == "not resolved"
    assert finding(difference(-0.1)) == "γ=1 lower than γ=0.5, one seed"
    assert "includes zero" in verdict(difference(-0.1, 0.11, 0.02)) and "3 seeds" in verdict(difference(-0.1, 0.11, 0.02))
    assert "no interval" in verdict(difference(-0.1)) and "[" not in verdict(difference(-0.1))
    assert gap_finding(difference(0.1, 0.11)) == "gap of γ=1 higher than gap of γ=0.5"
    assert gap_finding(difference(0.1, -0.11)) == "not resolved"


def test_best_note_is_silent_only_inside_a_complete_scan():
    e = estimate([3.0, 3.1])
    assert best_note(Best(0.01, e, "", (), False)) == ""
    assert "may lie outside" in best_note(Best(0.01, e, "highest", (), False))
    assert "one rate" in best_note(Best(0.01, e, "only", (), False))
    assert "no result at 0.03" in best_note(Best(0.01, e, "", (0.03,), False))
    assert "every seed" in best_note(Best(0.01, e, "", (), True))


# ---- results on disk -------------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_said_aloud_and_cut_off_by_the_next_append(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (len(whole) - 1, len(whole) - 7, len(whole) - len(lines[-1]) + 1):
        file.write_bytes(whole[:cut])
        rows, notices = read_results(tmp_path)
        assert len(rows) == 11 and len(notices) == 1 and "line 12" in notices[0]
    page, _ = report(tmp_path)
    assert "results.jsonl, line 12: cut off" in page.text and "11 of 12" in page.text
    append_result(tmp_path, json.loads(lines[-1]))
    rows, notices = read_results(tmp_path)
    assert notices == [] and list(rows) == sorted(rows) and rows == {row["cell"]: row for row in map(json.loads, lines)}


def test_a_damaged_line_in_the_middle_costs_that_row_alone(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b"\xff\xfe{oops\n", b"[1]\n", *lines[4:]]))
    rows, notices = read_results(tmp_path)
    assert len(rows) == 11 and ["line 4" in notices[0], "line 5" in notices[1]] == [True, True]


def test_the_last_row_of_a_cell_counts_and_strangers_are_reported(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", fail={"plain-gamma1-lr0.03-seed0"}, curves=False)
    row = {"cell": "plain-gamma1-lr0.03-seed0", "status": "done", "loss": 1.25}
    append_result(tmp_path, row)
    append_result(tmp_path, row | {"cell": "of-another-grid"})
    study = read_study(tmp_path)
    assert {run.cell.name: run for run in study.runs}["plain-gamma1-lr0.03-seed0"].loss == 1.25
    assert len(study.runs) == 12 and any("of-another-grid" in notice for notice in study.notices)


def test_a_loss_that_is_no_number_is_compared_with_nothing(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    append_result(tmp_path, {"cell": "plain-gamma1-lr0.03-seed0", "status": "done", "loss": float("nan")})
    page, summary = report(tmp_path)
    assert ("plain", 1.0, 0.03) not in {(row["group"], row["gamma"], row["rate"]) for row in summary["losses"]}
    assert "plain-gamma1-lr0.03-seed0: done, but its validation loss" in page.text and not re.search(r"\bnan\b", page.text)


def test_steps_taken_twice_by_a_resumed_run_count_once(tmp_path):
    write_study(tmp_path, "grids/quickstart:lrs=0.003/0.01/0.03", curves=False)
    run = read_study(tmp_path).runs[0]
    taken = [(5, 3.0), (10, 2.0), (15, 1.0), (10, 2.5), (15, 1.5), (20, 1.2)]
    rows = [{"kind": "train", "step": step, "tokens": step, "loss": loss} for step, loss in taken]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row["loss"]) for row in run.metrics["train"]] == [(5, 3.0), (10, 2.5), (15, 1.5), (20, 1.2)]


def test_group_name_is_every_label_but_the_numeric_axes():
    assert group_name({"size": "125m", "arm": "plain", "gamma": 1.0, "lr": 0.1, "seed": 2}) == "125m · plain"
    assert group_name({"eps": 1e-8, "gamma": 1.0}) == "eps 1e-08"
    assert group_name({"gamma": 1.0}) == "all runs"


def test_text_table_is_aligned_and_has_no_times_on_request():
    rows = [
        {"labels": {"arm": "plain", "gamma": 0.5}, "loss": 3.25, "bits_per_byte": 1.5, "tokens": 100, "status": "done", "seconds": 9.26},
        {"labels": {"arm": "adjusted", "gamma": 1.0}, "loss": None, "tokens": None, "status": "failed", "seconds": None},
    ]
    lines = text_table(rows).split("\n")
    assert [line.split() for line in lines] == [
        ["arm", "gamma", "loss", "bits/byte", "tokens", "status", "seconds"],
        ["plain", "0.5", "3.2500", "1.5000", "100", "done", "9.3"],
        ["adjusted", "1", "–", "–", "–", "failed", "–"],
    ]
    assert len({line.rstrip().rfind(word) for line, word in zip(lines, ("status", "done", "failed"), strict=True)}) == 1
    assert "seconds" not in text_table(rows, times=False) and "9.3" not in text_table(rows, times=False)


# ---- drawing and command line ----------------------------------------------------------------------------------------------------


def test_smoothing_keeps_constants_and_is_the_weighted_mean_it_claims():
    assert plots.smoothed([2.5] * 50) == pytest.approx([2.5] * 50)
    values = np.random.default_rng(0).normal(size=200)
    decay = 1 - 1 / (0.03 * 200)
    weights = decay ** np.arange(200)[::-1]
    assert plots.smoothed(list(values))[-1] == pytest.approx(np.sum(weights * values) / np.sum(weights))


@pytest.mark.parametrize(("number", "text"), [(999, "999"), (231_552, "232k"), (2_457_600, "2.46M"), (36e9, "36B"), (10.61, "10.6")])
def test_compact(number, text):
    assert plots.compact(number) == text


def test_colours_and_markers_tell_gammas_apart_and_are_dark_enough_on_white():
    gammas = [g / 10 for g in range(5, 16)]
    colour = plots.colours(gammas)
    assert len(set(colour.values())) == 11 == len(set(plots.markers(gammas).values()))
    for value in colour.values():
        channels = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = np.dot(linear, [0.2126, 0.7152, 0.0722])
        assert 1.05 / (luminance + 0.05) > 2.2 and math.isfinite(luminance)


def test_command_line(tmp_path, capsys, full):
    shutil.copytree(full[0], tmp_path / "w")
    (tmp_path / "w/report/old.png").write_bytes(b"")
    assert main(["report", "--workdir", str(tmp_path / "w")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:4] == ["arm", "gamma", "lr", "seed"] and len(out) == 1 + 36 + 1
    assert out[-1] == f"report: {tmp_path / 'w/report/index.html'}" and not (tmp_path / "w/report/old.png").exists()
    assert main(["report", "--workdir", str(tmp_path / "w"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == full[2]
    assert main(["report", "--workdir", str(tmp_path)]) == 2
    assert "grid.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no readable grid\.json"):
        write_report(tmp_path)
