"""`gammalm inspect` on models of ours: a run, what it exports to, the bare file, configs; what it writes, and what it refuses."""

import importlib
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from gammalm.analysis.weights import weight_rows
from gammalm.cli.main import main
from gammalm.config import load_config, to_json
from gammalm.errors import ConfigError
from gammalm.initializers import init_params
from gammalm.inspection import inspect_config, inspect_model, page_of, text_of
from gammalm.interop.export import export_hf
from gammalm.models.decoder import Model
from gammalm.training.load import save_model

from .cases import CASES, config_of, random_model

to_device = importlib.import_module("gammalm.cli.import").to_device  # a keyword, as a name


def rows_of(found):
    return sorted((r["fan_in"], r["std"], r["gamma"], r["kurtosis"], r["near_zero"]) for r in found["matrices"])


def wanted(config, params):
    rows = weight_rows(Model(config.model).specs, params)
    return sorted((r["fan_in"], r["std"], r["gamma"], r["kurtosis"], r["sparsity"]) for r in rows)


@pytest.mark.parametrize("case", ["qwen3-next", pytest.param("own: softmax router", marks=pytest.mark.full), "gpt2"])
def test_a_run_and_its_export_have_the_same_figures(case, tmp_path, monkeypatch):
    """Those of `gammalm analyze weights`, whoever stored the weights: gates beside queries, experts, a Conv1D, our own layout."""
    monkeypatch.setattr("gammalm.inspection.figures.outlook", lambda *_, **__: None)  # has a test of its own, and compiles
    config = config_of({}, style="gpt2") if case == "gpt2" else config_of(CASES[case][1])
    params, buffers = random_model(config)
    export_hf(config, params, buffers, tmp_path / "exported")
    to_device(params)
    to_device(buffers)
    save_model(tmp_path / "run", config, params, buffers)
    expected = np.array(wanted(config, params), float)
    for folder in ("run", "exported"):
        found = inspect_model(tmp_path / folder)
        np.testing.assert_allclose(np.array(rows_of(found), float), expected, rtol=1e-4, atol=1e-6, err_msg=folder)
        assert found["state"]["verdict"] == "just begun"  # its gains are no constants
        assert found["family"] == "gammalm" and found["layers"] == config.model.n_layers and found["declared"]["value"] == 0.7
        assert not [line for line in found["unsaid"] if "Theory" not in line]
        declared = {row["kind"]: row["declared"] for row in found["matrices"]}
        assert all(declared.values()), declared
        assert declared["ffn_down"] and declared["q"] == pytest.approx(config.model.d_model**-0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of nano's kind whose weights are fresh, and its export."""
    place = tmp_path_factory.mktemp("inspected")
    config = load_config("lm:size=tiny,vocab=200,gamma=0.8,gate=none,seq_len=16,batch=2,steps=4", [("model.norm_eps", 1e-5)])
    model = Model(config.model)
    params = init_params(model.specs, config.init, 0, d_model=config.model.d_model, n_layers=config.model.n_layers)
    save_model(place / "run", config, params, {})
    export_hf(config, params, {}, place / "exported", dtype="bfloat16")
    return place


def test_fresh_weights_of_a_run(folder):
    found = inspect_model(folder / "run")
    assert (found["source"], found["step"], found["state"]["verdict"]) == ("run", 0, "fresh")
    for row in found["matrices"]:
        assert row["gamma"] == pytest.approx(0.8, abs=0.02) and row["declared"] == pytest.approx(row["fan_in"] ** -0.8)
        assert row["stable_rank"] == pytest.approx(row["stable_rank_random"], rel=0.2)
    by_kind = {row["kind"]: row for row in found["by_kind"]}
    assert by_kind["ffn_down"]["fan_in"] == 176 and by_kind["q"]["count"] == 2
    assert [row["layer"] for row in found["by_layer"]] == [None, 0, 1] and found["by_layer"][1]["matrices"] == 7
    assert found["outlook"]["embedding"] == pytest.approx(64**-0.8) and found["sink"]["risk"] == "raised"
    norm = found["outlook"]["norms"]["attn_norm"]
    assert norm["ratio"][0] == pytest.approx(1e-5 * 64**1.6, rel=1e-4)
    json.dumps(found)


def test_the_command(folder, capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["inspect", str(folder / "exported"), "--html", str(page), "--matrices"]) == 0
    out, err = capsys.readouterr()
    assert "they look fresh" in out and "model.norm_eps" in out and "BF16" in out and "inspect: done" in err
    assert re.search(r"^  model.layers.1.mlp.down_proj.weight +1 +64x176 +176 ", out, re.MULTILINE)
    html = page.read_text()
    assert html.count("<svg") == 6 and "http" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", html) and "<script" not in html
    assert main(["inspect", str(folder / "run") + ":0", "--json", "--ranks", "none"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 0 and all(row["stable_rank"] is None for row in found["matrices"]) and found["state"]["verdict"] == "fresh"


def test_the_bare_file_and_the_config_alone(folder, tmp_path, capsys):
    shutil.copy(folder / "exported" / "model.safetensors", tmp_path / "x.safetensors")
    bare = inspect_model(tmp_path / "x.safetensors")
    assert rows_of(bare) == rows_of(inspect_model(folder / "exported")) and bare["outlook"] is None and bare["width"] == 64
    assert any("no config.json" in line for line in bare["unsaid"]) and bare["state"]["verdict"] == "fresh"
    assert "not known" in "".join(bare["advice"]) and "http" not in page_of(bare).replace("http://www.w3.org", "")
    hf = json.loads((folder / "exported" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf))
    alone = inspect_model(tmp_path / "config.json")
    assert alone["matrices"] == [] and alone["family"] == hf["model_type"] and alone["eps"] == 1e-5 and alone["outlook"]
    to_json(load_config("lm:size=tiny,gamma=0.6"), tmp_path / "saved.json")
    assert inspect_model(tmp_path / "saved.json")["declared"]["value"] == 0.6
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "x.safetensors").unlink()
    assert any("never opened" in line for line in inspect_model(tmp_path)["unsaid"])


def test_a_config(capsys):
    assert main(["inspect", "--config", "lm:size=tiny,gamma=1.0", "--config.model.norm_eps=1e-5"]) == 0
    out = capsys.readouterr().out
    assert "2 layers, width 64" in out and "eps 1e-05" in out and "gamma 1, eps 1e-12" in out and "Sinks: low risk" in out
    sink = inspect_config(load_config("lm:size=tiny,gate=none", [("model.softmax_sink", "one")]), "lm")
    assert sink["outlook"] is None and "softmax sink" in sink["unsaid"][0] and sink["sink"]["risk"] == "low"


@pytest.mark.parametrize("arguments, says", [
    ([], "takes a MODEL or a --config"), (["{run}", "--config", "lm"], "one of them"), (["{run}", "--init-table"], "has its own"),
    (["{run}", "--config.seed=1"], "--config.seed is of a --config"), (["lm:size=tiny"], "is given as --config"),
    (["{run}:7"], "7"), (["{exported}", "--html", "{run}/no/page.html"], "--html"), (["{run}/config.jsonl"], "is not there"),
    (["{empty}"], "is no model that can be inspected"), (["{run}/versions.txt"], "neither a .safetensors file nor"),
    (["{exported}:3"], "no run of ours"), (["--config", "lm", "--ranks", "all"], "--ranks is of a MODEL's weights"),
    (["--config", "lm", "--matrices"], "--matrices is of a MODEL's weights"), (["{exported}", "--html", "{run}"], "cannot be written"),
])  # fmt: skip
def test_refusals(arguments, says, folder, tmp_path, capsys):
    (folder / "run" / "versions.txt").write_text("x")
    places = {"run": folder / "run", "exported": folder / "exported", "empty": tmp_path}
    assert main(["inspect", *(a.format(**places) for a in arguments)]) in (1, 2)
    assert says in capsys.readouterr().err


def test_configs_of_ours_that_are_not_plain(monkeypatch):
    monkeypatch.setattr("gammalm.inspection.figures.outlook", lambda *_, **__: None)  # has a test of its own, and compiles
    learned = inspect_config(config_of({}, style="gpt2"), "lm")
    rows = {row["matrix"]: row for row in learned["declared"]["matrices"]}
    assert learned["declared"]["value"] == 0.7 and rows["embed"]["gamma"] == pytest.approx(0.7)  # the table's, without the positions
    scheme = inspect_config(load_config("lm:size=tiny", [("init.preset", "gpt2")]), "lm")
    assert scheme["declared"]["value"] is None and "init.preset gpt2" in text_of(scheme) and "no one gamma" in scheme["advice"][0]
    post = inspect_config(load_config("lm:size=tiny", [("model.residual", "post")]), "lm")
    assert "post-norm residuals" in text_of(post) and not [line for line in post["advice"] if "behind each branch" in line]
    fixup = inspect_config(load_config("lm:preset=fixup"), "lm")
    assert fixup["eps"] is None and "scalars in place of norms" in text_of(fixup) and not [a for a in fixup["advice"] if "norm_eps" in a]


def test_numbers_that_are_not_finite_are_said_first(tmp_path):
    arrays = {"norm.weight": np.array([1, np.nan, 1], np.float32), "a.q_proj.weight": np.full((4, 3), np.inf, np.float32)}
    many = {f"b.{i}.qweight": np.ones((2, 2), np.int32) for i in range(20)}
    save_file(arrays | many, tmp_path / "x.safetensors")
    found = inspect_model(tmp_path / "x.safetensors")
    assert "NaN" not in json.dumps(found) and [line.split()[0] for line in found["unsaid"][1:3]] == ["a.q_proj.weight", "norm.weight"]
    assert not found["vectors"][0]["moved"] and found["parameters"]["total"] is None and found["state"]["verdict"] == "unclear"
    page_of(found)
    with pytest.raises(ConfigError, match="has no step 3"):
        inspect_model(tmp_path / "x.safetensors", step=3)
