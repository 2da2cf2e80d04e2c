"""What a path is, and what can be had from it: a run of ours, a model folder of transformers, its config.json alone, safetensors, Orbax."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gammalm.analysis.weights import copies_of, matrix_paths, matrix_stack, outputs_first
from gammalm.config import available, from_json, is_net, validate
from gammalm.errors import CheckpointError, ConfigError
from gammalm.inspection.own import declared_table, decoder_of, kind_of, own_weights, vector_kind
from gammalm.interop.export import OUR_CONFIG
from gammalm.interop.families import Described, describe
from gammalm.interop.jax_names import read_jax
from gammalm.interop.layouts import Matrix, Vector, Weights
from gammalm.interop.mapped import Tensor, is_orbax, read_orbax, read_safetensors
from gammalm.interop.targets import OWN
from gammalm.interop.torch_names import Known, read_torch
from gammalm.models.decoder import Model
from gammalm.theory import Decoder
from gammalm.trees import flat

CONFIG = "config.json"


@dataclasses.dataclass
class Subject:
    """A model as inspection sees it. described: of a config.json of transformers; config: ours, where there is one.

    weights: None where there are none or nobody may read them. declared(kind, fan-in, layer): std that the config draws a matrix with, or
    None. decoder: for theory, with what its token table is multiplied by (`scale`); `unsaid` has why there is none.
    """

    path: str
    source: str
    weights: Weights | None = None
    described: Described | None = None
    config: object | None = None
    step: int | None = None
    declared: Callable[[str, int | None, int | None], float | None] = lambda *_: None
    decoder: Decoder | None = None
    scale: float = 1.0
    distinct: bool = False
    known: Known = Known()
    unsaid: list[str] = dataclasses.field(default_factory=list)


def open_path(path: str | Path, step: int | None = None) -> Subject:
    """The subject at `path`; `step` chooses one of a run. Raises ConfigError for what is none, CheckpointError for damaged files."""
    path = Path(path)
    if not path.exists():
        hint = f" A config of ours is given as --config {path}." if str(path).partition(":")[0] in available() else ""
        raise ConfigError(f"{path} is not there. Name a run, a model folder, a file of safetensors or an Orbax folder.{hint}")
    if path.is_file() and step is None:
        return _file(path)
    if step is None and path.name.isdigit():  # a step's folder inside a run
        run = next((folder for folder in path.absolute().parents[:2] if _is_run(folder)), None)
        if run is not None:
            return _run(run, int(path.name))
    if _is_run(path):
        return _run(path, step)
    if step is not None:
        raise ConfigError(f"{path} is no run of ours, so it has no step {step}. Leave the step out.")
    if (path / CONFIG).is_file() and not is_orbax(path):
        return _folder(path)
    if any(path.glob("*.safetensors")):
        return _tensors(path, "safetensors", path)
    return _orbax(path)


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Fetch it again.") from error
    return found if isinstance(found, dict) else {}


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and {"model", "init", "train"} <= _json(folder / CONFIG).keys()


def _file(path: Path) -> Subject:
    if path.suffix == ".safetensors":
        return _tensors(path, "safetensors", path.parent)
    if path.suffix == ".json":
        hf = _json(path)
        if {"model", "init"} <= hf.keys():
            return of_config(validate(from_json(path)), str(path))
        if "model_type" in hf:
            return _described(Subject(str(path), "config.json"), hf, str(path))
    raise ConfigError(f"{path} is neither a .safetensors file nor a config.json. Pickles are never opened: convert those that you trust.")


def of_config(config, path: str) -> Subject:
    """The subject of a config of ours, without weights. Raises ConfigError where it is of no decoder."""
    if is_net(config):
        raise ConfigError(f"{path} is of a small net and no decoder: `gammalm advise --arch mlp` says what its stds do.")
    return _with_config(Subject(path, "config"), config, Model(config.model).specs)


def _with_config(subject: Subject, config, specs) -> Subject:
    table = declared_table(specs, config)
    decoder, why = decoder_of(specs, config)
    subject.config, subject.decoder = config, decoder
    subject.declared = lambda kind, fan_in, layer: table.get((kind, fan_in, layer))
    subject.distinct = config.model.positions == "learned"
    subject.unsaid += [why] if why else []
    return subject


def _run(folder: Path, step: int | None) -> Subject:
    from gammalm.training.load import load_model

    if is_net(from_json(folder / CONFIG)):
        raise ConfigError(f"{folder} is the run of a small net and no decoder.")
    loaded = load_model(folder, step)
    subject = Subject(str(folder), "run", Weights([], [], {}, []), step=loaded.step)
    arrays = flat(loaded.params)
    matrices = set(matrix_paths(loaded.model.specs))
    for path, spec in loaded.model.specs.items():
        if path in matrices:
            stack = matrix_stack(arrays[path], spec)
            for index, names in copies_of(spec):
                rows, columns = stack.shape[-2:]
                subject.weights.matrices.append(
                    Matrix(path, kind_of(path), names["layer"], names["expert"], rows, columns,
                           "columns" if outputs_first(spec) else "rows", "F32", lambda s=stack, i=index: np.asarray(s[i]))
                )  # fmt: skip
            continue
        stacked = spec.axes[:1] == ("layers",)
        for i in range(spec.shape[0]) if stacked else [None]:
            values = arrays[path] if i is None else arrays[path][i]
            layer = None if i is None else spec.first_layer + i
            size, kind = int(np.prod(values.shape)), vector_kind(path, spec)
            read = lambda v=values: np.asarray(v, np.float32).reshape(-1)  # noqa: E731
            subject.weights.vectors.append(Vector(path, kind, layer, size, read))
    return _with_config(subject, loaded.config, loaded.model.specs)


def _folder(path: Path) -> Subject:
    hf = _json(path / CONFIG)
    if any(path.glob("*.safetensors")):
        return _tensors(path, "transformers folder", path)
    subject = _described(Subject(str(path), "config.json"), hf, str(path / CONFIG))
    others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if others:
        subject.unsaid.append(f"The weights are pickles ({others[0]}), which can run any program and are never opened; none was read.")
    return subject


def _tensors(path: Path, source: str, folder: Path) -> Subject:
    """Safetensors, with the config.json of `folder` where there is one."""
    subject = Subject(str(path), source)
    hf = _json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if (folder / CONFIG).is_file():
        _described(subject, hf, str(folder / CONFIG))
    else:
        subject.unsaid.append("There is no config.json: epsilon and the declared initialization are not known, so nothing is predicted.")
    tensors = _all_tensors(path)
    own = hf.get("model_type") == OWN
    subject.weights = own_weights(tensors, Model(subject.config.model).specs) if own else read_torch(tensors, subject.known)
    if not subject.weights.matrices:
        raise CheckpointError(f"{path} holds no matrix that can be read.")
    return subject


def _all_tensors(path: Path) -> list[Tensor]:
    """Of a file or a folder; a folder without the usual names is all its .safetensors files."""
    usual = path.is_file() or any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    if usual:
        return read_safetensors(path)
    return [tensor for file in sorted(path.glob("*.safetensors")) for tensor in read_safetensors(file)]


def _described(subject: Subject, hf: dict, where: str) -> Subject:
    ours = Path(where).with_name(OUR_CONFIG)
    if ours.is_file():  # exported from a run: our own config says more
        config = validate(from_json(ours))
        _with_config(subject, config, Model(config.model).specs)
        m, mha = config.model, config.model.attention == "mha"
        sizes = (m.n_kv_heads, m.head_dim) if mha else (m.n_heads, 0)
        subject.known = Known(str(hf.get("model_type") or ""), m.d_model, m.n_heads, *sizes, m.tie_embeddings)
        return subject
    if hf.get("model_type") == OWN:
        raise ConfigError(f"{where} is of our own export, whose {OUR_CONFIG} is missing beside it. Export the run again.")
    found = describe(hf, where)
    subject.described, subject.known, subject.decoder = found, found.known, found.decoder
    subject.scale, subject.distinct = found.scale, found.distinct
    subject.unsaid += found.unsaid
    subject.declared = _declared_by(found)
    return subject


def _declared_by(found: Described) -> Callable:
    """transformers draws every matrix with one std, but for GPT-2's outputs."""

    def declared(kind: str, fan_in: int | None, layer: int | None) -> float | None:
        if found.decoder is None or kind == "other":
            return None
        if kind in ("out", "ffn_down"):
            return found.decoder.stds[-1]["attn/out"]
        return found.declared

    return declared


def _orbax(path: Path) -> Subject:
    """An Orbax folder of anybody: itself, an item of it, or the newest step below it."""
    steps = sorted((p for p in path.iterdir() if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name))
    places = [path, *steps[-1:]]
    places += [place / item for place in places for item in ("default", "params", "state", "items", "model")]
    place = next((place for place in places if is_orbax(place)), None)
    if place is None:
        raise ConfigError(
            f"{path} is no model that can be inspected: it has neither {CONFIG}, nor .safetensors files, nor an Orbax checkpoint."
        )
    subject = Subject(str(place), "Orbax folder", read_jax(read_orbax(place)))
    subject.unsaid.append("An Orbax folder says nothing of heads, epsilon or the declared initialization, so nothing is predicted.")
    if not subject.weights.matrices:
        raise CheckpointError(f"{place} holds no matrix that can be read.")
    return subject
