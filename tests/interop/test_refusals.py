"""What cannot be represented is refused with the reason, in both directions, and leaves nothing behind."""

import errno
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gammalm.errors import CheckpointError, ConfigError, GammalmError
from gammalm.interop.export import OUR_CONFIG, choose_target, export_hf
from gammalm.interop.import_ import import_hf
from gammalm.interop.sources import read_config
from gammalm.interop.tensorfiles import INDEX

from .cases import CASES, HEADS, LATENT, MIXED, config_of, random_model, same

AGAINST = [
    ("llama", HEADS | {"gate": "headwise"}, "model.gate=headwise; its attention has no gate"),
    ("llama", HEADS | {"gate": "elementwise"}, "model.gate=elementwise; its attention has no gate"),
    ("llama", HEADS | {"softmax_sink": "learned"}, "model.softmax_sink=learned; the softmax of its attention has no sink"),
    ("deepseek-v3", LATENT | {"softmax_sink": "one"}, "model.softmax_sink=one; the softmax of its attention has no sink"),
    ("llama", HEADS | {"qk_norm": True}, "model.qk_norm=True; it never normalises queries and keys"),
    ("llama", HEADS | {"logit_softcap": 30.0}, "model.logit_softcap=30; it has no logit soft-cap"),
    ("llama", HEADS | {"n_heads": 5, "n_kv_heads": 1}, "model.d_model=24 is no multiple of model.n_heads=5"),
    ("llama", LATENT, "model.attention=mla; it has mha alone"),
    ("mistral", HEADS | MIXED, "model.ffn=moe; it has dense alone"),
    ("qwen3", HEADS, "model.qk_norm=False; it always normalises queries and keys"),
    ("qwen3-next", HEADS | {"gate": "elementwise"}, "model.qk_norm=False; it always normalises queries and keys"),
    ("qwen3-next", HEADS | {"gate": "headwise", "qk_norm": True}, "model.gate=headwise; its attention has the elementwise gate, always"),
    ("glm4-moe", HEADS, "model.ffn=dense; it has moe alone"),
    ("glm4-moe", HEADS | MIXED | {"gate": "elementwise"}, "model.gate=elementwise; its attention has no gate"),
    ("glm4-moe", HEADS | MIXED | {"moe.score": "softmax"}, "model.moe.score=softmax; its router takes sigmoids"),
    ("glm4-moe", HEADS | MIXED | {"moe.n_shared": 0}, "model.moe.n_shared=0; it always has a shared expert"),
    ("glm4-moe", HEADS | MIXED | {"moe.n_experts": 1, "moe.top_k": 1}, "model.moe.n_experts=1; its router needs two"),
    ("deepseek-v3", LATENT | MIXED | {"gate": "headwise"}, "model.gate=headwise; its attention has no gate"),
    ("deepseek-v3", LATENT | {"norm_eps": 1e-12}, "model.norm_eps=1e-12; its latent norms have 1e-06"),
    ("deepseek-v3", HEADS | MIXED, "model.attention=mha; it has mla alone"),
]


@pytest.mark.parametrize("target, leaves, reason", AGAINST)
def test_an_explicit_target_that_does_not_fit(target, leaves, reason, tmp_path):
    config = config_of(leaves)
    with pytest.raises(ConfigError) as refused:
        export_hf(config, *random_model(config), tmp_path / "out", target=target)
    assert reason in str(refused.value) and "--target" in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert choose_target("auto", config.model, random_model(config)[0], "float32")[0] != target


def test_every_reason_is_given():
    config = config_of(HEADS | {"gate": "headwise", "qk_norm": True, "logit_softcap": 5.0})
    with pytest.raises(ConfigError) as refused:
        choose_target("llama", config.model, {}, "float32")
    assert str(refused.value).count("\n  ") == 3


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    config = config_of(HEADS)
    (tmp_path / "mine").write_text("x")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ConfigError, match="no empty folder"):
            export_hf(config, *random_model(config), out)
    (tmp_path / "empty").mkdir()
    export_hf(config, *random_model(config), tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "mine"]


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    config = config_of(HEADS)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for out, reason in [
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "dangling", "symbolic link"),
        (tmp_path / "file" / "below", "file is no folder"),
        (tmp_path / "file" / "far" / "below", "file is no folder"),
        (tmp_path / ("n" * 300), "too long"),
        (tmp_path / ("n" * 250), "too long"),  # too long for the folder it is made as
        (Path("/proc/nothing/there"), "cannot be made"),
    ]:
        with pytest.raises(ConfigError, match=reason) as refused:
            export_hf(config, *random_model(config), out)
        assert str(out) in str(refused.value)
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever tests may write everywhere
    with pytest.raises(ConfigError, match="not writable"):
        export_hf(config, *random_model(config), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_no_room_for_the_folder_stays_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = config_of(HEADS)
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        export_hf(config, *random_model(config), tmp_path / "out")


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = config_of(HEADS)
    monkeypatch.setattr("gammalm.interop.export.to_json", full)  # after the weights
    with pytest.raises(OSError, match="No space left"):
        export_hf(config, *random_model(config), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def exported(tmp_path):
    """Writes the export of a case and returns its folder, without our own config: what another program could have saved."""

    def write(name):
        config = config_of(CASES[name][1])
        export_hf(config, *random_model(config), tmp_path / "model")
        (tmp_path / "model" / OUR_CONFIG).unlink()
        return tmp_path / "model"

    return write


def change(folder, **keys):
    path = folder / "config.json"
    hf = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in hf.items() if value != "REMOVED"}))


ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA, MISTRAL, QWEN, NEXT = "llama, tied", "mistral: 24 is no multiple of 5", "qwen3", "qwen3-next"
GLM, DEEPSEEK = "glm4-moe", "deepseek-v3"
MISFITS = [
    (LLAMA, {"model_type": "olmo2"}, "normalises the output of each branch"),
    (LLAMA, {"model_type": "bloom"}, "what can be imported is llama, mistral"),
    (LLAMA, {"model_type": "REMOVED"}, "model_type None"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is the language model"),
    (LLAMA, {"model_type": ["llama"]}, "model_type ['llama']"),
    (LLAMA, {"dtype": ["float32"]}, "dtype=['float32'] is no text"),
    (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is no boolean"),
    (LLAMA, {"rope_theta": "500", "rope_parameters": None}, "rope_theta='500' is no number above 0"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is no number"),
    (LLAMA, {"hidden_size": "REMOVED"}, "hidden_size is missing"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads=0 is no whole number of at least 1"),
    (LLAMA, {"vocab_size": "50"}, "vocab_size='50' is no whole number"),
    (LLAMA, {"head_dim": 10.5}, "head_dim=10.5"),
    (LLAMA, {"rms_norm_eps": "REMOVED"}, "rms_norm_eps is missing"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (LLAMA, {"attention_bias": True}, "no biases"),
    (LLAMA, {"mlp_bias": True}, "no biases"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "stored quantized"),
    (LLAMA, {"rope_parameters": ROPE | {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
    (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    (LLAMA, {"rope_parameters": ROPE | {"mrope_section": [1, 2]}}, "mrope_section"),
    (LLAMA, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (LLAMA, {"rope_parameters": {"full_attention": ROPE}}, "one rotary embedding"),
    (LLAMA, {"rope_theta": 1e4}, "differ"),
    (LLAMA, {"residual_multiplier": 0.5}, "residual_multiplier=0.5: not known here"),
    (MISTRAL, {"sliding_window": 6}, "sliding_window=6"),
    (MISTRAL, {"sliding_window": "REMOVED", "max_position_embeddings": 8192}, "sliding_window=4096"),
    (MISTRAL, {"num_key_value_heads": "REMOVED"}, "num_key_value_heads is missing"),
    (MISTRAL, {"sliding_window": "6"}, "sliding_window='6' is no whole number"),
    (QWEN, {"layer_types": 2}, "layer_types=2 is no list"),
    (QWEN, {"use_sliding_window": True}, "use_sliding_window=True"),
    (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (NEXT, {"layer_types": "REMOVED"}, "full_attention_interval"),
    (NEXT, {"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
    (NEXT, {"mlp_only_layers": [0], "num_experts": 4}, "layers [1] hold experts"),
    (NEXT, {"partial_rotary_factor": "REMOVED", "rope_parameters": ROPE}, "partial_rotary_factor=0.25"),
    (GLM, {"partial_rotary_factor": "REMOVED", "rope_parameters": ROPE}, "partial_rotary_factor=0.5"),
    (NEXT, {"mlp_only_layers": 1}, "mlp_only_layers=1 is no list"),
    (NEXT, {"mlp_only_layers": [], "num_experts": "4"}, "num_experts='4' is no whole number"),
    (NEXT, {"mlp_only_layers": [], "num_experts": 4, "decoder_sparse_step": 0}, "decoder_sparse_step=0 is no whole number of at least 1"),
    (GLM, {"use_qk_norm": "no"}, "use_qk_norm='no' is no boolean"),
    (GLM, {"first_k_dense_replace": "1"}, "first_k_dense_replace='1' is no whole number"),
    (GLM, {"n_shared_experts": [1]}, "n_shared_experts=[1] is no whole number"),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob=False"),
    (GLM, {"n_group": 2, "topk_group": 1}, "n_group=2"),
    (GLM, {"n_routed_experts": "REMOVED"}, "n_routed_experts is missing"),
    (DEEPSEEK, {"q_lora_rank": "REMOVED"}, "q_lora_rank is missing"),
    (DEEPSEEK, {"q_lora_rank": "11"}, "q_lora_rank='11' is no whole number"),
    (DEEPSEEK, {"rope_interleave": "no"}, "rope_interleave='no' is no boolean"),
    (DEEPSEEK, {"n_group": "REMOVED"}, "n_group=8"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method='greedy'"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads=2"),
]


@pytest.mark.parametrize("name, keys, reason", MISFITS)
def test_a_model_that_ours_is_not(name, keys, reason, exported):
    folder = exported(name)
    import_hf(folder)  # fits, until the keys are changed
    change(folder, **keys)
    with pytest.raises(ConfigError) as refused:
        import_hf(folder)
    assert reason in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize("name", [LLAMA, MISTRAL, QWEN, NEXT, GLM, DEEPSEEK, "own: softmax router"])
def test_odd_values_of_any_key(name, exported):
    """Each key of config.json with a value of every type is taken (then the weights are looked for) or refused in a message."""
    folder = exported(name)
    path, weights = folder / "config.json", folder / "model.safetensors"
    weights.unlink()
    hf = json.loads(path.read_text())
    more = "rope_scaling sliding_window partial_rotary_factor decoder_sparse_step num_experts layer_types mlp_only_layers".split()
    for key in [*hf, *more]:
        for odd in (None, 0, -1, 1.5, float("nan"), "x", True, [], [1], {"a": 1}):
            path.write_text(json.dumps(hf | {key: odd}))
            with pytest.raises(GammalmError) as refused:
                import_hf(folder)
            said = str(refused.value)
            assert key in said or "model." in said or "is it a model folder" in said, (key, odd, said)


def test_every_misfit_is_listed(exported):
    folder = exported(LLAMA)
    change(folder, attention_bias=True, hidden_act="relu", rope_parameters=ROPE | {"rope_type": "yarn"})
    with pytest.raises(ConfigError) as refused:
        import_hf(folder)
    assert str(refused.value).count("\n  ") == 3


def test_what_does_not_matter_is_passed_over(exported):
    """Bookkeeping, generation, keys that are switched off; keys that a family's own default makes superfluous; older spellings."""
    folder = exported(LLAMA)
    before = import_hf(folder)
    change(
        folder, transformers_version="4.30", use_cache=True, temperature=0.7, attention_dropout=0.1, some_new_feature=False, other=None,
        pretraining_tp=2, rope_parameters="REMOVED", rope_scaling=None, dtype="REMOVED", architectures="REMOVED", hidden_act="REMOVED",
    )  # fmt: skip
    after = import_hf(folder)
    assert same(before.params, after.params) and before.config == after.config


def test_sizes_that_older_llamas_leave_out():
    hf = dict(model_type="llama", vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20)
    leaves = read_config(hf | dict(rms_norm_eps=1e-6, max_position_embeddings=64), "config.json").leaves
    assert leaves["model.n_kv_heads"] == 4 and leaves["model.head_dim"] == 6 and leaves["model.rope_theta"] == 10_000
    assert leaves["model.tie_embeddings"] is False


def test_pickles_are_never_opened(exported):
    folder = exported(LLAMA)
    (folder / "model.safetensors").rename(folder.parent / "kept")

    class Bomb:
        def __reduce__(self):
            return (folder.parent / "went off").write_text, ("x",)

    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pickles only"):
        import_hf(folder)
    (folder.parent / "kept").rename(folder / "model.safetensors")
    import_hf(folder)
    assert not (folder.parent / "went off").exists()


def edit(folder, function):
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    function(tensors)
    save_file(tensors, path)


def test_tensors_that_do_not_fit(exported):
    folder = exported(LLAMA)
    norm, extra = "model.layers.1.input_layernorm.weight", "model.layers.2.input_layernorm.weight"
    value = load_file(folder / "model.safetensors")[norm]
    for function, reason in [
        (lambda t: t.pop(norm), f"{norm} is missing"),
        (lambda t: t.update({norm: value[:-1]}), f"{norm} has shape (23,), its config asks for (24,)"),
        (lambda t: t.update({norm: value, extra: value}), f"{extra} is not known"),
        (lambda t: (t.pop(extra), t.update({norm: value.astype(np.float64)})), f"{norm} is F64"),
        (lambda t: t.update({norm: value, "lm_head.weight": t["model.embed_tokens.weight"] + 1}), "lm_head.weight differs"),
    ]:
        edit(folder, function)
        with pytest.raises(CheckpointError) as refused:
            import_hf(folder)
        assert reason in str(refused.value)
    # A head stored beside the embedding that it is tied to, and a constant that old checkpoints hold, change nothing.
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}))
    import_hf(folder)


def test_files_that_are_missing_or_damaged(exported):
    folder = exported(LLAMA)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_hf(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is it a model folder"):
        import_hf(folder)
    (folder.parent / "elsewhere.safetensors").write_bytes(whole)
    for name in ("model-00001-of-00002.safetensors", "../elsewhere.safetensors"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(CheckpointError, match="not in the folder"):
            import_hf(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="no index"):
        import_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        import_hf(folder)


def test_the_single_file_is_read_before_an_index(exported):
    """As transformers 5.24 does (modeling_utils._get_resolved_checkpoint_files): an index may be left of an older save."""
    folder = exported(LLAMA)
    before = import_hf(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    assert same(import_hf(folder).params, before.params)


def test_an_own_export_that_was_cut(tmp_path):
    config = config_of(CASES["own: headwise gate"][1])
    for key in ("max_position_embeddings", "gate"):
        export_hf(config, *random_model(config), tmp_path / key)
        change(tmp_path / key, **{key: "REMOVED"})
        with pytest.raises(GammalmError, match=key):
            import_hf(tmp_path / key)


def test_two_configs_that_disagree(tmp_path):
    config = config_of(HEADS)
    export_hf(config, *random_model(config), tmp_path / "out")
    change(tmp_path / "out", rms_norm_eps=2e-3)
    with pytest.raises(ConfigError, match=f"{OUR_CONFIG} disagree on model.norm_eps"):
        import_hf(tmp_path / "out")
    (tmp_path / "out" / OUR_CONFIG).unlink()
    assert import_hf(tmp_path / "out").config.model.norm_eps == 2e-3
