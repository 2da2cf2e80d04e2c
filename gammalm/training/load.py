"""A model as others need it: read from a run's folder without its optimizer, or written as the beginning of one.

Evaluation, measurement and export read with `load_model`; import writes with `save_model`, and `gammalm train` goes on from there.
"""

import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gammalm.config import from_json, to_json, validate
from gammalm.data.fetch import file_sha256
from gammalm.data.load import Split, open_split
from gammalm.data.shards import TOKENIZER
from gammalm.errors import CheckpointError, ConfigError, DataError
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import parameter_shardings
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.integrity import SEAL
from gammalm.trees import nested

IMPORTED = "imported"  # folder of the weights that a run begins from instead of drawing them; a checkpoint of step 0


@dataclasses.dataclass
class Loaded:
    """One step of a run: its config, structure, parameters and buffers (nested dicts of arrays).

    `tokenizer_sha256` identifies the tokenizer it was trained with; None: not known, as of another's model.
    """

    config: object
    model: Model
    params: dict
    buffers: dict
    step: int
    tokenizer_sha256: str | None


def load_model(workdir: str | Path, step: int | None = None, mesh: Mesh | None = None) -> Loaded:
    """The model of `step` (None: the newest) in the run folder `workdir`; the optimizer's state is not read.

    It lies on `mesh` as in training; None: on the first device. Step 0 is an imported model. Raises CheckpointError where there is no such
    checkpoint or it is damaged, ConfigError for a folder that is no run's, or a mesh that does not divide the model.
    """
    workdir = Path(workdir)
    if not (workdir / "config.json").exists():
        run = next((folder for folder in workdir.absolute().parents[:2] if (folder / "config.json").exists()), None)
        hint = f"The run is {run}; choose a step of it by its number." if run else "Name the folder of a run, its --workdir."
        raise ConfigError(f"{workdir} holds no config.json. {hint}")
    config = validate(from_json(workdir / "config.json"))
    model = Model(config.model)
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        steps = checkpointer.steps()
        if step is None and not steps or step == 0:
            found = restore_imported(workdir, _abstract(model, mesh))
            if found is None:
                raise CheckpointError(f"{workdir}/checkpoints holds no complete checkpoint. Train it first, or name another run.")
            step, (tree, tokenizer) = 0, found
        else:
            step = steps[-1] if step is None else step
            tree, extra = checkpointer.restore_part(step, _abstract(model, mesh))
            tokenizer = extra["tokenizer"]
    return Loaded(config, model, tree["params"], tree["buffers"], step, tokenizer)


def weights_sha256(workdir: str | Path, step: int) -> str:
    """Identifies the weights of a step (0: imported ones) wherever the run's folder lies. Raises OSError where there is no such step."""
    return file_sha256(Path(workdir) / ("checkpoints" if step else IMPORTED) / f"{step:09d}" / SEAL)


def validation_split(loaded: Loaded, sequences: int, path: str | Path | None = None) -> Split:
    """The validation split that belongs to a model, in batches of `sequences`; `path`: of the prepared folder, None: the config's.

    Raises DataError where there is none, or its tokenizer is not the model's.
    """
    data = loaded.config.data
    split = open_split(
        path or data.path, "validation", seq_len=data.seq_len, packing=data.packing, mixture=data.mixture,
        seed=loaded.config.seed, batch=sequences, loss=data.loss,
    )  # fmt: skip
    if split.vocab_size > loaded.config.model.vocab_size or loaded.tokenizer_sha256 not in (None, split.tokenizer_sha256):
        raise DataError(f"{split.path} has another tokenizer than the model was trained with. Give --data the folder it was trained on.")
    return split


def validation_batches(split: Split, batches: int) -> Iterator[dict]:
    """The first `batches` of each domain of a validation split, the domains one after another; 0: all."""
    for domain in split.domains:
        yield from itertools.islice(split.validation(domain), batches or None)


def restore_imported(workdir: Path, abstract: dict) -> tuple[dict, str | None] | None:
    """({"params", "buffers"}, hash of the tokenizer or None) that import left in `workdir`; None where it left nothing.

    `abstract` has the same two trees of jax.ShapeDtypeStruct. Raises CheckpointError where the files are damaged.
    """
    if not (workdir / IMPORTED).exists():
        return None
    with Checkpointer(workdir / IMPORTED) as checkpointer:
        tree, extra = checkpointer.restore(0, {name: abstract[name] for name in ("params", "buffers")})
    return tree, extra["tokenizer"]


def require_no_run(workdir: str | Path) -> None:
    """Raises CheckpointError if a run is in `workdir`."""
    if any((Path(workdir) / name).exists() for name in ("config.json", "checkpoints", "metrics.jsonl")):
        raise CheckpointError(f"{workdir} holds a run already. Choose another folder.")


def save_model(workdir: str | Path, config, params: dict, buffers: dict, tokenizer: str | Path | None = None) -> None:
    """Makes `workdir` a run at step 0 whose weights are `params` and `buffers`; training it begins from them with a fresh optimizer.

    `tokenizer`: the file of the model's tokenizer, copied. config.json is written last: a folder without it is no run, and saving again
    begins anew. Raises CheckpointError if a run is in it already.
    """
    workdir = Path(workdir)
    require_no_run(workdir)
    shutil.rmtree(workdir / IMPORTED, ignore_errors=True)  # what an interrupted import left
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{workdir} cannot be made ({error.strerror}). Choose another folder.") from error
    sha256 = None
    if tokenizer is not None:
        shutil.copyfile(tokenizer, workdir / TOKENIZER)
        sha256 = hashlib.sha256((workdir / TOKENIZER).read_bytes()).hexdigest()
    with Checkpointer(workdir / IMPORTED) as checkpointer:
        checkpointer.save(0, {"params": params, "buffers": buffers}, {"tokenizer": sha256})
    to_json(config, workdir / "config.json")


def _abstract(model: Model, mesh: Mesh | None) -> dict:
    params = nested({path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in model.specs.items()})
    if mesh is None:
        return {"params": params, "buffers": model.buffers}
    place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "params": jax.tree.map(place, params, parameter_shardings(model.specs, mesh)),
        "buffers": jax.tree.map(lambda a: place(a, whole), model.buffers),
    }
