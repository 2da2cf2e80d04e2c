"""Several runs as one program: the same losses and states as one run at a time, whatever the mode and whether devices share the cells.

Shapes: C=4 cells with their own γ, ε, rate and decay; B=4 sequences, T=12 tokens. Tolerance 1e-5 in the loss: sums in another order.
"""

import jax
import numpy as np
import pytest

from gammalm.training.program import Program
from gammalm.training.step import scalars

from ..models.reference import small_config

C, B, T, V, STEPS, BROKEN = 4, 4, 12, 50, 3, 2
TOKEN_BYTES = np.arange(V, dtype=np.int32)
CELLS = {
    ffn: [
        small_config(
            spec="lm:vocab=50,seq_len=12,batch=4,steps=10,gate=headwise", ffn=ffn, seed=seed, init__gamma=gamma, norm_eps=eps,
            optimizer__learning_rate=rate, optimizer__weight_decay=decay, optimizer__warmup_steps=1, loss_chunk=8,
        )
        for seed, gamma, eps, rate, decay in (
            (0, 0.5, 1e-5, 1e-2, 0.1), (1, 1.0, 1e-1, 3e-2, 0.0), (2, 0.5, 1e-5, 1e-2, 0.1), (3, 1.0, 1e-12, 1e-3, 5.0)
        )
    ]
    for ffn in ("dense", "moe")
}  # fmt: skip
PROGRAMS = {
    "single": dict(devices=1),
    "map": dict(devices=1, cells=C, mode="map"),
    "vmap": dict(devices=2, cells=C, mode="vmap"),  # over data=2
    "shared out": dict(devices=4, cells=C, mode="map", cell_devices=2),  # two devices with two cells each, times data=2
}


def batch(cell, step):
    return {"tokens": np.random.default_rng(10 * step + cell).integers(0, V, (B, T + 1)).astype(np.int32)}


class Ran:
    """Three steps of every cell; the parameters of cell BROKEN hold one NaN from the start."""

    def __init__(self, configs, starts, devices, **how):
        self.program = p = Program(configs[0], TOKEN_BYTES, devices=jax.devices()[:devices], **how)
        place = lambda tree: jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), tree, p.abstract_state)  # noqa: E731
        each = [scalars(c) for c in configs]
        self.losses, self.halted = np.zeros((STEPS, C)), np.zeros((STEPS, C), bool)
        if p.cells is None:
            states = []
            for cell in range(C):
                state = place(starts[cell])
                for step in range(STEPS):
                    state, metrics = p.step(state, p.put([batch(cell, step)]), each[cell])
                    self.losses[step, cell], self.halted[step, cell] = metrics["loss"], metrics["halted"]
                states.append(state)
            self.sums = [p.validate(s, self.validation(), e["norm_eps"]) for s, e in zip(states, each, strict=True)]
        else:
            state = p.stack([place(start) for start in starts])
            together = p.scalars(each)
            for step in range(STEPS):
                state, metrics = p.step(state, p.put([batch(cell, step) for cell in range(C)]), together)
                self.losses[step], self.halted[step] = metrics["loss"], metrics["halted"]
            states = [p.pick(state, cell) for cell in range(C)]
            sums = p.validate(state, self.validation(), together["norm_eps"])
            self.sums = [{name: value[cell] for name, value in sums.items()} for cell in range(C)]
        self.states = jax.device_get(states)

    def validation(self):
        one = batch(0, 99) | {"weights": np.ones((B, T), np.float32)}
        return self.program.put([one] * (self.program.cells or 1))


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.full)])
def cells(request):
    return CELLS[request.param]


@pytest.fixture(scope="module")
def starts(cells):
    program = Program(cells[0], TOKEN_BYTES, devices=jax.devices()[:1])
    states = [jax.tree.map(np.array, program.init(c)) for c in cells]
    ffn = states[BROKEN]["params"]["layers"]["ffn"]
    ffn.get("shared", ffn)["up"][1, 3, 4] = np.nan
    return states


@pytest.fixture(scope="module")
def ran(cells, starts):
    made = {}

    def run(name):
        if name not in made:
            made[name] = Ran(cells, starts, **PROGRAMS[name])
        return made[name]

    return run


SOUND = [cell for cell in range(C) if cell != BROKEN]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "single"])
def test_together_as_alone(ran, name):
    """Losses, validation sums and parameters of each cell; none is disturbed by the broken one."""
    alone, together = ran("single"), ran(name)
    assert np.isfinite(alone.losses[:, SOUND]).all()
    np.testing.assert_allclose(together.losses[:, SOUND], alone.losses[:, SOUND], atol=1e-5)
    for cell in SOUND:
        for total, expected in alone.sums[cell].items():
            assert float(together.sums[cell][total]) == pytest.approx(float(expected), rel=1e-5)
        assert int(together.states[cell]["step"]) == STEPS
        for ours, theirs in zip(*(jax.tree.leaves(r.states[cell]["params"]) for r in (together, alone)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_broken_cell_halts_alone(ran, starts, name):
    found = ran(name)
    assert found.halted[:, BROKEN].all() and not found.halted[:, SOUND].any()
    assert jax.tree.structure(found.states[BROKEN]) == jax.tree.structure(starts[BROKEN])
    for now, before in zip(*(jax.tree.leaves(s["params"]) for s in (found.states[BROKEN], starts[BROKEN])), strict=True):
        np.testing.assert_array_equal(now, before)


def test_cells_differ_by_each_of_their_scalars(ran):
    """The losses of the sound cells part: nothing is shared that should be each cell's own."""
    last = ran("single").losses[-1, SOUND]
    assert min(abs(a - b) for i, a in enumerate(last) for b in last[:i]) > 1e-4


@pytest.mark.parametrize("name", ["map", "shared out"])
def test_stack_and_pick_are_inverse(ran, starts, name):
    """Bit for bit, NaN included, and placed as a single run's state: one checkpoint per cell is that of a single run."""
    p = ran(name).program
    place = lambda tree: jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), tree, p.abstract_state)  # noqa: E731
    stacked = p.stack([place(start) for start in starts])
    for cell in (0, BROKEN, C - 1):
        picked = p.pick(stacked, cell)
        for ours, theirs, like in zip(*map(jax.tree.leaves, (picked, starts[cell], p.abstract_state)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert (ours.shape, ours.dtype, ours.sharding) == (like.shape, like.dtype, like.sharding)
