"""The decoder written out a second time, in float64 NumPy with plain loops over sequences: what the tests compare with.

Nothing here is shared with gammalm.models. Legend: B batch, T tokens, D width, H heads, G key heads,
K head size, F FFN width, V vocabulary.
"""

import jax
import numpy as np

from gammalm.config import load_config

SMALL = {
    "model.d_model": 24, "model.n_heads": 4, "model.n_kv_heads": 2, "model.head_dim": 6, "model.d_ff": 20,
    "model.dtype": "float32", "model.residual_dtype": "float32", "init.gamma": 0.5, "model.norm_eps": 1e-3,
}  # fmt: skip


def small_config(spec="lm:size=tiny,vocab=50,seq_len=12,batch=2,steps=10,gate=none", **changes):
    """A config of a few thousand parameters in fp32, GQA, H·K = D; `changes` name leaves of `config.model`, or group__leaf, or seed."""
    dotted = {name: name.replace("__", ".") if "__" in name or name == "seed" else f"model.{name}" for name in changes}
    named = {dotted[name]: value for name, value in changes.items()}
    return load_config(spec, list((SMALL | named).items()))


def random_params(specs, seed=0, scale=1.0):
    """Nested dict of normal values with std scale/sqrt(fan_in), norm gains 1 ± .2: unlike any init, so that no factor of 1 hides."""
    rng = np.random.default_rng(seed)
    tree = {}
    for path, spec in specs.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        fan_in = spec.fans()[0]
        values = rng.normal(size=spec.shape)
        node[leaf] = (1 + 0.2 * values if fan_in is None else scale * values / np.sqrt(fan_in)).astype(np.float32)
    return tree


def rms_norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def rope(x_THK, positions, theta):
    """Complex multiplication of the pairs (k, k + K/2) by exp(i · position · theta^(-2k/K))."""
    half = x_THK.shape[-1] // 2
    turn = np.exp(1j * positions[:, None, None] * theta ** (-np.arange(half) / half))
    z = (x_THK[..., :half] + 1j * x_THK[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def attention(q_THK, k_TGK, v_TGK, segments=None):
    """(output [T, H, K], log-sum-exp [H, T]) by a full softmax matrix per head."""
    T, H, K = q_THK.shape
    visible = np.tril(np.ones((T, T), bool))
    if segments is not None:
        visible &= segments[:, None] == segments[None, :]
    out, lse = np.zeros_like(q_THK), np.zeros((H, T))
    for h in range(H):
        g = h * k_TGK.shape[1] // H
        scores = np.where(visible, q_THK[:, h] @ k_TGK[:, g].T / np.sqrt(K), -np.inf)
        lse[h] = np.logaddexp.reduce(scores, axis=1)
        out[:, h] = np.exp(scores - lse[h][:, None]) @ v_TGK[:, g]
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


def logits_of(params, c, tokens_T, segments_T=None):
    """Logits [T, V] of one sequence under `c` = config.model."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    positions = positions_of(segments_T, len(tokens_T))
    x = p["embed"]["table"][tokens_T]
    for layer in range(c.n_layers):
        w = jax.tree.map(lambda a: a[layer], p["layers"])  # noqa: B023
        attn, ffn = w["attn"], w["ffn"]
        n = rms_norm(x, w["attn_norm"]["gain"], c.norm_eps)
        q, k, v = (np.tensordot(n, attn[name], 1) for name in ("q", "k", "v"))
        if c.qk_norm:
            q, k = rms_norm(q, attn["q_norm"]["gain"], c.norm_eps), rms_norm(k, attn["k_norm"]["gain"], c.norm_eps)
        y, _ = attention(rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta), v, segments_T)
        if c.gate == "elementwise":
            y = y * sigmoid(np.tensordot(n, attn["gate"], 1))
        elif c.gate == "headwise":
            y = y * sigmoid(n @ attn["gate"])[..., None]
        x = x + np.tensordot(y, attn["out"], 2)
        n = rms_norm(x, w["ffn_norm"]["gain"], c.norm_eps)
        up = n @ ffn["gate"]
        x = x + (up * sigmoid(up) * (n @ ffn["up"])) @ ffn["down"]
    x = rms_norm(x, p["final_norm"]["gain"], c.norm_eps)
    z = x @ (p["embed"]["table"].T if c.tie_embeddings else p["head"]["kernel"])
    return z if not c.logit_softcap else c.logit_softcap * np.tanh(z / c.logit_softcap)


def mean_loss(params, c, tokens_BS, segments_BS=None):
    """Mean next-token loss of sequences of T + 1 tokens over what counts: inside one document, never padding (segment 0)."""
    total, count = 0.0, 0
    for b, tokens in enumerate(tokens_BS):
        segments = None if segments_BS is None else segments_BS[b]
        logp = log_softmax(logits_of(params, c, tokens[:-1], None if segments is None else segments[:-1]))
        for t in range(len(tokens) - 1):
            if segments is None or (segments[t + 1] == segments[t] and segments[t + 1] > 0):
                total, count = total - logp[t, tokens[t + 1]], count + 1
    return total / count
