"""`gammalm compare`: every figure from a made-up study against a plain computation, what limits a comparison, refusals, the page."""

import json
import math
import statistics
from html.parser import HTMLParser

import pytest

from gammalm.cli import main as cli
from gammalm.config import apply_overrides, from_json, leaves, to_json
from gammalm.errors import ConfigError
from gammalm.experiments.compare import compare, read_runs
from gammalm.experiments.compare_page import write_page

from .study import write_study


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Folders of a grid's four cells; the last has made 40 % of its steps."""
    workdir = tmp_path_factory.mktemp("study")
    spec = "grids/quickstart:lrs=0.01"
    names = [cell.name for cell in write_study(workdir, spec).cells]
    again = tmp_path_factory.mktemp("again")
    write_study(again, spec, skip=names[-1:])
    return [again / "cells" / name for name in names]


def logged(folder, kind):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def test_losses_are_means_over_the_same_tokens(cells):
    found = compare(read_runs(cells))
    train = [logged(cell, "train") for cell in cells]
    seen = min(rows[-1]["tokens"] for rows in train)
    assert seen == train[-1][-1]["tokens"] < train[0][-1]["tokens"]  # the one that is behind
    assert [row["tokens"] for row in found["at_equal_tokens"]] == [round(seen * share) for share in (0.1, 0.25, 0.5, 0.75, 1)]
    for row in found["at_equal_tokens"]:
        for rows, loss in zip(train, row["loss"], strict=True):
            inside = [r["loss"] for r in rows if 0.9 * row["tokens"] < r["tokens"] <= row["tokens"]]
            assert inside and loss == pytest.approx(statistics.mean(inside), rel=1e-12)


def test_validations_and_differences(cells):
    first, second = cells[:2]
    found = compare(read_runs([first, second]))
    rows = [logged(cell, "validation") for cell in (first, second)]
    common = {row["tokens"] for row in rows[0]} & {row["tokens"] for row in rows[1]}
    assert [row["tokens"] for row in found["validation_at_equal_tokens"]] == sorted(common) and common
    assert found["validation_at_equal_tokens"][-1]["loss"] == [rows[0][-1]["loss"], rows[1][-1]["loss"]]
    configs = [leaves(from_json(cell / "config.json")) for cell in (first, second)]
    naive = {name: [c.get(name) for c in configs] for name in {**configs[0], **configs[1]} if configs[0].get(name) != configs[1].get(name)}
    assert found["config"] == naive and "init.gamma" in naive and found["versions"] == {}
    for run, config, log in zip(found["runs"], configs, rows, strict=True):
        assert run["steps"] == run["planned_steps"] == config["train.steps"]
        assert run["validation"]["loss"] == log[-1]["loss"] and run["error"] is None
        table = json.loads((first.parent / run["name"] / "init_table.json").read_text())
        assert run["parameters"] == sum(math.prod(row["shape"]) for row in table)


def test_speed_is_the_median_without_the_first_row(tmp_path, cells):
    for name, speeds in (("a", [1, 100, 300, 200]), ("b", [5])):
        (tmp_path / name).mkdir()
        to_json(from_json(cells[0] / "config.json"), tmp_path / name / "config.json")
        rows = [{"kind": "train", "step": i + 1, "tokens": 10 * (i + 1), "loss": 2.0, "tokens_per_s": s} for i, s in enumerate(speeds)]
        rows += [{"kind": "halted", "step": 2, "error": "loss is not finite"}] * (name == "b")
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert [run["tokens_per_s"] for run in found["runs"]] == [200, None]
    assert [run["error"] for run in found["runs"]] == [None, "loss is not finite"]
    assert [row["loss"] for row in found["at_equal_tokens"]][-1] == [2.0, 2.0] and found["validation_at_equal_tokens"] == []


def run_folder(folder, config, rows=(), versions=None):
    """A run's folder with these rows of metrics."""
    folder.mkdir()
    to_json(config, folder / "config.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if versions is not None:
        (folder / "versions.json").write_text(json.dumps(versions))


def rows_of_training(tokens):
    return [{"kind": "train", "step": i + 1, "tokens": at, "loss": 2.0} for i, at in enumerate(tokens)]


def test_every_version_that_differs_is_said(tmp_path, cells, capsys):
    config = from_json(cells[0] / "config.json")
    for name, optax in (("a", "0.2.5"), ("b", "0.2.6")):
        run_folder(tmp_path / name, config, versions={"jax": "0.10.0", "optax": optax})
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps({"kind": "resumed", "step": 4, "versions": {}}) + "\n")
    found = compare(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert found["versions"] == {"optax": ["0.2.5", "0.2.6"]}
    assert [note.partition(":")[0] for note in found["notes"] if "versions" in note] == ["b went on with other versions than it began with"]
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "are the same" not in capsys.readouterr().out


def test_a_run_that_has_logged_nothing_does_not_hide_the_others(tmp_path, cells):
    config = from_json(cells[0] / "config.json")
    for name, tokens in (("a", (10, 20)), ("b", (10,)), ("c", ())):
        run_folder(tmp_path / name, config, rows_of_training(tokens))
    found = compare(read_runs([tmp_path / name for name in "abc"]))
    assert found["at_equal_tokens"] == [{"tokens": 10, "loss": [2.0, 2.0, None]}]


def test_a_loss_that_is_no_number_is_left_out_of_the_curves_and_null_in_json(tmp_path, cells, capsys):
    config = from_json(cells[0] / "config.json")
    for name, loss in (("a", math.inf), ("b", math.nan)):
        bad = {"kind": "validation", "step": 2, "tokens": 20, "loss": loss, "bits_per_byte": loss, "domains": {}}
        run_folder(tmp_path / name, config, [*rows_of_training((10, 20)), bad])
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert "<svg" in write_page(runs, compare(runs))
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [run["validation"]["loss"] for run in said["runs"]] == [None, None]


@pytest.mark.parametrize(
    "schedule, changed, differ",
    [
        ("cosine", {"batch.sequences": 16}, True),
        ("cosine", {"optimizer.final_fraction": 0.5}, True),
        ("cosine", {"optimizer.cooldown_share": 0.5}, False),
        ("wsd", {"optimizer.cooldown_share": 0.5}, True),
        ("constant", {"train.steps": 7}, False),
        ("constant", {"seed": 7}, False),
    ],
)
def test_when_learning_rates_are_not_the_same(tmp_path, cells, schedule, changed, differ):
    config = from_json(cells[0] / "config.json")
    both = [("optimizer.schedule", schedule), ("optimizer.warmup_steps", 2)]
    run_folder(tmp_path / "a", apply_overrides(config, both))
    run_folder(tmp_path / "b", apply_overrides(config, both + list(changed.items())))
    assert ("Learning rates" in " ".join(compare(read_runs([tmp_path / "a", tmp_path / "b"]))["notes"])) == differ


def seal(folder, tokenizer):
    (folder / "checkpoints" / "000000009").mkdir(parents=True)
    (folder / "checkpoints" / "000000009" / "checksums.json").write_text(
        json.dumps({"body": {"facts": {"extra": {"tokenizer": tokenizer}}}})
    )


def test_notes_say_what_limits_the_comparison(tmp_path, cells):
    notes = " ".join(compare(read_runs(cells))["notes"])
    assert "has made" in notes and "okenizer" not in notes and "Learning rates" not in notes and "Single runs" in notes
    config = from_json(cells[0] / "config.json")
    for name, packing, rate in (("a", "concat", 1e-2), ("b", "documents", 2e-2)):
        (tmp_path / name).mkdir()
        with config.unlocked():
            config.data.packing, config.optimizer.learning_rate = packing, rate
        to_json(config, tmp_path / name / "config.json")
        seal(tmp_path / name, f"sha of {name}")
    notes = " ".join(compare(read_runs([tmp_path / "a", tmp_path / "b"]))["notes"])
    for said in ("tokenizers differ", "data.packing differs", "Learning rates are not the same"):
        assert said in notes


def test_names_are_as_short_as_they_can_be(tmp_path, cells):
    assert [run.name for run in read_runs(cells[:2])] == [cell.name for cell in cells[:2]]
    twin = tmp_path / "cells" / cells[0].name
    twin.mkdir(parents=True)
    to_json(from_json(cells[0] / "config.json"), twin / "config.json")
    assert [run.name for run in read_runs([cells[0], twin])] == ["/".join(path.resolve().parts[-3:]) for path in (cells[0], twin)]


def test_refusals(tmp_path, cells):
    grid = cells[0].parents[1]
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text(json.dumps({"model": {"widths": [11, 5, 1]}}))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    for folders, says in (
        ([cells[0]], "two or more"),
        ([cells[0], cells[0].parent / "." / cells[0].name], "two or more"),
        ([cells[0], tmp_path / "none"], "is no folder"),
        ([cells[0], tmp_path], "holds no config.json"),
        ([cells[0], grid], "gammalm report"),
        ([cells[0], tmp_path / "net"], "small supervised net"),
        ([cells[0], tmp_path / "hf"], "config.json is of no run"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_runs(folders)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.outside, self.drawings = [], 0

    def handle_starttag(self, tag, attrs):
        self.drawings += tag == "svg"
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]


def test_the_command_and_its_page(cells, tmp_path, capsys):
    page = tmp_path / "compared.html"
    argv = ["compare", *map(str, cells[:2]), "--html", str(page)]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main([*argv, "--out", str(tmp_path / "found.json")]) == 0
    text = capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text()) == found
    a, b = found["at_equal_tokens"][-1]["loss"]
    row = next(line for line in text.splitlines() if line.split()[:2] == [f"{found['at_equal_tokens'][-1]['tokens']:,}", f"{a:.4f}"])
    assert f"{b:.4f}" in row and f"{b - a:+.4f}".replace("-", "−") in row
    assert "init.gamma" in text and str(cells[0]) in text
    html = page.read_text()
    links = Links()
    links.feed(html)
    assert links.outside == [] and links.drawings == 1
    assert f"{a:.4f}" in html and "init.gamma" in html
    assert cli.main([*argv[:-1], str(tmp_path / "none" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_page_of_runs_that_logged_nothing(tmp_path, cells):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        to_json(from_json(cells[0] / "config.json"), tmp_path / name / "config.json")
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert "Nothing was logged yet" in write_page(runs, compare(runs))
