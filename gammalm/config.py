"""Config files: find one by name, give it typed arguments, change single leaves from the command line, save and read back.

A config is a Python file with `get_config(arg) -> ConfigDict`; a spec is `NAME_OR_PATH[:name=value,...]`, for instance
`lm:size=125m,gamma=1.0` or `configs/lm.py:size=tiny` or `/somewhere/mine.py`. What is true of the values themselves is checked
by `gammalm.config_checks`, re-exported here as `validate`. Nothing here imports JAX: a bad config is refused before any device is touched.
"""

import ast
import difflib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ml_collections import ConfigDict

from gammalm.config_checks import is_net, leaves, validate
from gammalm.errors import ConfigError, GammalmError
from gammalm.files import write_json_atomic

__all__ = [
    "apply_overrides",
    "available",
    "call",
    "configs_folder",
    "did_you_mean",
    "from_json",
    "is_net",
    "leaves",
    "load_config",
    "load_module",
    "to_dict",
    "to_json",
    "typed_args",
    "validate",
]


# ---- values ----------------------------------------------------------------------------------------------------------------------


def _number(text: str, kind: type) -> float | int:
    """`text` as a finite float, or as an int that may be written 1e3 or 1_000. Raises ValueError."""
    try:
        return kind(text) if kind is int else _finite(float(text))
    except ValueError:
        value = _finite(float(text))
        if kind is float or not value.is_integer():
            raise
        return int(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    tuple: 'a list such as (1, 2) or ("a", "b")',
}


def _tuple(text: str) -> tuple:
    """`(1, 2)`, `1,2`, `("a", "b")` or bare words `a,b` as a tuple; empty text is the empty tuple. Raises ValueError."""
    if not text.strip():
        return ()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if any(c in text for c in "()[]{}'\""):
            raise ValueError("not a list") from None
        return tuple(part.strip() for part in text.split(","))
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _convert(value: Any, like: Any, what: str) -> Any:
    """`value` (text, or already a Python value) with the type of `like`. Raises ConfigError, which `what` opens."""
    kind = type(like)
    if kind not in _EXPECTED:
        raise ConfigError(f"{what}: a value of type {kind.__name__} cannot be set this way; change it in the config file.")
    try:
        if kind is tuple:
            values = _tuple(value) if isinstance(value, str) else tuple(value)
            return tuple(_convert(v, like[0], what) for v in values) if like else values
        if isinstance(value, str):
            if kind is bool:
                return {"true": True, "1": True, "false": False, "0": False}[value.strip().lower()]
            return value if kind is str else _number(value.strip(), kind)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind:
            raise TypeError
        return _finite(value) if kind is float else value
    except (ValueError, KeyError, TypeError, OverflowError):
        nothing = " Nothing is ever None: 0 stands for it." if kind in (int, float) and str(value).lower() in ("none", "null") else ""
        raise ConfigError(f"{what}={value!r} is not {_EXPECTED[kind]}.{nothing}") from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the dotted `names`, by the whole name or by its last part; else nothing."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if not near:
        by_last = {n.rpartition(".")[2]: n for n in reversed(names)}
        near = [by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1)]
    return f"; did you mean {near[0]}?" if near else "."


def typed_args(arg: str, defaults: dict[str, Any], where: str) -> SimpleNamespace:
    """`name=value,...` over `defaults`, whose types the values take: a namespace with every name of `defaults`.

    A piece without `=` continues the text before it, so that `mixture=web:3,code:1` is one value.
    Raises ConfigError, opened by `where`, for an unknown or repeated name and for a value of another type.
    """
    given: dict[str, str] = {}
    last = None
    for piece in filter(None, arg.split(",")):
        name, equals, value = piece.partition("=")
        name = name.strip()
        if not equals:
            if last is None or not isinstance(defaults[last], str):
                raise ConfigError(f"{where}: {piece!r} has no value; write name=value, with names from {', '.join(defaults)}.")
            given[last] += f",{piece}"
            continue
        if name not in defaults:
            raise ConfigError(
                f"{where}: unknown argument {name!r}{did_you_mean(name, defaults)} Known arguments: {', '.join(defaults)}."
            )
        if name in given:
            raise ConfigError(f"{where}: argument {name!r} is given twice; keep one.")
        given[name], last = value, name
    return SimpleNamespace(**defaults | {n: _convert(v, defaults[n], f"{where}: {n}") for n, v in given.items()})


# ---- files -----------------------------------------------------------------------------------------------------------------------


def configs_folder() -> Path:
    """The folder of the configs that come with gammalm: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "lm.py").is_file():
            return folder
    raise ConfigError(f"the configs that come with gammalm are missing beside {package}; install gammalm again.")


def available() -> list[str]:
    """Names of the configs and grids that come with gammalm: `lm`, `grids/quickstart`, ..."""
    folder = configs_folder()
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.py") if p.stem != "__init__")


def _find(name: str) -> Path:
    """The file that `name` means: a path from the working folder (`.py` may be left out), else a config that comes with gammalm."""
    file = Path(name).expanduser()
    file = file if file.suffix == ".py" else file.with_name(file.name + ".py") if file.name else file
    ours = Path(*file.parts[1:]) if file.parts[:1] == ("configs",) else file
    for candidate in (file, configs_folder() / ours):
        if candidate.is_file():
            return candidate.resolve()
    known = available()
    raise ConfigError(f"no config {name!r}: neither a file nor one of {', '.join(known)}{did_you_mean(name, known)}")


def _guard(file: Path, function, *args) -> Any:
    """`function(*args)`, with any fault of the config `file` turned into a ConfigError that names file and line."""
    try:
        return function(*args)
    except GammalmError:
        raise
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(file) else lines[-1] if lines else 1
        raise ConfigError(f"{file}, line {line}: {type(error).__name__}: {error}") from error


def load_module(spec: str) -> ModuleType:
    """The executed Python file that `spec` (its arguments do not matter here) names. Raises ConfigError."""
    file = _find(spec.partition(":")[0])
    name = f"gammalm_config:{file}"  # no import finds this name, so no module of the same name is shadowed
    module_spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    _guard(file, module_spec.loader.exec_module, module)
    return module


def call(spec: str, function: str) -> Any:
    """`function(arg)` of the file and argument that `spec` names; how configs and grids are read.

    Raises ConfigError: no such file, no such function in it, or a fault in it (with file and line).
    """
    module = load_module(spec)
    file = Path(module.__file__)
    if not callable(getattr(module, function, None)):
        other, kind = {"get_config": ("get_grid", "a grid: gammalm grid"), "get_grid": ("get_config", "one run: gammalm train")}[function]
        hint = f"it describes {kind} takes it" if hasattr(module, other) else "add it, or name another file"
        raise ConfigError(f"{file} defines no {function}(arg); {hint}.")
    return _guard(file, getattr(module, function), spec.partition(":")[2])


def load_config(spec: str, overrides: Iterable[tuple[str, Any]] = ()) -> ConfigDict:
    """The locked config that `spec` names, after `overrides` (see `apply_overrides`). `validate` it before use. Raises ConfigError.

    A name that ends in .json is a saved config, such as a run's config.json.
    """
    config = from_json(spec) if spec.endswith(".json") else call(spec, "get_config")
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{spec}: get_config returned a {type(config).__name__}; it must return an ml_collections.ConfigDict.")
    return apply_overrides(config, overrides)


# ---- leaves ----------------------------------------------------------------------------------------------------------------------


def apply_overrides(config: ConfigDict, overrides: Iterable[tuple[str, Any]]) -> ConfigDict:
    """A locked copy of `config` with dotted leaves replaced: `[('optimizer.learning_rate', '1e-3'), ('init.gamma', 0.5)]`.

    A text is read by the type of the leaf it replaces; any other value must have that type already (an int may fill a float).
    Raises ConfigError for an unknown name (with the nearest one), for a group of leaves, and for a value of another type.
    """
    config = config.copy_and_resolve_references()
    known = leaves(config)
    for name, value in overrides:
        if name not in known:
            inside = [leaf for leaf in known if leaf.startswith(f"{name}.")]
            if inside:
                raise ConfigError(f"config.{name} is a group of values; set one of {', '.join(inside)}.")
            raise ConfigError(f"the config has no {name!r}{did_you_mean(name, known)}")
        group, _, leaf = name.rpartition(".")
        node = config
        for part in filter(None, group.split(".")):
            node = node[part]
        node[leaf] = _convert(value, known[name], f"config.{name}")
    return config.lock()


def to_dict(config: ConfigDict) -> dict[str, Any]:
    """The config as nested plain dicts, ready for JSON."""
    return config.to_dict()


def to_json(config: ConfigDict, path: str | os.PathLike) -> None:
    """Write the config to `path`, whole or not at all. Raises OSError where it cannot be written."""
    write_json_atomic(path, to_dict(config))


# Leaves that came after the first saved configs, with the value under which a run is what it was without them.
LATER = {
    "model.attention_kernel": "auto", "train.stall_timeout": 1800.0, "mesh.context": 1, "mesh.dcn_data": 1, "mesh.dcn_fsdp": 1,
    "train.spike": "off", "train.spike_window": 128, "train.spike_sigma": 6.0, "train.spike_rollbacks": 3, "data.loss": "all",
    "model.softmax_sink": "none", "monitor.kinds": (), "monitor.points": 24, "optimizer.kind": "adamw",
    "init.base_width": 256, "model.norm": "rms", "model.residual": "pre", "model.positions": "rope",
    "downstream.tasks": (), "downstream.steps": (), "downstream.limit": 0, "downstream.offline": False,
    "downstream.include": "", "train.tracker": "none",
}  # fmt: skip


def from_json(path: str | os.PathLike) -> ConfigDict:
    """The locked config that `to_json` wrote, equal to the one that was saved but for leaves of LATER that it lacked.

    Raises ConfigError for a file that is none.
    """

    def build(value: Any) -> Any:
        if isinstance(value, dict):
            return ConfigDict({k: build(v) for k, v in value.items()})
        return tuple(build(v) for v in value) if isinstance(value, list) else value

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a saved config: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no config: it must be one JSON object.")
    for name, value in () if is_net(data) else LATER.items():
        group, _, leaf = name.partition(".")
        if isinstance(data.setdefault(group, {}), dict):
            data[group].setdefault(leaf, value)
    try:
        return build(data).lock()
    except ValueError as error:  # names that no config can have
        raise ConfigError(f"{path} is no saved config: {error}") from error
