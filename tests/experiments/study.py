"""A made-up grid workdir with known effects, written the way the runner writes it: losses are exact sums of the terms below.

And its report, read back as a page and as data.
"""

import json
import math
import random
from html.parser import HTMLParser

from gammalm.config import to_json
from gammalm.experiments.grid import load_grid
from gammalm.experiments.report import write_report
from gammalm.experiments.results import append_result

DOMAINS = {"web-en": (0.25, 900), "web-zh": (0.4, 700), "encyclopaedia-en": (-0.05, 800), "code-en": (-0.6, 500), "math-en": (0.1, 400)}


def loss_of(labels, noise=0.0):
    """Final loss of a cell: a bowl in log rate whose bottom moves with γ, an arm effect that differs by γ, a seed effect, noise."""
    gamma, rate, seed = labels["gamma"], labels.get("lr", 0.01), labels.get("seed", 0)
    bottom = math.log(0.022) - 1.1 * (gamma - 0.5)
    arm = 0.0 if labels.get("arm") == "plain" else -0.02 - 0.05 * (gamma - 0.5)
    return 3.35 - 0.04 * (gamma - 0.5) + 0.035 * (math.log(rate) - bottom) ** 2 + arm + 0.01 * seed + noise


THREE_SEEDS = "grids/quickstart:lrs=0.003/0.01/0.03,seeds=3"


def write_study(
    workdir, spec=THREE_SEEDS, *, skip=(), fail=(), noise=0.004, order=None, seed=0, curves=True, loss_of=loss_of, parameters=None
):
    """Writes the workdir of the grid `spec`; cells in `skip` are unfinished, those in `fail` failed. Gives the grid.

    parameters: how many there are by the label `size`, where it is not one model.
    """
    rng = random.Random(seed)
    grid = load_grid(spec)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "grid.json").write_text(json.dumps(grid.to_json()))
    rows = []
    for cell in grid.cells:
        folder = workdir / "cells" / cell.name
        folder.mkdir(parents=True)
        config = cell.config()
        to_json(config, folder / "config.json")
        (folder / "versions.json").write_text(json.dumps({"python": "3.13.5", "jax": "0.12.0", "devices": {"kind": "cpu", "count": 1}}))
        (folder / "init_table.json").write_text(json.dumps(_init_rows(config)))
        loss = loss_of(cell.labels, rng.gauss(0, noise))
        step_tokens = config.batch.sequences * config.data.seq_len
        share = 0.4 if cell.name in skip else 1.0
        if curves:
            _write_metrics(folder, config, loss, step_tokens, share, rng)
        if cell.name in skip:
            continue
        row = {"cell": cell.name, "status": "done", "labels": dict(cell.labels), "steps": config.train.steps, "error": None}
        row |= {"parameters": (parameters or {}).get(cell.labels.get("size"), 231_552)}
        row |= {"tokens": config.train.steps * step_tokens, "seconds": rng.uniform(38, 52)}
        if cell.name in fail:
            row |= {"status": "failed", "error": "TrainingError: loss is not finite at step 212; first bad layer: layers/attn/q[1]"}
            row |= {"loss": None, "bits_per_byte": None, "train_loss": None, "domains": {}}
        else:
            domains = {}
            for name, (shift, tokens) in DOMAINS.items():
                value = loss + shift + 0.02 * (cell.labels["gamma"] - 0.5)
                domains[name] = {"loss": value, "bits_per_byte": value / math.log(2) / 3.1, "tokens": tokens}
            row |= {"loss": loss, "bits_per_byte": loss / math.log(2) / 3.1, "train_loss": loss - 0.05, "domains": domains}
        rows.append(row)
    for i in order or range(len(rows)):
        append_result(workdir, rows[i])
    return grid


def _write_metrics(folder, config, loss, step_tokens, share, rng):
    lines = []
    every = config.train.log_every
    stop = int(config.train.steps * share)
    for step in range(every, stop + 1, every):
        value = loss + (7.6 - loss) * math.exp(-9 * step / config.train.steps) + 0.25 * (1 - step / config.train.steps) + rng.gauss(0, 0.05)
        lines.append({"kind": "train", "step": step, "tokens": step * step_tokens, "loss": value, "lr": 0.01, "grad_norm": 1.0})
    if share == 1.0:
        lines.append({"kind": "validation", "step": stop, "tokens": stop * step_tokens, "loss": loss, "domains": {}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _init_rows(config):
    d, gamma = config.model.d_model, config.init.gamma
    rows = [
        {"path": "embed/table", "shape": [config.model.vocab_size, d], "fan_in": d, "gamma": gamma, "sigma": d**-gamma},
        {"path": "layers/attn_norm/gain", "shape": [config.model.n_layers, d], "fan_in": None, "gamma": None, "sigma": 0.0},
        {"path": "layers/ffn/down", "shape": [2, config.model.d_ff, d], "fan_in": 160, "gamma": gamma, "sigma": [160**-gamma, 0.5]},
    ]
    return rows


class Page(HTMLParser):
    """Collects what the tests ask of a page: tags with attributes, ids, and the text that is seen."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"style", "svg", "title"} & set(self._open):
            self.text += data + " "

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def report(workdir):
    index = write_report(workdir)
    return Page(index.read_text(encoding="utf-8")), json.loads((workdir / "report/summary.json").read_text(encoding="utf-8"))
