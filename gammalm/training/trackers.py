"""An experiment tracker beside TensorBoard: Weights & Biases, where config.train.tracker asks for it, called as clu's writers are.

    <workdir>/tracker.json   the id by which the tracker knows the run: when the run goes on, it continues the same one there

Who is logged in, the project and whether anything is sent are the tracker's own business (WANDB_MODE, WANDB_PROJECT, ...).
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gammalm.config import to_dict
from gammalm.errors import ConfigError
from gammalm.files import write_json_atomic
from gammalm.sharding import processes

IDS = "tracker.json"
STEP = "step"  # the x axis: steps of the run, which may come again where a killed run goes on


def require(kind: str) -> None:
    """Raises ConfigError where the package of the tracker `kind` (a value of config.train.tracker) cannot be imported."""
    if kind == "none":
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"train.tracker={kind} needs the package {kind} ({error}): pip install 'gammalm[{kind}]', or set it to none."
        ) from error


def open_tracker(kind: str, workdir: Path, config) -> "Wandb | None":
    """What takes the numbers of the run in `workdir`, which is continued where tracker.json knows it; None for "none".

    Raises ConfigError where the tracker cannot start.
    """
    if kind == "none":
        return None
    require(kind)
    file = workdir / IDS
    ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {kind: secrets.token_hex(4)}
    try:
        tracker = Wandb(workdir, to_dict(config), ids[kind])
    except Exception as error:  # it has exceptions of its own: not logged in, no network
        raise ConfigError(
            f"train.tracker={kind} does not start ({type(error).__name__}: {' '.join(str(error).split())[:300]}). Log in, have it work "
            "offline (WANDB_MODE=offline), or set train.tracker=none."
        ) from error
    write_json_atomic(file, ids)
    return tracker


class Wandb:
    """A run of Weights & Biases. Runs that train side by side in one process are runs of their own there (wandb 0.19.10 and later).

    A fault of it after the start is said once; it is told nothing more, and training goes on.
    """

    def __init__(self, workdir: Path, config: Mapping, known_as: str):
        import wandb

        self._name, self.failed, folder = str(workdir), False, workdir.absolute()
        above = folder.parents[1] if folder.parent.name == "cells" else folder.parent  # of a grid's cell the grid
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "gammalm", id=known_as, resume="allow", reinit="create_new", name=folder.name,
            group=above.name, dir=str(workdir), config=dict(config), settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)  # wandb's own step only grows, and drops what comes again

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._tell(lambda run: run.log({STEP: step, **scalars}))

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self) -> None:
        self._tell(lambda run: run.finish(exit_code=int(self.failed)))

    def _tell(self, what: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            what(self._run)
        except Exception as error:
            self._run = None
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            processes.say(f"{self._name}: the tracker has failed ({told}) and is told nothing more; training goes on.")
