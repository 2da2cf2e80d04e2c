"""Small random models of every kind that a target represents, and what each target writes for them."""

import numpy as np

from gammalm.config import load_config
from gammalm.models.decoder import Model

from ..models.reference import random_params

BASE = {
    "d_model": 24, "n_heads": 4, "n_layers": 2, "d_ff": 20, "gate": "none", "norm_eps": 1e-3, "rope_theta": 500.0,
    "dtype": "float32", "residual_dtype": "float32",
}  # fmt: skip
HEADS = {"n_kv_heads": 2, "head_dim": 10}
GPT2 = {"n_kv_heads": 4, "head_dim": 6}
LATENT = {"attention": "mla", "norm_eps": 1e-6, "mla.kv_rank": 9, "mla.nope_dim": 6, "mla.rope_dim": 8, "mla.v_dim": 5}
MIXED = {"ffn": "moe", "moe.n_experts": 6, "moe.top_k": 2, "moe.n_shared": 2, "moe.d_expert": 7, "moe.route_scale": 1.5}

# Name -> (target that `auto` chooses, leaves of config.model). Between them: GQA, heads wider than d/H, tied and untied, dense layers.
CASES = {
    "llama, tied": ("llama", HEADS),
    "llama, untied, large epsilon": ("llama", HEADS | {"tie_embeddings": False, "norm_eps": 0.5, "n_kv_heads": 4}),
    "mistral: 24 is no multiple of 5": ("mistral", HEADS | {"n_heads": 5, "n_kv_heads": 1, "tie_embeddings": False}),
    "qwen3": ("qwen3", HEADS | {"qk_norm": True, "n_kv_heads": 1}),
    "qwen3-next": ("qwen3-next", HEADS | {"qk_norm": True, "gate": "elementwise", "tie_embeddings": False}),
    "qwen3-next, tied, mha": ("qwen3-next", HEADS | {"qk_norm": True, "gate": "elementwise", "n_kv_heads": 4}),
    "glm4-moe": ("glm4-moe", HEADS | MIXED | {"n_layers": 3, "moe.first_k_dense": 1, "tie_embeddings": False}),
    "glm4-moe, qk-norm, tied": ("glm4-moe", HEADS | MIXED | {"qk_norm": True, "moe.n_shared": 1}),
    "deepseek-v3": ("deepseek-v3", LATENT | MIXED | {"mla.q_rank": 0, "tie_embeddings": False}),
    "deepseek-v3, q latent, first layer dense": ("deepseek-v3", LATENT | MIXED | {"n_layers": 3, "mla.q_rank": 11, "moe.first_k_dense": 1}),
    "deepseek-v3, dense": ("deepseek-v3", LATENT | {"mla.q_rank": 11}),
    "own: headwise gate": ("gammalm", HEADS | {"gate": "headwise"}),
    "own: gate without qk-norm": ("gammalm", HEADS | {"gate": "elementwise", "tie_embeddings": False}),
    "own: latent with gate": ("gammalm", LATENT | {"gate": "elementwise"}),
    "own: other epsilon of the latents": ("gammalm", LATENT | {"norm_eps": 1e-5}),
    "own: softmax router": ("gammalm", HEADS | MIXED | {"moe.score": "softmax", "n_layers": 3, "moe.first_k_dense": 1}),
    "own: soft-cap": ("gammalm", HEADS | {"logit_softcap": 20.0}),
}


def config_of(leaves, packing="documents", style="gamma"):
    """A locked config with these leaves of config.model, and values elsewhere that no default has."""
    base = {name: value for name, value in BASE.items() if name != "rope_theta"} | GPT2 if style == "gpt2" else BASE
    kind = {"attention": "mha", "ffn": "dense"} | {name: leaves[name] for name in ("attention", "ffn") if name in leaves}
    size = "tiny-moe" if kind["ffn"] == "moe" else "tiny"
    spec = f"lm:size={size},attention={kind['attention']},style={style},vocab=50,seq_len=12,batch=2,steps=10,packing={packing}"
    rest = [("optimizer.learning_rate", 0.0123), ("init.gamma", 0.7)]
    return load_config(spec, [(f"model.{name}", value) for name, value in (base | leaves).items()] + rest)


def random_model(config, seed=0):
    """(params, buffers) of random fp32 numbers: gains in [½, 2) away from 1, and a selection bias that changes what is selected."""
    model = Model(config.model)
    rng = np.random.default_rng(seed)
    params = random_params(model.specs, seed)
    for path, spec in model.specs.items():
        if spec.role == "norm":
            *parents, leaf = path.split("/")
            node = params
            for parent in parents:
                node = node[parent]
            node[leaf] = rng.uniform(0.5, 2.0, spec.shape).astype(np.float32)
    return params, fill(model.buffers, lambda leaf: (0.2 * rng.normal(size=leaf.shape)).astype(np.float32))


def fill(tree, value):
    """The nested dict `tree` with `value(leaf)` for each leaf."""
    return {name: fill(leaf, value) if isinstance(leaf, dict) else value(leaf) for name, leaf in tree.items()}


def same(ours, theirs):
    """Whether two nested dicts of arrays are equal to the bit."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return ours.dtype == theirs.dtype == np.float32 and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
