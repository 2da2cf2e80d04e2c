"""The grid of sink remedies: five arms that differ in the remedy alone."""

from gammalm.config import leaves
from gammalm.experiments.grid import load_grid


def test_the_arms_differ_in_the_remedy_alone():
    cells = load_grid("grids/sink_remedies").cells
    assert len(cells) == 5 * 2 * 3 * 3 and cells[0].name == "none-gamma0.5-lr0.003-seed0"
    seen, rest = {}, set()
    for cell in cells:
        config = leaves(cell.config())
        remedy = tuple(config.pop(name) for name in ("model.gate", "model.softmax_sink", "model.d_ff"))
        seen.setdefault(cell.labels["arm"], set()).add(remedy)
        for name in ("seed", "init.gamma", "init.group_gammas", "optimizer.learning_rate"):
            config.pop(name)
        rest.add(repr(config))
    assert seen == {
        "none": {("none", "none", 128)},
        "elementwise": {("elementwise", "none", 112)},
        "headwise": {("headwise", "none", 128)},
        "one": {("none", "one", 128)},
        "learned": {("none", "learned", 128)},
    }
    (shared,) = rest
    assert "'model.norm_eps': 1e-12" in shared and "'optimizer.warmup_steps': 33" in shared and "'monitor.kinds': ('sink',)" in shared


def test_a_larger_size_keeps_its_own_run():
    c = load_grid("grids/sink_remedies:size=125m,lrs=6e-4,seeds=1,steps=0,batch=0,seq_len=0,vocab=0").cells[0].config()
    assert (c.data.seq_len, c.batch.sequences, c.model.vocab_size, c.train.steps) == (2048, 256, 50304, 68665)
    assert c.optimizer.warmup_steps == 715
