"""The decoder written out a second time, in float64 NumPy with plain loops over sequences: what the tests compare with.

Nothing here is shared with gammalm.models. Legend: B batch, T tokens, D width, H heads, G key heads,
K head size, F FFN width, V vocabulary, E experts, C rank of a latent.
"""

import jax
import numpy as np
from scipy.stats import norm

from gammalm.config import apply_overrides, leaves, load_config
from gammalm.trees import nested

SMALL = {
    "model.d_model": 24, "model.n_heads": 4, "model.n_kv_heads": 2, "model.head_dim": 6, "model.d_ff": 20,
    "model.dtype": "float32", "model.residual_dtype": "float32", "init.gamma": 0.5, "model.norm_eps": 1e-3,
}  # fmt: skip


SPEC = "lm:vocab=50,seq_len=12,batch=2,steps=10,gate=none"
SMALL_MLA = {"model.mla.kv_rank": 10, "model.mla.nope_dim": 6, "model.mla.rope_dim": 4, "model.mla.v_dim": 8}
SMALL_MOE = {"model.moe.n_experts": 6, "model.moe.top_k": 2, "model.moe.d_expert": 12, "model.moe.balance_loss": 0.05}


def small_config(spec=SPEC, *, attention="mha", ffn="dense", style="gamma", preset="", **changes):
    """A config of a few thousand parameters in fp32, GQA, H·K = D; `changes` name leaves of `config.model`, or group__leaf, or seed.
    `style` and `preset` are arguments of the config.

    model__moe__top_k is the leaf model.moe.top_k.
    """
    dotted = {name: name.replace("__", ".") if "__" in name or name == "seed" else f"model.{name}" for name in changes}
    named = {dotted[name]: value for name, value in changes.items()}
    config = load_config(f"{spec},size={'tiny-moe' if ffn == 'moe' else 'tiny'},attention={attention},style={style},preset={preset}")
    small = {name: value for name, value in (SMALL | SMALL_MLA | SMALL_MOE).items() if name in leaves(config)}
    return apply_overrides(config, list((small | named).items()))


def random_params(specs, seed=0, scale=1.0):
    """Nested dict of normal values with std scale/sqrt(fan_in), gains 1 ± .2, biases ± .2: unlike any init, no factor of 1 hides."""
    rng = np.random.default_rng(seed)
    flat = {}
    for path, spec in specs.items():
        fan_in = spec.fans()[0]
        values = rng.normal(size=spec.shape)
        alone = (spec.role != "bias") + 0.2 * values
        flat[path] = (alone if fan_in is None else scale * values / np.sqrt(fan_in)).astype(np.float32)
    return nested(flat)


def random_buffers(model, seed=1, scale=0.1):
    """Normal values for every buffer: selection biases that change who is chosen."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: (scale * rng.normal(size=a.shape)).astype(a.dtype), model.buffers)


def rms_norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def layer_norm(x, gain, bias, eps):
    away = x - x.mean(-1, keepdims=True)
    return away / np.sqrt((away**2).mean(-1, keepdims=True) + eps) * gain + bias


def norm_of(x, w, c):
    """What `config.model.norm` makes of x with the parameters `w`, which are None where there is no norm."""
    if c.norm == "none" or w is None:
        return x
    if c.norm == "fixup":
        return x + w["bias"]
    return layer_norm(x, w["gain"], w["bias"], c.norm_eps) if c.norm == "layer" else rms_norm(x, w["gain"], c.norm_eps)


def tied_in(x, y, w, c):
    """The stream after a branch gave y."""
    if c.residual == "pre":
        return x + y
    return norm_of((x * (2 * c.n_layers) ** 0.25 if c.residual == "deepnorm" else x) + y, w, c)


def shifted(x, w, name):
    """x and Fixup's bias of that name, where the branch `w` has one."""
    return x + w[f"{name}_shift"]["bias"] if f"{name}_shift" in w else x


def multiplied(y, w):
    """y times Fixup's multiplier, where the branch `w` has one."""
    return y * w["scale"]["gain"] if "scale" in w else y


def rope(x_THK, positions, theta):
    """Complex multiplication of the pairs (k, k + K/2) by exp(i · position · theta^(-2k/K))."""
    half = x_THK.shape[-1] // 2
    turn = np.exp(1j * positions[:, None, None] * theta ** (-np.arange(half) / half))
    z = (x_THK[..., :half] + 1j * x_THK[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def attention(q_THK, k_TGK, v_TGK, segments=None, sink_H=None):
    """(output [T, H, K], log-sum-exp [H, T]) by a full softmax matrix per head; a sink is one more column of it, without a value."""
    T, H, K = q_THK.shape
    visible = np.tril(np.ones((T, T), bool))
    if segments is not None:
        visible &= segments[:, None] == segments[None, :]
    out, lse = np.zeros((T, H, v_TGK.shape[-1])), np.zeros((H, T))
    for h in range(H):
        g = h * k_TGK.shape[1] // H
        scores = np.where(visible, q_THK[:, h] @ k_TGK[:, g].T / np.sqrt(K), -np.inf)
        columns = scores if sink_H is None else np.concatenate([scores, np.full((T, 1), sink_H[h])], axis=1)
        lse[h] = np.logaddexp.reduce(columns, axis=1)
        out[:, h] = np.exp(columns - lse[h][:, None])[:, :T] @ v_TGK[:, g]
    return out, lse


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_softmax(z):
    return z - np.logaddexp.reduce(z, axis=-1, keepdims=True)


def positions_of(segments, T):
    if segments is None:
        return np.arange(T)
    positions = np.zeros(T, int)
    for t in range(1, T):
        positions[t] = positions[t - 1] + 1 if segments[t] == segments[t - 1] else 0
    return positions


def attend(n_TD, attn, c, positions, segments):
    """Heads' outputs [T, H, K] before the gate: multi-head, grouped-query or latent attention on the normed input."""

    def through(x, name):
        return np.tensordot(x, attn[name], 1) + attn.get(f"{name}_bias", 0)

    def turned(x):
        return rope(x, positions, c.rope_theta) if c.positions == "rope" else x

    sink = {"none": None, "one": np.zeros(c.n_heads), "learned": attn.get("sink")}[c.softmax_sink]
    if c.attention == "mla":
        m = c.mla
        q = through(n_TD, "q") if m.q_rank == 0 else through(rms_norm(through(n_TD, "q_down"), attn["q_norm"]["gain"], c.norm_eps), "q_up")
        latent_TC = rms_norm(through(n_TD, "kv_down"), attn["kv_norm"]["gain"], c.norm_eps)
        shared = rope(through(n_TD, "k_rope")[:, None], positions, c.rope_theta)
        k = np.concatenate([through(latent_TC, "k_up"), np.repeat(shared, c.n_heads, axis=1)], axis=-1)
        q = np.concatenate([q[..., : m.nope_dim], rope(q[..., m.nope_dim :], positions, c.rope_theta)], axis=-1)
        return attention(q, k, through(latent_TC, "v_up"), segments, sink)[0]
    q, k, v = (through(n_TD, name) for name in ("q", "k", "v"))
    if c.qk_norm:
        q, k = rms_norm(q, attn["q_norm"]["gain"], c.norm_eps), rms_norm(k, attn["k_norm"]["gain"], c.norm_eps)
    return attention(turned(q), turned(k), v, segments, sink)[0]


def swiglu(x, w):
    up = shifted(x @ w["gate"], w, "act")
    return multiplied(shifted(up * sigmoid(up) * (x @ w["up"]), w, "down") @ w["down"], w)


ACTIVATIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * norm.cdf(z),
    "gelu_tanh": lambda z: z * sigmoid(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)),  # 1 + tanh(u) = 2·sigmoid(2u)
    "silu": lambda z: z * sigmoid(z),
    "tanh": np.tanh,
}


def mlp(x, w, activation):
    hidden = ACTIVATIONS[activation](shifted(x @ w["up"] + w.get("up_bias", 0), w, "act"))
    return multiplied(shifted(hidden, w, "down") @ w["down"] + w.get("down_bias", 0), w)


def mixture(n_TD, ffn, bias_E, c, valid_T):
    """(output [T, D], load [E], balance, smallest margin of a choice) of one sequence, token by token."""
    m = c.moe
    z = n_TD @ ffn["router"]
    s_TE = sigmoid(z) if m.score == "sigmoid" else np.exp(log_softmax(z))
    y, load, preferred, mean = np.zeros_like(n_TD), *np.zeros((3, m.n_experts))
    margin = np.inf
    for t, s in enumerate(s_TE):
        if m.n_shared:
            y[t] += swiglu(n_TD[t], ffn["shared"])
        if not valid_T[t]:
            continue
        order = np.argsort(-(s + bias_E))
        chosen = order[: m.top_k]
        if m.top_k < m.n_experts:
            for values in (s, s + bias_E):
                ranked = -np.sort(-values)
                margin = min(margin, ranked[m.top_k - 1] - ranked[m.top_k])
        for e in chosen:
            gate = m.route_scale * s[e] / s[chosen].sum()
            y[t] += gate * swiglu(n_TD[t], {name: w[e] for name, w in ffn["experts"].items()})
            load[e] += 1
        preferred[np.argsort(-s)[: m.top_k]] += 1  # the balance loss looks at affinities alone, without the bias
        mean += s / s.sum() / max(valid_T.sum(), 1)
    frequency = preferred * m.n_experts / (m.top_k * max(valid_T.sum(), 1))
    return y, load, (frequency * mean).sum(), margin


def forward(params, c, tokens_T, segments_T=None, buffers=None):
    """Logits [T, V] of one sequence under `c` = config.model, and (load [E], balance, margin) of each mixture layer."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    buffers = jax.tree.map(lambda a: np.asarray(a, np.float64), buffers)
    positions = positions_of(segments_T, len(tokens_T))
    valid_T = np.ones(len(tokens_T), bool) if segments_T is None else segments_T > 0
    x = p["embed"]["table"][tokens_T]
    if c.positions == "learned":
        x = x + p["embed"]["positions"][positions]
    measured = []
    for stack in ("dense_layers", "layers"):
        depth = len(p[stack]["attn"]["out"]) if stack in p else 0
        for layer in range(depth):
            w = jax.tree.map(lambda a: a[layer], p[stack])  # noqa: B023
            attn, ffn = w["attn"], w["ffn"]
            n = norm_of(x, w.get("attn_norm"), c) if c.residual == "pre" else x
            y = attend(n, attn, c, positions, segments_T)
            if c.gate == "elementwise":
                y = y * sigmoid(np.tensordot(n, attn["gate"], 1))
            elif c.gate == "headwise":
                y = y * sigmoid(n @ attn["gate"])[..., None]
            y = multiplied(np.tensordot(shifted(y, attn, "out"), attn["out"], 2) + attn.get("out_bias", 0), attn)
            x = tied_in(x, y, w.get("attn_norm"), c)
            n = norm_of(x, w.get("ffn_norm"), c) if c.residual == "pre" else x
            if "experts" in ffn:
                y, *found = mixture(n, ffn, buffers[stack]["ffn"]["bias"][layer], c, valid_T)
                measured.append(found)
            else:
                y = mlp(n, ffn, c.activation) if c.ffn == "mlp" else swiglu(n, ffn)
            x = tied_in(x, y, w.get("ffn_norm"), c)
    x = norm_of(x, p.get("final_norm"), c)
    z = x @ (p["embed"]["table"].T if c.tie_embeddings else p["head"]["kernel"])
    return (z if not c.logit_softcap else c.logit_softcap * np.tanh(z / c.logit_softcap)), measured


def logits_of(params, c, tokens_T, segments_T=None, buffers=None):
    """Logits [T, V] of one sequence."""
    return forward(params, c, tokens_T, segments_T, buffers)[0]


def mean_loss(params, c, tokens_BS, segments_BS=None, buffers=None):
    """Mean next-token loss of sequences of T + 1 tokens over what counts: inside one document, never padding (segment 0).

    Plus, of mixtures, the weighted balance loss: mean over sequences that hold any token, sum over layers.
    """
    total, count, balance, rows = 0.0, 0, 0.0, 0
    for b, tokens in enumerate(tokens_BS):
        segments = None if segments_BS is None else segments_BS[b]
        z, measured = forward(params, c, tokens[:-1], None if segments is None else segments[:-1], buffers)
        logp = log_softmax(z)
        balance += sum(found[1] for found in measured)
        rows += segments is None or bool((segments[:-1] > 0).any())
        for t in range(len(tokens) - 1):
            if segments is None or (segments[t + 1] == segments[t] and segments[t + 1] > 0):
                total, count = total - logp[t, tokens[t + 1]], count + 1
    return total / count + (c.moe.balance_loss * balance / rows if c.ffn == "moe" else 0.0)
