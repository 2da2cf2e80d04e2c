"""What stored tensors are: every matrix of every layout against the slice that NumPy takes by hand; damaged files; an Orbax folder."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from gammalm.errors import CheckpointError
from gammalm.interop import layouts
from gammalm.interop.jax_names import read_jax
from gammalm.interop.mapped import Tensor, is_orbax, read_orbax, read_safetensors
from gammalm.interop.torch_names import Known, read_torch

D, F, V, H, K, E = 12, 20, 30, 3, 4, 2


def tensors(shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def read(tmp_path, arrays, known=Known()):  # noqa: B008
    save_file(arrays, tmp_path / "model.safetensors")
    return read_torch(read_safetensors(tmp_path), known)


def found(weights):
    """{(kind, layer, expert): ([in, out] matrix, fan_in)} from the blocks."""
    rows = {}
    for m in weights.matrices:
        w = np.concatenate(list(m.blocks()))
        assert w.shape == (m.rows, m.columns) and w.dtype == np.float32
        assert (m.kind, m.layer, m.expert) not in rows
        rows[m.kind, m.layer, m.expert] = (w.T if m.inputs == "columns" else w, m.fan_in)
    return rows


def expect(weights, wanted):
    rows = found(weights)
    assert rows.keys() == wanted.keys()
    for key, w in wanted.items():
        np.testing.assert_array_equal(rows[key][0], np.asarray(w, np.float32), err_msg=str(key))
        assert rows[key][1] == len(w)


LLAMA = {
    "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
    "model.layers.0.self_attn.q_proj.weight": (H * K, D), "model.layers.0.self_attn.q_proj.bias": (H * K,),
    "model.layers.0.self_attn.o_proj.weight": (D, H * K), "model.layers.0.mlp.down_proj.weight": (D, F),
    "model.layers.0.input_layernorm.weight": (D,), "model.layers.0.self_attn.rotary_emb.inv_freq": (K,),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_linears_and_embeddings(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(layouts, "BLOCK", 50)  # several blocks a matrix
    arrays = tensors(LLAMA, dtype)
    weights = read(tmp_path, arrays)
    expect(weights, {
        ("embed", None, None): arrays["model.embed_tokens.weight"].T, ("head", None, None): arrays["lm_head.weight"].T,
        ("q", 0, None): arrays["model.layers.0.self_attn.q_proj.weight"].T,
        ("out", 0, None): arrays["model.layers.0.self_attn.o_proj.weight"].T,
        ("ffn_down", 0, None): arrays["model.layers.0.mlp.down_proj.weight"].T,
    })  # fmt: skip
    assert sorted((v.kind, v.layer is None) for v in weights.vectors) == [("bias", False), ("gain", False), ("gain", True)]
    assert not weights.notes


def test_a_tied_head_is_shown_once(tmp_path):
    arrays = tensors(LLAMA)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    weights = read(tmp_path, arrays)
    assert ("head", None, None) not in found(weights) and "lm_head.weight holds the numbers of" in weights.notes[0]
    arrays["lm_head.weight"][-1, -1] += 1  # the last number differs
    assert ("head", None, None) in found(read(tmp_path, arrays))
    del arrays["lm_head.weight"]
    assert "There is no head of its own" in read(tmp_path, arrays).notes[0]
    assert not read(tmp_path, arrays, Known(tied=False)).notes


def test_conv1d_is_inputs_first_and_linears_of_its_names_are_not(tmp_path):
    shapes = {"wte.weight": (V, D), "wpe.weight": (7, D), "h.1.attn.c_attn.weight": (D, 3 * D), "h.1.attn.c_proj.weight": (D, D),
              "h.1.mlp.c_fc.weight": (D, F), "h.1.mlp.c_proj.weight": (F, D),
              "h.1.attn.bias": (1, 1, 7, 7), "h.1.ln_1.weight": (D,)}  # fmt: skip
    arrays = tensors(shapes)
    qkv = arrays["h.1.attn.c_attn.weight"]
    expect(read(tmp_path, arrays), {
        ("embed", None, None): arrays["wte.weight"].T, ("position", None, None): arrays["wpe.weight"].T,
        **{(part, 1, None): qkv[:, i * D : (i + 1) * D] for i, part in enumerate("qkv")},
        ("out", 1, None): arrays["h.1.attn.c_proj.weight"], ("ffn_up", 1, None): arrays["h.1.mlp.c_fc.weight"],
        ("ffn_down", 1, None): arrays["h.1.mlp.c_proj.weight"],
    })  # fmt: skip
    cross = "h.1.crossattention.c_attn.weight"
    weights = read(tmp_path, arrays | tensors({cross: (D, 2 * D)}))
    assert [(m.kind, m.fan_in, m.fan_out) for m in weights.matrices if m.name.startswith(cross)] == [("qkv", D, 2 * D)]
    linears = {name: a.T.copy() if "attn.c" in name or "mlp" in name else a for name, a in arrays.items()}
    rows = found(read(tmp_path, linears, Known(heads=H, kv_heads=H, head_dim=K)))
    np.testing.assert_array_equal(rows["k", 1, None][0], qkv[:, D : 2 * D])
    np.testing.assert_array_equal(rows["ffn_down", 1, None][0], arrays["h.1.mlp.c_proj.weight"])


def test_fused_projections(tmp_path):
    neox = "gpt_neox.layers.0.attention.query_key_value.weight"
    arrays = tensors({neox: (3 * H * K, D)})
    by_head = arrays[neox].reshape(H, 3, K, D)
    expect(read(tmp_path, arrays, Known("gpt_neox", D, H, H, K)),
           {(part, 0, None): by_head[:, i].reshape(-1, D).T for i, part in enumerate("qkv")})  # fmt: skip
    expect(read(tmp_path, arrays), {("qkv", 0, None): arrays[neox].T})  # without heads: the whole
    phi, gate_up = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
    arrays = tensors({phi: ((H + 2) * K, D), gate_up: (2 * F, D)})
    q, k, v = np.split(arrays[phi], [H * K, (H + 1) * K])
    gate, up = np.split(arrays[gate_up], 2)
    wanted = {"q": q, "k": k, "v": v, "ffn_gate": gate, "ffn_up": up}
    expect(read(tmp_path, arrays, Known("phi3", D, H, 1, K)), {(kind, 0, None): w.T for kind, w in wanted.items()})
    gated = "model.layers.0.self_attn.q_proj.weight"
    arrays = tensors({gated: (2 * H * K, D)})
    by_head = arrays[gated].reshape(H, 2, K, D)
    expect(read(tmp_path, arrays, Known("qwen3_next", D, H, H, K)),
           {(part, 0, None): by_head[:, i].reshape(-1, D).T for i, part in enumerate(("q", "gate"))})  # fmt: skip


def test_experts_stacked_and_apart(tmp_path):
    base = "model.layers.3.mlp.experts."
    stacked = tensors({base + "gate_up_proj": (E, 2 * F, D), base + "down_proj": (E, D, F), "model.layers.3.mlp.gate.weight": (E, D)})
    wanted = {("router", 3, None): stacked["model.layers.3.mlp.gate.weight"].T}
    for e in range(E):
        gate, up = np.split(stacked[base + "gate_up_proj"][e], 2)
        wanted |= {("ffn_gate", 3, e): gate.T, ("ffn_up", 3, e): up.T, ("ffn_down", 3, e): stacked[base + "down_proj"][e].T}
    expect(read(tmp_path, stacked, Known("mixtral", D)), wanted)
    apart = {"model.layers.3.block_sparse_moe.gate.weight": stacked["model.layers.3.mlp.gate.weight"]}
    for (kind, _, e), w in wanted.items():
        if e is not None:
            name = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}[kind]
            apart[f"model.layers.3.block_sparse_moe.experts.{e}.{name}.weight"] = np.ascontiguousarray(w.T)
    expect(read(tmp_path, apart, Known("mixtral", D)), wanted)
    turned = {name: a.swapaxes(1, 2).copy() if a.ndim == 3 else a for name, a in stacked.items()}  # [E, in, out]: the width says so
    rows = found(read(tmp_path, turned, Known("", D)))
    np.testing.assert_array_equal(rows["ffn_down", 3, 1][0], stacked[base + "down_proj"][1].T)
    assert rows["ffn_gate_up", 3, 0][1] == D
    weights = read(tmp_path, stacked)  # neither config nor embedding: it could be either
    unsure = [m for m in weights.matrices if m.kind != "router"]
    assert unsure and all(m.fan_in is None and "no config.json says which" in m.unsaid for m in unsure)


def test_shards_and_what_is_no_weight(tmp_path):
    arrays = tensors({"a.q_proj.weight": (4, 5), "b.k_proj.weight": (5, 3)}) | {"c.v_proj.qweight": np.ones((3, 3), np.int8)}
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a.q_proj.weight": arrays["a.q_proj.weight"]}, tmp_path / names[0])
    save_file({name: arrays[name] for name in list(arrays)[1:]}, tmp_path / names[1])
    where = {name: names[i > 0] for i, name in enumerate(arrays)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    weights = read_torch(read_safetensors(tmp_path))
    assert [m.kind for m in weights.matrices] == ["q", "k"] and list(weights.unread) == ["c.v_proj.qweight"]
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match="Fetch the rest"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("damage", ["short", "length", "json", "empty", "shape"])
def test_damaged_files_are_refused(tmp_path, damage):
    file = tmp_path / "x.safetensors"
    save_file(tensors({"q_proj.weight": (8, 8)}), file)
    whole = file.read_bytes()
    file.write_bytes({"short": whole[:-9], "length": b"\xff" * 8 + whole[8:], "json": whole[:9] + b"?" + whole[10:], "empty": b"",
                      "shape": whole.replace(b"[8,8]", b"[-8,-8]", 1).replace(b"}  ", b"}", 1)}[damage])  # fmt: skip
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_safetensors(file)


FLAX = {
    "embed": {"embedding": (V, D)},
    "layers_0": {"attention": {"query": {"kernel": (D, H, K)}, "value": {"kernel": (D, H, K)}, "out": {"kernel": (H, K, D)}},
                 "norm": {"scale": (D,)}, "mlp": {"wi_0": {"kernel": (D, F)}, "wo": {"kernel": (F, D)}, "strange": {"kernel": (D, 2, F)}}},
}  # fmt: skip
SCANNED = {"embed": {"embedding": (V, D)}, "layers": {"norm": {"scale": (D, 5)}, "attention": {"query": {"kernel": (D, 5, H, K)}},
                                                      "mlp": {"wo": {"kernel": (F, 5, D)}}}}  # fmt: skip


def filled(tree, rng):
    return {k: filled(v, rng) if isinstance(v, dict) else jnp.asarray(rng.normal(size=v), jnp.float32) for k, v in tree.items()}


def test_an_orbax_folder_of_anybody(tmp_path):
    params = filled(FLAX, np.random.default_rng(0))
    state = {"params": params, "opt_state": [{"mu": params}, {"count": jnp.zeros((), jnp.int32)}], "step": jnp.zeros((), jnp.int32)}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "run", state)
    assert is_orbax(tmp_path / "run") and not is_orbax(tmp_path)
    weights = read_jax(read_orbax(tmp_path / "run"))
    layer = params["layers_0"]
    rows = {m.name.removeprefix("params/"): m for m in weights.matrices}
    strange = rows.pop("layers_0/mlp/strange/kernel")
    assert strange.fan_in is None and "nothing says which axes" in strange.unsaid
    weights.matrices.remove(strange)
    expect(weights, {
        ("embed", None, None): params["embed"]["embedding"].T, ("q", 0, None): layer["attention"]["query"]["kernel"].reshape(D, -1),
        ("v", 0, None): layer["attention"]["value"]["kernel"].reshape(D, -1),
        ("out", 0, None): layer["attention"]["out"]["kernel"].reshape(-1, D),
        ("ffn_gate", 0, None): layer["mlp"]["wi_0"]["kernel"], ("ffn_down", 0, None): layer["mlp"]["wo"]["kernel"],
    })  # fmt: skip
    assert "arrays of an optimizer" in weights.notes[0] and [(v.kind, v.layer) for v in weights.vectors] == [("gain", 0)]


def test_stacked_layers_on_another_axis(tmp_path):
    params = filled(SCANNED, np.random.default_rng(0))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "run", params)
    weights = read_jax(read_orbax(tmp_path / "run"))
    query, down = params["layers"]["attention"]["query"]["kernel"], params["layers"]["mlp"]["wo"]["kernel"]
    layers = {("q", i, None): query[:, i].reshape(D, -1) for i in range(5)} | {("ffn_down", i, None): down[:, i] for i in range(5)}
    expect(weights, layers | {("embed", None, None): params["embed"]["embedding"].T})
    assert [(v.layer, v.size) for v in weights.vectors] == [(i, D) for i in range(5)]


def test_what_names_do_not_say_has_no_fan_in(tmp_path):
    """Neither Mamba's A_log nor a stack of three axes is a Linear; a convolution is; causal masks and positions are no weights."""
    arrays = tensors({"layers.0.mixer.A_log": (D, F), "layers.0.mixer.conv1d.weight": (D, 1, 4), "vit.pos_embed": (1, 5, D),
                      "layers.0.attention.bias": (1, 1, 7, 7), "layers.0.self_attn.in_proj_weight": (3 * D, D)})  # fmt: skip
    weights = read(tmp_path, arrays | {"position_ids": np.arange(7)})
    fans = {m.name.rpartition(".")[2]: m.fan_in for m in weights.matrices}
    assert fans == {"A_log": None, "weight": 4, "pos_embed": None, "in_proj_weight": D} and not weights.unread
    assert all("nothing says which axes" in m.unsaid for m in weights.matrices if m.fan_in is None)


def test_fp8_with_scales_is_no_weight_as_it_stands(tmp_path):
    """The layout of DeepSeek-V3's files, and of GPTQ's scales; FP8 without scales is a plain cast."""
    base = "model.layers.0.mlp."
    fp8 = tensors({base + "down_proj.weight": (D, F), base + "up_proj.weight": (F, D)}, ml_dtypes.float8_e4m3fn)
    scales = tensors({base + "down_proj.weight_scale_inv": (1, 2), base + "gate_proj.scales": (2, F)})
    arrays = fp8 | scales
    codes = {"float8_e4m3fn": "F8_E4M3", "float32": "F32"}
    rows = [Tensor(name, a.shape, codes[a.dtype.name], lambda a=a: a) for name, a in arrays.items()]
    weights = read_torch(rows)
    expect(weights, {("ffn_up", 0, None): arrays[base + "up_proj.weight"].T})
    assert set(weights.unread) == arrays.keys() - {base + "up_proj.weight"}


def test_names_that_mean_two_things(tmp_path):
    arrays = tensors({"encoder.layer.1.intermediate.dense.weight": (F, D), "encoder.layer.1.output.dense.weight": (D, F),
                      "encoder.layer.1.attention.output.dense.weight": (D, D), "block.2.layer.1.DenseReluDense.wo.weight": (D, F),
                      "layers.3.attention.wo.weight": (D, D), "vision_tower.layers.1.self_attn.q_proj.weight": (D, D)})  # fmt: skip
    kinds = [(m.kind, m.layer) for m in read(tmp_path, arrays).matrices]
    assert sorted(kinds, key=str) == [("ffn_down", 1), ("ffn_down", 2), ("ffn_up", 1), ("other", None), ("out", 1), ("out", 3)]
    alone = {"vision_tower.layers.1.self_attn.q_proj.weight": arrays["vision_tower.layers.1.self_attn.q_proj.weight"]}
    assert [(m.kind, m.layer) for m in read(tmp_path, alone).matrices] == [("q", 1)]


def test_granites_experts(tmp_path):
    base = "model.layers.0.block_sparse_moe."
    arrays = tensors({base + "input_linear.weight": (E, 2 * F, D), base + "output_linear.weight": (E, D, F)})
    wanted = {}
    for e in range(E):
        gate, up = np.split(arrays[base + "input_linear.weight"][e], 2)
        wanted |= {("ffn_gate", 0, e): gate.T, ("ffn_up", 0, e): up.T, ("ffn_down", 0, e): arrays[base + "output_linear.weight"][e].T}
    expect(read(tmp_path, arrays, Known("granitemoe", D)), wanted)


def test_biases_and_gains_of_heads_are_vectors():
    rng = np.random.default_rng(0)
    shapes = {"query/kernel": (D, H, K), "query/bias": (H, K), "q_norm/scale": (H, K)}
    weights = read_jax([Tensor(f"params/layers_0/attention/{name}", shape, "float32", lambda s=shape: rng.normal(size=s))
                        for name, shape in shapes.items()])  # fmt: skip
    assert [(m.kind, m.fan_in) for m in weights.matrices] == [("q", D)]
    assert [(v.kind, v.size) for v in weights.vectors] == [("bias", H * K), ("gain", H * K)]


def test_three_axes_of_jax_may_be_experts_or_layers():
    """[E, in, out] of MaxText's experts, and stacked layers without a norm that shows their axis: nothing is guessed."""
    shapes = {"layers_0/MoeBlock_0/wi_0": (E, D, F), "layers_0/MoeBlock_0/wo": (E, F, D), "layers/mlp/wi_0/kernel": (5, D, F),
              "layers/attention/query/kernel": (5, D, H * K), "layers_0/attention/out/kernel": (H, K, D)}  # fmt: skip
    weights = read_jax([Tensor(f"params/{name}", shape, "float32", lambda s=shape: np.ones(s)) for name, shape in shapes.items()])
    assert [m.fan_in for m in weights.matrices] == [None] * 4 + [H * K] and "nothing says which axes" in weights.matrices[0].unsaid
    assert [np.concatenate(list(m.blocks())).size for m in weights.matrices] == [np.prod(shape) for shape in shapes.values()]
