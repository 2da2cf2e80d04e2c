"""Export then import gives every bit back, on any machine: no torch here. What the files are is checked with the safetensors library."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file

from gammalm.config import leaves
from gammalm.errors import ConfigError
from gammalm.interop.export import OUR_CONFIG, choose_target, export_hf
from gammalm.interop.import_ import import_hf
from gammalm.interop.table import entries, own_entries
from gammalm.interop.tensorfiles import INDEX
from gammalm.trees import flat

from .cases import BASE, CASES, HEADS, LATENT, MIXED, config_of, random_model, same


@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(name, tmp_path):
    target, model_leaves = CASES[name]
    config = config_of(model_leaves)
    params, buffers = random_model(config)
    exported = export_hf(config, params, buffers, tmp_path / "out", max_shard=4000)
    assert exported.target == target
    assert all(exported.passed_over.values())
    back = import_hf(tmp_path / "out")
    assert same(params, back.params) and same(buffers, back.buffers)
    assert leaves(back.config) == leaves(config)
    assert back.config.is_locked


@pytest.mark.parametrize("name", [name for name, (target, _) in CASES.items() if target != "gammalm"])
def test_config_json_alone_says_what_the_model_is(name, tmp_path):
    """Without our own config beside it, as after `save_pretrained`: the same model, computed in the dtype that was stored."""
    config = config_of(CASES[name][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out")
    (tmp_path / "out" / OUR_CONFIG).unlink()
    back = import_hf(tmp_path / "out")
    assert same(params, back.params) and same(buffers, back.buffers)
    ours, theirs = leaves(config), leaves(back.config)
    free = {"model.remat", "model.scan_unroll", "model.loss_chunk", "model.moe.backend", "model.moe.bias_rate", "model.moe.balance_loss"}
    assert {n: v for n, v in ours.items() if n.startswith("model.") and n not in free} == {
        n: v for n, v in theirs.items() if n.startswith("model.") and n not in free
    }
    assert theirs["data.seq_len"] == 12
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_table_covers_every_number_once(name):
    config = config_of(CASES[name][1])
    params, buffers = random_model(config)
    seen = {path: np.zeros(array.shape, int) for path, array in (flat(params) | flat(buffers)).items()}
    centred = CASES[name][0] == "qwen3-next"
    table = list(own_entries(config.model) if CASES[name][0] == "gammalm" else entries(config.model, centred=centred))
    for entry in table:
        for part in entry.parts:
            seen[part.path][part.index] += 1
            assert seen[part.path][part.index].shape == part.shape
    assert all((count == 1).all() for count in seen.values())
    assert len({entry.name for entry in table}) == len(table)


def test_the_stored_arrangement():
    """Against loops over single numbers: which of ours each stored number is."""
    config = config_of(LATENT | MIXED | {"mla.q_rank": 0})
    params, _ = random_model(config)
    attn, nope, rope = params["layers"]["attn"], 6, 8
    table = {entry.name: entry for entry in entries(config.model)}

    def stored(name):
        entry = table[f"model.layers.1.self_attn.{name}.weight"]
        array = entry.pack([flat(params)[part.path][part.index] for part in entry.parts])
        assert array.shape == entry.shape
        return array

    q = stored("q_proj")
    for head in range(4):
        for channel in range(nope + rope):
            pair, second = divmod(channel - nope, 2)
            ours = channel if channel < nope else nope + pair + second * rope // 2
            assert np.array_equal(q[head * (nope + rope) + channel], attn["q"][1, :, head, ours])
    kv = stored("kv_b_proj")
    for head in range(4):
        assert np.array_equal(kv[head * 11 : head * 11 + 6], attn["k_up"][1, :, head].T)
        assert np.array_equal(kv[head * 11 + 6 : head * 11 + 11], attn["v_up"][1, :, head].T)
    assert np.array_equal(stored("o_proj")[:, 5 * 3 + 2], attn["out"][1, 3, 2])


def test_files_are_safetensors_and_index_agrees(tmp_path):
    config = config_of(CASES["glm4-moe"][1])
    params, buffers = random_model(config)
    one = export_hf(config, params, buffers, tmp_path / "one")
    assert one.files == ["model.safetensors"] and not (tmp_path / "one" / INDEX).exists()
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert len(whole) == one.tensors and sum(a.nbytes for a in whole.values()) == one.bytes
    many = export_hf(config, params, buffers, tmp_path / "many", max_shard=5000)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert len(many.files) > 3 and index["metadata"]["total_size"] == one.bytes
    pieces = {name: load_file(tmp_path / "many" / name) for name in many.files}
    assert all(sum(a.nbytes for a in piece.values()) <= 5000 or len(piece) == 1 for piece in pieces.values())
    for name, file in index["weight_map"].items():
        assert np.array_equal(pieces[file].pop(name), whole[name])
    assert not any(pieces.values())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_bfloat16_rounds_all_but_the_router(tmp_path):
    import ml_dtypes

    config = config_of(CASES["deepseek-v3"][1] | {"d_model": 23, "vocab_size": 51})  # odd sizes: fp32 tensors must stay aligned
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, array in tensors.items():
        assert array.dtype == (np.float32 if ".mlp.gate." in name else ml_dtypes.bfloat16), name
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all((8 + length + said["data_offsets"][0]) % {"F32": 4, "BF16": 2}[said["dtype"]] == 0 for said in header.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    back = import_hf(tmp_path / "out")
    rounded = {name: a.astype(ml_dtypes.bfloat16).astype(np.float32) for name, a in flat(params).items() if not name.endswith("router")}
    assert all(np.array_equal(flat(back.params)[name], a) for name, a in rounded.items())
    assert same(back.buffers, buffers) and np.array_equal(back.params["layers"]["ffn"]["router"], params["layers"]["ffn"]["router"])
    assert back.config.model.dtype == "float32"  # what the run computed in
    (tmp_path / "out" / OUR_CONFIG).unlink()
    assert import_hf(tmp_path / "out").config.model.dtype == "bfloat16"  # what is known of another program's model


def test_gains_that_fp32_cannot_centre(tmp_path):
    """All gains from ½ up come back (Sterbenz below 2, exact above); below ½ some do not: Qwen3-Next is refused, auto takes another."""
    config = config_of(CASES["qwen3-next"][1])
    params, buffers = random_model(config)
    rng = np.random.default_rng(1)
    gains = params["layers"]["attn_norm"]["gain"]
    gains[:] = rng.uniform(0.5, 4.0, gains.shape)
    gains[0, :6] = [0.5, np.nextafter(np.float32(1), np.float32(0)), np.nextafter(np.float32(1), np.float32(2)), 1e6, 0.25, -1.0]
    export_hf(config, params, buffers, tmp_path / "a", target="qwen3-next")
    assert same(import_hf(tmp_path / "a").params, params)
    gains[1, 3] = 0.1
    with pytest.raises(ConfigError, match=r"1 gains of layers/attn_norm/gain \(such as 0.1\) change when stored as gain - 1"):
        export_hf(config, params, buffers, tmp_path / "b", target="qwen3-next")
    assert not (tmp_path / "b").exists()
    name, passed_over = choose_target("auto", config.model, params, "float32")
    assert name == "gammalm" and "such as 0.1" in passed_over["qwen3-next"][0]
    assert choose_target("auto", config.model, params, "bfloat16")[0] == "qwen3-next"


def big_model():
    leaves = BASE | HEADS | MIXED | {"d_model": 256, "d_ff": 512, "n_layers": 6, "moe.n_experts": 12, "moe.d_expert": 128, "head_dim": 32}
    config = config_of(leaves | {"vocab_size": 3000})
    return config, *random_model(config)


def test_memory_stays_near_one_copy(tmp_path):
    config, params, buffers = big_model()
    size = sum(array.nbytes for array in flat(params).values())
    assert size > 30e6
    tracemalloc.start()
    try:
        export_hf(config, params, buffers, tmp_path / "out")
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        back = import_hf(tmp_path / "out")
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert same(back.params, params)
    largest = 3000 * 256 * 4  # the embedding
    assert written < 3 * largest < size / 3
    assert read < size + 3 * largest
