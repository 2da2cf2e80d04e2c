"""The grid language: its algebra, names, configs and round trip, and the exact cells of the grids that come with gammalm."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gammalm.config import leaves, load_config
from gammalm.errors import ConfigError
from gammalm.experiments.grid import Grid, arms, chain, fixed, load_grid, numbers, product, subsample, values, zip_

TINY = "lm:size=tiny,steps=50"


def names(space):
    return [cell.name for cell in space]


def test_product_is_every_combination_in_order():
    space = product(values("gamma", [0.5, 1.0]), values("lr", [0.003, 0.01]), values("seed", range(2)))
    expected = [f"gamma{g}-lr{r}-seed{s}" for g, r, s in itertools.product(["0.5", "1"], ["0.003", "0.01"], [0, 1])]
    assert names(space) == expected
    assert space[3].labels == {"gamma": 0.5, "lr": 0.01, "seed": 1} == dict(space[3].args)


def test_zip_pairs_and_refuses_unequal_lengths():
    assert names(zip_(values("gamma", [0.5, 1.0]), values("lr", [0.03, 0.01]))) == ["gamma0.5-lr0.03", "gamma1-lr0.01"]
    with pytest.raises(ConfigError, match="2, 1 cells"):
        zip_(values("gamma", [0.5, 1.0]), values("lr", [0.03]))


def test_subsample_is_deterministic_ordered_and_bounded():
    space = values("seed", range(50))
    drawn = [subsample(space, 10, seed) for seed in (0, 0, 1)]
    assert names(drawn[0]) == names(drawn[1]) != names(drawn[2])
    seeds = [cell.args["seed"] for cell in drawn[0]]
    assert len(set(seeds)) == 10 and seeds == sorted(seeds)
    for n in (0, 51):
        with pytest.raises(ConfigError, match="between 1 and 50"):
            subsample(space, n)


def test_one_key_cannot_be_set_twice_in_a_product():
    with pytest.raises(ConfigError, match="eps is set by two axes"):
        product(arms(plain={"eps": 1e-5}), values("eps", [1e-8]))


def test_an_argument_acts_before_an_override_and_both_reach_the_config():
    space = product(
        arms(plain={"eps": 1e-5, "gate": "none"}, adjusted={"eps": 1e-12, "gate": "elementwise"}, wide={"model.d_ff": 999}),
        values("optimizer.weight_decay", [0.25], label="decay"),
        fixed({"optimizer.no_decay": ("norm", "embed")}),
    )
    plain, adjusted, wide = Grid("g", TINY, space).cells
    assert plain.name == "plain-decay0.25" and plain.labels == {"arm": "plain", "decay": 0.25}
    configs = [cell.config() for cell in (plain, adjusted, wide)]
    assert [c.model.d_ff for c in configs] == [176, 160, 999]  # the gate argument also narrows the FFN
    assert [c.model.norm_eps for c in configs] == [1e-5, 1e-12, 1e-12]
    assert all(c.optimizer.weight_decay == 0.25 and c.optimizer.no_decay == ("norm", "embed") for c in configs)
    untouched = leaves(load_config(TINY + ",eps=1e-5,gate=none"))
    changed = {key for key, value in leaves(configs[0]).items() if value != untouched[key]}
    assert changed == {"optimizer.weight_decay", "optimizer.no_decay"}


def test_data_path_replaces_the_configs_own_whatever_characters_it_has():
    (cell,) = Grid("g", TINY, values("seed", [3])).cells
    config = cell.config(data_path="/a,b=c/d:e")
    assert config.data.path == "/a,b=c/d:e" and config.seed == 3


def test_names_are_safe_as_folders():
    (cell,) = values("mixture", ["web:3,code/../1 ü"])
    assert cell.name == "mixtureweb_3_code_.._1_ü" and cell.labels == {"mixture": "web:3,code/../1 ü"}


def test_same_names_empty_grids_and_nameless_cells_are_refused():
    with pytest.raises(ConfigError, match="two cells are named gamma1"):
        Grid("g", TINY, chain(values("gamma", [1.0]), values("gamma", [1])))
    with pytest.raises(ConfigError, match="two cells are named armA"):
        Grid("g", TINY, values("size", ["a", "A"], label="arm"))
    with pytest.raises(ConfigError, match="no cells"):
        Grid("g", TINY, product(values("gamma", [1.0]), values("seed", [])))
    with pytest.raises(ConfigError, match="without a name"):
        Grid("g", TINY, fixed({"gamma": 1.0}))


def test_a_bad_cell_is_refused_by_its_name():
    cells = Grid("g", TINY, values("gamma", [-1.0])).cells
    with pytest.raises(ConfigError, match=r"grid cell gamma-1: (?s:.*)init.gamma=-1"):
        cells[0].config()
    cells = Grid("g", TINY, product(values("gamma", [1.0]), fixed({"optimizer.learnign_rate": 1.0}))).cells
    with pytest.raises(ConfigError, match="grid cell gamma1: .*learning_rate"):
        cells[0].config()


@pytest.mark.parametrize("spec", ["grids/quickstart:seeds=2", "grids/gamma_sweep", "grids/paper_dense"])
def test_json_round_trip(spec):
    grid = load_grid(spec, [("optimizer.no_decay", ("norm", "embed"))])
    again = Grid.from_json(json.loads(json.dumps(grid.to_json())))
    assert again == grid
    assert again.cells[-1].config() == grid.cells[-1].config()
    with pytest.raises(ConfigError, match="base"):
        Grid.from_json({"name": "g", "cells": []})


def test_overrides_reach_every_cell_but_not_what_the_grid_varies():
    grid = load_grid("grids/quickstart", [("train.checkpoints_kept", "5"), ("optimizer.warmup_steps", 7)])
    assert {(c.config().train.checkpoints_kept, c.config().optimizer.warmup_steps) for c in grid.cells} == {(5, 7)}
    for key in ("init.gamma", "optimizer.learning_rate", "model.gate", "model.d_ff"):
        with pytest.raises(ConfigError, match=f"{key} differs between the cells"):
            load_grid("grids/quickstart", [(key, "1")])
    with pytest.raises(ConfigError, match="batch.sequences"):
        load_grid("grids/quickstart", [("batch.sequence", 1)])


# ---- the grids that come with gammalm --------------------------------------------------------------------------------------------


def test_quickstart_cells():
    grid = load_grid("grids/quickstart")
    assert names(grid.cells) == [
        f"{arm}-gamma{gamma}-lr{lr}-seed0" for arm in ("plain", "adjusted") for gamma in ("0.5", "1") for lr in ("0.003", "0.02", "0.1")
    ]
    for cell in grid.cells:
        config = cell.config()
        plain = cell.labels["arm"] == "plain"
        assert (config.model.norm_eps, config.model.gate) == ((1e-5, "none") if plain else (1e-12, "elementwise"))
        assert (config.init.gamma, config.optimizer.learning_rate) == (cell.labels["gamma"], cell.labels["lr"])
        assert (config.train.steps, config.batch.sequences, config.data.seq_len, config.optimizer.warmup_steps) == (500, 32, 128, 33)


def test_every_quickstart_argument_changes_its_cells():
    grid = load_grid(
        "grids/quickstart:arms=plain,gammas=0.75,lrs=1e-2,seeds=2,size=125m,steps=30,batch=2,seq_len=64,vocab=512,data=x/y,"
        "mixture=web:3,code:1"
    )
    assert names(grid.cells) == ["plain-gamma0.75-lr0.01-seed0", "plain-gamma0.75-lr0.01-seed1"]
    c = grid.cells[1].config()
    assert (c.model.d_model, c.model.vocab_size, c.train.steps, c.optimizer.warmup_steps) == (768, 512, 30, 2)
    assert (c.batch.sequences, c.data.seq_len, c.data.path, c.data.mixture, c.seed) == (2, 64, "x/y", "web:3,code:1", 1)


def test_gamma_sweep_cells():
    grid = load_grid("grids/gamma_sweep")
    gammas = ["0.5", "0.6", "0.7", "0.8", "0.9", "1", "1.1", "1.2", "1.3", "1.4", "1.5"]
    assert names(grid.cells) == [f"adjusted-gamma{gamma}-seed0" for gamma in gammas]
    for gamma, cell in zip(gammas, grid.cells, strict=True):
        c = cell.config()
        assert (c.init.gamma, c.model.d_model, c.optimizer.learning_rate, c.model.gate) == (float(gamma), 768, 6e-4, "elementwise")
    assert names(load_grid("grids/gamma_sweep:arm=plain,seeds=2").cells)[:2] == ["plain-gamma0.5-seed0", "plain-gamma0.5-seed1"]


def test_paper_dense_cells_have_the_papers_size_and_tokens():
    grid = load_grid("grids/paper_dense")
    expected = [
        f"size{size}-{arm}-gamma{gamma}-seed0"
        for size in ("125m", "350m", "760m", "1.5b")
        for arm in ("plain", "adjusted")
        for gamma in ("0.5", "1")
    ]
    assert names(grid.cells) == [*expected, "size1.5b-low-eps-gamma0.5-seed0", "size1.5b-low-eps-gamma1-seed0"]
    batches = {"125m": 2**19, "350m": 2**19, "760m": 2**19, "1.5b": 2**20}
    rates = {"125m": 6e-4, "350m": 3e-4, "760m": 2.5e-4, "1.5b": 2e-4}
    recipes = {"plain": (1e-5, "none"), "adjusted": (1e-12, "elementwise"), "low-eps": (1e-12, "none")}
    for cell in grid.cells:
        c, size = cell.config(), cell.labels["size"]
        step_tokens = c.batch.sequences * c.data.seq_len
        assert step_tokens == batches[size] and c.data.seq_len == 2048
        assert c.train.steps * step_tokens == pytest.approx(36e9, rel=1e-4)
        assert c.optimizer.learning_rate == rates[size]
        assert (c.model.norm_eps, c.model.gate) == recipes[cell.labels["arm"]]
        assert (c.data.mixture, c.data.packing) == ("paper_dense", "concat")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("grids/quickstart:seed=2", "seeds"),
        ("grids/quickstart:gammas=a", "list of numbers"),
        ("grids/quickstart:arms=plian", "plian"),
        ("grids/quickstart:seeds=0", "no cells"),
        ("grids/quickstart:gammas=-1", "gamma"),
        ("grids/gamma_sweep:arm=none", "none"),
        ("grids/paper_dens", "paper_dense"),
        ("lm", "get_grid"),
    ],
)
def test_wrong_specs_exit_2_and_say_why(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_grid(spec)
    assert caught.value.exit_status == 2


def test_numbers_are_slash_separated():
    assert numbers("0.5/1/1e-2", "here") == [0.5, 1.0, 0.01]


def test_the_example_of_the_documentation_runs(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs/grids.md").read_text(encoding="utf-8")
    file = tmp_path / "decay.py"
    file.write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    cells = load_grid(f"{file}:seeds=3").cells
    assert len(cells) == 12 and "adjusted-gamma0.5-lr0.03-decay0.1-seed0" in names(cells)


def test_no_jax_needed():
    code = "import sys; from gammalm.experiments.grid import load_grid; load_grid('grids/paper_dense'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
