"""Time and price from the numbers of a plan, the search among plans, and `gammalm plan`."""

import json

import pytest

from gammalm.cli.main import main
from gammalm.config import load_config, validate
from gammalm.errors import ConfigError
from gammalm.plan.estimate import plan
from gammalm.plan.search import BEST, candidates, meshes, search
from gammalm.plan.topology import load

SPEC = "lm:size=1.5b,batch=512"


def config(spec=SPEC, *overrides):
    return validate(load_config(spec, overrides))


def test_the_roofline_and_what_follows_from_it():
    found = plan(config(), load("h100:8"), price=2.5)
    s, tokens = found["seconds"], 512 * 2048
    assert s["arithmetic"] == pytest.approx(found["flop_per_token"] * tokens / 8 / 989e12)
    assert s["roofline"] == max(s["arithmetic"], s["hbm"], s["collectives"]) == s["step"] and s["compiler"] is None
    assert found["mfu"] == pytest.approx(found["model_flop_per_token"] * tokens / 8 / 989e12 / s["step"])
    assert found["mfu"] == pytest.approx(found["model_flop_share"])  # bound by arithmetic
    assert found["hours"] == pytest.approx(found["steps"] * s["step"] / 3600)
    assert found["chip_hours"] == pytest.approx(8 * found["hours"]) and found["cost"] == pytest.approx(2.5 * found["chip_hours"])
    assert found["method"] == "analytic"


def test_a_compiler_s_estimate_is_used_only_where_it_is_sane(monkeypatch):
    from gammalm.plan import estimate

    device = estimate.known("TPU v5 lite")
    base = {"tokens_per_step": 1e6, "devices": 1, "chips": 1, "steps": 1, "flop_per_token": 1e9, "model_flop_per_token": 1e9}
    base["traffic"] = {"hbm_bytes": 1.0, "collectives": {}}
    roofline = 1e15 / 197e12
    for share, sane in [(-1, False), (0, False), (0.3, False), (0.8, True), (3, True), (25, False)]:
        found = estimate._time(base | {"compiler_cycles": share * roofline * device.clock}, device, None)["seconds"]
        assert (found["compiler"] is not None) == sane
        assert found["step"] == pytest.approx(roofline * (max(1, share) if sane else 1))


def test_a_step_too_large_for_its_compiler_is_a_plan_too(monkeypatch):
    """What the compiler needed is in its message; any other fault is one."""
    import jax

    from gammalm.plan import estimate
    from gammalm.plan.topology import Topology
    from gammalm.training import program

    said = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm."

    class Step:
        jaxpr = jax.make_jaxpr(lambda a: a @ a)(jax.numpy.ones((2, 2)))

        def trace(self):
            return self

        def lower(self):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(program, "Program", lambda *_, **__: Step())
    absent = Topology("v5e:1x1", "TPU v5 lite", "tpu", 1, devices=[None])
    memory = plan(config("lm:size=125m"), absent)["memory"]
    assert memory["total"] == pytest.approx(21.5 * 2**30) and memory["fits"] is False
    assert memory["left"] == pytest.approx((15.75 - 21.5) * 2**30)
    said = "INTERNAL: something else"
    with pytest.raises(ConfigError, match="something else"):
        estimate.plan(config("lm:size=125m"), absent)


def test_all_meshes_and_each_once():
    found = list(meshes(8, mixture=True))
    assert len(found) == len(set(found)) == 20 and all(a * b * c * d == 8 for a, b, c, d in found)
    assert {mesh[2] for mesh in meshes(8, mixture=False)} == {1}


def test_search_gives_the_fastest_that_fit():
    found = search(config(), load("h100:8"), quiet=True)
    assert len(found) == BEST and all(p["memory"]["fits"] for p in found)
    steps = [p["seconds"]["step"] for p in found]
    assert steps == sorted(steps)
    every = [p for _, p in candidates(config(), load("h100:8")) if p["memory"]["fits"]]
    assert steps[0] == min(p["seconds"]["step"] for p in every) and len(every) > 20
    assert not all(p["memory"]["fits"] for _, p in candidates(config(), load("h100:8")))


def test_search_that_cannot_answer():
    with pytest.raises(ConfigError, match="none of .* ways fits h100:1"):
        search(config("lm:size=moe-3b-a0.5b", ("model.n_layers", "64")), load("h100:1"), quiet=True)
    with pytest.raises(ConfigError, match="the speed of cpu is not known"):
        search(config(), load("cpu"), quiet=True)


def run(capsys, *argv):
    status = main(["plan", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_line(capsys):
    status, out, _ = run(capsys, "--config", SPEC, "--config.mesh.fsdp=8", "--config.mesh.data=1", "--topology", "h100:8", "--price", "2")
    assert status == 0
    for words in ("analytic", "fits: ", "fsdp=8", "parameters 755 MB", "all-gather", "reduce-scatter", "MFU", "chip-hours", "cost"):
        assert words in out
    status, out, _ = run(capsys, "--config", SPEC, "--topology", "h100:1", "--json")
    found = json.loads(out)
    assert status == 1 and found["memory"]["fits"] is False and found["cost"] is None
    status, out, _ = run(capsys, "--config", "lm:size=tiny", "--topology", "cpu")
    assert status == 0 and "how much there is, is not known" in out and "MFU" not in out


def test_a_grid_is_the_sum_of_its_cells(capsys):
    status, out, _ = run(capsys, "--grid", "grids/paper_dense", "--topology", "h100:8", "--price", "2", "--json")
    found = json.loads(out)
    cells, total = found["cells"], found["total"]
    assert status == 0 and len(cells) == 18
    assert total["chip_hours"] == pytest.approx(sum(cell["chip_hours"] for cell in cells.values()))
    assert total["cost"] == pytest.approx(2 * total["chip_hours"])
    small = cells["size125m-plain-gamma0.5-seed0"]
    assert small == cells["size125m-plain-gamma1-seed0"]  # one program
    assert plan(config("lm:size=125m,gate=none,eps=1e-5"), load("h100:8"))["chip_hours"] == pytest.approx(small["chip_hours"])
    _, out, _ = run(capsys, "--grid", "grids/paper_dense", "--topology", "h100:8", "--config.batch.micro_batches=2")
    assert "all 18" in out and "analytic" in out and "cost" not in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--config", "lm:size=tiny", "--topology", "h100:8", "--price", "-1"], "--price"),
        (["--config", "lm:size=1.5b", "--topology", "h100:8", "--config.mesh.fsdp=3"], "config.mesh"),
        (["--grid", "grids/paper_dense", "--topology", "h100:8", "--search"], "--search"),
        (["--config", "lm:size=tiny", "--topology", "v9:2"], "v5e:16x16"),
    ],
)
def test_what_cannot_be_planned(capsys, arguments, says):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and says in err
