"""The specs written out by hand in conftest.py, on which the golden tables stand, are those that the real decoder declares."""

import pytest

from gammalm.config import load_config
from gammalm.models.decoder import param_specs

SIZES = dict(n_layers=2, d_model=64, n_heads=3, n_kv_heads=3, head_dim=32, d_ff=160, vocab_size=256)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gate", ["none", "headwise", "elementwise"])
def test_the_decoder_declares_these_specs(decoder_specs, gate, tied):
    changes = SIZES | dict(gate=gate, tie_embeddings=tied)
    config = load_config("lm:size=tiny", [(f"model.{name}", value) for name, value in changes.items()])
    assert param_specs(config.model) == decoder_specs(gate=gate, tied=tied)
