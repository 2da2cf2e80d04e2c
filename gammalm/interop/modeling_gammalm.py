"""The models of gammalm for `transformers`: this one file goes into the export folder and needs torch and transformers (5.24) alone.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

A decoder with pre-norm RMSNorm blocks, RoPE, no biases; attention with all heads, grouped heads or latents (DeepSeek-V2,
arXiv:2405.04434), with or without an output gate (arXiv:2505.06708) and a softmax sink; SwiGLU or a mixture of experts (DeepSeek-V3,
arXiv:2412.19437).
Tensors have gammalm's own names and layouts (inputs first), so weights move between the two bit by bit.

Shapes: B batch, T query tokens, S key tokens, D d_model, H heads, G key/value heads, K head size, N and P the parts of a latent
attention's head without and with position, W its value size, F FFN width, E experts, A experts per token, M tokens, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults


class GammalmConfig(PreTrainedConfig):
    """The leaves of gammalm's `config.model` under their own names, but `dtype`, which is that of the stored tensors here.

    Leaves that only training reads (`compute_dtype`, `residual_dtype`, `remat`, …) are carried along for the way back.
    """

    model_type = "gammalm"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "norm_eps",
    }

    vocab_size: int = 50304
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    attention: str = "mha"  # mha | mla
    n_kv_heads: int | None = None  # mha: these three
    head_dim: int | None = None
    qk_norm: bool | None = None
    mla: dict | None = None  # mla: q_rank (0: none), kv_rank, nope_dim, rope_dim, v_dim
    ffn: str = "dense"  # dense | moe
    d_ff: int = 2048
    moe: dict | None = None  # n_experts, top_k, n_shared, d_expert, first_k_dense, score (sigmoid | softmax), route_scale, …
    norm_eps: float = 1e-12
    gate: str = "none"  # none | headwise | elementwise
    softmax_sink: str = "none"  # none | one | learned
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    logit_softcap: float = 0.0  # 0: none
    max_position_embeddings: int = 2048  # the length of training; nothing else stops at it
    initializer_range: float = 0.02  # of a model made from this config without weights
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · gain, in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.gain.float()).to(x.dtype)


def rope_angles(positions_BT, size: int, theta: float):
    """cos and sin [B, T, 1, size/2] in fp32."""
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=positions_BT.device) / size)
    angle = positions_BT[:, :, None, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x_BTHK, angles):
    """Rotates the pairs (x[k], x[k + K/2])."""
    cos, sin = angles
    first, second = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHK.dtype)


class Attention(nn.Module):
    """What the two kinds share: the cache, the product of softmax and values, the sink, the gate, the output projection."""

    def __init__(self, c: GammalmConfig, index: int, value_size: int):
        super().__init__()
        self.index = index
        self.repeats = 1  # query heads per key head
        self.gated = c.gate
        if c.gate == "elementwise":
            self.gate = weight(c.d_model, c.n_heads, value_size)
        elif c.gate == "headwise":
            self.gate = weight(c.d_model, c.n_heads)
        self.sinks = c.softmax_sink
        if c.softmax_sink == "learned":
            self.sink = weight(c.n_heads)
        self.out = weight(c.n_heads, value_size, c.d_model)

    def forward(self, x_BTD, angles, mask, cache):
        q, k, v = (a.transpose(1, 2) for a in self.project(x_BTD, angles))  # heads before tokens
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        k, v = (a.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else a for a in (k, v))
        if self.sinks != "none":
            k, v, mask = self.with_sink(k, v, mask, q.shape[2])
        causal = mask is None and q.shape[2] > 1
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)
        if self.gated == "elementwise":
            y = y * torch.einsum("btd,dhk->bthk", x_BTD, self.gate).sigmoid()
        elif self.gated == "headwise":
            y = y * (x_BTD @ self.gate).sigmoid()[..., None]
        return torch.einsum("bthk,hkd->btd", y, self.out)

    def with_sink(self, k, v, mask, T: int):
        """Keys, values and a mask to add [B, H, T, 1+S], with one more key in front: every query gives it the sink's score; value zero."""
        B, H, S = k.shape[:3]
        if mask is None:
            mask = torch.ones(T, S, dtype=torch.bool, device=k.device).tril(S - T)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=k.dtype).masked_fill(~mask, float("-inf"))
        score_H = self.sink.to(mask.dtype) if self.sinks == "learned" else mask.new_zeros(H)
        mask = torch.cat([score_H[:, None, None].expand(B, H, T, 1), mask.expand(B, H, T, S)], dim=-1)
        return functional.pad(k, (0, 0, 1, 0)), functional.pad(v, (0, 0, 1, 0)), mask


class GroupedAttention(Attention):
    """All heads of their own, or groups of query heads that share a key head; optionally queries and keys are normed."""

    def __init__(self, c: GammalmConfig, index: int):
        super().__init__(c, index, c.head_dim)
        self.repeats = c.n_heads // c.n_kv_heads
        self.q = weight(c.d_model, c.n_heads, c.head_dim)
        self.k = weight(c.d_model, c.n_kv_heads, c.head_dim)
        self.v = weight(c.d_model, c.n_kv_heads, c.head_dim)
        self.normed = c.qk_norm
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def project(self, x_BTD, angles):
        q, k, v = (torch.einsum("btd,dhk->bthk", x_BTD, w) for w in (self.q, self.k, self.v))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, angles), rotate(k, angles), v


class LatentAttention(Attention):
    """Keys and values of all heads from one normed latent per token; position in a separate part, which all heads' keys share."""

    def __init__(self, c: GammalmConfig, index: int):
        m = c.mla
        super().__init__(c, index, m["v_dim"])
        self.nope_dim = m["nope_dim"]
        qk_dim = m["nope_dim"] + m["rope_dim"]
        self.compressed = m["q_rank"] > 0
        if self.compressed:
            self.q_down = weight(c.d_model, m["q_rank"])
            self.q_norm = RMSNorm(m["q_rank"], c.norm_eps)
            self.q_up = weight(m["q_rank"], c.n_heads, qk_dim)
        else:
            self.q = weight(c.d_model, c.n_heads, qk_dim)
        self.kv_down = weight(c.d_model, m["kv_rank"])
        self.k_rope = weight(c.d_model, m["rope_dim"])
        self.kv_norm = RMSNorm(m["kv_rank"], c.norm_eps)
        self.k_up = weight(m["kv_rank"], c.n_heads, m["nope_dim"])
        self.v_up = weight(m["kv_rank"], c.n_heads, m["v_dim"])

    def project(self, x_BTD, angles):
        x, w = (self.q_norm(x_BTD @ self.q_down), self.q_up) if self.compressed else (x_BTD, self.q)
        q_BTHN, q_BTHP = torch.einsum("btr,rhk->bthk", x, w).tensor_split([self.nope_dim], dim=-1)
        latent = self.kv_norm(x_BTD @ self.kv_down)
        k_BTHN, v_BTHW = (torch.einsum("btr,rhk->bthk", latent, w) for w in (self.k_up, self.v_up))
        k_BT1P = rotate((x_BTD @ self.k_rope)[:, :, None], angles)
        q = torch.cat([q_BTHN, rotate(q_BTHP, angles)], dim=-1)
        return q, torch.cat([k_BTHN, k_BT1P.expand(-1, -1, k_BTHN.shape[2], -1)], dim=-1), v_BTHW


class SwiGLU(nn.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate, self.up, self.down = weight(d_model, d_ff), weight(d_model, d_ff), weight(d_ff, d_model)

    def forward(self, x):
        return (functional.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Experts(nn.Module):
    """Routed experts: each runs on the tokens that chose it."""

    def __init__(self, n_experts: int, d_model: int, d_expert: int):
        super().__init__()
        self.gate, self.up = weight(n_experts, d_model, d_expert), weight(n_experts, d_model, d_expert)
        self.down = weight(n_experts, d_expert, d_model)

    def forward(self, x_MD, ids_MA, gates_MA):
        y_MD = torch.zeros_like(x_MD, dtype=torch.float32)
        for e in ids_MA.unique().tolist():
            token, choice = torch.where(ids_MA == e)
            x = x_MD[token]
            x = (functional.silu(x @ self.gate[e]) * (x @ self.up[e])) @ self.down[e]
            y_MD.index_add_(0, token, x.float() * gates_MA[token, choice, None])
        return y_MD.to(x_MD.dtype)


class MoE(nn.Module):
    """Routed and shared experts. The bias decides who is chosen and is no part of a gate; scores and gates are fp32."""

    def __init__(self, c: GammalmConfig):
        super().__init__()
        m = c.moe
        self.top_k, self.score, self.route_scale = m["top_k"], m["score"], m["route_scale"]
        self.router = weight(c.d_model, m["n_experts"])
        self.register_buffer("bias", torch.zeros(m["n_experts"], dtype=torch.float32))
        self.experts = Experts(m["n_experts"], c.d_model, m["d_expert"])
        self.shared = SwiGLU(c.d_model, m["n_shared"] * m["d_expert"]) if m["n_shared"] else None

    def forward(self, x_BTD):
        x_MD = x_BTD.flatten(0, 1)
        logits = x_MD.float() @ self.router.float()
        scores_ME = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        ids_MA = (scores_ME + self.bias.float()).topk(self.top_k, dim=-1).indices
        chosen_MA = scores_ME.gather(-1, ids_MA)
        gates_MA = self.route_scale * chosen_MA / (chosen_MA.sum(-1, keepdim=True) + 1e-20)
        y_BTD = self.experts(x_MD, ids_MA, gates_MA).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class Block(GradientCheckpointingLayer):
    """x + attention(norm x), then x + ffn(norm x)."""

    def __init__(self, c: GammalmConfig, index: int, mixed: bool):
        super().__init__()
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = (LatentAttention if c.attention == "mla" else GroupedAttention)(c, index)
        self.ffn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.ffn = MoE(c) if mixed else SwiGLU(c.d_model, c.d_ff)

    def forward(self, x_BTD, angles, mask, cache=None):
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, mask, cache)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Embedding(nn.Module):
    """The token table; the output matrix too, where embeddings are tied."""

    def __init__(self, c: GammalmConfig):
        super().__init__()
        self.table = weight(c.vocab_size, c.d_model)

    def forward(self, tokens_BT):
        return functional.embedding(tokens_BT, self.table)


class Head(nn.Module):
    """An untied output matrix."""

    def __init__(self, c: GammalmConfig):
        super().__init__()
        self.kernel = weight(c.d_model, c.vocab_size)


class GammalmForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model. Layers that come before the mixtures are named `dense_layers`, all others `layers`."""

    config_class = GammalmConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = ["router", "bias"]

    def __init__(self, config: GammalmConfig):
        super().__init__(config)
        c = config
        first = c.moe["first_k_dense"] if c.ffn == "moe" else 0
        self.embed = Embedding(c)
        if first:
            self.dense_layers = nn.ModuleList(Block(c, i, False) for i in range(first))
        self.layers = nn.ModuleList(Block(c, i, c.ffn == "moe") for i in range(first, c.n_layers))
        self.final_norm = RMSNorm(c.d_model, c.norm_eps)
        if not c.tie_embeddings:
            self.head = Head(c)
        self.rope_dim = c.mla["rope_dim"] if c.attention == "mla" else c.head_dim
        self.post_init()

    def _init_weights(self, module):
        """Of a model without a checkpoint; loaded tensors are marked, and `init` leaves them alone."""
        for name, parameter in module.named_parameters(recurse=False):
            std = 0.0 if name == "sink" else self.config.initializer_range
            init.ones_(parameter) if name == "gain" else init.normal_(parameter, std=std)
        for _, buffer in module.named_buffers(recurse=False):
            init.zeros_(buffer)

    def get_input_embeddings(self):
        return self.embed

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Logits [B, T, V] and, with `labels` [B, T] (-100: ignored; shifted here), the mean loss. `kwargs` go to the loss."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x_BTD = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = (start + torch.arange(x_BTD.shape[1], device=x_BTD.device))[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x_BTD, attention_mask=attention_mask, cache=cache, position_ids=position_ids
        )
        angles = rope_angles(position_ids, self.rope_dim, self.config.rope_theta)
        for block in [*getattr(self, "dense_layers", []), *self.layers]:
            x_BTD = block(x_BTD, angles, mask, cache=cache)
        x_BTD = self.final_norm(slice_logits_to_keep(x_BTD, logits_to_keep))
        logits = x_BTD @ (self.embed.table.T if self.config.tie_embeddings else self.head.kernel)
        if self.config.logit_softcap:
            logits = self.config.logit_softcap * torch.tanh(logits.float() / self.config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
