"""What a config.json says of a model before any weight is read: sizes, norms and their ε, the declared initialization.

For the families of FAMILIES everything that theory needs follows, and how transformers initializes them is known; of any other model what
its keys say, and in `unsaid` what cannot be said. A key that is missing has the family's default, and `assumed` names it.
Source of keys, defaults and initialization: transformers 5.24, models/*/configuration_*.py, modeling_*.py, modeling_utils.py.
"""

import dataclasses
import math

from gammalm.errors import ConfigError
from gammalm.interop.torch_names import Known
from gammalm.theory import Decoder, Dense, Heads, Latent, Mixture, Stack

GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu": "geglu"}  # erf and tanh: < .1 %
PLAIN = GELUS | {"relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"}
STD = 0.02  # of transformers, where a config does not say it
COMMON = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "ffn": "intermediate_size"}
GPT2_KEYS = {"width": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn": "n_inner"}
ANY_KEYS = {name: (COMMON[name], GPT2_KEYS[name]) for name in COMMON} | {"width": ("hidden_size", "n_embd", "d_model", "dim")}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a family is built. eps: key of its norms' ε and its default; key None: fixed in the code. norms: pre | sandwich | post.

    softcap: of attention's scores and of the logits (0: none). scaled: embeddings times √width. divided: what writes into the stream has
    std/√(2L). qk_norm: always. latent: attention like DeepSeek's.
    """

    eps: tuple[str | None, float]
    norms: str = "pre"
    keys: tuple = tuple(COMMON.items())
    act: tuple[str, str] = ("hidden_act", "silu")
    gated: bool = True
    tied: bool = False
    scaled: bool = False
    divided: bool = False
    qk_norm: bool = False
    latent: bool = False
    parallel: bool = False
    softcap: tuple[float, float] = (0.0, 0.0)
    positions: str = ""  # key of how many are learned
    mixture: str = ""  # key of the number of experts


RMS = ("rms_norm_eps", 1e-6)
GEMMA = dict(act=("hidden_activation", "gelu_pytorch_tanh"), tied=True, scaled=True)
FAMILIES = {
    "llama": Kind(RMS), "qwen2": Kind(RMS), "qwen3": Kind(RMS, qk_norm=True), "mistral": Kind(RMS),
    "gemma": Kind(RMS, act=("hidden_act", "gelu_pytorch_tanh"), tied=True, scaled=True),
    "gemma2": Kind(RMS, "sandwich", softcap=(50.0, 30.0), **GEMMA), "gemma3_text": Kind(RMS, "sandwich", qk_norm=True, **GEMMA),
    "gpt2": Kind(("layer_norm_epsilon", 1e-5), keys=tuple(GPT2_KEYS.items()), act=("activation_function", "gelu_new"), gated=False,
                 tied=True, divided=True, positions="n_positions"),
    "gpt_neox": Kind(("layer_norm_eps", 1e-5), act=("hidden_act", "gelu"), gated=False, parallel=True),
    "olmo": Kind((None, 1e-5)), "olmo2": Kind(("rms_norm_eps", 1e-5), "post", qk_norm=True),
    "deepseek_v3": Kind(RMS, latent=True, mixture="n_routed_experts"),
    "mixtral": Kind(("rms_norm_eps", 1e-5), mixture="num_local_experts"),
}  # fmt: skip
# What a config leaves out, as nested ones of models of text and images do: vocabulary, width, feed-forward, layers, heads, size of a head
# (0: width / heads).
SIZES = {
    "llama": (32000, 4096, 11008, 32, 32, 0), "qwen2": (151936, 4096, 22016, 32, 32, 0), "qwen3": (151936, 4096, 22016, 32, 32, 128),
    "mistral": (32000, 4096, 14336, 32, 32, 0), "gemma": (256000, 3072, 24576, 28, 16, 256), "gemma2": (256000, 2304, 9216, 26, 8, 256),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 256), "gpt2": (50257, 768, 0, 12, 12, 0), "gpt_neox": (50432, 6144, 24576, 44, 64, 0),
    "olmo": (50304, 4096, 11008, 32, 32, 0), "olmo2": (50304, 4096, 11008, 32, 32, 0), "deepseek_v3": (129280, 7168, 18432, 61, 128, 0),
    "mixtral": (32000, 4096, 14336, 32, 32, 0),
}  # fmt: skip
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclasses.dataclass
class Described:
    """A config.json read. None where it does not say, or nobody knows.

    eps_key: where ε is set; None: nowhere. declared: std of the initialization, and declared_key its key. scale: what embeddings are
    multiplied by. decoder: for theory; None: `unsaid` has the reason. known: for reading tensors.
    """

    model_type: str
    width: int | None
    layers: int | None
    vocab: int | None
    ffn: int | None
    norms: str | None
    eps: float | None
    eps_key: str | None
    declared: float | None
    declared_key: str
    scale: float
    tied: bool | None
    decoder: Decoder | None
    known: Known
    assumed: list[str]
    unsaid: list[str]
    distinct: bool = False


class _Keys:
    """A config.json with the defaults that were taken."""

    def __init__(self, hf: dict, where: str):
        self.hf, self.where, self.assumed = hf, where, []

    def number(self, key: str, default=None, kind=int):
        value = self.hf.get(key)
        if value is None:
            if default is not None:
                self.assumed.append(f"{key} = {default:g}")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or not 0 <= value < math.inf:
            raise ConfigError(f"{self.where}: {key}={value!r} is no {'number' if kind is float else 'whole number'} of at least 0.")
        return value

    def need(self, key: str, default: int = 0) -> int:
        if default and key not in self.hf:
            return self.number(key, default)
        value = self.number(key)
        if not value:
            raise ConfigError(f"{self.where} is of a {self.hf.get('model_type')} model and lacks {key}. Take the model's own config.json.")
        return value


def describe(hf: dict, where: str) -> Described:
    """What the config.json `hf` says. Raises ConfigError, opened by `where`, for a size that a known family needs and that is none."""
    inner = hf.get("text_config")
    notes = []
    if isinstance(inner, dict) and ("hidden_size" in inner or "model_type" in inner):  # a model of text and images: its text
        notes = [f"Of the {hf.get('model_type')} model the language model alone is described; what reads images is not."]
        hf = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf} | inner
    kind = str(hf.get("model_type") or "")
    keys = _Keys(hf, where)
    found = _family(keys, kind, FAMILIES[kind]) if kind in FAMILIES else _other(keys, kind)
    found.assumed += keys.assumed
    found.unsaid = notes + found.unsaid
    return found


def _other(keys: _Keys, kind: str) -> Described:
    """What any config.json says by the usual names of keys."""
    hf = keys.hf

    def first(*names, kind=int):
        return next((keys.number(name, kind=kind) for name in names if isinstance(hf.get(name), int | float)), None)

    sizes = {name: first(*(options if isinstance(options, tuple) else (options,))) for name, options in ANY_KEYS.items()}
    eps_key = next((key for key in hf if "eps" in key and "norm" in key and isinstance(hf[key], float) and 0 <= hf[key] < 1), None)
    std_key = next((key for key in ("initializer_range", "init_std") if isinstance(hf.get(key), int | float)), "initializer_range")
    named = f"model_type {kind!r} is" if kind else "Its config.json has no model_type, so it is"
    unsaid = [
        f"{named} none of the families known here ({', '.join(FAMILIES)}): where its norms stand, how it is initialized and "
        "what its branches multiply are not known, so no residual flow and no norm is predicted."
    ]
    if sizes["width"] is None:
        unsaid.append("No key that is known here gives its width, so no gamma can be given to its declared std.")
    tied = hf.get("tie_word_embeddings")
    known = _known(hf, kind, sizes["width"] or 0, sizes["heads"] or 0, tied if isinstance(tied, bool) else None)
    return Described(kind, sizes["width"], sizes["layers"], first("vocab_size"), sizes["ffn"], None, hf.get(eps_key), eps_key,
                     first(std_key, kind=float), std_key, 1.0, known.tied, None, known, [], unsaid)  # fmt: skip


def _known(hf: dict, kind: str, width: int, heads: int, tied: bool | None) -> Known:
    def whole(key, default):
        return hf[key] if isinstance(hf.get(key), int) and hf[key] > 0 else default  # some list one for every layer

    return Known(kind, width, heads, whole("num_key_value_heads", heads), whole("head_dim", width // heads if heads else 0), tied)


def _family(keys: _Keys, kind: str, family: Kind) -> Described:
    hf, names = keys.hf, dict(family.keys)
    usual = dict(zip(("vocab_size", "width", "ffn", "layers", "heads", "head_dim"), SIZES[kind], strict=True))
    width, layers, heads, vocab = (keys.need(names.get(name, name), usual[name]) for name in ("width", "layers", "heads", "vocab_size"))
    default = 4 * width if family.positions else None
    ffn = (hf.get(names["ffn"]) or default) if default else keys.need(names["ffn"], usual["ffn"])
    if usual["head_dim"] and "head_dim" not in hf:
        hf = hf | {"head_dim": keys.need("head_dim", usual["head_dim"])}
    eps_key, eps = family.eps
    eps = keys.number(eps_key, eps, float) if eps_key else eps
    declared = keys.number("initializer_range", STD, float) or STD  # 0 means the default to transformers too
    tied = hf.get("tie_word_embeddings", family.tied)
    known = _known(hf, kind, width, heads, tied)
    scale = math.sqrt(width) if family.scaled else 1.0
    found = Described(kind, width, layers, vocab, ffn, family.norms, eps, eps_key, declared, "initializer_range", scale, tied, None, known,
                      [], [])  # fmt: skip
    act = hf.get(family.act[0]) or hf.get("hidden_act") or family.act[1]
    activation = (GATED if family.gated else PLAIN).get(str(act))
    if activation is None:
        found.unsaid.append(f"{family.act[0]}={act!r}: theory knows no such activation, so no residual flow is predicted.")
        return found
    if hf.get("attn_logit_softcapping", family.softcap[0]) or hf.get("query_pre_attn_scalar", known.head_dim) != known.head_dim:
        found.unsaid.append("The prediction leaves out the soft cap on attention's scores, and takes 1/sqrt(head size) as their scale.")
    attention = _latent(keys, heads) if family.latent else Heads(heads, known.head_dim, family.qk_norm)
    stacks = _stacks(keys, family, found, attention, Dense(ffn, activation))
    stds = [_stds(stack, declared, declared / math.sqrt(2 * layers) if family.divided else declared) for stack in stacks]
    embed = declared * scale
    if family.positions:
        embed *= math.sqrt(2)
        found.distinct = True
        found.unsaid.append("The vectors of learned positions count as part of the embedding, and tokens as distinct.")
    rope = hf.get("rope_parameters")
    theta = hf.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None) or 10_000.0
    theta = float(theta) if isinstance(theta, int | float) and not family.positions else 1e30  # 1e30: nothing turns
    # Where the stream begins with something else than the table, a tied head counts as one of its own: a token's own logit is left out.
    separate = not tied or scale != 1 or bool(family.positions)
    found.decoder = Decoder(width, vocab, tuple(stacks), tuple(stds), embed, declared if separate else None, eps, theta,
                            float(hf.get("final_logit_softcapping", family.softcap[1]) or 0.0))  # fmt: skip
    return found


def _latent(keys: _Keys, heads: int) -> Latent:
    rank = keys.hf.get("q_lora_rank", 1536)
    return Latent(heads, rank or 0, *(keys.need(*pair) for pair in DEEPSEEK.items()))


def _stacks(keys: _Keys, family: Kind, found: Described, attention, dense: Dense) -> list[Stack]:
    parallel = family.parallel and keys.hf.get("use_parallel_residual", True)
    rest = dict(norms=family.norms, parallel=parallel)
    if not family.mixture:
        return [Stack(found.layers, attention, dense, **rest)]
    experts, chosen = keys.need(family.mixture, 256 if family.latent else 8), keys.number("num_experts_per_tok", 8 if family.latent else 2)
    if not family.latent:
        return [Stack(found.layers, attention, Mixture(experts, chosen, 0, dense.width, "softmax"), **rest)]
    first = min(keys.number("first_k_dense_replace", 3), found.layers)
    mixture = Mixture(experts, chosen, keys.number("n_shared_experts", 1), keys.need("moe_intermediate_size", 2048), "sigmoid",
                      keys.number("routed_scaling_factor", 2.5, float))  # fmt: skip
    if keys.number("n_group", 8) > 1:
        found.unsaid.append("Experts are chosen within groups; the prediction takes the best of all, which changes no size.")
    if found.eps != 1e-6:
        found.unsaid.append(f"The latents' norms have eps 1e-06 in the code; the prediction takes {found.eps_key} for them too.")
    stacks = [Stack(first, attention, dense, **rest), Stack(found.layers - first, attention, mixture, **rest)]
    return [stack for stack in stacks if stack.depth]


def _stds(stack: Stack, std: float, out: float) -> dict[str, float]:
    """One std for every matrix, and another for what writes into the stream."""
    return {name: out if name.rpartition("/")[2] in ("out", "down") else std for name in stack.matrices()}
