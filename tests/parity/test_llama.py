"""The same weights in transformers' Llama, fp32 on CPU: logits, loss and the gradient of every parameter.

Shapes: B=2 sequences, T=20 tokens; ours are stacked (L, …) and multiply from the right, torch's Linear is (out, in).
"""

import jax
import numpy as np
import pytest

from gammalm.models.decoder import Model
from gammalm.training.step import loss_and_gradients

from ..models.reference import random_params, small_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

T = 20
VARIANTS = {
    "gqa, tied": dict(n_heads=4, n_kv_heads=2, head_dim=6),
    "mha, untied, wide heads": dict(n_heads=4, n_kv_heads=4, head_dim=10, tie_embeddings=False, rope_theta=500.0),
    "mqa, large epsilon": dict(n_heads=4, n_kv_heads=1, head_dim=8, norm_eps=0.5, tie_embeddings=False),
}


def llama_of(c):
    """transformers' Llama of the shape `c` = config.model."""
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers, head_dim=c.head_dim,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, attention_bias=False, mlp_bias=False, hidden_act="silu",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.float32).eval()


def matrices(tree, c):
    """Our nested dict (parameters or gradients) -> {name in transformers: array of torch's shape}."""
    flat_out = lambda w: w.reshape(w.shape[0], -1).T  # noqa: E731  D x (heads · size) -> out, in
    named = {"model.embed_tokens.weight": tree["embed"]["table"], "model.norm.weight": tree["final_norm"]["gain"]}
    if not c.tie_embeddings:
        named["lm_head.weight"] = tree["head"]["kernel"].T
    for i in range(c.n_layers):
        layer = jax.tree.map(lambda a: np.asarray(a)[i], tree["layers"])  # noqa: B023
        here = f"model.layers.{i}."
        named |= {here + f"self_attn.{name}_proj.weight": flat_out(layer["attn"][name]) for name in "qkv"}
        named |= {here + f"mlp.{name}_proj.weight": layer["ffn"][name].T for name in ("gate", "up", "down")}
        named[here + "self_attn.o_proj.weight"] = layer["attn"]["out"].reshape(-1, c.d_model).T
        named[here + "input_layernorm.weight"] = layer["attn_norm"]["gain"]
        named[here + "post_attention_layernorm.weight"] = layer["ffn_norm"]["gain"]
    return {name: np.array(value) for name, value in named.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients(name):
    """1e-4 of the largest value of each array: two fp32 implementations with sums in different orders."""
    c = small_config(**VARIANTS[name]).model
    model = Model(c)
    params = random_params(model.specs)
    llama = llama_of(c)
    missing, unexpected = llama.load_state_dict({k: torch.from_numpy(v) for k, v in matrices(params, c).items()}, strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if c.tie_embeddings else [])
    tokens = np.random.default_rng(1).integers(0, c.vocab_size, (2, T + 1))

    theirs = llama(torch.from_numpy(tokens[:, :-1])).logits
    their_loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), torch.from_numpy(tokens[:, 1:]).flatten())
    their_loss.backward()
    ours = jax.jit(lambda p: model.bind(p).logits(tokens[:, :-1], None, c.norm_eps))(params)
    our_loss, gradients, *_ = jax.jit(lambda p: loss_and_gradients(model, p, {}, {"tokens": tokens}, c.norm_eps, 1))(params)

    theirs = theirs.detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max(), rtol=0)
    assert float(our_loss) == pytest.approx(their_loss.item(), rel=1e-5)
    reached = dict(llama.named_parameters())
    for path, ours in matrices(gradients, c).items():
        theirs = reached[path].grad.numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max(), rtol=0, err_msg=path)
