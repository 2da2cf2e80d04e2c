"""GPT-2's tensors and config.json both ways, bit for bit; what is no GPT-2, and what nothing represents.

With transformers: tests/parity/test_gpt2.py.
"""

import json

import pytest
from safetensors.numpy import load_file, save_file

from gammalm.config import leaves
from gammalm.errors import ConfigError
from gammalm.interop import gpt2
from gammalm.interop.export import OUR_CONFIG, export_hf
from gammalm.interop.import_ import import_hf

from .cases import HEADS, config_of, random_model, same

FREE = {"model.remat", "model.scan_unroll", "model.loss_chunk"}


def model_leaves(config):
    return {name: value for name, value in leaves(config).items() if name.startswith("model.") and name not in FREE}


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "activation": "relu", "max_positions": 30}])
def test_every_bit_and_leaf_comes_back(changes, tmp_path):
    config = config_of(changes, style="gpt2")
    params, _ = random_model(config)
    exported = export_hf(config, params, {}, tmp_path / "out")
    assert exported.target == "gpt2" and all(exported.passed_over.values())
    assert load_file(tmp_path / "out" / "model.safetensors")["transformer.h.1.attn.c_attn.weight"].shape == (24, 72)
    back = import_hf(tmp_path / "out")
    assert same(params, back.params) and leaves(back.config) == leaves(config)
    (tmp_path / "out" / OUR_CONFIG).unlink()
    back = import_hf(tmp_path / "out")
    assert same(params, back.params) and model_leaves(back.config) == model_leaves(config)


def test_the_layout_of_the_first_weights(tmp_path):
    """Names without a prefix, beside the masks that old files hold."""
    config = config_of({}, style="gpt2")
    params, _ = random_model(config)
    export_hf(config, params, {}, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = {name.removeprefix(gpt2.PREFIX): a for name, a in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": tensors["ln_f.bias"]}, file)
    assert same(import_hf(tmp_path / "out").params, params)


def test_what_is_no_gpt2(tmp_path):
    config = config_of({}, style="gpt2")
    params, _ = random_model(config)
    export_hf(config, params, {}, tmp_path / "out")
    (tmp_path / "out" / OUR_CONFIG).unlink()
    file = tmp_path / "out" / "config.json"
    hf = json.loads(file.read_text())
    for key, value in {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu_fast", "n_head": 5, "n_layer": None}.items():
        file.write_text(json.dumps(hf | {key: value}))
        with pytest.raises(ConfigError, match=key):
            import_hf(tmp_path / "out")


def test_parts_that_nothing_represents_are_refused(tmp_path):
    for changes, style, told in (
        (HEADS | {"norm": "layer"}, "gamma", "llama: model.norm=layer.*gpt2: model.ffn=dense.*gammalm: model.norm=layer"),
        ({"biases": False}, "gpt2", "gpt2: model.biases=False"),
        ({"n_kv_heads": 2}, "gpt2", "gpt2: 4 heads of 6 with 2 key heads"),
        (HEADS | {"residual": "post"}, "gamma", "gammalm: model.residual=post"),
    ):
        config = config_of(changes, style=style)
        with pytest.raises(ConfigError, match=f"(?s)cannot be exported.*{told}"):
            export_hf(config, random_model(config)[0], {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
