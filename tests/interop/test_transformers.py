"""transformers on torch (fp32, CPU, eager attention) computes with an exported folder what we compute, and we with what it saved.

The bound is 1e-4 of the largest logit. Mixtures are compared where no choice of an expert hangs on rounding: the margin between the
last chosen and the first left out is measured on transformers' side and has to exceed 1e-3 for every token and layer.
"""

import jax
import numpy as np
import pytest

from gammalm.interop.export import export_hf
from gammalm.interop.import_ import import_hf
from gammalm.interop.table import entries
from gammalm.interop.targets import TARGETS
from gammalm.models.decoder import Model
from gammalm.training.step import loss_and_gradients
from gammalm.trees import flat

from .cases import CASES, config_of, random_model, same

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

FAMILIES = [name for name, (target, _) in CASES.items() if target != "gammalm"]
T = 7
MARGIN = 1e-3
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # its grouped products ask for sizes in multiples of four


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """At these shapes torch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder, **arguments):
    """transformers' model of a folder; every tensor of the folder must have been used, and none made up."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **(arguments or EAGER))
    assert not any(info.values()), info
    return model.float().eval()


def torch_logits(model, tokens):
    """Logits [B, T, V] and the smallest margin of any choice of experts (infinite without mixtures)."""
    margins = [np.inf]

    def watch(router, _, output):
        scores = output[0].sigmoid() + router.e_score_correction_bias
        best = scores.topk(router.top_k + 1, dim=-1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())

    routers = [module for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    for hook in hooks:
        hook.remove()
    assert len(margins) == len(routers) + 1
    return logits, min(margins)


def decided(model, seed=0):
    """Random tokens [2, T] for which no choice is close, and the logits for them."""
    for tokens in np.random.default_rng(seed).integers(0, model.config.vocab_size, (60, 2, T)):
        logits, margin = torch_logits(model, tokens)
        if margin > MARGIN:
            return tokens, logits
    raise AssertionError("no tokens with a clear choice of experts")


def our_logits(config, params, buffers, tokens):
    model = Model(config.model)
    compute = jax.jit(lambda p, b, t: model.bind(p, b).logits(t, None, config.model.norm_eps))
    return np.asarray(compute(params, buffers, tokens))


def assert_close(ours, theirs):
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_ours_in_transformers(name, tmp_path):
    config = config_of(CASES[name][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out", max_shard=20_000)
    model = load(tmp_path / "out")
    assert type(model).__name__ == TARGETS[CASES[name][0]].architecture
    tokens, logits = decided(model)
    assert_close(our_logits(config, params, buffers, tokens), logits)


@pytest.mark.parametrize("name", ["own: latent with gate", "own: softmax router"])
def test_ours_in_our_own_modelling_file(name, tmp_path, monkeypatch):
    """The whole folder as `transformers` takes it up, code included; test_portable.py compares every kind of model."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = config_of(CASES[name][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out", max_shard=20_000)
    model = load(tmp_path / "out", trust_remote_code=True)
    tokens = np.random.default_rng(0).integers(0, 50, (2, T))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    assert_close(our_logits(config, params, buffers, tokens), logits)


@pytest.mark.parametrize("name, sharded", [*((name, False) for name in FAMILIES), ("llama, tied", True), ("glm4-moe", True)])
def test_transformers_own_in_ours(name, sharded, tmp_path):
    """A model that transformers initialized and saved itself; its gains and selection bias are made random first."""
    config = config_of(CASES[name][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "shape")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "shape")
    theirs.initializer_range = 0.3
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(theirs, **EAGER).float().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith("e_score_correction_bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
    tokens, logits = decided(model)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB" if sharded else "5GB")
    assert (tmp_path / "saved" / "model.safetensors").exists() != sharded
    back = import_hf(tmp_path / "saved")
    assert_close(our_logits(back.config, back.params, back.buffers, tokens), logits)
    if "qwen3-next" in name:
        return  # gain - 1 has more bits than gain, which is what it computes with
    # And out again: what transformers then loads has the numbers it saved.
    export_hf(back.config, back.params, back.buffers, tmp_path / "again", target=CASES[name][0])
    before, after = model.state_dict(), load(tmp_path / "again").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_rotary_channels_in_halves(tmp_path):
    """DeepSeek-V3 with rope_interleave false: the rotary channels are stored as ours are."""
    config = config_of(CASES["deepseek-v3, dense"][1])
    export_hf(config, *random_model(config), tmp_path / "shape")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "shape", rope_interleave=False)
    theirs.initializer_range = 0.3
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(theirs, **EAGER).float().eval()
    model.save_pretrained(tmp_path / "saved")
    tokens, logits = decided(model)
    back = import_hf(tmp_path / "saved")
    assert_close(our_logits(back.config, back.params, back.buffers, tokens), logits)


def test_experts_saved_as_one_tensor(tmp_path):
    """The form that transformers 5 holds in memory, gate and up fused and experts stacked, is read as well."""
    config = config_of(CASES["glm4-moe"][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out")
    model = load(tmp_path / "out")
    names = [name for name, _ in model.named_parameters() if "experts.gate_up_proj" in name]
    assert len(names) == 2  # else nothing here is fused
    from safetensors.torch import save_file

    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    back = import_hf(tmp_path / "out")
    assert same(back.params, params) and same(back.buffers, buffers)


@pytest.mark.parametrize("name", ["llama, untied, large epsilon", "deepseek-v3, q latent, first layer dense"])
def test_gradients_of_one_step(name, tmp_path):
    """Next-token loss: the gradient of every parameter, arranged as the export arranges parameters, is torch's."""
    config = config_of(CASES[name][1] | ({"moe.balance_loss": 0.0} if "deepseek" in name else {}))
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "out")
    model = load(tmp_path / "out")
    tokens, _ = decided(model)
    loss = model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()
    ours = Model(config.model)
    step = jax.jit(lambda p: loss_and_gradients(ours, p, buffers, {"tokens": tokens}, config.model.norm_eps, 1))
    our_loss, gradients, *_ = step(params)
    assert float(our_loss) == pytest.approx(loss.item(), rel=1e-5)
    gradients = flat(jax.tree.map(np.asarray, gradients))
    theirs = {key: tensor.grad.numpy() for key, tensor in model.named_parameters()}
    checked = set()
    fused = config.model.ffn == "moe"
    for entry in entries(config.model, fused=fused):
        if entry.name.endswith("e_score_correction_bias"):
            continue
        reference = theirs[entry.name]
        ours = entry.pack([gradients[part.path][part.index] for part in entry.parts])
        assert np.abs(ours - reference).max() <= 1e-4 * np.abs(reference).max(), entry.name
        checked.add(entry.name)
    assert checked == theirs.keys()
