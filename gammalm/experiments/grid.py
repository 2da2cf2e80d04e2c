"""The grid language: which runs an experiment consists of, written as a few lines of Python in `configs/grids/`.

    cells = product(
        arms(plain={"eps": 1e-5, "gate": "none"}, adjusted={"eps": 1e-12, "gate": "elementwise"}),
        values("gamma", [0.5, 1.0]),
        values("lr", [3e-3, 1e-2]),
        values("seed", range(2)),
    )
    Grid("quickstart", base="lm:size=tiny", cells=cells)

A space is a list of `Cell`s. `values` and `arms` make one, `product`, `zip_` and `chain` combine them, `subsample` thins one out.
A key without a dot is an argument of the base config's `get_config`, so whatever follows from it follows here too (the gate
chooses the FFN width that keeps the parameter count); a key with dots overrides one leaf of the config, after the arguments.
Nothing here imports JAX: a grid can be listed, named and checked on any machine.
"""

import dataclasses
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from gammalm.config import call, leaves, load_config, validate
from gammalm.errors import ConfigError

Scalar = str | int | float | bool

# The paper's two architectures (docs/science.md, sections 2 and 3). The gate also narrows the FFN, so that parameter counts agree.
ARMS = {"plain": {"eps": 1e-5, "gate": "none"}, "adjusted": {"eps": 1e-12, "gate": "elementwise"}}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid, or (before its grid is made) a part of one.

    name: readable, the same on every machine, usable as a folder name: `plain-gamma0.5-lr0.003-seed0`.
    labels: what tables and the report group by, e.g. {"arm": "plain", "gamma": 0.5, "lr": 0.003, "seed": 0}.
    args: arguments of the base config; overrides: leaves of the config by dotted path.
    base: the config both apply to, with arguments of its own: `lm:size=tiny`. Set by `Grid`.
    """

    name: str
    labels: Mapping[str, Scalar]
    args: Mapping[str, Scalar]
    overrides: Mapping[str, Any]
    base: str = ""

    def config(self, data_path: str | None = None) -> ConfigDict:
        """The locked, validated config of this run; `data_path` replaces `data.path`. Raises ConfigError, naming the cell."""
        overrides = dict(self.overrides) | ({} if data_path is None else {"data.path": data_path})
        name, _, given = self.base.partition(":")
        arguments = [piece for piece in given.split(",") if piece] + [f"{key}={value}" for key, value in self.args.items()]
        try:
            config = load_config(f"{name}:{','.join(arguments)}", overrides.items())
            validate(config)
        except ConfigError as error:
            raise ConfigError(f"grid cell {self.name}: {error}") from error
        return config


@dataclasses.dataclass(frozen=True)
class Grid:
    """A named list of cells over one base config. Raises ConfigError for an empty grid or two cells of one name."""

    name: str
    base: str
    cells: Sequence[Cell]

    def __post_init__(self):
        if not self.cells:
            raise ConfigError(f"grid {self.name}: no cells. An axis is empty.")
        seen = set()
        for cell in self.cells:
            if not cell.name:
                raise ConfigError(f"grid {self.name}: a cell without a name. Vary at least one thing.")
            if cell.name.casefold() in seen:  # some file systems do not tell upper from lower case
                raise ConfigError(f"grid {self.name}: two cells are named {cell.name}. Give what differs between them a label.")
            seen.add(cell.name.casefold())
        object.__setattr__(self, "cells", tuple(dataclasses.replace(cell, base=self.base) for cell in self.cells))

    def to_json(self) -> dict:
        """Plain data for `grid.json`; `from_json` gives an equal grid back."""
        cells = [
            {"name": c.name, "labels": dict(c.labels), "args": dict(c.args), "overrides": dict(c.overrides)} for c in self.cells
        ]
        return {"name": self.name, "base": self.base, "cells": cells}

    @classmethod
    def from_json(cls, data: Mapping) -> "Grid":
        """The grid that `to_json` wrote. Raises ConfigError when a field is missing."""
        try:
            cells = [Cell(c["name"], c["labels"], c["args"], _tuples(c["overrides"])) for c in data["cells"]]
            return cls(data["name"], data["base"], cells)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"grid.json: {error!r} is missing or of the wrong kind. Written by another version?") from error


def load_grid(spec: str, overrides: Iterable[tuple[str, Any]] = ()) -> Grid:
    """The grid that `spec` names (`grids/quickstart:seeds=2` or the path of a file with `get_grid(arg)`).

    `overrides`, as of `load_config`, go to every cell. Raises ConfigError: no such grid, wrong arguments, an override of what the
    grid itself varies, or a cell whose config is not valid.
    """
    grid = call(spec, "get_grid")
    if not isinstance(grid, Grid):
        raise ConfigError(f"{spec}: get_grid returned a {type(grid).__name__}; it must return a gammalm.experiments.grid.Grid.")
    configs = [leaves(cell.config()) for cell in grid.cells]
    overrides = dict(overrides)
    for key in overrides:
        if key in configs[0] and len({repr(config[key]) for config in configs}) > 1:
            raise ConfigError(f"{spec}: {key} differs between the cells of this grid and cannot be set for all; use its own arguments.")
    if overrides:
        grid = Grid(grid.name, grid.base, [dataclasses.replace(c, overrides={**c.overrides, **overrides}) for c in grid.cells])
        for cell in grid.cells:
            cell.config()
    return grid


Space = list[Cell]


def values(key: str, choices: Iterable[Scalar], label: str | None = None) -> Space:
    """One cell per value of `key`, named and labelled by `label` (default: the key, or its last part): `gamma0.5`, `gamma1`."""
    label = label or {"learning_rate": "lr"}.get(last := key.rsplit(".", 1)[-1], last)
    return [_cell(label + _text(value), {label: value}, {key: value}) for value in choices]


def arms(label: str = "arm", /, **bundles: Mapping[str, Any]) -> Space:
    """One cell per named bundle of settings: `arms(plain={"eps": 1e-5, "gate": "none"}, adjusted={…})`."""
    return [_cell(name, {label: name}, settings) for name, settings in bundles.items()]


def fixed(settings: Mapping[str, Any]) -> Space:
    """One cell that only adds settings: a factor of a product for what all its cells share. Neither named nor labelled."""
    return [_cell("", {}, settings)]


def product(*spaces: Space) -> Space:
    """Every combination, the last space varying fastest. Raises ConfigError when two spaces set one key."""
    return [_merge(parts) for parts in itertools.product(*spaces)]


def zip_(*spaces: Space) -> Space:
    """The spaces side by side: first with first, second with second. Raises ConfigError when their lengths differ."""
    if len({len(space) for space in spaces}) > 1:
        raise ConfigError(f"grid: zip_ of spaces with {', '.join(str(len(s)) for s in spaces)} cells. Give them one length.")
    return [_merge(parts) for parts in zip(*spaces, strict=True)]


def chain(*spaces: Space) -> Space:
    """The spaces one after another."""
    return list(itertools.chain(*spaces))


def subsample(space: Space, n: int, seed: int = 0) -> Space:
    """`n` cells drawn without replacement, the same on every machine, in their old order. Raises ConfigError unless 1 ≤ n ≤ len."""
    if not 1 <= n <= len(space):
        raise ConfigError(f"grid: subsample of {n} out of {len(space)} cells. Choose between 1 and {len(space)}.")
    return [space[i] for i in sorted(random.Random(seed).sample(range(len(space)), n))]


def numbers(text: str, where: str) -> list[float]:
    """The numbers of a list argument, `0.5/1`: a slash apart, because a comma ends an argument. Raises ConfigError."""
    try:
        return [float(part) for part in text.split("/")]
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} is no list of numbers. Write them a slash apart: 0.5/1.") from error


def _cell(name: str, labels: Mapping, settings: Mapping) -> Cell:
    args = {key: value for key, value in settings.items() if "." not in key}
    overrides = {key: value for key, value in settings.items() if "." in key}
    return Cell(name, dict(labels), args, overrides)


def _tuples(settings: Mapping) -> dict:
    """Settings read from JSON, their lists as the tuples that configs have."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _text(value: Scalar) -> str:
    """A value as part of a file name: 1.0 -> 1, 0.003 -> 0.003, anything else but letters, digits and ._+- -> _."""
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]", "_", text)


def _merge(parts: Sequence[Cell]) -> Cell:
    merged = {"labels": {}, "args": {}, "overrides": {}}
    for part in parts:
        for field, into in merged.items():
            for key, value in getattr(part, field).items():
                if key in into:
                    raise ConfigError(f"grid: {key} is set by two axes of a product, {into[key]!r} and {value!r}. Keep one.")
                into[key] = value
    return Cell("-".join(part.name for part in parts if part.name), **merged)
