"""Which configs share a compiled program, and what one program computes: validation sums and a falling loss.

Shapes: B=4 sequences, T=12 tokens, V=50.
"""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gammalm.training.program import Program, Programs, signature
from gammalm.training.step import scalars

from ..models.reference import log_softmax, logits_of, random_params, small_config

B, T, V = 4, 12, 50
TOKEN_BYTES = np.random.default_rng(5).integers(0, 9, V).astype(np.int32)
SHARED = dict(
    seed=3, init__gamma=0.25, init__rules=("q=zeros",), norm_eps=0.5, optimizer__learning_rate=7.0, optimizer__weight_decay=0.9,
    train__checkpoints_kept=7, train__spike_rollbacks=9,
)  # fmt: skip
OWN = dict(
    gate="headwise", d_ff=24, tie_embeddings=False, optimizer__b1=0.5, optimizer__clip=0.0, optimizer__schedule="wsd",
    optimizer__no_decay=(), train__steps=11, batch__sequences=6, batch__micro_batches=2, data__packing="documents", data__seq_len=13,
    data__path="elsewhere", mesh__fsdp=2, optimizer__warmup_steps=1, remat="full",
    train__spike="skip", init__preset="mup", optimizer__kind="muon",
)  # fmt: skip


def config(**changes):
    return small_config("lm:vocab=50,seq_len=12,batch=4,steps=10,gate=none", **changes)


@pytest.mark.parametrize("leaf", SHARED)
def test_configs_that_share_a_program(leaf):
    assert signature(config(**{leaf: SHARED[leaf]})) == signature(config())


@pytest.mark.parametrize("leaf", OWN)
def test_configs_that_need_their_own(leaf):
    assert signature(config(**{leaf: OWN[leaf]})) != signature(config())


def test_mup_shares_by_what_its_learning_rates_come_from():
    mup = dict(init__preset="mup", init__base_width=12)
    assert signature(config(**mup, init__gamma=0.25)) == signature(config(**mup))
    assert signature(config(**mup | {"init__base_width": 24})) != signature(config(**mup))
    assert signature(config(init__base_width=24)) == signature(config())


def test_programs_are_made_once():
    made = Programs()
    how = dict(cells=2, mode="map")
    first = made.get(config(batch__sequences=8), TOKEN_BYTES, **how)
    assert made.get(config(batch__sequences=8, seed=1, init__gamma=0.25), TOKEN_BYTES, **how) is first
    assert made.get(config(batch__sequences=8), TOKEN_BYTES, cells=2, mode="vmap") is not first
    assert made.get(config(batch__sequences=8), TOKEN_BYTES + 1, **how) is not first
    assert made.get(config(batch__sequences=8, gate="headwise"), TOKEN_BYTES, **how) is not first


@pytest.fixture(scope="module")
def program():
    return Program(config(optimizer__learning_rate=0.02, optimizer__warmup_steps=0), TOKEN_BYTES, devices=jax.devices()[:1])


def test_validation_sums(program):
    """Nats, tokens and bytes of text over the counted targets, against the float64 model: documents, padding and padded rows."""
    rng = np.random.default_rng(0)
    params = random_params(program.model.specs)
    tokens, weights = rng.integers(0, V, (B, T + 1)).astype(np.int32), (rng.uniform(size=(B, T)) < 0.7).astype(np.float32)
    weights[3] = 0
    state = {"params": params, "buffers": {}}
    found = program.validate(state, program.put([{"tokens": tokens, "weights": weights}]), program.config.model.norm_eps)
    logp = np.stack([log_softmax(logits_of(params, program.config.model, row)) for row in tokens[:, :-1]])
    losses = -np.take_along_axis(logp, tokens[:, 1:, None], 2)[..., 0]
    assert float(found["nats"]) == pytest.approx((losses * weights).sum(), rel=1e-5)
    assert float(found["tokens"]) == weights.sum()
    assert float(found["bytes"]) == (TOKEN_BYTES[tokens[:, 1:]] * weights).sum()


def test_the_loss_falls_on_a_repeated_batch(program):
    """From about ln V to below half of it in 60 steps: the model can learn by heart 48 tokens."""
    c = program.config
    state = program.init(c)
    batch = program.put([{"tokens": np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)}])
    losses = []
    for _ in range(60):
        state, metrics = program.step(state, batch, scalars(c))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(V), abs=1.0)
    assert losses[-1] < 0.5 * losses[0]


def test_the_largest_seed(program):
    """config_checks allows 0 to 2**32 - 1, beyond int32."""
    tables = [np.asarray(program.init(config(seed=seed))["params"]["embed"]["table"]) for seed in (2**32 - 1, 2**31, 0)]
    assert all(np.isfinite(t).all() for t in tables)
    assert not (tables[0] == tables[1]).any() and not (tables[1] == tables[2]).any()


@pytest.mark.parametrize(("devices", "kept"), [(1, True), (2, False)])
def test_steps_over_several_cpu_devices_are_not_kept_compiled(tmp_path, devices, kept):
    """What XLA:CPU reads back of them hangs; everything else is kept, and the setting is left as it was."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        c = config(mesh__data=devices, d_ff=40 + 8 * devices)  # a shape that no other test has compiled
        program = Program(c, TOKEN_BYTES, devices=jax.devices()[:devices])
        state = program.init(c)
        batch = program.put([{"tokens": np.zeros((B, T + 1), np.int32)}])
        jax.block_until_ready(program.step(state, batch, program.scalars([scalars(c)])))
        assert any("jit_step" in file.name for file in tmp_path.iterdir()) == kept, [file.name for file in tmp_path.iterdir()]
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()
