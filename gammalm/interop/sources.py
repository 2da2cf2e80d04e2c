"""What of transformers' models ours can represent: config.json of a family -> leaves of our config, or every reason why not.

Nothing is guessed: a size that config.json lacks, a key whose meaning we do not know, a value that asks for something our modules do not
have, each is a reason. Keys that change no logit (IDLE) are passed over, and so is every value that switches its key off (null, false, 0).
Source of names and defaults: transformers 5.24, models/*/configuration_*.py and modeling_*.py.
"""

import dataclasses
from typing import Any

from gammalm.errors import ConfigError
from gammalm.interop import gpt2
from gammalm.interop.targets import LATENT_EPS, PARTIAL_ROTARY

# model_type -> class of its language model. The order is that of docs/huggingface.md.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": gpt2.ARCHITECTURE,
}
KNOWN_MISFITS = {
    "olmo2": "it normalises the output of each branch instead of its input, and queries and keys over their whole width",
    "olmo3": "it normalises the output of each branch instead of its input, and queries and keys over their whole width",
    "qwen2": "its attention has biases",
    "qwen3_moe": "its router is a softmax without a selection bias, and it has no shared expert",
    "deepseek_v2": "its router is a softmax over groups",
    "mixtral": "its router takes a softmax over the chosen experts alone",
}
# Keys that change no logit: bookkeeping, training, generation, and what other keys make idle.
IDLE = frozenset(
    "architectures auto_map model_type transformers_version _name_or_path _attn_implementation_autoset name_or_path "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id cls_token_id id2label label2id problem_type "
    "num_labels finetuning_task task_specific_params tokenizer_class prefix use_cache return_dict output_attentions output_hidden_states "
    "output_router_logits is_encoder_decoder is_decoder initializer_range attention_dropout hidden_dropout attn_implementation "
    "pretraining_tp router_aux_loss_coef aux_loss_alpha seq_aux ep_size router_jitter_noise num_nextn_predict_layers num_mtp_layers "
    "max_length min_length temperature top_p top_k typical_p repetition_penalty length_penalty num_beams num_beam_groups do_sample "
    "diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences chunk_size_feed_forward "
    "early_stopping forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens exponential_decay_length_penalty "
    "tie_encoder_decoder torchscript use_bfloat16 pruned_heads remove_invalid_values tf_legacy_loss hidden_dropout_prob "
    "is_llama_config transformers.js_config "
    # what GPT-2's other heads read
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    # Qwen3-Next's linear attention and experts, which a model of full attention and dense layers has not; Qwen3's unused window
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "full_attention_interval moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts decoder_sparse_step "
    "mlp_only_layers norm_topk_prob max_window_layers".split()
)


@dataclasses.dataclass
class Source:
    """A config.json read: leaves of `config.model` by dotted name, sequence length, the dtype it names (None: none), and how its
    tensors are arranged (table.entries)."""

    leaves: dict[str, Any]
    seq_len: int
    dtype: str | None
    centred: bool
    interleaved: bool


NAMES = {bool: "boolean", int: "whole number", float: "number", str: "text", list: "list"}


def _is(value: Any, kind: type) -> bool:
    """Whether `value` is of the type `kind`: a whole number is a number too, a boolean is none."""
    return isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)


class Reader:
    """Reads keys of a config.json, noting which were read and what stands against an import."""

    def __init__(self, hf: dict):
        self.hf, self.read, self.reasons = hf, set(), []

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is missing."""
        self.read.add(key)
        return self.hf.get(key, default)

    def given(self, key: str, kind: type, default: Any = None, low: int = 0) -> Any:
        """The value of type `kind` (a number: at least `low`); `default` where the key is missing, or null where that switches off.

        Anything else is a reason.
        """
        value, number = self.get(key, default), kind in (int, float)
        if (value is None and not default) or (_is(value, kind) and (not number or value >= low)):
            return default if value is None else value
        self.reasons.append(f"{key}={value!r} is no {NAMES[kind]}{f' of at least {low}' if number else ''}")
        return default

    def need(self, key: str, kind: type = int, low: int = 1) -> Any:
        """The number of type `kind`, at least `low`, that has to be there; anything else is a reason, and None."""
        if self.get(key) is None:
            self.reasons.append(f"{key} is missing")
        return self.given(key, kind, low=low)

    def only(self, key: str, *allowed: Any, default: Any = None, why: str) -> None:
        """A reason unless the value is one of `allowed`."""
        value = self.get(key, default)
        if value not in allowed:
            self.reasons.append(f"{key}={value!r}: {why}")

    def unknown(self) -> None:
        """A reason for each key that was neither read nor is idle, and is not switched off."""
        for key in sorted(self.hf.keys() - self.read - IDLE):
            if self.hf[key]:
                self.reasons.append(f"{key}={self.hf[key]!r}: not known here, and it may change what is computed; remove the key if not")


def read_config(hf: dict, where: str) -> Source:
    """What the config.json `hf` of one of ARCHITECTURES describes. Raises ConfigError, opened by `where`: every reason against it."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        reason = KNOWN_MISFITS.get(str(kind), f"what can be imported is {', '.join(ARCHITECTURES)} and gammalm")
        raise ConfigError(f"{where}: model_type {kind!r} cannot be imported: {reason}.")
    r = Reader(hf)
    if kind == "gpt2":
        return _gpt2(r, where)
    leaves = {
        "vocab_size": r.need("vocab_size"),
        "d_model": r.need("hidden_size"),
        "n_layers": r.need("num_hidden_layers"),
        "n_heads": r.need("num_attention_heads"),
        "d_ff": r.need("intermediate_size"),
        "norm_eps": r.need("rms_norm_eps", float, 0),
    }
    seq_len = r.need("max_position_embeddings")
    sizes_lack = bool(r.reasons)  # the rest is counted in them
    dtypes = [r.given(key, str) for key in ("dtype", "torch_dtype")]  # transformers since 5, before 5
    leaves |= {
        "tie_embeddings": r.given("tie_word_embeddings", bool, False),
        "rope_theta": _rope_theta(r, kind),
        "gate": "elementwise" if kind == "qwen3_next" else "none",
        "softmax_sink": "none",
        "logit_softcap": 0.0,
        "attention": "mla" if kind == "deepseek_v3" else "mha",
        "ffn": "dense",
    }
    _language_model(r)
    r.only("hidden_act", "silu", "swish", default="silu", why="the feed-forward layers here take silu")
    for bias in ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias"):
        r.only(bias, False, None, why="there are no biases here")
    interleaved = r.given("rope_interleave", bool, True) if kind == "deepseek_v3" else True
    if not sizes_lack:
        _all_layers_attend(r, kind, seq_len)
        leaves |= _latent(r, leaves) if kind == "deepseek_v3" else _heads(r, kind, leaves)
        if kind == "qwen3_next":
            _no_mixture(r, leaves["n_layers"])
        elif kind in ("glm4_moe", "deepseek_v3"):
            leaves |= _mixture(r, leaves["n_layers"])
        r.unknown()
    return _source(r, where, leaves, seq_len, dtypes, centred=kind == "qwen3_next", interleaved=interleaved)


def _source(r: Reader, where: str, leaves: dict, seq_len: int, dtypes: list, *, centred: bool = False, interleaved: bool = True) -> Source:
    """What was read. Raises ConfigError, opened by `where`: every reason against it."""
    if r.reasons:
        kind = r.hf["model_type"]
        raise ConfigError(f"{where} describes a {kind} model that cannot be represented here:\n  " + "\n  ".join(r.reasons))
    named = {f"model.{name}": value for name, value in leaves.items()}
    return Source(named, seq_len, dtypes[0] or dtypes[1], centred, interleaved)


def _language_model(r: Reader) -> None:
    """Reasons where the folder holds another kind of model of its family, or weights that are stored quantized."""
    name = ARCHITECTURES[r.hf["model_type"]]
    r.only("architectures", None, [name], why=f"{name} is the language model of this family")
    r.only("quantization_config", None, why="weights that are stored quantized are not read")


def _gpt2(r: Reader, where: str) -> Source:
    dtypes = [r.given(key, str) for key in ("dtype", "torch_dtype")]
    leaves = gpt2.read(r)
    _language_model(r)
    r.unknown()
    return _source(r, where, leaves, leaves["max_positions"], dtypes)


def _rope_theta(r: Reader, kind: str) -> float:
    """The base of plain rotary positions over all channels of a head; anything else is a reason."""
    given = {"rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):  # transformers before 5, since 5
        value = r.get(key) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            r.reasons.append(f"{key}={value!r}: one rotary embedding for all layers is what there is here")
            return 0.0
        given |= value
    rope_type = given.pop("type", None) or given["rope_type"]
    share = given.pop("partial_rotary_factor", r.get("partial_rotary_factor", PARTIAL_ROTARY.get(kind, 1.0)))
    theta = given.pop("rope_theta", None)
    outside = r.get("rope_theta")
    if rope_type != "default":
        r.reasons.append(f"rope_type={rope_type!r}: rotary positions are not scaled here")
    elif extra := {key: value for key, value in given.items() if key != "rope_type" and value is not None}:
        r.reasons.append(f"rope_scaling or rope_parameters hold {extra!r}: rotary positions here have a base alone")
    if r.get("rotary_pct", 1.0) != 1.0 or share != 1.0:
        r.reasons.append(f"partial_rotary_factor={share!r}: all channels of a head are rotated here")
    if theta is not None and outside is not None and theta != outside:
        r.reasons.append(f"rope_theta={outside!r} and rope_parameters.rope_theta={theta!r} differ")
    base = theta if theta is not None else 10_000.0 if outside is None else outside
    if not _is(base, float) or not base > 0:
        r.reasons.append(f"rope_theta={base!r} is no number above 0")
    return base


def _all_layers_attend(r: Reader, kind: str, seq_len: int) -> None:
    """Reasons where some layer has no full causal attention."""
    if any(layer != "full_attention" for layer in r.given("layer_types", list, [])):
        r.reasons.append("layer_types: every layer here has full attention")
    elif kind == "qwen3_next" and not r.hf.get("layer_types") and r.hf.get("full_attention_interval", 4) != 1:
        r.reasons.append("full_attention_interval without layer_types: every layer here has full attention")
    r.only("use_sliding_window", False, None, why="attention windows are not known here")
    r.get("sliding_window")  # read by one family alone
    window = r.given("sliding_window", int, low=1) if kind == "mistral" and "sliding_window" in r.hf else 4096
    if kind == "mistral" and window is not None and window < seq_len:
        r.reasons.append(f"sliding_window={window!r} is shorter than max_position_embeddings: attention windows are not known here")


def _heads(r: Reader, kind: str, leaves: dict) -> dict:
    heads = leaves["n_heads"]
    groups, size = heads, leaves["d_model"] // heads
    if kind != "llama" or r.get("num_key_value_heads") is not None:
        groups = r.need("num_key_value_heads")
    if kind in ("qwen3", "qwen3_next") or r.get("head_dim") is not None:
        size = r.need("head_dim")
    qk_norm = kind in ("qwen3", "qwen3_next") or kind == "glm4_moe" and r.given("use_qk_norm", bool, False)
    return {"n_kv_heads": groups, "head_dim": size, "qk_norm": qk_norm}


def _latent(r: Reader, leaves: dict) -> dict:
    heads = leaves["n_heads"]
    r.only("num_key_value_heads", heads, None, why="each head of latent attention has keys and values of its own")
    for follows in ("head_dim", "qk_head_dim"):
        r.get(follows)
    if leaves["norm_eps"] != LATENT_EPS:
        why = f"its latent norms have {LATENT_EPS:g} all the same, ours that of the model"
        r.reasons.append(f"rms_norm_eps={leaves['norm_eps']!r}: {why}")
    ranks = {"kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim"}
    rank = r.need("q_lora_rank") if r.get("q_lora_rank", 0) is not None else 0
    return {"mla.q_rank": rank} | {f"mla.{name}": r.need(key) for name, key in ranks.items()}


def _no_mixture(r: Reader, n_layers: int) -> None:
    """A reason unless every layer of Qwen3-Next is dense; the rule is that of its decoder layer."""
    alone, experts = r.given("mlp_only_layers", list, []), r.given("num_experts", int, 512)
    step = r.given("decoder_sparse_step", int, 1, low=1)
    mixed = [i for i in range(n_layers) if i not in alone and experts > 0 and (i + 1) % step == 0]
    if mixed:
        r.reasons.append(f"layers {mixed[:5]} hold experts, whose softmax router and gated shared expert our mixtures have not")


def _mixture(r: Reader, n_layers: int) -> dict:
    """Leaves of DeepSeek's mixture, which GLM shares; none where every layer is dense."""
    dense = r.need("first_k_dense_replace", low=0)
    sizes = {"n_experts": "n_routed_experts", "top_k": "num_experts_per_tok", "d_expert": "moe_intermediate_size"}
    found = {name: r.need(key) for name, key in sizes.items()} | {"route_scale": r.need("routed_scaling_factor", float, 0)}
    found |= {"n_shared": r.given("n_shared_experts", int, 1), "first_k_dense": dense, "score": "sigmoid"}
    if dense is not None and dense >= n_layers:
        for key in ("n_group", "topk_group", "norm_topk_prob", "scoring_func", "topk_method", "moe_layer_freq"):
            r.get(key)
        return {}
    r.only("norm_topk_prob", True, default=True, why="the gates of a token's experts are normalised here")
    r.only("scoring_func", "sigmoid", None, why="its router takes sigmoids")
    r.only("topk_method", "noaux_tc", None, why="experts are chosen by affinity and bias here")
    r.only("moe_layer_freq", 1, None, why="every layer after the first dense ones is a mixture here")
    for key in ("n_group", "topk_group"):
        absent = 1 if r.hf["model_type"] == "glm4_moe" else 8
        r.only(key, 1, default=absent, why="experts are not chosen by groups here")
    return {"ffn": "moe"} | {f"moe.{name}": value for name, value in found.items()}
