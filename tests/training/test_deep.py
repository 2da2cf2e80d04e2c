"""What the presets for deep stacks are for: a decoder of 48 layers that trains from its first step on at the peak rate, or without norms,
where its like without the preset does not. Width 32, a language in which nine of ten tokens follow from the one before.

Guessing costs ln 32 = 3.47 nats, knowing the language .65. Shapes: B sequences, T tokens, N steps.
"""

import jax
import numpy as np
import pytest

from gammalm.config import load_config, validate
from gammalm.models.decoder import Model
from gammalm.training.step import init_state, make_step, scalars

VOCAB, T, B, STEPS = 32, 32, 8, 120
SMALL = {
    "model.d_model": 32, "model.n_layers": 48, "model.n_heads": 2, "model.n_kv_heads": 2, "model.head_dim": 16, "model.d_ff": 64,
    "model.dtype": "float32", "model.residual_dtype": "float32", "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.0,
}  # fmt: skip
FOLLOWS = np.random.default_rng(0).permutation(VOCAB)


def language():
    """Batches [N, B, T+1]: each token is followed by FOLLOWS of it, one in ten by any."""
    rng = np.random.default_rng(1)
    tokens_NBT = rng.integers(0, VOCAB, (STEPS, B, T + 1)).astype(np.int32)
    for t in range(T):
        follows = FOLLOWS[tokens_NBT[:, :, t]]
        tokens_NBT[:, :, t + 1] = np.where(rng.random((STEPS, B)) < 0.1, tokens_NBT[:, :, t + 1], follows)
    return tokens_NBT


def losses(preset, **changes):
    """Training loss of every step at the rate 3e-3, with clipping at 1; NaN from a step on that is not finite."""
    named = SMALL | {f"model.{name}": value for name, value in changes.items()}
    spec = f"lm:size=tiny,style=gpt2,preset={preset},vocab={VOCAB},seq_len={T},batch={B},steps={STEPS},lr=3e-3"
    c = validate(load_config(spec, named.items()))
    model = Model(c.model)
    step = make_step(model, c)

    @jax.jit
    def train(state, tokens_NBT):
        def one(state, tokens_BT):
            state, found = step(state, {"tokens": tokens_BT}, scalars(c))
            return state, found["loss"]

        return jax.lax.scan(one, state, tokens_NBT)[1]

    return np.asarray(train(init_state(model, c, 0), language()))


@pytest.mark.full
def test_deepnorm_and_scale_by_depth_train_without_warm_up_where_post_norm_does_not():
    assert losses("deepnorm")[-10:].mean() < 1
    assert losses("depth_scaled", residual="post")[-10:].mean() < 1
    assert losses("xavier_normal", residual="post")[-10:].mean() > 3.3


@pytest.mark.full
def test_fixup_trains_without_norms_where_a_standard_initialization_does_not():
    assert losses("fixup")[-10:].mean() < 1
    assert not losses("kaiming_normal", norm="none")[-10:].mean() < 3.3  # it may not be finite
