"""`gammalm analyze tokens` and `scaling` from the command line: two untrained runs on real text, and a grid with planted losses."""

import json

import numpy as np
import pytest

from gammalm.analysis.tokens import symmetric_gain
from gammalm.cli.main import main
from gammalm.config import apply_overrides, load_config, validate
from gammalm.data.load import open_split
from gammalm.data.shards import TOKENIZER
from gammalm.experiments.grid import Grid, arms, product, values
from gammalm.experiments.results import append_result
from gammalm.initializers import init_params
from gammalm.models.decoder import Model, fresh_buffers
from gammalm.training.load import load_model, save_model

SMALL = {"model.d_model": 16, "model.n_heads": 2, "model.n_kv_heads": 2, "model.head_dim": 8, "model.d_ff": 24, "model.n_layers": 1}


def write_run(folder, data, seed, packing="concat", seq_len=16, tokenizer=True):
    """A run at step 0 with parameters of std 0.7, so that its losses differ from token to token."""
    spec = f"lm:size=tiny,vocab=608,data={data},seq_len={seq_len},packing={packing},gamma=0.1"
    config = validate(apply_overrides(load_config(spec), SMALL.items()))
    model = Model(config.model)
    params = init_params(model.specs, config.init, seed, d_model=16, n_layers=1)
    save_model(folder, config, params, fresh_buffers(model), data / TOKENIZER if tokenizer else None)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("runs")
    return [str(write_run(folder / name, corpus[0], seed)) for name, seed in (("a", 1), ("b", 2))]


def said(capsys, *argv):
    assert main(["analyze", *map(str, argv)]) == 0
    return capsys.readouterr().out


def found(capsys, *argv):
    return json.loads(said(capsys, *argv, "--json"))


def naive_gains(runs, data, packing="concat"):
    """Gains of all counted tokens of two batches of each domain, from full logits, float64."""
    split = open_split(data, "validation", seq_len=16, packing=packing, mixture="natural", seed=0, batch=3)
    gains = []
    loaded = [load_model(run) for run in runs]
    for domain in split.domains:
        for batch, _ in zip(split.validation(domain), range(2), strict=False):
            losses = []
            for one in loaded:
                segments = batch["segments"][:, :-1] if packing == "documents" else None
                logits = one.model.bind(one.params, one.buffers).logits(batch["tokens"][:, :-1], segments, one.config.model.norm_eps)
                logits = np.asarray(logits, np.float64)
                picked = np.take_along_axis(logits, batch["tokens"][:, 1:, None], -1)[..., 0]
                losses.append(np.log(np.exp(logits).sum(-1)) - picked)
            gains.append(symmetric_gain(*losses)[batch["weights"] > 0])
    return np.concatenate(gains)


def test_tokens_of_two_runs(capsys, runs, corpus, tmp_path):
    pair = ("tokens", "--small", runs[0], "--standard", runs[1], "--sequences", 3, "--batches", 2)
    whole = found(capsys, *pair, "--html", tmp_path / "gains.html", "--out", tmp_path / "gains.json")
    expected = naive_gains(runs, corpus[0])
    assert whole["tokens"] == len(expected) == sum(whole["histogram"])
    assert whole["gain"] == pytest.approx(expected.mean(), abs=1e-3) and abs(expected).mean() > 0.1
    assert len(whole["by_difficulty"]) == 10 and whole["by_difficulty"][0]["gain_se"] > 0
    assert json.loads((tmp_path / "gains.json").read_text()) == whole

    # The same in two parts, merged.
    for i in range(2):
        found(capsys, *pair, "--part", f"{i}/2", "--state", tmp_path / f"{i}.npz")
    merged = found(capsys, "tokens", "--merge", tmp_path / "0.npz", tmp_path / "1.npz")
    assert {k: merged[k] for k in ("gain", "gain_se", "by_difficulty", "histogram")} == {k: whole[k] for k in
        ("gain", "gain_se", "by_difficulty", "histogram")}  # fmt: skip

    page = (tmp_path / "gains.html").read_text("utf-8")
    assert page.count('title="gain ') >= 8 and "γ = 0.1" in page and "http" not in page
    swapped = found(capsys, "tokens", "--small", runs[1], "--standard", runs[0], "--sequences", 3, "--batches", 2)
    assert swapped["gain"] == pytest.approx(-whole["gain"], abs=1e-12)
    text = said(capsys, *pair)
    assert "decile" in text and f"{len(expected):,} tokens" in text


def test_tokens_of_packed_documents(capsys, corpus, tmp_path):
    runs = [str(write_run(tmp_path / name, corpus[0], seed, packing="documents")) for name, seed in (("a", 1), ("b", 2))]
    pair = ("tokens", "--small", runs[0], "--standard", runs[1], "--sequences", 3, "--batches", 2)
    whole = found(capsys, *pair, "--html", tmp_path / "p.html")
    expected = naive_gains(runs, corpus[0], "documents")
    assert whole["tokens"] == len(expected) and whole["gain"] == pytest.approx(expected.mean(), abs=1e-3)
    assert (tmp_path / "p.html").exists()


def test_runs_that_cannot_be_compared_are_refused(capsys, runs, corpus, tmp_path):
    def refused(*argv):
        status = main(["analyze", "tokens", *map(str, argv)])
        return status, capsys.readouterr().err

    other = write_run(tmp_path / "longer", corpus[0], 1, seq_len=24)
    status, message = refused("--small", runs[0], "--standard", other)
    assert status == 2 and "data.seq_len" in message
    assert refused("--small", runs[0])[0] == 2
    assert refused("--small", runs[0], "--standard", runs[1], "--merge", "x.npz")[0] == 2
    for part in ("2/2", "x", "1/0"):
        assert refused("--small", runs[0], "--standard", runs[1], "--part", part)[0] == 2
    assert refused("--merge", tmp_path / "missing.npz")[0] == 1
    status, message = refused("--small", runs[0], "--standard", runs[1], "--batches", 1, "--state", tmp_path / "no" / "x.npz")
    assert status == 2 and "cannot be written" in message


def write_grid(workdir, rates=(0.01,), gain=0.5, seeds=1):
    """A finished grid of four widths whose losses are a planted law in the parameters of the body, and best at rate .01."""
    cells = product(
        values("model.d_model", (32, 64, 128, 256), label="size"), arms(plain={"eps": 1e-5}), values("gamma", (0.5, 1.0)),
        values("lr", rates), values("seed", range(seeds)),
    )  # fmt: skip
    grid = Grid("planted", "lm:size=tiny", cells)
    workdir.mkdir()
    (workdir / "grid.json").write_text(json.dumps(grid.to_json()))
    for cell in grid.cells:
        specs = Model(cell.config().model).specs
        body = sum(np.prod(spec.shape) for path, spec in specs.items() if not path.startswith(("embed", "head")))
        size = body * (1 + gain * (cell.labels["gamma"] == 1.0))
        loss = 1.2 + 50 * size**-0.25 + (cell.labels["lr"] != 0.01) + 1e-3 * cell.labels["seed"]
        append_result(workdir, {"cell": cell.name, "status": "done", "loss": float(loss)})
    return workdir


def test_scaling_finds_the_law_of_a_grid(capsys, tmp_path):
    workdir = write_grid(tmp_path / "grid", rates=(0.01, 0.1))
    result = found(capsys, "scaling", "--workdir", workdir)
    assert [fit["rates"] for fit in result["fits"]] == ["rate 0.01", "rate 0.1", "the best rate of each size and γ"]
    for fit in result["fits"]:
        assert (fit["group"], fit["standard_gamma"], fit["small_gamma"]) == ("plain", 0.5, 1.0)
        assert fit["law"]["gain"] == pytest.approx(0.5, abs=1e-3) and fit["law"]["alpha"] == pytest.approx(0.25, abs=1e-3)
    assert result["fits"][1]["law"]["E"] == pytest.approx(2.2, abs=1e-3) and result["fits"][2]["law"]["E"] == pytest.approx(1.2, abs=1e-3)
    sizes = [one["N"] for one in result["fits"][0]["sizes"]]
    total = [one["N"] for one in found(capsys, "scaling", "--workdir", workdir, "--size", "total")["fits"][0]["sizes"]]
    vocabulary = load_config("lm:size=tiny").model.vocab_size
    assert [b - a for a, b in zip(sizes, total, strict=True)] == [vocabulary * d for d in (32, 64, 128, 256)]  # the tied embedding alone
    text = said(capsys, "scaling", "--workdir", workdir)
    assert "effective size: gain 0.5" in text and "extrapolated" in text and "one seed" in text


def test_scaling_with_seeds_has_intervals_and_without_sizes_is_refused(capsys, tmp_path):
    result = found(capsys, "scaling", "--workdir", write_grid(tmp_path / "seeds", seeds=2))
    low, high = result["fits"][0]["intervals"]["gain"]
    assert low <= 0.5 + 1e-6 and high >= 0.5 - 1e-6 and len(result["fits"]) == 1
    assert main(["analyze", "scaling", "--workdir", str(tmp_path / "seeds"), "--label", "arm"]) == 2
    assert "at least two sizes" in (message := capsys.readouterr().err) and "--label arm" in message
    assert main(["analyze", "scaling", "--workdir", str(tmp_path)]) == 2
