"""GPT-2 of transformers: what of ours it represents, and its config.json both ways. Its tensors: table.gpt2_entries.

It is `lm:style=gpt2`: pre-norm LayerNorms, two matrices with biases around a GELU, learned positions, as many key heads as heads of size
d/H. Nothing heavy is imported here: the command line reads the names. Source: transformers 5.24, models/gpt2.
"""

MODEL_TYPE, ARCHITECTURE, PREFIX = "gpt2", "GPT2LMHeadModel", "transformer."
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu", "tanh": "tanh"}  # ours -> theirs
STYLE = {"attention": "mha", "ffn": "mlp", "norm": "layer", "residual": "pre", "positions": "learned", "gate": "none",
         "softmax_sink": "none", "logit_softcap": 0.0}  # leaves of config.model that it has no choice of  # fmt: skip
MATRICES = {"biases": True, "qk_norm": False}  # the same, of leaves that not every model has
SAME = {  # ours -> theirs
    "vocab_size": "vocab_size", "d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "d_ff": "n_inner",
    "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
OFF = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False}


def against(m) -> list[str]:
    """Reasons why `config.model` is no GPT-2; empty: it is one."""
    wanted = STYLE | (MATRICES if m.ffn == "mlp" and m.attention == "mha" else {})
    reasons = [f"model.{name}={m[name]}; it has {value} alone" for name, value in wanted.items() if m[name] != value]
    if not reasons and (m.n_kv_heads, m.n_heads * m.head_dim) != (m.n_heads, m.d_model):
        reasons.append(f"{m.n_heads} heads of {m.head_dim} with {m.n_kv_heads} key heads; it has d_model/n_heads, a key head for each")
    return reasons


def keys(m) -> dict:
    """Its own keys of config.json."""
    sizes = {theirs: m[ours] for ours, theirs in SAME.items()}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return sizes | dropout | {"activation_function": ACTIVATIONS[m.activation]} | OFF


def read(r) -> dict:
    """Leaves of `config.model` from the config.json that the `sources.Reader` r holds; what stands against it is noted there."""
    leaves = {"d_model": r.need("n_embd"), "n_heads": r.need("n_head")}
    for ours in ("vocab_size", "n_layers", "max_positions"):
        leaves[ours] = r.need(SAME[ours])
    inner = r.given("n_inner", int, low=1)
    leaves["norm_eps"] = r.given(SAME["norm_eps"], float, 1e-5)
    leaves["tie_embeddings"] = r.given(SAME["tie_embeddings"], bool, True)
    theirs = {value: name for name, value in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
    r.only("activation_function", *theirs, default="gelu_new", why="that activation is not known here")
    leaves["activation"] = theirs.get(r.get("activation_function", "gelu_new"))
    for key, value in OFF.items():
        r.only(key, value, None, why=f"attention here is that of {key}={value}")
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx"):  # dropout acts in training alone; n_ctx is n_positions of old files
        r.get(key)
    if leaves["d_model"] and leaves["n_heads"]:
        if leaves["d_model"] % leaves["n_heads"]:
            r.reasons.append(f"n_embd={leaves['d_model']} is no multiple of n_head={leaves['n_heads']}")
        leaves |= {"n_kv_heads": leaves["n_heads"], "head_dim": leaves["d_model"] // leaves["n_heads"]}
        leaves["d_ff"] = inner or 4 * leaves["d_model"]
    return leaves | STYLE | MATRICES
