"""Norms before, behind and on both sides of the branches, parallel branches, GELU gates: the recursion against decoders run in NumPy.

The decoder is written out here in float64, shared with nothing. Legend: T tokens, D width, H heads, K head size.
"""

import numpy as np
import pytest
from scipy import special

from gammalm.errors import ConfigError
from gammalm.theory import Decoder, Dense, Heads, Latent, Stack, predict
from gammalm.theory.gradients import stream_gradients

T, D, H, K, F, L, VOCAB = 24, 256, 4, 64, 320, 2, 40
PHI = {"swiglu": lambda z: z * special.expit(z), "geglu": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))}
DRAWS = 10


def rms(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def attention(x, std, qk_norm, eps, rng):
    q, k, v = (x @ rng.normal(size=(D, H, K)).reshape(D, -1) * std[f"attn/{name}"] for name in "qkv")
    q, k, v = (a.reshape(T, H, K) for a in (q, k, v))
    if qk_norm:
        q, k = rms(q, eps), rms(k, eps)
    scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(K)
    scores[:, ~np.tri(T, dtype=bool)] = -np.inf
    weights = special.softmax(scores, axis=-1)
    return np.einsum("hts,shk->thk", weights, v).reshape(T, -1) @ rng.normal(size=(H * K, D)) * std["attn/out"]


def run(decoder, tokens, seed):
    """Mean squares: of what each branch adds [L], of what enters the norms behind them [L], of the final stream."""
    rng = np.random.default_rng(seed)
    (stack,), (std,) = decoder.stacks, decoder.stds
    before = (lambda x: x) if stack.norms == "post" else (lambda x: rms(x, decoder.eps))
    behind = (lambda x: x) if stack.norms == "pre" else (lambda x: rms(x, decoder.eps))
    x = (rng.normal(size=(VOCAB, D)) * decoder.embed)[tokens]
    found = {"attn_added": [], "ffn_added": [], "attn_behind": [], "ffn_behind": []}
    for _ in range(stack.depth):
        raw = attention(before(x), std, stack.attention.qk_norm, decoder.eps, rng)
        read = x if stack.parallel else x + behind(raw)
        n = before(read)
        gate, up = (n @ rng.normal(size=(D, F)) * std[f"ffn/{name}"] for name in ("gate", "up"))
        ffn = PHI[stack.ffn.activation](gate) * up @ rng.normal(size=(F, D)) * std["ffn/down"]
        for name, value in (("attn_behind", raw), ("ffn_behind", ffn), ("attn_added", behind(raw)), ("ffn_added", behind(ffn))):
            found[name].append(np.mean(value**2))
        x = x + behind(raw) + behind(ffn)
    return {name: np.array(values) for name, values in found.items()} | {"final": np.mean(x**2)}


CASES = {
    "sandwich": (dict(norms="sandwich"), "geglu", True, 0.03, 1.0),
    "sandwich, large epsilon": (dict(norms="sandwich"), "swiglu", False, 0.005, 1e-3),
    "post": (dict(norms="post"), "swiglu", True, 0.03, 1e-5),
    "post, large epsilon": (dict(norms="post"), "swiglu", True, 0.006, 1e-4),
    "parallel": (dict(parallel=True), "swiglu", False, 0.01, 1e-5),
    "gelu gates": (dict(), "geglu", False, 0.06, 1e-5),
}
DEFAULT = ("sandwich", "post, large epsilon")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full) for name in CASES])
def test_against_decoders_that_were_run(name):
    """Root mean squares within 6 % of the mean over ten draws, as the width of 256 leaves it."""
    places, activation, qk_norm, std, eps = CASES[name]
    stack = Stack(L, Heads(H, K, qk_norm), Dense(F, activation), **places)
    decoder = Decoder(D, VOCAB, (stack,), ({matrix: std for matrix in stack.matrices()},), 0.02, None, eps, rope_theta=1e30)
    tokens = np.random.default_rng(1).integers(VOCAB, size=T)
    draws = [run(decoder, tokens, seed) for seed in range(DRAWS)]
    predicted = predict(decoder, tokens, heads=128)
    values = {"attn_added": predicted.attn_added, "ffn_added": predicted.ffn_added, "final": predicted.final, **predicted.behind}
    assert set(predicted.behind) == (set() if stack.norms == "pre" else {"attn_behind", "ffn_behind"})
    for key, value in values.items():
        measured = np.mean([draw[key] for draw in draws], axis=0)
        np.testing.assert_allclose(np.sqrt(value), np.sqrt(measured), rtol=0.06, err_msg=key)
    shares = predicted.eps_share()
    assert ("attn_norm" in shares) == (stack.norms != "post") and ("ffn_behind" in shares) == (stack.norms != "pre")


def test_what_is_refused():
    def decoder(*norms, **kind):
        stacks = tuple(Stack(1, Heads(H, K), Dense(F), norms=each, **kind) for each in norms)
        return Decoder(D, VOCAB, stacks, tuple(dict.fromkeys(s.matrices(), 0.02) for s in stacks), 0.02, None, 1e-5)

    for norms in (("behind",), ("pre", "post")):
        with pytest.raises(ConfigError, match="norms="):
            decoder(*norms)
    for one in (decoder("post"), decoder("pre", parallel=True)):
        with pytest.raises(ConfigError, match="follow each other"):
            stream_gradients(one, np.arange(4), np.arange(4))


@pytest.mark.parametrize("norms", ["pre", "post"])
def test_latents_read_the_stream_where_no_norm_is_before_them(norms):
    stack = Stack(1, Latent(H, 0, 16, 8, 4, 8), Dense(32), norms=norms)
    decoder = Decoder(D, VOCAB, (stack,), (dict.fromkeys(stack.matrices(), 0.03),), 0.02, None, 1e-12)
    found = predict(decoder, np.arange(8), heads=0)
    assert found.latents["kv_norm"] == pytest.approx([D * 0.03**2 * (1.0 if norms == "pre" else 0.02**2)], rel=1e-4)
