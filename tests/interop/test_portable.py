"""Our own modelling file in transformers against our decoder: every kind of model, tensors bit for bit, logits, gradients, generation.

Shapes: B=2 sequences, T=20 tokens.
"""

import ast
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from gammalm.config import load_config
from gammalm.errors import DataError
from gammalm.interop import portable
from gammalm.models.decoder import Model

from ..models.reference import random_params

SIZES = {
    "vocab_size": 60, "d_model": 24, "n_layers": 3, "n_heads": 4, "d_ff": 20, "norm_eps": 1e-3, "rope_theta": 500.0, "logit_softcap": 0.0,
    "dtype": "float32", "residual_dtype": "float32",
}  # fmt: skip
MHA = {"n_kv_heads": 2, "head_dim": 6}
MLA = {"mla.kv_rank": 10, "mla.nope_dim": 6, "mla.rope_dim": 4, "mla.v_dim": 8}
MOE = {"moe.n_experts": 8, "moe.top_k": 3, "moe.d_expert": 7, "moe.route_scale": 1.5}
KINDS = {  # name -> (arguments of configs/lm.py, leaves of config.model)
    "gqa": ("gate=none", MHA),
    "mha, qk-norm, headwise, untied": ("gate=headwise", MHA | {"n_kv_heads": 4, "qk_norm": True, "tie_embeddings": False}),
    "gqa, qk-norm, elementwise, softcap": ("gate=elementwise", MHA | {"qk_norm": True, "logit_softcap": 3.0}),
    "gqa, learned sink": ("gate=none", MHA | {"softmax_sink": "learned"}),
    "mla": ("attention=mla,gate=none", MLA),
    "mla, headwise, sink of one": ("attention=mla,gate=headwise", MLA | {"softmax_sink": "one"}),
    "mla, q compressed, elementwise": ("attention=mla,gate=elementwise", MLA | {"mla.q_rank": 9}),
    "mha-moe, elementwise": ("size=tiny-moe,gate=elementwise", MHA | MOE),
    "mla-moe, softmax, no shared, one dense": (
        "size=tiny-moe,attention=mla,gate=headwise",
        MLA | MOE | {"moe.score": "softmax", "moe.n_shared": 0, "moe.first_k_dense": 1},
    ),
    "mla-moe, q compressed, two shared, two dense": (
        "size=tiny-moe,attention=mla,gate=none",
        MLA | MOE | {"moe.n_shared": 2, "moe.first_k_dense": 2, "mla.q_rank": 5, "tie_embeddings": False},
    ),
}


def built(name):
    """(config.model, model, random parameters, random buffers) of a kind."""
    spec, leaves = KINDS[name]
    size = "" if "size=" in spec else "size=tiny,"
    c = load_config(f"lm:{size}{spec}", [(f"model.{leaf}", value) for leaf, value in (SIZES | leaves).items()]).model
    model = Model(c)
    rng = np.random.default_rng(5)
    buffers = jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(np.float32), model.buffers)
    return c, model, random_params(model.specs), buffers


def tensors(*trees):
    """Name in the export -> array, of nested dicts of arrays."""
    named = {}
    for tree in trees:
        for keys, a in jax.tree.leaves_with_path(tree):
            path = "/".join(key.key for key in keys)
            parts = list(np.asarray(a)) if portable.is_stacked(path) else [np.asarray(a)]
            named |= zip(portable.tensor_names(path, len(a)), parts, strict=True)
    return named


def test_names():
    assert portable.tensor_names("layers/ffn/experts/gate", 2) == ["layers.0.ffn.experts.gate", "layers.1.ffn.experts.gate"]
    assert portable.tensor_names("dense_layers/attn_norm/gain", 1) == ["dense_layers.0.attn_norm.gain"]
    assert portable.tensor_names("embed/table", 60) == ["embed.table"]
    for name in KINDS:
        c, model, params, buffers = built(name)
        count = sum(np.size(a) for a in jax.tree.leaves((params, buffers)))
        assert sum(a.size for a in tensors(params, buffers).values()) == count  # no name twice


@pytest.mark.parametrize("name", KINDS)
def test_the_config_comes_back(name):
    c = built(name)[0]
    text = json.dumps(portable.hf_config(c, dtype="bfloat16", seq_len=128, eos_token_id=1))
    assert portable.model_config(json.loads(text)) == c.to_dict()
    assert json.loads(text)["dtype"] == "bfloat16" and json.loads(text)["eos_token_id"] == 1


def test_foreign_configs_are_refused():
    good = portable.hf_config(built("mla")[0], dtype="float32", seq_len=128, eos_token_id=1)
    with pytest.raises(DataError, match="llama"):
        portable.model_config(good | {"model_type": "llama"})
    with pytest.raises(DataError, match="norm_eps is missing, mla is missing"):
        portable.model_config({k: v for k, v in good.items() if k not in ("mla", "norm_eps")})
    for odd in ("ssm", ["mla"], None):
        with pytest.raises(DataError, match="attention="):
            portable.model_config(good | {"attention": odd})
    for key, odd in (("mla", [1]), ("mla", 3), ("norm_eps", {}), ("d_ff", [20])):
        with pytest.raises(DataError, match=f"{key}="):
            portable.model_config(good | {key: odd})


@pytest.mark.parametrize("group, name", [("mla", "mla"), ("moe", "mha-moe, elementwise")])
def test_groups_of_leaves_are_complete(group, name):
    good = portable.hf_config(built(name)[0], dtype="float32", seq_len=128, eos_token_id=1)
    for leaf in good[group]:
        with pytest.raises(DataError, match=f"{group}.{leaf} is missing"):
            portable.model_config(good | {group: {k: v for k, v in good[group].items() if k != leaf}})
    with pytest.raises(DataError, match=f"{group}.n_group is not known"):
        portable.model_config(good | {group: good[group] | {"n_group": 2}})


def test_the_modelling_file_stands_alone(tmp_path):
    portable.copy_files(tmp_path)
    (file,) = tmp_path.iterdir()
    assert portable.hf_config(built("gqa")[0], dtype="float32", seq_len=1, eos_token_id=1)["auto_map"]["AutoConfig"].startswith(file.stem)
    packages = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add(node.module.split(".")[0])
    assert packages == {"torch", "transformers"}
    assert "gammalm.interop.modeling_gammalm" not in sys.modules


# ---- with transformers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(name, **arguments of from_pretrained) -> (model in transformers, loading info), from a folder written here."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import save_file

    def load(name, **arguments):
        c, _, params, buffers = built(name)
        folder = tmp_path_factory.mktemp("export")
        save_file({k: np.ascontiguousarray(a) for k, a in tensors(params, buffers).items()}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(portable.hf_config(c, dtype="float32", seq_len=64, eos_token_id=1)))
        portable.copy_files(folder)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True, **arguments
        )
        return model.eval(), info

    with pytest.MonkeyPatch.context() as patch:  # transformers copies the modelling file there and imports the copy
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        torch.manual_seed(0)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # at these shapes threads only wait for each other
        yield load
        torch.set_num_threads(threads)


@pytest.mark.parity
@pytest.mark.parametrize("name", KINDS)
def test_tensors_and_logits(name, load):
    """1e-4 of the largest logit: two fp32 implementations with sums in different orders."""
    import torch

    c, model, params, buffers = built(name)
    hf, info = load(name)
    assert not any(info.values()), info
    exported = tensors(params, buffers)
    assert {k: np.array_equal(v.numpy(), exported[k]) for k, v in hf.state_dict().items()} == dict.fromkeys(exported, True)
    tokens = np.random.default_rng(1).integers(0, c.vocab_size, (2, 20))
    with torch.no_grad():
        theirs = hf(torch.from_numpy(tokens)).logits.numpy()
    ours = jax.jit(lambda p: model.bind(p, buffers).logits(tokens, None, c.norm_eps))(params)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max(), rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", ["gqa, learned sink", "gqa, qk-norm, elementwise, softcap", "mla-moe, q compressed, two shared, two dense"]
)
def test_loss_and_gradients(name, load):
    """The mean loss of `labels`, and 1e-4 of the largest value of each tensor's gradient."""
    import torch

    c, model, params, buffers = built(name)
    hf, _ = load(name)
    tokens = np.random.default_rng(1).integers(0, c.vocab_size, (2, 21))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    their_loss = hf(torch.from_numpy(tokens), labels=torch.from_numpy(tokens)).loss
    their_loss.backward()

    def loss(p):
        total, _ = model.bind(p, buffers).loss(inputs, targets, np.ones(inputs.shape, np.float32), None, c.norm_eps)
        return total / inputs.size

    our_loss, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert float(our_loss) == pytest.approx(their_loss.item(), rel=1e-5)
    reached = {k: p.grad.numpy() for k, p in hf.named_parameters()}
    assert set(reached) == set(tensors(params))
    for k, ours in tensors(gradients).items():
        np.testing.assert_allclose(ours, reached[k], atol=1e-4 * abs(reached[k]).max(), rtol=0, err_msg=k)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", ["gqa, qk-norm, elementwise, softcap", "mla, headwise, sink of one", "mla-moe, q compressed, two shared, two dense"]
)
def test_generation_with_a_cache_and_padding(name, load):
    """Greedy tokens with a cache, without one, from our own logits, and padded on the left; logits of a text given in two parts."""
    import torch

    c, model, params, buffers = built(name)
    hf, _ = load(name)
    greedy = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    rng = np.random.default_rng(2)
    short, long = (torch.from_numpy(rng.integers(1, c.vocab_size, (1, n))) for n in (9, 14))
    cached = hf.generate(short, **greedy)
    assert torch.equal(cached, hf.generate(short, use_cache=False, **greedy))

    ours = np.asarray(model.bind(params, buffers).logits(cached.numpy()[:, :-1], None, c.norm_eps))
    assert ours[0, 8:].argmax(-1).tolist() == cached[0, 9:].tolist()

    with torch.no_grad():
        whole, first = hf(long).logits, hf(long[:, :6], use_cache=True)
        rest = hf(long[:, 6:], cache=first.cache).logits
    torch.testing.assert_close(rest, whole[:, 6:], atol=1e-4 * whole.abs().max().item(), rtol=0)

    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :5] = 0
    together = hf.generate(torch.cat([padded, long]), attention_mask=mask, **greedy)
    assert torch.equal(together[:1, 5:], cached)
    assert torch.equal(together[1:], hf.generate(long, **greedy))


@pytest.mark.parity
def test_in_bf16_the_routing_stays_fp32(load):
    import torch

    hf, _ = load("mha-moe, elementwise", dtype=torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, a in hf.state_dict().items() if a.dtype == torch.float32}
    assert kept == {"router", "bias"}
    assert hf(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parity
def test_saved_again_it_is_the_same(load, tmp_path):
    from safetensors.numpy import load_file

    hf, _ = load("mla-moe, softmax, no shared, one dense")
    hf.save_pretrained(tmp_path)
    c, _, params, buffers = built("mla-moe, softmax, no shared, one dense")
    assert portable.model_config(json.loads((tmp_path / "config.json").read_text())) == c.to_dict()
    assert (tmp_path / portable.MODELLING).read_bytes() == Path(portable.__file__).with_name(portable.MODELLING).read_bytes()
    saved, exported = load_file(tmp_path / "model.safetensors"), tensors(params, buffers)
    assert {k: np.array_equal(v, exported[k]) for k, v in saved.items()} == dict.fromkeys(exported, True)


@pytest.mark.parity
def test_a_model_without_weights_is_initialized(load):
    """Every tensor gets a value: gains one, matrices near .02, the bias zero; `torch.empty` would leave anything."""
    hf, _ = load("mha-moe, elementwise")
    fresh = type(hf)(hf.config)
    for name, a in fresh.state_dict().items():
        if a.ndim > 1:
            assert a.std().item() == pytest.approx(0.02, rel=0.25), name
        else:
            assert a.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
