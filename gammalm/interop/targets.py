"""What of ours transformers can represent: per target the reasons why a model does not fit it, and its config.json.

A target fits exactly or not at all: nothing is dropped or approximated. The names and defaults are those of transformers 5.24
(models/*/configuration_*.py); rope_theta and torch_dtype are written in the older place too, where other programs look for them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from gammalm.interop import gpt2

LATENT_EPS = 1e-6  # of DeepSeek-V3's latent norms: they do not read rms_norm_eps
OWN = "gammalm"  # our own modelling file: fits every model that `not_llama_like` has nothing against


@dataclasses.dataclass(frozen=True)
class Target:
    """A family of transformers: its names, the reasons against a `config.model` (none: it fits), its own keys of config.json; `llama_like`:
    with those that the families after Llama share."""

    model_type: str
    architecture: str
    against: Callable[[object], list[str]]
    keys: Callable[[object], dict]
    centred: bool = False
    llama_like: bool = True


def not_llama_like(m) -> list[str]:
    """Reasons that hold against every family but GPT-2, and against our own modelling file."""
    wanted = {"norm": ("rms", "RMSNorms"), "residual": ("pre", "norms before its branches"), "positions": ("rope", "rotary positions")}
    reasons = [f"model.{name}={m[name]}; it has {has} alone" for name, (value, has) in wanted.items() if m[name] != value]
    return reasons + (["model.ffn=mlp; its feed-forward layers are SwiGLUs"] if m.ffn == "mlp" else [])


def _kind(m, *, attention: str, ffn: tuple[str, ...], gate: str, qk_norm: bool | None) -> list[str]:
    """Reasons from the kind of the model; qk_norm None: with or without."""
    reasons = not_llama_like(m)
    if m.attention != attention:
        reasons.append(f"model.attention={m.attention}; it has {attention} alone")
    if m.ffn not in (*ffn, "mlp"):
        reasons.append(f"model.ffn={m.ffn}; it has {ffn[0]} alone")
    if m.gate != gate:
        reasons.append(f"model.gate={m.gate}; its attention has {'no gate' if gate == 'none' else f'the {gate} gate, always'}")
    if m.softmax_sink != "none":
        reasons.append(f"model.softmax_sink={m.softmax_sink}; the softmax of its attention has no sink")
    if m.attention == "mha" and qk_norm is not None and m.qk_norm != qk_norm:
        reasons.append(f"model.qk_norm={m.qk_norm}; it {'always' if qk_norm else 'never'} normalises queries and keys")
    if m.logit_softcap:
        reasons.append(f"model.logit_softcap={m.logit_softcap:g}; it has no logit soft-cap")
    if m.ffn == "moe" and "moe" in ffn:
        if m.moe.score != "sigmoid":
            reasons.append(f"model.moe.score={m.moe.score}; its router takes sigmoids")
        if m.moe.n_shared == 0:
            reasons.append("model.moe.n_shared=0; it always has a shared expert")
        if m.moe.n_experts < 2:
            reasons.append(f"model.moe.n_experts={m.moe.n_experts}; its router needs two")
    return reasons


def _llama(m) -> list[str]:
    reasons = _mistral(m)
    if m.d_model % m.n_heads:
        reasons.append(f"model.d_model={m.d_model} is no multiple of model.n_heads={m.n_heads}; transformers refuses to build that")
    return reasons


def _mistral(m) -> list[str]:
    return _kind(m, attention="mha", ffn=("dense",), gate="none", qk_norm=False)


def _qwen3(m) -> list[str]:
    return _kind(m, attention="mha", ffn=("dense",), gate="none", qk_norm=True)


def _qwen3_next(m) -> list[str]:
    return _kind(m, attention="mha", ffn=("dense",), gate="elementwise", qk_norm=True)


def _glm4_moe(m) -> list[str]:
    return _kind(m, attention="mha", ffn=("moe",), gate="none", qk_norm=None)


def _deepseek_v3(m) -> list[str]:
    reasons = _kind(m, attention="mla", ffn=("moe", "dense"), gate="none", qk_norm=None)
    if m.norm_eps != LATENT_EPS:
        reasons.append(f"model.norm_eps={m.norm_eps:g}; its latent norms have {LATENT_EPS:g}, whatever its config says")
    return reasons


def _full_attention(m) -> dict:
    return {"layer_types": ["full_attention"] * m.n_layers}


def _heads(m) -> dict:
    return {"num_key_value_heads": m.n_kv_heads, "head_dim": m.head_dim}


def _mixture(m) -> dict:
    """Keys of DeepSeek's mixture, which GLM shares; a model without one has dense layers alone, beside which the rest is unread."""
    shared = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0}
    if m.ffn == "dense":
        sizes = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": m.d_ff}
        return shared | sizes | {"routed_scaling_factor": 1.0, "first_k_dense_replace": m.n_layers}
    e = m.moe
    return shared | {
        "n_routed_experts": e.n_experts,
        "num_experts_per_tok": e.top_k,
        "n_shared_experts": e.n_shared,
        "moe_intermediate_size": e.d_expert,
        "routed_scaling_factor": e.route_scale,
        "first_k_dense_replace": e.first_k_dense,
    }


def _latent(m) -> dict:
    a = m.mla
    return _mixture(m) | {
        "num_key_value_heads": m.n_heads,
        "q_lora_rank": a.q_rank or None,
        "kv_lora_rank": a.kv_rank,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.v_dim,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _dense_qwen3_next(m) -> dict:
    # Without experts every layer is dense; mlp_only_layers says it again, for programs that read only one of the two.
    return _heads(m) | _full_attention(m) | {"num_experts": 0, "mlp_only_layers": list(range(m.n_layers)), "decoder_sparse_step": 1}


# In the order in which `auto` tries them.
TARGETS = {
    "llama": Target("llama", "LlamaForCausalLM", _llama, lambda m: _heads(m) | {"mlp_bias": False}),
    "mistral": Target("mistral", "MistralForCausalLM", _mistral, lambda m: _heads(m) | {"sliding_window": None}),
    "qwen3": Target("qwen3", "Qwen3ForCausalLM", _qwen3, lambda m: _heads(m) | _full_attention(m) | {"use_sliding_window": False}),
    "qwen3-next": Target("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next, _dense_qwen3_next, centred=True),
    "glm4-moe": Target("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, lambda m: _heads(m) | _mixture(m) | {"use_qk_norm": m.qk_norm}),
    "deepseek-v3": Target("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_v3, _latent),
    "gpt2": Target(gpt2.MODEL_TYPE, gpt2.ARCHITECTURE, gpt2.against, gpt2.keys, llama_like=False),
}
PARTIAL_ROTARY = {"qwen3_next": 0.25, "glm4_moe": 0.5}  # share of a head's channels that is rotated, where config.json does not say


def uncentrable(name: str, gain: np.ndarray) -> list[str]:
    """The reason why the norm `gain` cannot be stored as gain − 1: fp32 does not give it back (below ½ the difference is rounded)."""
    one = np.float32(1)
    lost = (gain - one) + one != gain
    if not lost.any():
        return []
    example = gain[lost].flat[0]
    return [f"{np.count_nonzero(lost)} gains of {name} (such as {example!s}) change when stored as gain - 1, which is how it stores them"]


def config_json(target: Target, model, *, dtype: str, seq_len: int, eos_token_id: int | None) -> dict:
    """config.json of `config.model` for `target`; `dtype` is that of the stored tensors, `seq_len` the length it was trained at."""
    found = {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    }
    return found | (_shared(target, model, seq_len) if target.llama_like else {}) | target.keys(model)


def _shared(target: Target, model, seq_len: int) -> dict:
    """Keys that the families after Llama have."""
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    partial = {"partial_rotary_factor": 1.0} if target.model_type in PARTIAL_ROTARY else {}
    return {
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": rope | partial,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **partial,
    }
