"""Tables 2 and 3 of the papers: every number is that of a run the grids would train."""

import json

import pytest

from gammalm.cli.main import main
from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.experiments.tables import TABLES, format_hyperparameters, hyperparameters


def rows(table):
    return {row["name"]: dict(zip(table["columns"], row["values"], strict=True)) for row in table["rows"]}


def test_table2_says_what_the_dense_grid_trains():
    found = rows(hyperparameters("table2"))
    assert found["width d"] == {"125m": "768", "350m": "1024", "760m": "1536", "1.5b": "2048"}
    assert found["FFN width F"]["1.5b"] == "5440 / 4416"  # plain, then with the gate
    assert found["parameters"]["1.5b"].startswith("1,509,")
    assert found["norm eps"]["350m"] == "1e-05 / 1e-12" and found["initialization rate"]["350m"] == "0.5 / 1"
    assert set(found["tokens"].values()) == {"36.0B"}
    assert "routed experts" not in found


def test_table3_has_the_published_counts_and_either_attention():
    found = rows(hyperparameters("table3"))
    assert found["parameters"]["moe-1.5b-a0.25b"].split(" / ")[0] == "1,490,183,168"
    assert found["active parameters"]["moe-3b-a0.5b"].split(" / ")[0] == "506,512,896"
    assert found["routed experts"] == dict.fromkeys(found["routed experts"], "96") and set(found["tokens"].values()) == {"100.0B"}
    latent = rows(hyperparameters("table3", "attention=mla"))
    assert latent["attention"]["moe-3b-a0.5b"] == "MLA, 12 heads of 128+64, values of 128"
    assert latent["parameters"] != found["parameters"]


@pytest.mark.parametrize("table", TABLES)
def test_command_line(table, capsys):
    assert main(["figure", table]) == 0
    printed = capsys.readouterr().out
    assert printed == format_hyperparameters(hyperparameters(table))
    lines = printed.splitlines()[2:]
    assert len({line.count("|") for line in lines}) == 1, "one column more or less in some line"
    assert main(["figure", table, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == hyperparameters(table)


def test_what_is_not_there_is_refused(capsys):
    assert main(["figure", "table9"]) == 2
    assert "table9" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="atention"):
        hyperparameters("table3", "atention=mla")


def test_a_table_follows_the_config():
    """The peak rate of a column is that of the size's own config."""
    found = rows(hyperparameters("table3"))
    for size in found["peak learning rate"]:
        assert float(found["peak learning rate"][size]) == load_config(f"lm:size={size}").optimizer.learning_rate
