"""A model as others need it: read from a run's folder without its optimizer, or written as the beginning of one.

Evaluation, measurement and export read with `load_model`; import writes with `save_model`, and `gammalm train` goes on from there.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from gammalm.config import from_json, to_json, validate
from gammalm.errors import CheckpointError
from gammalm.models.decoder import Model
from gammalm.training.checkpoint import Checkpointer
from gammalm.trees import nested


@dataclasses.dataclass
class Loaded:
    """One step of a run: its config, structure, parameters and buffers (nested dicts of arrays).

    `tokenizer_sha256` identifies the tokenizer it was trained with; None: not known, as of an imported model.
    """

    config: object
    model: Model
    params: dict
    buffers: dict
    step: int
    tokenizer_sha256: str | None


def load_model(workdir: str | Path, step: int | None = None) -> Loaded:
    """The model of `step` (None: the newest) in the run folder `workdir`, on the first device; the optimizer's state is not read.

    Raises CheckpointError where there is no such checkpoint or it is damaged, ConfigError for a folder without config.json.
    """
    workdir = Path(workdir)
    config = validate(from_json(workdir / "config.json"))
    model = Model(config.model)
    wanted = {
        "params": nested({path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in model.specs.items()}),
        "buffers": model.buffers,
    }
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        steps = checkpointer.steps()
        if not steps:
            raise CheckpointError(f"{workdir}/checkpoints holds no complete checkpoint. Train it first, or name another run.")
        step = steps[-1] if step is None else step
        found, extra = checkpointer.restore_part(step, wanted)
    return Loaded(config, model, found["params"], found["buffers"], step, extra["tokenizer"])


def save_model(workdir: str | Path, config, params: dict, buffers: dict) -> None:
    """Makes `workdir` a run at step 0 whose weights are `params` and `buffers`; training it begins from them with a fresh optimizer.

    Raises CheckpointError if a run is in it already.
    """
    workdir = Path(workdir)
    if (workdir / "checkpoints").exists() or (workdir / "config.json").exists():
        raise CheckpointError(f"{workdir} holds a run already. Choose another folder.")
    workdir.mkdir(parents=True, exist_ok=True)
    to_json(config, workdir / "config.json")
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        checkpointer.save(0, {"params": params, "buffers": buffers}, {"seconds": 0.0, "error": None, "tokenizer": None})
