"""`gamma_init_` on modules of torch and random models of transformers: which parameters it touches, and the std of each by its own fan-in.

Fan-ins are written out by hand from each model's sizes, by what its layers compute. Sampling error of a standard deviation from n values:
1/√(2n); the tolerance is 5 times that. Sizes differ from each other, so that a fan-in taken from another axis shows.
"""

import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from gammalm.interop.torch import _zero_row, format_rows, gamma_init_  # noqa: E402

from ..initializers.any_recipe import recipe  # noqa: E402

V, D, F, HEADS, SIZE, POSITIONS = 300, 64, 160, 4, 24, 48
E, F_E, RANK_Q, RANK_KV, ROPE, NOPE, SIZE_V, SHARED = 5, 40, 33, 20, 8, 12, 18, 2
COMMON = dict(vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=HEADS, max_position_embeddings=POSITIONS)
GQA = COMMON | dict(intermediate_size=F, num_key_value_heads=2, head_dim=SIZE, tie_word_embeddings=False)
ATTENTION = {"(embed_tokens|lm_head).weight": D, "[qkv]_proj.weight": D, "o_proj.weight": HEADS * SIZE}
DENSE = ATTENTION | {"mlp.(gate|up)_proj.weight": D, "mlp.down_proj.weight": F}
MIXED = {"mlp.gate.weight": D, "mlp.experts.gate_up_proj": D, "mlp.experts.down_proj": F_E}

# Family -> (config, {pattern over the end of a name: fan-in}). What no pattern names is a norm, which stays, or a bias, which becomes 0.
FAMILIES = {
    "llama": (lambda: transformers.LlamaConfig(**GQA), DENSE),
    "llama, tied, biases": (lambda: transformers.LlamaConfig(**GQA | dict(tie_word_embeddings=True, attention_bias=True)), DENSE),
    "qwen3": (lambda: transformers.Qwen3Config(**GQA), DENSE),
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=HEADS, n_inner=F, n_positions=POSITIONS),
        {"wte.weight": D, "wpe.weight": D, "attn.c_(attn|proj).weight": D, "mlp.c_fc.weight": D, "mlp.c_proj.weight": F},
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**GQA | dict(intermediate_size=F_E, num_local_experts=E, num_experts_per_tok=2)),
        ATTENTION | MIXED,
    ),
    "deepseek-v3": (
        lambda: transformers.DeepseekV3Config(
            **COMMON, intermediate_size=F, moe_intermediate_size=F_E, num_key_value_heads=HEADS, n_routed_experts=E, num_experts_per_tok=2,
            n_shared_experts=SHARED, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=RANK_Q, kv_lora_rank=RANK_KV,
            qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=SIZE_V,
        ),
        {"(embed_tokens|lm_head).weight": D, "(q_a|kv_a)_proj(_with_mqa)?.weight": D, "q_b_proj.weight": RANK_Q,
         "kv_b_proj.weight": RANK_KV, "o_proj.weight": HEADS * SIZE_V, "(mlp|shared_experts).(gate|up)_proj.weight": D,
         "mlp.down_proj.weight": F, "shared_experts.down_proj.weight": SHARED * F_E} | MIXED,
    ),
    "qwen3-moe": (
        lambda: transformers.Qwen3MoeConfig(**GQA, moe_intermediate_size=F_E, num_experts=E, num_experts_per_tok=2), ATTENTION | MIXED,
    ),
}  # fmt: skip


def measured(tensor, fan_in, gamma, of):
    """The std of the tensor, and of each matrix of a stack, is fan_in^(−γ); its mean is 0."""
    for matrix in tensor.double() if tensor.ndim == 3 else [tensor.double()]:
        std, n = fan_in**-gamma, matrix.numel()
        assert matrix.std().item() == pytest.approx(std, rel=5 / (2 * n) ** 0.5), of
        assert abs(matrix.mean().item()) < 5 * std / n**0.5, of


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    make, fan_ins = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(make())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rows = {row.name: row for row in gamma_init_(model, gamma=0.75, seed=1)}
    parameters = dict(model.named_parameters())
    assert rows.keys() == parameters.keys()
    seen = set()
    for name, parameter in parameters.items():
        (*patterns,) = [pattern for pattern in fan_ins if re.search(rf"(^|\.){pattern}$", name)]
        seen.update(patterns)
        row = rows[name]
        if patterns:
            (pattern,) = patterns
            measured(parameter, fan_ins[pattern], 0.75, name)
            assert (row.action, row.fan_in, row.std) == ("drawn", fan_ins[pattern], pytest.approx(fan_ins[pattern] ** -0.75))
        elif name.endswith("bias") and "norm" not in name and "ln_" not in name:
            assert row.action == "zero" and (parameter == 0).all(), name
        else:
            assert "norm" in name or "ln_" in name
            assert row.action == "kept" and (parameter == 7).all(), name
    assert seen == set(fan_ins)
    tied = model.config.tie_word_embeddings
    assert [row.tied for row in rows.values() if row.tied] == ([("lm_head.weight",)] if tied else [])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_stacks_in_both_layouts():
    """GPT-OSS says that its experts are (E, in, out), Llama 4's two stacks fit no other way, JetMoe names its sizes; and a router."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    sizes = dict(hidden_size=D, intermediate_size=F_E, num_local_experts=E, num_experts_per_tok=2)
    oss, four = transformers.GptOssConfig(**sizes), transformers.Llama4TextConfig(**sizes)
    modules = torch.nn.ModuleList([GptOssExperts(oss), Llama4TextExperts(four), JetMoeParallelExperts(E, F_E, D), GptOssTopKRouter(oss)])
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.fill_(7)
    gamma_init_(modules, seed=2)
    for module in modules[:2]:
        measured(module.gate_up_proj, D, 1.0, "gate_up")
        measured(module.down_proj, F_E, 1.0, "down")
    measured(modules[2].weight, F_E, 1.0, "jetmoe")
    measured(modules[3].weight, D, 1.0, "router")
    assert not any(bias.any() for bias in (modules[0].gate_up_proj_bias, modules[0].down_proj_bias, modules[3].bias))


class NormOfNoKind(torch.nn.Module):
    """Says that it is a norm and holds a matrix."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((30, 20), 7.0))


class Own(torch.nn.Module):
    """A layer that nothing is known of: a matrix, a vector that ends in bias, and an embedding with padding."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((30, 20), 7.0))
        self.dt_bias = torch.nn.Parameter(torch.full((30,), 7.0))
        self.table = torch.nn.Embedding(200, 16, padding_idx=3)


@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_of_torch():
    nn = torch.nn
    module = nn.ModuleDict({
        "conv": nn.Conv2d(12, 60, 3, groups=3), "up": nn.ConvTranspose1d(12, 60, 5, groups=2),
        "attention": nn.MultiheadAttention(24, 4, kdim=10),
        "lstm": nn.LSTM(30, 20, num_layers=2), "cell": nn.GRUCell(30, 20), "norm": nn.LayerNorm((4, 6)), "batch": nn.BatchNorm1d(6),
    })  # fmt: skip
    gains = module["norm"].weight.detach().clone()
    rows = {row.name: row for row in gamma_init_(module, gamma=0.5, seed=3)}
    expected = {"conv.weight": 36, "up.weight": 30, "attention.q_proj_weight": 24, "attention.k_proj_weight": 10,
                "attention.v_proj_weight": 24, "attention.out_proj.weight": 24, "lstm.weight_ih_l0": 30, "lstm.weight_hh_l0": 20,
                "lstm.weight_ih_l1": 20, "lstm.weight_hh_l1": 20, "cell.weight_ih": 30, "cell.weight_hh": 20}  # fmt: skip
    assert {name: row.fan_in for name, row in rows.items() if row.action == "drawn"} == expected
    for name, fan_in in expected.items():
        measured(dict(module.named_parameters())[name].flatten(1), fan_in, 0.5, name)
    assert {row.action for name, row in rows.items() if "bias" in name} == {"zero", "kept"}
    assert {name for name, row in rows.items() if row.action == "kept"} == {f"{norm}.{part}" for norm in ("norm", "batch")
                                                                            for part in ("weight", "bias")}  # fmt: skip
    assert torch.equal(module["norm"].weight, gains)


def test_the_unknown_is_named_and_left():
    module = Own()
    with pytest.warns(UserWarning, match=r"(?s)leaves 2 parameters.*w \(30, 20\) in Own.*dt_bias \(30,\)") as caught:
        rows = gamma_init_(module, seed=0)
    assert caught[0].filename == __file__
    assert {row.name: row.action for row in rows} == {"w": "unknown", "dt_bias": "unknown", "table.weight": "drawn"}
    assert (module.w == 7).all() and (module.dt_bias == 7).all()
    assert "unknown" in format_rows(rows) and "0.0625" in format_rows(rows)
    assert (module.table.weight[3] == 0).all() and module.table.weight[4].all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gamma_init_(module, 1.0, gammas={"table": 0.5, "w": 0.25}, fan_ins={"^w$": 20, "dt": None}, seed=0)
    measured(module.w.detach(), 20, 0.25, "w")
    measured(module.table.weight.detach()[4:], 16, 0.5, "table")  # the first pattern found in table.weight, which has a w too


def test_a_matrix_is_no_gain_and_a_layer_may_stand_twice():
    layer = torch.nn.Linear(40, 30, bias=False)
    with pytest.warns(UserWarning, match=r"weight \(30, 20\) in NormOfNoKind"):
        rows = gamma_init_(torch.nn.ModuleList([layer, NormOfNoKind(), layer]))
    assert [(row.name, row.action, row.tied) for row in rows] == [("0.weight", "drawn", ("2.weight",)), ("1.weight", "unknown", ())]


class ReadingGate(torch.nn.Module):
    """Its name says a router of transformers, (experts, D); its weight is (D, experts)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((30, 4), 7.0))


def test_a_gate_of_another_layout_and_quantized_numbers_are_left():
    kinds = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
    layers = [torch.nn.Linear(40, 30, bias=False) for _ in kinds]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.weight = torch.nn.Parameter(torch.full((30, 40), 7.0).to(kind), requires_grad=False)
    module = torch.nn.ModuleList([ReadingGate(), *layers])
    with pytest.warns(UserWarning, match="leaves 3 parameters"):
        rows = gamma_init_(module, seed=0)
    assert [row.action for row in rows] == ["unknown", "unknown", "unknown", "drawn"]
    assert all((p.float() == 7).all() for p in list(module.parameters())[:3])
    with pytest.raises(ValueError, match=r"1.weight is quantized \(torch.int8\)"):
        gamma_init_(module, fan_ins={"weight": 40})


def drawn(gamma=1.0, dtype=torch.float32, extra=False, **how):
    layers = [torch.nn.Linear(40, 30), torch.nn.Embedding(100, 40)]
    module = torch.nn.Sequential(*layers, *([torch.nn.Linear(5, 5)] if extra else [])).to(dtype)
    gamma_init_(module, gamma, **how)
    return [module[0].weight.detach(), module[1].weight.detach()]


def test_seeds_and_dtypes():
    base = drawn(seed=5)
    for other, factor in ((drawn(seed=5, extra=True), 1.0), (drawn(0.5, seed=5), 40**0.5)):
        assert all(torch.allclose(a * factor, b, rtol=1e-5) for a, b in zip(base, other, strict=True))
    assert not torch.equal(base[0], drawn(seed=6)[0]) and not torch.equal(base[0].flatten()[:1000], base[1].flatten()[:1000])
    for a, b in zip(base, drawn(seed=5, dtype=torch.bfloat16), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.to(torch.bfloat16), b)
    first, second = (drawn(generator=torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(a.double(), b) for a, b in zip(base, drawn(seed=5, dtype=torch.float64), strict=True))
    torch.manual_seed(4)
    module = torch.nn.Linear(40, 30)
    state = torch.get_rng_state()
    gamma_init_(module)
    torch.set_rng_state(state)
    assert torch.equal(module.weight, torch.empty(30, 40).normal_(0, 1 / 40))


def test_drawn_in_parts(monkeypatch):
    """A parameter of more than CHUNK numbers, of which some are strided: every number is drawn, with the same std."""
    monkeypatch.setattr("gammalm.interop.torch.CHUNK", 1000)
    module = torch.nn.Linear(64, 130, bias=False)
    module.weight = torch.nn.Parameter(torch.zeros(64, 130).T)
    module.experts_EFD = torch.nn.Parameter(torch.zeros(3, 30, 50))  # one expert is larger than a part
    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **how: sizes.append(shape.numel()) or empty(shape, **how))
    gamma_init_(module, fan_ins={"experts": 50}, seed=0)
    measured(module.weight.detach(), 64, 1.0, "strided")
    measured(module.experts_EFD.detach(), 50, 1.0, "experts")
    assert sum(sizes) == 64 * 130 + 3 * 30 * 50 and max(sizes) <= 1000
    assert module.weight.all() and len(module.weight.unique()) > 8000


def test_refusals():
    module = torch.nn.Linear(40, 30)
    with torch.no_grad():
        module.weight.fill_(7)
    for arguments, message in (
        (dict(gamma=-1), "gamma must be"), (dict(gamma=True), "gamma must be"), (dict(gammas={"weight": "1"}), r"gammas\['weight'\]"),
        (dict(fan_ins={"weight": 0}), "whole number"), (dict(fan_ins={"wieght": 3}), "decides nothing"),
        (dict(gammas={"(": 0.5}), r"gammas\['\('\] is no regular expression"),
        (dict(gammas={"bias": 0.5}), "decides nothing"), (dict(seed=1, generator=torch.Generator()), "not both"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gamma_init_(module, **arguments)
    assert (module.weight == 7).all()
    with torch.device("meta"):
        absent = torch.nn.Linear(40, 30)
    with pytest.raises(ValueError, match=r"weight, bias: on the meta device.*to_empty"):
        gamma_init_(absent)
    gamma_init_(absent.to_empty(device="cpu"), seed=0)
    measured(absent.weight.detach(), 40, 1.0, "materialized")
    module.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match="before wrapping"):
        gamma_init_(module)
    with pytest.warns(UserWarning, match=r"leaves 1 parameters.*\n  0.weight \(9, 6\)"):
        (row,) = [row for row in gamma_init_(tied_apart()) if row.action == "unknown"]
    assert row.tied == ("1.weight",)


def tied_apart():
    """One matrix as an embedding of width 6 and as a Conv1D of transformers that reads 9."""
    table, projection = torch.nn.Embedding(9, 6), transformers.pytorch_utils.Conv1D(6, 9)
    projection.weight = table.weight
    return torch.nn.ModuleList([table, projection])


def test_sharded_tensors_on_cpus_are_refused(tmp_path):
    distributed = torch.distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module = torch.nn.Linear(40, 30)
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(ValueError, match="weight: a DTensor on CPUs"):
            gamma_init_(module)
    finally:
        distributed.destroy_process_group()


def test_the_row_of_padding_of_a_sharded_table():
    """Rows of a sharded DTensor are copies: the row is set to 0 in the shard that has it."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # one process stands for both
    try:
        mesh = init_device_mesh("cpu", (2,))
        for axis, shape in ((0, (4, 6)), (1, (8, 3))):
            table = torch.nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(axis)], src_data_rank=None))
            with torch.no_grad():
                _zero_row(table, 3)
            shard = table.to_local()
            assert shard.shape == shape and not shard[3].any() and shard.sum() == shard.numel() - shape[1]
    finally:
        torch.distributed.destroy_process_group()


def test_the_file_alone_is_enough(tmp_path):
    """A copy under another name works where neither gammalm nor JAX can be imported, and imports neither."""
    import gammalm.interop.torch as ours

    shutil.copy(ours.__file__, tmp_path / "gamma_init.py")
    code = ("import sys, torch; from gamma_init import gamma_init_; gamma_init_(torch.nn.Linear(4, 3)); "
            "assert not {'jax', 'gammalm', 'numpy.f2py'} & set(sys.modules)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imports = re.findall(r"^(?:from|import) (\w+)", Path(ours.__file__).read_text("utf-8"), re.MULTILINE)
    assert set(imports) - set(sys.stdlib_module_names) == {"torch"}


def test_the_recipes_for_modules(capsys):
    model = recipe("torch")["model"]
    measured(model[3].weight.detach(), 512, 1.0, "torch")
    assert "0.00390625" in capsys.readouterr().out
    for mark, width in (("transformers", 688), ("transformers, meta device", 172)):
        model = recipe(mark)["model"].model
        measured(model.layers[1].mlp.down_proj.weight.detach(), width, 1.0, mark)
        assert (model.norm.weight == 1).all()
    assert torch.isfinite(model(torch.arange(9)[None]).last_hidden_state).all()  # rotary buffers were filled


def test_the_recipe_for_torchtitan():
    names = recipe("torchtitan")
    for init in (names["_LINEAR_INIT"], names["_EMBEDDING_INIT"], names["_output_linear_init"](D), names["_depth_init"](3)):
        weight = torch.empty(F, D)
        init["weight"](weight)
        measured(weight, D, 1.0, "torchtitan")


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_recipe_for_megatron(on_cpu):
    """What reads the whole input goes by its own shape; what reads a share of it by the share times the ranks. A vector becomes 0."""
    config = types.SimpleNamespace(
        use_cpu_initialization=on_cpu, tensor_model_parallel_size=4, expert_tensor_parallel_size=None, num_moe_experts=None if on_cpu else E
    )
    recipe("megatron")["set_gamma"](config)
    share = 1 if on_cpu else 4
    for init, shape, fan_in in (
        (config.init_method, (3 * D // 4, D), D),
        (config.embedding_init_method, (V, D), D),
        (config.output_layer_init_method, (D, F // share), F),
    ):
        measured(init(torch.empty(shape)), fan_in, 1.0, "megatron")  # its attention keeps what is returned
        assert not init(torch.ones(E)).any()
    config.num_moe_experts, config.use_cpu_initialization = E, True
    with pytest.raises(AssertionError):
        recipe("megatron")["set_gamma"](config)
