"""Specs of a decoder, written out by hand from the model's declared layout, and an init config of plain attributes.

Legend: L layers, V vocabulary, D embed, H heads, G kv heads, K head size, F ffn width.
"""

import types

import pytest

from gammalm.initializers import ParamSpec


def _decoder_specs(L=2, D=64, H=3, G=3, K=32, F=160, V=256, gate="elementwise", tied=True, two_matrix_ffn=False):
    heads = ("layers", "embed", "heads", "head_dim")
    kv_heads = ("layers", "embed", "kv_heads", "head_dim")
    layer_gain = ParamSpec((L, D), ("layers", "embed"), (), (), "norm")
    out_axes = ("layers", "heads", "head_dim", "embed")
    specs = {
        "embed/table": ParamSpec((V, D), ("vocab", "embed"), ("embed",), ("vocab",), "embed"),
        "layers/attn_norm/gain": layer_gain,
        "layers/attn/q": ParamSpec((L, D, H, K), heads, ("embed",), ("heads", "head_dim"), "qk"),
        "layers/attn/k": ParamSpec((L, D, G, K), kv_heads, ("embed",), ("kv_heads", "head_dim"), "qk"),
        "layers/attn/v": ParamSpec((L, D, G, K), kv_heads, ("embed",), ("kv_heads", "head_dim"), "vo"),
    }
    if gate == "elementwise":
        specs["layers/attn/gate"] = ParamSpec((L, D, H, K), heads, ("embed",), ("heads", "head_dim"), "gate")
    if gate == "headwise":
        specs["layers/attn/gate"] = ParamSpec((L, D, H), ("layers", "embed", "heads"), ("embed",), ("heads",), "gate")
    specs["layers/attn/out"] = ParamSpec((L, H, K, D), out_axes, ("heads", "head_dim"), ("embed",), "vo", residual_out=True)
    specs["layers/ffn_norm/gain"] = layer_gain
    for name in ("up",) if two_matrix_ffn else ("gate", "up"):
        specs[f"layers/ffn/{name}"] = ParamSpec((L, D, F), ("layers", "embed", "ffn"), ("embed",), ("ffn",), "ffn")
    specs["layers/ffn/down"] = ParamSpec((L, F, D), ("layers", "ffn", "embed"), ("ffn",), ("embed",), "ffn", residual_out=True)
    specs["final_norm/gain"] = ParamSpec((D,), ("embed",), (), (), "norm")
    if not tied:
        specs["head/kernel"] = ParamSpec((D, V), ("embed", "vocab"), ("embed",), ("vocab",), "head")
    return specs


def _init_config(**changes):
    leaves = dict(preset="fan_in", gamma=1.0, group_gammas=(1.0,) * 4, base_width=256, depth_scale=False, truncate=0.0, rules=())
    assert set(changes) <= set(leaves)
    return types.SimpleNamespace(**(leaves | changes))


@pytest.fixture
def decoder_specs():
    """Function: sizes -> {path: ParamSpec} of a dense decoder."""
    return _decoder_specs


@pytest.fixture
def init_config():
    """Function: changed leaves -> an init config, otherwise the defaults of configs/lm.py."""
    return _init_config
