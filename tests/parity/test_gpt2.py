"""GPT-2 of transformers and `lm:style=gpt2`, fp32 on CPU: logits with its weights read by us and with ours read by it, loss and gradients.

Every parameter is random, biases and gains too, so that none hides. Shapes: B=2 sequences, T=20 tokens.
"""

import jax
import numpy as np
import pytest

from gammalm.interop.export import export_hf
from gammalm.interop.import_ import import_hf
from gammalm.interop.table import gpt2_entries
from gammalm.models.decoder import Model
from gammalm.training.step import loss_and_gradients
from gammalm.trees import flat

from ..interop.cases import config_of, random_model, same

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

T = 20
TOKENS = np.random.default_rng(1).integers(0, 50, (2, T + 1))


def theirs(**changes):
    """A random GPT-2 of three layers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=T, n_embd=24, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None,
                                     **changes)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def agree(a, b, what=""):
    """1e-4 of the largest value: two fp32 implementations with sums in different orders."""
    np.testing.assert_allclose(a, b, atol=1e-4 * abs(b).max(), rtol=0, err_msg=what)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 0.3}]
)
def test_its_weights_give_its_logits_loss_and_gradients(changes, tmp_path):
    model = theirs(**changes)
    model.save_pretrained(tmp_path)
    found = import_hf(tmp_path)
    ours, c = Model(found.config.model), found.config.model
    logits = model(torch.from_numpy(TOKENS[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(TOKENS[:, 1:]).flatten())
    loss.backward()
    agree(jax.jit(lambda p: ours.bind(p).logits(TOKENS[:, :-1], None, c.norm_eps))(found.params), logits.detach().numpy())
    our_loss, gradients, *_ = jax.jit(lambda p: loss_and_gradients(ours, p, {}, {"tokens": TOKENS}, c.norm_eps, 1))(found.params)
    assert float(our_loss) == pytest.approx(loss.item(), rel=1e-5)
    reached, gradients = dict(model.named_parameters()), {path: np.asarray(a) for path, a in flat(gradients).items()}
    for entry in gpt2_entries(c):
        packed = entry.pack([gradients[part.path][part.index] for part in entry.parts])
        agree(packed, reached[entry.name].grad.numpy(), entry.name)


def test_our_export_is_its_model(tmp_path):
    config = config_of({"norm_eps": 1e-5, "d_ff": 30}, style="gpt2")
    params, _ = random_model(config)
    assert export_hf(config, params, {}, tmp_path / "out").target == "gpt2"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is transformers.GPT2LMHeadModel and not any(info.values()), info
    tokens = TOKENS[:, :12]
    with torch.no_grad():
        logits = model.float().eval()(torch.from_numpy(tokens)).logits.numpy()
    agree(jax.jit(lambda p: Model(config.model).bind(p).logits(tokens, None, 1e-5))(params), logits)
    assert same(import_hf(tmp_path / "out").params, params)
