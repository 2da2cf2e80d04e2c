"""The export target `gammalm`: our own modelling file, with our names and layouts. It covers every model
of ours that `targets.not_llama_like` has nothing against.

A tensor of a stack is cut up by layer and keeps its shape otherwise, so nothing is computed and both ways are exact to the bit:
`layers/attn/q` (L, D, H, K) becomes `layers.0.attn.q` (D, H, K) and so on; `embed/table` becomes `embed.table`.
`modeling_gammalm.py` beside this file is copied into the export folder; gammalm itself never imports it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gammalm.config import LATER
from gammalm.config_checks import KINDS as CHECKS
from gammalm.errors import DataError
from gammalm.files import write_text_atomic

MODEL_TYPE = "gammalm"
MODELLING = "modeling_gammalm.py"
STACKS = ("dense_layers/", "layers/")  # of the paths that are stacked on axis 0
LEAVES = (  # of config.model, of every model; `dtype` has another name there, where it is the dtype of the stored tensors
    "vocab_size", "d_model", "n_layers", "n_heads", "attention", "ffn", "d_ff", "norm_eps", "gate", "tie_embeddings", "rope_theta",
    "logit_softcap", "residual_dtype", "remat", "scan_unroll", "loss_chunk", "attention_kernel", "softmax_sink",
)  # fmt: skip
ALWAYS = {"norm": "rms", "residual": "pre", "positions": "rope"}  # leaves that the modelling file leaves no choice of
KINDS = {"mha": ("n_kv_heads", "head_dim", "qk_norm"), "mla": ("mla",), "dense": (), "moe": ("moe",)}  # leaves of one kind alone
GROUPS = {  # of leaves -> their names
    group: sorted(name.removeprefix(f"model.{group}.") for name in CHECKS[kind]) for group, kind in
    {"mla": ("model.attention", "mla"), "moe": ("model.ffn", "moe")}.items()
}  # fmt: skip


def is_stacked(path: str) -> bool:
    """Whether the array at `path` ("layers/attn/q") holds all layers of a stack on axis 0."""
    return path.startswith(STACKS)


def tensor_names(path: str, count: int) -> list[str]:
    """Names of the tensors of the array at `path`, in order of axis 0 (of length `count`) where it is stacked; else one name."""
    if not is_stacked(path):
        return [path.replace("/", ".")]
    stack, _, rest = path.replace("/", ".").partition(".")
    return [f"{stack}.{i}.{rest}" for i in range(count)]


def hf_config(model: Mapping[str, Any], *, dtype: str, seq_len: int, eos_token_id: int | None) -> dict[str, Any]:
    """The content of the export's `config.json` for `config.model`.

    `dtype` of the stored tensors ("float32", "bfloat16"); `seq_len` in tokens, the length of training; `eos_token_id` of the tokenizer.
    """
    names = (*LEAVES, *KINDS[model["attention"]], *KINDS[model["ffn"]])
    return {
        "architectures": ["GammalmForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{Path(MODELLING).stem}.GammalmConfig",
            "AutoModelForCausalLM": f"{Path(MODELLING).stem}.GammalmForCausalLM",
        },
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        "max_position_embeddings": seq_len,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
        "compute_dtype": model["dtype"],
        **{name: dict(model[name]) if name in ("mla", "moe") else model[name] for name in names},
    }


def model_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`config.model` as nested plain dicts from the content of a `config.json`: what `hf_config` was given.

    Raises DataError where leaves are missing or not known, or the model is another one. Values of leaves are checked by no one here.
    """
    later = {name.removeprefix("model."): value for name, value in LATER.items() if name.startswith("model.")}  # an older export lacks them
    hf = later | dict(hf)
    if hf.get("model_type") != MODEL_TYPE:
        raise DataError(f"config.json: model_type is {hf.get('model_type')!r}; {MODEL_TYPE!r} is read here.")
    attention, ffn = hf.get("attention"), hf.get("ffn")
    if attention not in ("mha", "mla") or ffn not in ("dense", "moe"):
        raise DataError(f"config.json of a {MODEL_TYPE} model: attention={attention!r} ffn={ffn!r}. Export the model again.")
    names = (*LEAVES, "compute_dtype", *KINDS[attention], *KINDS[ffn])
    faults = [f"{name} is missing" for name in names if name not in hf]
    for name in names:
        value = hf.get(name)
        if name in GROUPS and isinstance(value, dict):
            faults += [f"{name}.{leaf} is missing" for leaf in GROUPS[name] if leaf not in value]
            faults += [f"{name}.{leaf} is not known" for leaf in value if leaf not in GROUPS[name]]
        elif name in hf and (name in GROUPS or isinstance(value, dict | list)):
            faults.append(f"{name}={value!r}")
    if faults:
        raise DataError(f"config.json of a {MODEL_TYPE} model: {', '.join(faults)}. Export the model again.")
    return ALWAYS | {"dtype" if name == "compute_dtype" else name: dict(hf[name]) if name in ("mla", "moe") else hf[name] for name in names}


def copy_files(out: "str | os.PathLike") -> None:
    """Copies the modelling file into the folder `out`. Raises OSError where it cannot be written."""
    write_text_atomic(Path(out) / MODELLING, Path(__file__).with_name(MODELLING).read_text("utf-8"))
