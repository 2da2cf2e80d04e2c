"""`gammalm inspect` of transformers' random models: every figure against a direct computation on the torch module, whatever was stored how;
what the config alone says; a model of ours, exported."""

import json

import numpy as np
import pytest

from gammalm.analysis.outlook import _tokens
from gammalm.errors import ConfigError
from gammalm.inspection import inspect_model, page_of, text_of
from gammalm.interop.families import FAMILIES, describe
from gammalm.theory import Heads, predict

BASE = dict(vocab_size=60, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
GQA = dict(num_key_value_heads=2)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=20, q_lora_rank=28, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
              n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1,
              n_shared_experts=2)  # fmt: skip
GPT2 = dict(vocab_size=60, n_embd=48, n_layer=2, n_head=4, n_positions=32, bos_token_id=None, eos_token_id=None, pad_token_id=None)
# family -> (class of its config, keys, ε's key)
MODELS = {
    "llama": ("LlamaConfig", BASE | GQA), "qwen2": ("Qwen2Config", BASE | GQA), "qwen3": ("Qwen3Config", BASE | GQA | dict(head_dim=16)),
    "mistral": ("MistralConfig", BASE | GQA), "gemma": ("GemmaConfig", BASE | GQA | dict(head_dim=16)),
    "gemma2": ("Gemma2Config", BASE | GQA | dict(head_dim=16)), "gemma3_text": ("Gemma3TextConfig", BASE | GQA | dict(head_dim=16)),
    "gpt2": ("GPT2Config", GPT2), "gpt_neox": ("GPTNeoXConfig", BASE), "olmo": ("OlmoConfig", BASE), "olmo2": ("Olmo2Config", BASE),
    "deepseek_v3": ("DeepseekV3Config", BASE | LATENT), "mixtral": ("MixtralConfig", BASE | GQA | dict(num_local_experts=4)),
}  # fmt: skip


def direct(w):
    """(fan-in, std, γ, share near zero, stable rank) of a matrix [out, in]."""
    w = np.asarray(w, np.float64)
    values = np.linalg.svd(w, compute_uv=False)
    std = w.std()
    near = np.mean(np.abs(w) <= 0.1 * std)
    return [w.shape[1], std, -np.log(std) / np.log(w.shape[1]), near, (values**2).sum() / values[0] ** 2]


def matrices_of(torch, transformers, model):
    """Every matrix of a torch module as [out, in], by what its module does with it."""
    config, seen = model.config, set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.ndim < 2 or id(p) in seen:
                continue
            seen.add(id(p))
            w = p.detach().float().numpy()
            if isinstance(module, transformers.pytorch_utils.Conv1D):
                yield from np.split(w.T, 3 if w.shape[1] == 3 * w.shape[0] else 1)
            elif w.ndim == 3:  # experts of transformers 5: [experts, out, in]
                for expert in w:
                    yield from np.split(expert, 2 if name == "gate_up_proj" else 1)
            elif isinstance(module, torch.nn.Linear) and config.model_type == "gpt_neox" and w.shape[0] == 3 * w.shape[1]:
                by_head = w.reshape(config.num_attention_heads, 3, -1, w.shape[1])
                yield from (by_head[:, i].reshape(-1, w.shape[1]) for i in range(3))
            else:
                yield w


def make(name, seed=0, **more):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, keys = MODELS[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys | more))
    return torch, transformers, model


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_module(name, tmp_path, monkeypatch):
    monkeypatch.setattr("gammalm.inspection.figures.outlook", lambda *_, **__: None)  # has a test of its own, and compiles
    torch, transformers, model = make(name)
    model.save_pretrained(tmp_path / "fresh")
    found = inspect_model(tmp_path / "fresh")
    assert found["family"] == name and found["state"]["verdict"] == "fresh", found["state"]
    assert any(reason.startswith("0 of") and "another std" in reason for reason in found["state"]["reasons"])
    for row in found["matrices"]:  # the declared std is what transformers drew with, and every matrix has one
        assert row["declared"] and row["std"] == pytest.approx(row["declared"], rel=6 / np.sqrt(2 * row["rows"] * row["columns"])), row
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(1 + i / 7).add_(0.001 * (i % 3) if p.ndim > 1 else torch.randn_like(p))  # no two alike, and gains that have moved
    model.save_pretrained(tmp_path / "changed")
    found = inspect_model(tmp_path / "changed")
    expected = sorted(direct(w) for w in matrices_of(torch, transformers, model))
    names = ("fan_in", "std", "gamma", "near_zero", "stable_rank")
    measured = sorted([row[name] for name in names] for row in found["matrices"])
    assert len(expected) == len(measured) and not found["unsaid"][: len(found["unsaid"]) - len(describe_of(tmp_path).unsaid)]
    np.testing.assert_allclose(np.array(measured, float), np.array(expected, float), rtol=2e-5, atol=1e-4)
    count = sum(p.numel() for p in model.parameters()) + sum(b.numel() for n, b in model.named_buffers() if "correction" in n)
    assert found["parameters"]["total"] == count
    assert found["state"]["verdict"] in ("just begun", "trained") or name == "olmo"  # whose norms have no gains
    assert text_of(found, each=True).count("\n") > 30 and "<svg" in page_of(found)


def describe_of(folder):
    return describe(json.loads((folder / "fresh" / "config.json").read_text()), "config.json")


@pytest.mark.parity
@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "olmo2", "gpt2", "mixtral"])
def test_the_predicted_stream_is_what_the_module_has(name):
    """Root mean squares of embedding, stream behind the last layer and logits, over eight draws: within 6 % at width 192."""
    wide = dict(hidden_size=192, intermediate_size=320, max_position_embeddings=256)
    wide = dict(n_embd=192, n_positions=256) if name == "gpt2" else wide | (dict(head_dim=48) if name == "gemma2" else {})
    measured = []
    for seed in range(8):
        torch, _, model = make(name, seed, **wide)
        tokens, streams = _tokens(60, False)[:64], []
        norm = [m for n, m in model.named_modules() if n.rpartition(".")[2] in ("norm", "ln_f", "final_layer_norm")][-1]
        norm.register_forward_pre_hook(lambda _, given, streams=streams: streams.append(given[0]))
        with torch.no_grad():
            out = model.eval()(torch.tensor(tokens)[None], output_hidden_states=True)
        measured.append([x.float().pow(2).mean().item() for x in (out.hidden_states[0], streams[0], out.logits)])
    embed, final, logits = np.sqrt(np.mean(measured, axis=0))
    found = describe(model.config.to_dict(), "config.json")
    predicted = predict(found.decoder, np.arange(64) if found.distinct else tokens, heads=32)
    assert np.sqrt(predicted.embed) == pytest.approx(embed, rel=0.06)
    assert np.sqrt(predicted.final) == pytest.approx(final, rel=0.06)
    if name != "gpt2":  # of 60 logits a token's own, which the table as head makes large, shows; beside positions it is left out
        assert predicted.logit_std == pytest.approx(logits, rel=0.06)


CONFIGS = {  # as their makers publish them: sizes of a model of each family
    "llama": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                  rms_norm_eps=1e-5),
    "gpt2": dict(vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024),
    "gemma2": dict(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, head_dim=256),
    "mixtral": dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                    num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=8),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone(name):
    d = describe(CONFIGS[name] | {"model_type": name}, "config.json")
    std = dict(d.decoder.stds[0])
    fans = {k: fan or d.width for k, fan in d.decoder.stacks[0].matrices().items()}
    assert "initializer_range = 0.02" in d.assumed and d.declared == 0.02
    if name == "llama":
        assert d.eps == 1e-5 and fans["ffn/down"] == 11008 and set(std.values()) == {0.02} and d.decoder.head == 0.02
    if name == "gpt2":
        assert std["attn/out"] == std["ffn/down"] == pytest.approx(0.02 / 24**0.5) and std["ffn/up"] == 0.02 and fans["ffn/down"] == 3072
        assert d.decoder.embed == pytest.approx(0.02 * 2**0.5) and d.distinct and d.eps == 1e-5 and d.tied
    if name == "gemma2":
        assert d.decoder.embed == pytest.approx(0.02 * 48) and d.decoder.stacks[0].norms == "sandwich" and d.tied
        assert d.decoder.stacks[0].ffn.activation == "geglu" and fans["attn/out"] == 2048
    if name == "mixtral":
        ffn = d.decoder.stacks[0].ffn
        assert (ffn.n_experts, ffn.top_k, ffn.n_shared, ffn.d_expert, ffn.score) == (8, 2, 0, 14336, "softmax") and d.eps == 1e-5


def test_an_unknown_family_says_what_it_can_and_what_not(tmp_path):
    hf = {"model_type": "newest", "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 4096, "initializer_range": 0.01,
          "weird_norm_eps": 1e-5, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    found = inspect_model(tmp_path)
    assert found["outlook"] is None and "none of the families known here" in found["unsaid"][0]
    gammas = {row["matrix"]: row["gamma"] for row in found["declared"]["matrices"]}
    assert gammas == {"width": pytest.approx(np.log(100) / np.log(1024)), "feed-forward": pytest.approx(np.log(100) / np.log(4096))}
    assert any("Set weird_norm_eps to 1e-12" in line for line in found["advice"])
    assert "newest" in text_of(found) and "Before the first step" not in page_of(found)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert "Without the model's width" in inspect_model(tmp_path)["advice"][0]


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"num_hidden_layers": None}, {"rms_norm_eps": -1.0}, {"vocab_size": True}])
def test_a_size_that_is_none_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        describe(CONFIGS["llama"] | {"model_type": "llama"} | change, "config.json")


def test_a_model_of_text_and_images_is_described_by_its_text():
    inner = CONFIGS["gemma2"] | {"model_type": "gemma3_text", "num_key_value_heads": 4}
    d = describe({"model_type": "gemma3", "text_config": inner, "vision_config": {}}, "config.json")
    assert d.model_type == "gemma3_text" and d.width == 2304 and "what reads images is not" in d.unsaid[0]


def test_every_family_has_a_random_model_here():
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_a_config_lacks_are_the_familys(name):
    """Those of the class's own defaults; nested configs of models of text and images are stored without them."""
    transformers = pytest.importorskip("transformers")
    full = describe(getattr(transformers, MODELS[name][0])().to_dict(), "config.json")
    bare = describe({"model_type": name}, "config.json")
    for field in ("width", "layers", "vocab", "ffn", "eps", "tied", "scale", "declared"):
        assert getattr(bare, field) == getattr(full, field), field
    assert bare.decoder.stacks == full.decoder.stacks and bare.decoder.softcap == full.decoder.softcap
    assert any(said.startswith("vocab_size = ") for said in bare.assumed)


def test_a_nested_config_may_leave_sizes_out():
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}  # Gemma 3 4B's
    d = describe({"model_type": "gemma3", "text_config": inner}, "config.json")
    assert (d.width, d.vocab, d.tied, d.decoder.stacks[0].attention) == (2560, 262208, True, Heads(8, 256, True))
    llava = describe({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}, "config.json")
    assert (llava.width, llava.vocab, llava.tied) == (4096, 32064, False) and "hidden_size = 4096" in llava.assumed


def test_sizes_by_layer_are_no_size():
    d = describe({"model_type": "newest", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": [1, 2]}, "config.json")
    assert d.known.kv_heads == 4 and d.known.head_dim == 8


def test_a_config_without_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "initializer_range": 0.02}))
    found = inspect_model(tmp_path)
    assert "has no model_type" in found["unsaid"][0] and found["declared"]["matrices"] and "None" not in text_of(found).splitlines()[0]


def test_odd_values_are_no_crash():
    d = describe(CONFIGS["llama"] | {"model_type": "llama", "hidden_act": ["silu"], "rope_parameters": "x"}, "config.json")
    assert d.decoder is None and "hidden_act" in d.unsaid[0]
    assert describe(CONFIGS["llama"] | {"model_type": "llama", "rope_parameters": "x"}, "config.json").decoder.rope_theta == 10_000
    assert describe({"model_type": "newest", "layer_norm_eps": float("nan")}, "config.json").eps is None
