"""A model folder of transformers as one of ours: config, parameters, buffers. Only safetensors are read, never a pickle.

Every array of ours is allocated once; tensors are read one at a time and put in their places, so that reading holds near one copy (saving
the model as a run, which is not done here, takes about another).
What our modules cannot represent is refused with every reason. See sources.py for configs, table.py for tensors.
"""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from gammalm.config import apply_overrides, from_json, leaves, load_config, validate
from gammalm.errors import CheckpointError, ConfigError
from gammalm.interop import gpt2, portable
from gammalm.interop.export import OUR_CONFIG
from gammalm.interop.sources import read_config
from gammalm.interop.table import Entry, entries, gpt2_entries, own_entries, shapes
from gammalm.interop.targets import OWN
from gammalm.interop.tensorfiles import Tensors
from gammalm.trees import nested

COMPUTE = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float32"}  # stored dtype -> dtype of products
SHOWN = 5  # tensors named in a message
IDLE_TENSORS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # constants that old checkpoints store


@dataclasses.dataclass
class Imported:
    """A model read: its locked config, nested dicts of fp32 arrays, the model_type it came as."""

    config: ConfigDict
    params: dict
    buffers: dict
    model_type: str


def import_hf(folder: str | os.PathLike) -> Imported:
    """The model in `folder`: config.json and *.safetensors, one file or several with an index.

    Raises ConfigError for what our modules cannot represent, CheckpointError for files that are missing, damaged or do not fit.
    """
    folder = Path(folder)
    hf = _read_json(folder / "config.json")
    if hf.get("model_type") == OWN:
        derived = leaves(ConfigDict({"model": portable.model_config(hf)}))
        seq_len = hf.get("max_position_embeddings")
        if type(seq_len) is not int or seq_len < 1:
            raise ConfigError(f"{folder / 'config.json'}: max_position_embeddings={seq_len!r} is no length. Export the model again.")
        config = _config(folder, derived, seq_len)
        make = lambda _: own_entries(config.model)  # noqa: E731
    else:
        source = read_config(hf, str(folder / "config.json"))
        config = _config(folder, source.leaves, source.seq_len, COMPUTE.get(source.dtype, "float32"))
        if hf["model_type"] == gpt2.MODEL_TYPE:
            make = lambda names: gpt2_entries(config.model, prefixed=any(n.startswith(gpt2.PREFIX) for n in names))  # noqa: E731
        else:
            make = lambda names: entries(  # noqa: E731
                config.model, centred=source.centred, interleaved=source.interleaved,
                fused=any(name.endswith(".mlp.experts.gate_up_proj") for name in names),
            )  # fmt: skip
    with Tensors(folder) as tensors:
        table = list(make(tensors.where))
        _check(folder, table, tensors, tied=config.model.tie_embeddings)
        params, buffers = ({path: np.empty(shape, np.float32) for path, shape in group.items()} for group in shapes(config.model))
        arrays = params | buffers
        for entry in table:
            for part, values in zip(entry.parts, entry.unpack(tensors.read(entry.name)), strict=True):
                arrays[part.path][part.index] = values
    return Imported(config, nested(params), nested(buffers), hf["model_type"])


def _read_json(path: Path) -> dict:
    try:
        hf = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Name the folder of a model that transformers saved.") from error
    if not isinstance(hf, dict):
        raise CheckpointError(f"{path} is no config of a model: it must be one JSON object.")
    return hf


def _config(folder: Path, derived: dict, seq_len: int, dtype: str | None = None) -> ConfigDict:
    """Our locked config: the one exported with the model where there is one (it must agree), else `configs/lm.py` with the model's leaves.

    `dtype`, of products and residual stream, holds where the exported config does not say it.
    """
    if (folder / OUR_CONFIG).is_file():
        config = validate(from_json(folder / OUR_CONFIG))
        said = leaves(config)
        length = {} if "model.max_positions" in derived else {"data.seq_len": seq_len}  # learned positions may be more than were read
        differing = [name for name, value in (derived | length).items() if said.get(name) != value]
        if differing:
            raise ConfigError(
                f"{folder}: config.json and {OUR_CONFIG} disagree on {', '.join(differing)}. "
                f"Remove {OUR_CONFIG} if config.json is right; it adds what transformers has no name for."
            )
        return config
    size = "moe-1.5b-a0.25b" if derived["model.ffn"] == "moe" else "125m"
    style = "gpt2" if derived["model.ffn"] == "mlp" else "gamma"
    base = load_config(f"lm:size={size},attention={derived['model.attention']},style={style},seq_len={seq_len}")
    computed = {"model.dtype": dtype, "model.residual_dtype": dtype} if dtype else {}
    try:
        return validate(apply_overrides(base, (derived | computed).items()))
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def _check(folder: Path, table: list[Entry], tensors: Tensors, *, tied: bool) -> None:
    """Raises CheckpointError unless the folder holds the tensors of `table`, in their shapes, and no others."""
    wanted = {entry.name: entry.shape for entry in table}
    found = set(tensors.where)
    spare = {name for name in found - wanted.keys() if name.endswith(IDLE_TENSORS)}
    head = "lm_head.weight"
    embedding = next((name for name in ("model.embed_tokens.weight", gpt2.PREFIX + "wte.weight", "wte.weight") if name in wanted), "")
    if tied and head in found and embedding in found:  # stored twice: harmless where the two are one
        if tensors.shape(head) != tensors.shape(embedding) or not np.array_equal(tensors.read(head), tensors.read(embedding)):
            raise CheckpointError(f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}. Set it to false.")
        spare.add(head)
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is not known: the model has no such part here" for name in sorted(found - wanted.keys() - spare)]
    faults += [
        f"{name} has shape {tensors.shape(name)}, its config asks for {shape}"
        for name, shape in wanted.items()
        if name in found and tensors.shape(name) != shape
    ]
    if faults:
        more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(f"{folder}: the tensors do not fit config.json:\n  " + "\n  ".join(faults[:SHOWN]) + more)
