"""What must hold of a config's values before anything runs: one table of rules, every breach reported at once.

A rule is a dotted leaf name, what its value must be, and a test. Rules over several leaves follow as plain code.
Not checked here, because it needs the thing itself: init presets and rules (gammalm.initializers), data mixtures (gammalm.data),
whether the mesh fits the devices (gammalm.sharding).
"""

import difflib
import math
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from gammalm.errors import ConfigError

Check = tuple[str, Callable[[Any], bool]]  # what the value must be, and the test of it


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_real(v: Any) -> bool:
    return (_is_int(v) or isinstance(v, float)) and math.isfinite(v)


def _whole(low: int) -> Check:
    return f"a whole number of at least {low}", lambda v: _is_int(v) and v >= low


def _one_of(*names: str) -> Check:
    return f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names


_POSITIVE = ("a finite number above 0", lambda v: _is_real(v) and v > 0)
_NOT_NEGATIVE = ("a finite number of at least 0", lambda v: _is_real(v) and v >= 0)
_SHARE = ("a number from 0 to 1", lambda v: _is_real(v) and 0 <= v <= 1)
_BETA = ("a number from 0 to below 1", lambda v: _is_real(v) and 0 <= v < 1)
_BOOL = ("true or false", lambda v: isinstance(v, bool))
_TEXT = ("a text that is not empty", lambda v: isinstance(v, str) and v != "")
_TEXTS = ('a list of texts such as ("norm",)', lambda v: isinstance(v, tuple | list) and all(isinstance(t, str) for t in v))
_DTYPE = _one_of("bfloat16", "float32")
_EVEN = ("an even whole number of at least 2 (RoPE turns pairs)", lambda v: _is_int(v) and v >= 2 and v % 2 == 0)
_MESH_AXIS = ("a whole number of at least 1, or -1 for what is left of the devices", lambda v: _is_int(v) and (v >= 1 or v == -1))

RULES: dict[str, Check] = {
    "seed": ("a whole number from 0 to 2**32 - 1", lambda v: _is_int(v) and 0 <= v < 2**32),
    "model.vocab_size": _whole(1),
    "model.d_model": _whole(1),
    "model.n_layers": _whole(1),
    "model.n_heads": _whole(1),
    "model.d_ff": _whole(1),
    "model.norm_eps": _POSITIVE,
    "model.gate": _one_of("none", "headwise", "elementwise"),
    "model.softmax_sink": _one_of("none", "one", "learned"),
    "model.attention": _one_of("mha", "mla"),
    "model.attention_kernel": _one_of("auto", "blockwise", "cudnn", "splash"),
    "model.ffn": _one_of("dense", "mlp", "moe"),
    "model.norm": _one_of("rms", "layer", "none", "fixup"),
    "model.residual": _one_of("pre", "post", "deepnorm"),
    "model.positions": _one_of("rope", "learned"),
    "model.tie_embeddings": _BOOL,
    "model.logit_softcap": _NOT_NEGATIVE,
    "model.dtype": _DTYPE,
    "model.residual_dtype": _DTYPE,
    "model.remat": _one_of("none", "dots", "full"),
    "model.scan_unroll": _whole(1),
    "model.loss_chunk": _whole(0),
    "init.preset": _TEXT,
    "init.gamma": _NOT_NEGATIVE,
    "init.group_gammas": (
        "four finite numbers of at least 0 (embedding and head, qk, vo, ffn)",
        lambda v: isinstance(v, tuple | list) and len(v) == 4 and all(_is_real(g) and g >= 0 for g in v),
    ),
    "init.base_width": _whole(1),
    "init.depth_scale": _BOOL,
    "init.truncate": _NOT_NEGATIVE,
    "init.rules": _TEXTS,
    "data.path": _TEXT,
    "data.mixture": _TEXT,
    "data.packing": _one_of("concat", "documents"),
    "data.loss": _one_of("all", "last"),
    "data.seq_len": _whole(1),
    "batch.sequences": _whole(1),
    "batch.micro_batches": _whole(1),
    "optimizer.kind": _one_of("adamw", "muon"),
    "optimizer.learning_rate": _NOT_NEGATIVE,
    "optimizer.b1": _BETA,
    "optimizer.b2": _BETA,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.no_decay": _TEXTS,
    "optimizer.clip": _NOT_NEGATIVE,
    "optimizer.schedule": _one_of("cosine", "wsd", "constant"),
    "optimizer.warmup_steps": _whole(0),
    "optimizer.final_fraction": _SHARE,
    "optimizer.cooldown_share": _SHARE,
    "train.steps": _whole(1),
    "train.log_every": _whole(1),
    "train.validate_every": _whole(0),
    "train.validation_batches": _whole(0),
    "train.checkpoint_every": _whole(1),
    "train.checkpoints_kept": _whole(1),
    "train.stall_timeout": _NOT_NEGATIVE,
    "train.tracker": _one_of("none", "wandb"),
    "train.spike": _one_of("off", "skip", "rollback"),
    "train.spike_window": _whole(2),
    "train.spike_sigma": _POSITIVE,
    "train.spike_rollbacks": _whole(0),
    "monitor.kinds": _TEXTS,
    "monitor.points": _whole(2),
    "downstream.tasks": _TEXTS,
    "downstream.steps": (
        "a list of whole numbers of at least 0, such as (0, 500)",
        lambda v: isinstance(v, tuple | list) and all(_is_int(step) and step >= 0 for step in v),
    ),
    "downstream.limit": _whole(0),
    "downstream.offline": _BOOL,
    "downstream.include": ("a text", lambda v: isinstance(v, str)),
    "mesh.data": _MESH_AXIS,
    "mesh.fsdp": _MESH_AXIS,
    "mesh.expert": _MESH_AXIS,
    "mesh.context": _whole(1),
    "mesh.tensor": _MESH_AXIS,
    "mesh.dcn_data": _whole(1),
    "mesh.dcn_fsdp": _whole(1),
}

# What can be measured while a run trains (gammalm.experiments.monitors).
MONITORS = ("sink", "flow", "norm", "condensation", "weights")
# Leaves by which a model is measured on the way: they leave training as it is.
MEASURED = (
    "monitor.kinds", "monitor.points", "downstream.tasks", "downstream.steps", "downstream.limit", "downstream.offline",
    "downstream.include",
)  # fmt: skip

# Leaves that exist only where another leaf has this value: nothing else reads them.
KINDS: dict[tuple[str, str], dict[str, Check]] = {
    ("model.attention", "mha"): {"model.n_kv_heads": _whole(1), "model.head_dim": _EVEN, "model.qk_norm": _BOOL},
    ("model.attention", "mla"): {
        "model.mla.q_rank": _whole(0),
        "model.mla.kv_rank": _whole(1),
        "model.mla.nope_dim": _whole(1),
        "model.mla.rope_dim": _EVEN,
        "model.mla.v_dim": _whole(1),
    },
    ("model.positions", "rope"): {"model.rope_theta": _POSITIVE},
    ("model.positions", "learned"): {"model.max_positions": _whole(1)},
    ("model.ffn", "dense"): {},
    ("model.ffn", "mlp"): {
        "model.activation": _one_of("relu", "gelu", "gelu_tanh", "silu", "tanh"),
        "model.biases": _BOOL,
    },
    ("model.ffn", "moe"): {
        "model.moe.n_experts": _whole(1),
        "model.moe.top_k": _whole(1),
        "model.moe.n_shared": _whole(0),
        "model.moe.d_expert": _whole(1),
        "model.moe.first_k_dense": _whole(0),
        "model.moe.score": _one_of("sigmoid", "softmax"),
        "model.moe.route_scale": _POSITIVE,
        "model.moe.bias_rate": _NOT_NEGATIVE,
        "model.moe.balance_loss": _NOT_NEGATIVE,
        "model.moe.backend": _one_of("auto", "dense", "blocked", "ragged", "tokamax"),
    },
}

# Inputs and outputs of the tables that small supervised nets learn.
NET_ENDS = {"mnist": (784, 10), "wine-red": (11, 1), "wine-quality": (11, 1)}
# A small supervised net (configs/mlp.py) is what has model.widths. These are all its leaves.
NET_RULES: dict[str, Check] = {
    "seed": RULES["seed"],
    "model.widths": (
        "at least two whole numbers of at least 1: inputs, hidden layers, outputs",
        lambda v: isinstance(v, tuple | list) and len(v) >= 2 and all(_is_int(width) and width >= 1 for width in v),
    ),
    "model.activation": _one_of("relu", "gelu", "gelu_tanh", "silu", "tanh", "elu"),
    "model.biases": _BOOL,
    "init.preset": _one_of(
        "fan_in", "fixed_std", "kaiming_normal", "kaiming_uniform", "lecun_normal", "lecun_uniform", "orthogonal", "torch_linear",
        "xavier_normal", "xavier_uniform",
    ),
    "init.gamma": _NOT_NEGATIVE,
    "init.truncate": _NOT_NEGATIVE,
    "init.rules": _TEXTS,
    "data.name": _one_of(*NET_ENDS),
    "data.path": ("a text, empty for the cache", lambda v: isinstance(v, str)),
    "data.standardize": _BOOL,
    "batch.examples": _whole(1),
    "optimizer.kind": _one_of("sgd", "adam"),
    "optimizer.learning_rate": _NOT_NEGATIVE,
    "train.epochs": _whole(1),
}  # fmt: skip


def is_net(config) -> bool:
    """Whether a config, or one as plain dicts, is of a small supervised net and not of a decoder."""
    return "widths" in getattr(config.get("model"), "keys", tuple)()


def _read(config: ConfigDict, name: str) -> Any:
    node = config
    for part in name.split("."):
        node = node[part]
    return node


def leaves(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted name, in the order of the config: `{'seed': 0, 'model.d_model': 64, ...}`."""
    found = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _has(config: ConfigDict, name: str) -> bool:
    try:
        _read(config, name)
    except (KeyError, AttributeError, TypeError):
        return False
    return True


def _alone(config: ConfigDict, rules: dict[str, Check]) -> list[str]:
    """Breaches of `rules`, leaf by leaf."""
    found = []
    for name, (must_be, holds) in rules.items():
        if not _has(config, name):
            found.append(f"{name} is missing; it must be {must_be}.")
        elif not holds(value := _read(config, name)):
            found.append(f"{name}={value!r} must be {must_be}.")
    return found


def _across(c: ConfigDict) -> list[str]:
    """Breaches of the rules over several leaves, each of which is good on its own."""
    found = []
    m, b, o, steps = c.model, c.batch, c.optimizer, c.train.steps
    if m.attention == "mha" and m.n_heads % m.n_kv_heads:
        found.append(f"model.n_heads={m.n_heads} is no multiple of model.n_kv_heads={m.n_kv_heads}; each key head serves as many queries.")
    if m.ffn == "moe":
        e = m.moe
        if e.top_k > e.n_experts:
            found.append(f"model.moe.top_k={e.top_k} is more than model.moe.n_experts={e.n_experts}; choose fewer.")
        if e.first_k_dense >= m.n_layers:
            found.append(
                f"model.moe.first_k_dense={e.first_k_dense} leaves none of model.n_layers={m.n_layers} for a mixture; lower it, or choose "
                "a dense size."
            )
    found += _parts(c)
    if b.sequences % b.micro_batches:
        found.append(f"batch.sequences={b.sequences} is no multiple of batch.micro_batches={b.micro_batches}; change one of them.")
    if o.warmup_steps > steps:
        found.append(f"optimizer.warmup_steps={o.warmup_steps} is longer than the run (train.steps={steps}); change one of them.")
    elif o.schedule == "wsd" and o.warmup_steps + o.cooldown_share * steps > steps:
        found.append(
            f"optimizer.warmup_steps={o.warmup_steps} and the cool-down (optimizer.cooldown_share={o.cooldown_share} of "
            f"train.steps={steps}) overlap; shorten one of them."
        )
    if c.data.loss == "last" and c.data.packing != "documents":
        found.append("data.loss='last' needs data.packing='documents': without it no token is known to be a document's last.")
    for kind in c.monitor.kinds:
        if kind not in MONITORS:
            near = difflib.get_close_matches(kind, MONITORS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            found.append(f"monitor.kinds: {kind!r} is none of {', '.join(MONITORS)}.{hint}")
    if late := [step for step in c.downstream.steps if step > steps]:
        found.append(f"downstream.steps: {', '.join(map(str, late))} come after the last step (train.steps={steps}), which is always one.")
    if c.downstream.offline and c.downstream.include:
        found.append("downstream.offline has its own tasks and takes no downstream.include; leave one of them out.")
    if c.data.seq_len % c.mesh.context:
        found.append(f"data.seq_len={c.data.seq_len} is no multiple of mesh.context={c.mesh.context}, over which each sequence is cut.")
    if list(c.mesh.values()).count(-1) > 1:
        found.append("mesh: only one axis may be -1 (what is left of the devices); give the others a size.")
    return found


def _parts(c: ConfigDict) -> list[str]:
    """Breaches of what parts of a decoder need of each other, and presets of them."""
    found, m = [], c.model
    plain = m.attention == "mha" and m.ffn in ("dense", "mlp")
    if m.attention == "mla" and (m.positions == "learned" or (m.ffn == "mlp" and m.biases)):
        found.append("model.attention='mla' has a rotated part and no biases: it needs model.positions='rope' and model.biases=False.")
    if m.residual != "pre" and m.norm not in ("rms", "layer"):
        found.append(f"model.residual={m.residual!r} normalises each branch's sum; model.norm={m.norm!r} does not. Set it to rms or layer.")
    if m.norm == "fixup" and not plain:
        found.append("model.norm='fixup' has scalars for model.attention='mha' with model.ffn 'dense' or 'mlp'; choose these.")
    if m.norm in ("none", "fixup") and "norm" in c.monitor.kinds:
        found.append(f"monitor.kinds: there is no norm to measure under model.norm={m.norm!r}; leave it out.")
    if m.positions == "learned" and c.data.seq_len > m.max_positions:
        found.append(f"data.seq_len={c.data.seq_len} is more than model.max_positions={m.max_positions}; raise that, or read less.")
    if c.init.preset == "fixup" and (m.norm != "fixup" or m.tie_embeddings):
        found.append("init.preset='fixup' belongs to model.norm='fixup' and an untied head, which it sets to 0: lm:preset=fixup has all.")
    if c.init.preset == "deepnorm" and (m.residual != "deepnorm" or not plain):
        found.append(
            "init.preset='deepnorm' belongs to model.residual='deepnorm' with model.attention='mha' and model.ffn 'dense' or 'mlp': "
            "lm:preset=deepnorm has all but the last two."
        )
    if c.init.preset == "mup" and (m.norm not in ("rms", "layer") or m.residual != "pre"):
        found.append("init.preset='mup' sets the final norm's gain: it needs model.residual='pre' and model.norm rms or layer.")
    return found


def validate(config: ConfigDict) -> ConfigDict:
    """`config` itself, when every static rule holds. Raises one ConfigError that lists every breach: what, where, what to do."""
    if is_net(config):
        return _validate_net(config)
    found = _alone(config, RULES)
    for (leaf, kind), rules in KINDS.items() if not found else ():
        if _read(config, leaf) != kind:
            continue
        missing = [name for name in rules if not _has(config, name)]
        if missing:
            found.append(
                f"{leaf}={kind!r} needs {', '.join(missing)}, which this config has not. Choose the kind where the config is made "
                "(lm:attention=mla, lm:style=gpt2, or the size of a mixture), not as an override."
            )
        else:
            found += _alone(config, rules)
    known = set(RULES).union(*(rules for (leaf, kind), rules in KINDS.items() if not found and _read(config, leaf) == kind))
    if not found and (idle := [name for name in leaves(config) if name not in known]):
        kinds = ", ".join(f"{leaf}={_read(config, leaf)!r}" for leaf in dict.fromkeys(leaf for leaf, _ in KINDS))
        found.append(f"{', '.join(idle)}: nothing reads this under {kinds}. Remove it, or choose the kind where the config is made.")
    found = found or _across(config)
    return _refuse(config, found)


def _refuse(config: ConfigDict, found: list[str]) -> ConfigDict:
    """`config`, unless something was found."""
    if found:
        raise ConfigError("bad config:" + (" " if len(found) == 1 else "\n  ") + "\n  ".join(found))
    return config


def _validate_net(config: ConfigDict) -> ConfigDict:
    found = _alone(config, NET_RULES)
    if idle := [name for name in leaves(config) if name not in NET_RULES]:
        found.append(f"{', '.join(idle)}: a net (model.widths) does not read this; remove it.")
    if not found and (config.model.widths[0], config.model.widths[-1]) != (needed := NET_ENDS[config.data.name]):
        found.append(f"model.widths={config.model.widths} must begin and end with {needed} for data.name={config.data.name!r}.")
    return _refuse(config, found)
