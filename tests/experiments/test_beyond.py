"""The grids beyond the paper: their cells differ in what the question asks and in nothing else, and the report reads them."""

import itertools

import pytest

from gammalm.config import leaves
from gammalm.errors import ConfigError
from gammalm.experiments.grid import load_grid
from tests.experiments.study import report, write_study

# Study -> (number of cells, leaves in which its cells may differ besides seed and rate).
STUDIES = {
    "learning_rate": (120, {"init.gamma", "init.group_gammas", "model.norm_eps", "model.gate", "model.d_ff", "model.d_model",
                            "model.n_heads", "model.n_kv_heads", "model.head_dim"}),
    "balanced": (54, {"init.gamma", "init.group_gammas", "init.preset"}),
    "embedding": (24, {"init.gamma", "init.group_gammas", "model.norm_eps"}),
    "muon": (60, {"init.gamma", "init.group_gammas", "optimizer.kind"}),
    "mup": (60, {"init.gamma", "init.group_gammas", "init.preset", "init.base_width", "model.d_ff", "model.d_model", "model.n_heads",
                 "model.n_kv_heads"}),
    "length": (48, {"init.gamma", "init.group_gammas", "model.norm_eps", "model.gate", "model.d_ff", "train.steps", "train.log_every",
                    "train.checkpoint_every", "optimizer.warmup_steps"}),
    "sinks": (90, {"init.gamma", "init.group_gammas", "model.gate", "model.softmax_sink", "model.d_ff"}),
    "depth_scale": (36, {"init.gamma", "init.group_gammas", "init.depth_scale"}),
}  # fmt: skip


@pytest.mark.parametrize("study", STUDIES)
def test_cells_differ_in_what_is_asked(study):
    count, asked = STUDIES[study]
    grid = load_grid(f"grids/beyond:study={study}")
    configs = [leaves(cell.config()) for cell in grid.cells]
    assert (grid.name, len(configs)) == (study, count)
    varied = {name for name in configs[0] if len({repr(config[name]) for config in configs}) > 1}
    assert varied - {"seed", "optimizer.learning_rate"} == asked
    for config in configs:
        tokens = config["train.steps"] * config["batch.sequences"] * config["data.seq_len"]
        times = {500: 1, 1500: 3, 4500: 9}[config["train.steps"]]
        assert (times == 1 or study == "length") and (tokens, config["model.vocab_size"]) == (times * 1_024_000, 1024)
        assert config["optimizer.warmup_steps"] == config["train.steps"] // 15


def test_the_embedding_has_a_gamma_of_its_own():
    seen = set()
    for cell in load_grid("grids/beyond:study=embedding").cells:
        config = cell.config()
        embedding, *body = config.init.group_gammas
        assert body == [cell.labels["gamma"]] * 3 and config.init.preset == "groups"
        assert cell.labels["embedding"] == f"embedding{embedding:g}" and config.model.gate == "none"
        assert config.optimizer.learning_rate == 5e-3 and "lr" not in cell.labels
        seen.add((embedding, body[0], config.model.norm_eps))
    assert seen == set(itertools.product((0.5, 1.25), (0.5, 1.25), (1e-5, 1e-12)))
    assert 192**-2.5 < 1e-5 < 192**-1  # only the larger γ meets the barrier


def test_arms_of_sinks_differ_in_the_remedy():
    seen = {}
    for cell in load_grid("grids/beyond:study=sinks").cells:
        c = cell.config()
        seen.setdefault(cell.labels["arm"], set()).add((c.model.gate, c.model.softmax_sink, c.model.d_ff))
        assert c.model.norm_eps == 1e-12 and c.monitor.kinds == ("sink",)
    assert seen == {
        "none": {("none", "none", 128)},
        "elementwise": {("elementwise", "none", 112)},
        "headwise": {("headwise", "none", 128)},
        "one": {("none", "one", 128)},
        "learned": {("none", "learned", 128)},
    }


def test_arguments_replace_what_a_study_has():
    grid = load_grid("grids/beyond:study=depth_scale,sizes=nano-96/nano,lrs=0.02,seeds=1,steps=30,batch=2,seq_len=64,vocab=512,data=x/y")
    assert [cell.name for cell in grid.cells][:2] == ["nano-96-unscaled-gamma0.5-lr0.02-seed0", "nano-96-unscaled-gamma1-lr0.02-seed0"]
    c = grid.cells[-1].config()
    assert (c.model.d_model, c.model.n_layers, c.init.depth_scale, c.optimizer.learning_rate) == (48, 8, True, 0.02)
    assert (c.train.steps, c.optimizer.warmup_steps, c.batch.sequences, c.data.seq_len, c.model.vocab_size) == (30, 2, 2, 64, 512)
    assert c.data.path == "x/y" and len(grid.cells) == 8
    c = load_grid("grids/beyond:study=muon,sizes=125m,steps=0,batch=0,seq_len=0,vocab=0").cells[0].config()
    assert (c.train.steps, c.optimizer.warmup_steps) == (68665, 715), "zero: as the size says"
    with pytest.raises(ConfigError, match="a number above 0"):
        load_grid("grids/beyond:study=length,steps=0")
    with pytest.raises(ConfigError, match="none of learning_rate, balanced"):
        load_grid("grids/beyond:study=balance")


def test_the_report_compares_arms_and_gammas(tmp_path):
    write_study(tmp_path, "grids/beyond:study=embedding", curves=False)
    page, summary = report(tmp_path)
    assert {item["group"] for item in summary["losses"]} == {
        f"nano-192 · embedding{embedding} · eps1e-{eps}" for embedding in ("0.5", "1.25") for eps in (5, 12)
    }
    assert {(item["first"], item["second"]) for item in summary["arm_differences"]} == {("eps1e-5", "eps1e-12")}
    assert "embedding1.25" in page.text
