"""Runs side by side: what differs in their configs, their losses after the same tokens, their last validations, their speed.

Reads the folders that training leaves (gammalm/training/workdir.py) and nothing else, also of runs that are still going; JAX is not needed.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gammalm.config import from_json, is_net, leaves
from gammalm.errors import ConfigError
from gammalm.experiments.results import by_kind, read_json
from gammalm.experiments.summary import number

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the tokens that all runs have seen: where losses are compared
WHAT = "Name the --workdir of a run of `gammalm train`, or the folder of a grid's cell."
WINDOW = 0.1  # the loss after t tokens is the mean of the logged ones from (1 - WINDOW) t to t: that of one batch says little


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's folder: its config by leaves, and what it has logged."""

    name: str
    folder: Path
    config: Mapping[str, Any]

    @cached_property
    def rows(self) -> dict[str, list[dict]]:
        """Rows of metrics.jsonl by kind, in the order of their steps."""
        return by_kind(self.folder / "metrics.jsonl")

    @property
    def train(self) -> list[dict]:
        """Rows of training steps whose loss is a number."""
        return [row for row in self.rows.get("train", []) if isinstance(row.get("loss"), int | float) and math.isfinite(row["loss"])]

    @property
    def validation(self) -> list[dict]:
        return self.rows.get("validation", [])

    @property
    def tokens(self) -> int:
        """Of training so far, as far as was logged."""
        return max((row["tokens"] for row in self.train), default=0)

    def loss_after(self, tokens: float) -> float | None:
        """Mean training loss (nats per token) over the last WINDOW of `tokens`; None where nothing was logged there."""
        inside = [row["loss"] for row in self.train if (1 - WINDOW) * tokens < row["tokens"] <= tokens]
        return statistics.fmean(inside) if inside else None

    def summary(self) -> dict:
        """What the run is and how it did, for JSON."""
        c, last = self.config, self.validation[-1] if self.validation else None
        steps = max((row["step"] for row in self.train), default=0)
        halted, goodput = self.rows.get("halted", []), self.rows.get("goodput", [])
        # The first row includes compilation; the median leaves out what validation and saving cost single rows.
        speeds = [row["tokens_per_s"] for row in self.train[1:] if "tokens_per_s" in row]
        mfu = [row["mfu"] for row in self.train[1:] if row.get("mfu") is not None]
        return {
            "name": self.name,
            "workdir": str(self.folder),
            "steps": steps,
            "planned_steps": c["train.steps"],
            "tokens": self.tokens,
            "parameters": self._parameters(),
            "train_loss": self.loss_after(self.tokens) if self.train else None,
            "validation": last and {name: last.get(name) for name in ("step", "tokens", "loss", "bits_per_byte", "domains")},
            "tokens_per_s": statistics.median(speeds) if speeds else None,
            "mfu": statistics.median(mfu) if mfu else None,
            "seconds": goodput[-1]["seconds"] if goodput else None,
            "goodput": goodput[-1]["goodput"] if goodput else None,
            "error": halted[-1]["error"] if halted else None,
        }

    def _parameters(self) -> int | None:
        """From the init table, which lists each parameter; None for an imported model, which has none."""
        table = read_json(self.folder / "init_table.json")
        return sum(math.prod(row["shape"]) for row in table) if table else None

    def tokenizer(self) -> str | None:
        """SHA-256 of its tokenizer, as its newest checkpoint says; None where there is none yet."""
        for seal in sorted(self.folder.glob("checkpoints/*/checksums.json"), reverse=True):
            try:
                return json.loads(seal.read_text(encoding="utf-8"))["body"]["facts"]["extra"]["tokenizer"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return None


def read_runs(workdirs: Iterable[str | os.PathLike]) -> list[Trained]:
    """The runs of the folders, named as shortly as tells them apart. Raises ConfigError for a folder that holds no run of a decoder."""
    folders = [Path(workdir) for workdir in workdirs]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ConfigError(f"{', '.join(map(str, folders))}: name two or more different workdirs.")
    configs = [_config(folder) for folder in folders]
    return [Trained(name, folder, config) for name, folder, config in zip(_short(folders), folders, configs, strict=True)]


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "grid.json").exists():
        raise ConfigError(f"{folder} holds a grid: `gammalm report --workdir {folder}` compares its cells. Or name folders of cells.")
    if not (folder / "config.json").exists():
        what = "holds no config.json" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{folder} {what}. {WHAT}")
    config = from_json(folder / "config.json")
    if is_net(config):
        raise ConfigError(f"{folder} holds a small supervised net, which has no tokens to compare by. Name runs of decoders.")
    found = leaves(config)
    if "train.steps" not in found:  # as in a folder of transformers
        raise ConfigError(f"{folder}/config.json is of no run. {WHAT}")
    return found


def _short(folders: Sequence[Path]) -> list[str]:
    """As many of each path's last parts as tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names


def compare(runs: Sequence[Trained]) -> dict:
    """Everything that is said of `runs` side by side, for JSON; lists are in their order, None is what a run does not have.

    runs: `Trained.summary` of each. config, versions: {name: values} of those that differ. at_equal_tokens: {tokens, loss} at SHARES of
    the fewest tokens that a run has logged (not counting those that logged none), where two runs at least have a loss.
    validation_at_equal_tokens: where all were validated after the same tokens. notes: what limits the comparison.
    """
    seen = min((run.tokens for run in runs if run.tokens), default=0)
    points = sorted({round(share * seen) for share in SHARES} - {0})
    at_equal = [{"tokens": point, "loss": [run.loss_after(point) for run in runs]} for point in points]
    versions = [read_json(run.folder / "versions.json") or {} for run in runs]
    return {
        "runs": [run.summary() for run in runs],
        "config": _differences([run.config for run in runs]),
        "versions": _differences(versions),
        "at_equal_tokens": [row for row in at_equal if len(row["loss"]) - row["loss"].count(None) > 1],
        "validation_at_equal_tokens": _validations(runs),
        "notes": _notes(runs),
    }


def _differences(tables: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    names = dict.fromkeys(name for table in tables for name in table)
    found = {name: [table.get(name) for table in tables] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _validations(runs: Sequence[Trained]) -> list[dict]:
    by_tokens = [{row["tokens"]: row for row in run.validation} for run in runs]
    common = sorted(set.intersection(*map(set, by_tokens)))
    names = ("loss", "bits_per_byte")
    return [{"tokens": tokens, **{name: [rows[tokens].get(name) for rows in by_tokens] for name in names}} for tokens in common]


def _notes(runs: Sequence[Trained]) -> list[str]:
    """What a reader has to know before believing a difference."""

    def differ(leaf: str) -> bool:
        return len({run.config.get(leaf) for run in runs}) > 1

    notes, tokenizers = [], {run.tokenizer() for run in runs} - {None}
    sizes = [{name: row["tokens"] for name, row in (run.validation[-1]["domains"] if run.validation else {}).items()} for run in runs]
    if len(tokenizers) > 1:
        notes.append("Their tokenizers differ: a token is not the same text. Compare bits per byte, not losses.")
    if len({json.dumps(size, sort_keys=True) for size in sizes if size}) > 1:
        notes.append("Their last validations did not read the same tokens: domains or their sizes differ.")
    for leaf, why in (
        ("data.packing", "documents apart and text run together give losses that are not the same quantity"),
        ("data.loss", "other tokens count"),
        ("data.seq_len", "tokens have contexts of other lengths"),
        ("data.mixture", "training text is mixed in other shares, so training losses are of other text"),
    ):
        if differ(leaf):
            notes.append(f"{leaf} differs: {why}.")
    for run in runs:
        steps = max((row["step"] for row in run.train), default=0)
        if steps < run.config["train.steps"]:
            notes.append(f"{run.name} has made {steps:,} of its {run.config['train.steps']:,} steps.")
        if "resumed" in run.rows:
            notes.append(f"{run.name} went on with other versions than it began with: rows `resumed` of its metrics.jsonl.")
    if len({_schedule(run.config) for run in runs}) > 1:
        notes.append("Learning rates are not the same after the same tokens: peaks, schedules or tokens per step differ.")
    notes.append("Single runs: how much of a difference is chance, only several seeds can say (gammalm grid).")
    return notes


def _schedule(config: Mapping[str, Any]) -> tuple:
    """Values on which the learning rate after so many tokens depends (training/optimizer.py, schedule_factor)."""
    kind = config["optimizer.schedule"]
    names = ["optimizer.schedule", "optimizer.learning_rate", "optimizer.warmup_steps", "batch.sequences", "data.seq_len"]
    names += [] if kind == "constant" else ["train.steps", "optimizer.final_fraction"]
    return tuple(config[name] for name in names + ["optimizer.cooldown_share"] * (kind == "wsd"))


# ---- as rows of tables -----------------------------------------------------------------------------------------------------------


def letters(runs: Sequence) -> list[str]:
    """What the runs go by in headings: A, B, ...; numbers from the 27th on."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(runs))]


def differences(names: Sequence[str]) -> list[str]:
    """Headings of the columns that `losses` adds."""
    return [f"{name} − {names[0]}" for name in names[1:]]


def losses(values: Sequence[float | None]) -> list[str]:
    """The losses of one row as texts, then each minus the first."""
    first = values[0]
    less = ["–" if None in (value, first) else number(value - first) for value in values[1:]]
    return ["–" if value is None else f"{value:.4f}" for value in values] + less


FACTS = {
    "steps": lambda run: f"{run['steps']:,} of {run['planned_steps']:,}",
    "tokens": lambda run: f"{run['tokens']:,}",
    "parameters": lambda run: _text(run["parameters"], ","),
    "training loss, last tenth": lambda run: _text(run["train_loss"], ".4f"),
    "validation loss": lambda run: _text(run["validation"] and run["validation"]["loss"], ".4f"),
    "bits per byte": lambda run: _text(run["validation"] and run["validation"]["bits_per_byte"], ".4f"),
    "tokens per second": lambda run: _text(run["tokens_per_s"], ",.0f"),
    "MFU": lambda run: _text(run["mfu"], ".1%"),
    "goodput": lambda run: _text(run["goodput"], ".1%"),
    "seconds": lambda run: _text(run["seconds"], ",.0f"),
    "stopped by": lambda run: run["error"] or "–",
}


def _text(value, form: str) -> str:
    return "–" if value is None else format(value, form)


def standing(said: Sequence[dict]) -> list[tuple[str, ...]]:
    """Rows of how each run stands, for a table: (what, of the first run, of the second, ...); what no run has is left out."""
    rows = [(name, *map(tell, said)) for name, tell in FACTS.items()]
    return [row for row in rows if set(row[1:]) != {"–"}]


def by_domain(said: Sequence[dict]) -> list[tuple[str, list[float | None]]]:
    """(domain, last validation loss of each run in it) of every domain that a run has."""
    tables = [run["validation"]["domains"] if run["validation"] else {} for run in said]
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, [table[name]["loss"] if name in table else None for table in tables]) for name in names]
