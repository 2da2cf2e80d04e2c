"""gpu_check.py: its configs are those of configs/lm.py, it needs no more than a bare JAX image has, and no failure ends it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "benchmarks"))

import _gpu_configs  # noqa: E402
import _gpu_table  # noqa: E402
import _gpu_worker  # noqa: E402
import gpu_check  # noqa: E402

# Python starts with it: what a bare JAX image lacks is not found, however well it is installed here.
BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"a bare image has no {{name}}", name=name)

sys.meta_path.insert(0, Bare())
"""
ABSENT = ("grain", "clu", "tensorflow", "ml_collections", "matplotlib", "tokamax", "torch", "transformers", "datasets", "tokenizers")


@pytest.fixture
def bare(tmp_path):
    """Runs the script in an empty folder as on a bare image; returns (finished process, its records, folder of results)."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(BARE.format(absent=ABSENT))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def run(*options):
        command = [sys.executable, REPO / "benchmarks/gpu_check.py", "--tiny", "--out", "found", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        found = tmp_path / "found"
        return done, [json.loads(line) for line in (found / "results.jsonl").read_text("utf-8").splitlines()], found

    run.environment = environment
    return run


def test_configs_are_those_of_lm():
    written = json.loads(_gpu_configs.FILE.read_text("utf-8"))
    assert written == _gpu_configs.configs(), "run python benchmarks/_gpu_configs.py"


def test_models_have_the_sizes_that_their_names_say():
    sizes = {"10m": 10e6, "125m": 125e6, "1.5b": 1.5e9, "moe-1.5b-a0.25b": 1.5e9}
    for name, size in sizes.items():
        model = _gpu_worker.Model(_gpu_worker.config_of(name, {}).model)
        assert model.parameter_count == pytest.approx(size, rel=0.12), name


def test_every_case_is_one_that_the_worker_knows():
    for tiny in (False, True):
        plan = gpu_check.cases(tiny)
        assert list(plan) == list(gpu_check.SHARES)
        for case in sum(plan.values(), []):
            assert case["kind"] in _gpu_worker.KINDS
            if "model" in case:
                _gpu_worker.config_of(case["model"], case)
    assert sum(gpu_check.SHARES.values()) == pytest.approx(1)
    assert set(_gpu_table.MFU_GOALS) < set(plan)


def test_a_case_changes_its_config():
    case = {"remat": "dots", "kernel": "blockwise", "backend": "ragged"}
    model = _gpu_worker.config_of("tiny-moe", case).model
    assert (model.remat, model.attention_kernel, model.moe.backend) == ("dots", "blockwise", "ragged")
    assert _gpu_worker.config_of("tiny-moe", {}).model.moe.backend == "auto"


def test_the_first_process_leaves_the_device_alone(bare):
    code = f"import sys; sys.path.insert(0, {str(REPO / 'benchmarks')!r}); import gpu_check; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=bare.environment)


def test_the_device_is_described_on_a_bare_image(bare):
    done, records, found = bare("--sections", "device")
    assert done.returncode == 0, (found / "worker.log").read_text()
    assert [r["name"] for r in records] == ["versions", "product, FLOP/s", "copy, bytes read and written/s"]
    assert records[0]["jax"] == jax.__version__ and records[0]["platform"] == "cpu"
    assert f"- jax: {jax.__version__}" in done.stdout


@pytest.mark.full
def test_everything_runs_small_on_a_bare_image(bare):
    """On a CPU all runs but cuDNN, whose absence is recorded; contestants agree, and training lowers the loss."""
    done, records, found = bare("--budget", "1200")
    assert done.returncode == 0
    failed = [r for r in records if "failed" in r]
    assert {(r["section"], r.get("name")) for r in failed} == {("attention", "cudnn")}, failed
    assert {r["section"] for r in records} == set(gpu_check.SHARES)
    steps = [r for r in records if r["case"]["kind"] == "step"]
    assert len(steps) == 3 and all(r["last_loss"] < r["first_loss"] - 1 for r in steps)
    assert steps[1]["experts"] == "ragged" and steps[2]["attention"] == "blockwise"
    contests = [r for r in records if "difference" in r]
    assert len(contests) == 2 * (2 * 2 + 3 + 2) and all(r["difference"] < 0.02 for r in contests)
    assert all(r["rate"] > 0 for r in records if "ms" in r)
    text = (found / "table.md").read_text("utf-8")
    assert text in done.stdout and "| 2 | auto | side by side |" in text and "needs an NVIDIA GPU" in text


# ---- what goes wrong ---------------------------------------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time

print("this goes to the log", file=sys.stderr, flush=True)
for line in sys.stdin:
    case = json.loads(line)
    print(json.dumps({"name": case["do"], "process": os.getpid()}), flush=True)
    if case["do"] == "crash":
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os._exit(3)
    if case["do"] == "hang":
        time.sleep(600)
    print(json.dumps({"done": True}), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    worker = gpu_check.Worker(tmp_path / "log", [sys.executable, str(tmp_path / "fake.py")], {})
    yield worker
    worker.close()


def plan(**sections):
    return {name.replace("_", "."): [{"do": what} for what in cases] for name, cases in sections.items()}


def test_a_crash_is_recorded_and_the_rest_goes_on(worker):
    records = list(gpu_check.run(plan(device=["answer", "crash", "answer"]), 60, worker, fresh=False))
    assert [r.get("name") or r["failed"] for r in records] == ["answer", "crash", "crash", "answer"]
    assert records[2]["message"] == "the process ended with status 3: CUDA error: an illegal memory access"
    assert records[0]["process"] == records[1]["process"] != records[3]["process"]


def test_what_hangs_is_killed_and_leaves_time_for_the_rest(worker):
    begin = time.monotonic()
    records = list(gpu_check.run(plan(device=["hang", "answer"], moe=["answer"]), 30, worker, fresh=False))
    assert time.monotonic() - begin < 30
    assert [r.get("name") or r["failed"] for r in records] == ["hang", "out of time", "answer", "answer"]
    assert [r["section"] for r in records] == ["device"] * 3 + ["moe"]
    with pytest.raises(ProcessLookupError):
        os.kill(records[0]["process"], 0)


def test_time_that_is_up_is_said_of_each_case_left(worker):
    records = list(gpu_check.run(plan(device=["hang"], moe=["answer"]), 1e-3, worker, fresh=False))
    assert [r["failed"] for r in records[-1:]] == ["no time left"] and records[-1]["section"] == "moe"


def test_each_section_has_a_process_of_its_own(worker):
    records = list(gpu_check.run(plan(device=["answer", "answer"], moe=["answer"]), 60, worker, fresh=True))
    first, second, third = (r["process"] for r in records)
    assert first == second != third


def test_the_memory_share_is_the_users_to_say(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_check.environment(False) == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # both together are an error of JAX
    assert gpu_check.environment(False) == {}


def needs(gib_of_rows: float, rows: int, state: float = 18.0):
    memory = {"argument_bytes": state * 2**30, "scratch_bytes": (state / 3 + gib_of_rows * rows) * 2**30}
    memory["compiled_bytes"] = memory["argument_bytes"] + memory["scratch_bytes"]
    return memory


def tried(monkeypatch, one_step, rows):
    records = []
    monkeypatch.setattr(_gpu_worker, "_one_step", one_step)
    _gpu_worker.step({"rows": rows}, records.append)
    return records


def test_the_largest_batch_that_fits_is_found_without_trying_all(monkeypatch):
    """5 GiB for each row beside 24: 14 rows fit in 95, and of those offered 8."""

    def one_step(case, rows):
        memory = needs(5.0, rows)
        if memory["compiled_bytes"] > 0.95 * 100 * 2**30:
            raise _gpu_worker.DoesNotFit(memory, 100 * 2**30)
        return {"ms": 1.0}

    records = tried(monkeypatch, one_step, [64, 32, 16, 8, 4, 2, 1])
    assert [r["sequences"] for r in records] == [64, 8]
    assert records[0]["failed"] == "does not fit" and records[0]["scratch_bytes"] > 300 * 2**30 and "ms" in records[1]


def test_out_of_memory_goes_on_with_fewer_rows_and_other_errors_do_not(monkeypatch):
    def exhausted(case, rows):
        if rows > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
        return {"ms": 1.0}

    assert [r.get("failed") for r in tried(monkeypatch, exhausted, [8, 4, 2, 1])] == ["out of memory", "out of memory", None]

    def unknown(case, rows):
        raise NotImplementedError("no such kernel")

    assert [r["failed"] for r in tried(monkeypatch, unknown, [8, 4])] == ["NotImplementedError"]


def test_a_program_too_large_is_not_run(monkeypatch):
    monkeypatch.setattr(_gpu_worker, "memory_stat", lambda name: 3000)
    with pytest.raises(_gpu_worker.DoesNotFit, match="GiB"):
        _gpu_worker.compiled(lambda x: x + 1, jax.ShapeDtypeStruct((400,), jnp.float32))  # 1600 bytes in, 1600 out
    _gpu_worker.compiled(lambda x: x + 1, jax.ShapeDtypeStruct((400,), jnp.float32), donate=0)


def test_contestants_that_fail_are_left_out_and_the_others_are_compared():
    def fails():
        raise ValueError("not on this device")

    records = []
    contestants = {"none": fails, "one": lambda: (lambda: jnp.ones(4), {}), "off": lambda: (lambda: jnp.full(4, 1.5), {})}
    _gpu_worker.compete(contestants, 100.0, records.append)
    assert [(r["name"], r.get("in_turns")) for r in records] == [
        ("none", None), ("one", False), ("off", False), ("one", True), ("off", True)
    ]  # fmt: skip
    assert records[0]["failed"] == "ValueError" and records[0]["message"] == "not on this device"
    np.testing.assert_allclose([r["difference"] for r in records[1:3]], [0, 0.5], rtol=1e-6)
    assert all(r["rate"] == pytest.approx(1e5 / r["ms"]) for r in records[1:])


# ---- the table ---------------------------------------------------------------------------------------------------------------------


def step_record(section, mfu):
    found = {"name": "", "attention": "cudnn", "sequences": 8, "ms": 1.0, "rate": 1.0, "mfu": mfu, "peak_bytes": None, "steps": 3}
    found |= {"compiled_bytes": 2**30, "scratch_bytes": 0, "compile_s": 1.0, "first_loss": 1.0, "last_loss": 0.5}
    return found | {"section": section, "case": {"kind": "step", "model": section, "remat": str(mfu), "seq_len": 2048}}


def cell_records(cells, single, together, kernel):
    case = {"kind": "cells", "cells": cells, "kernel": kernel}
    for turns in (False, True):
        for name, rate in (("one at a time", single), ("side by side", together * turns)):
            yield {"section": "cells", "case": case, "name": name, "rate": rate, "ms": 1.0, "in_turns": turns, "difference": 0.0}


def test_goals_stand_beside_what_was_measured():
    records = [step_record("1.5b", 0.41), step_record("1.5b", 0.52), step_record("moe", 0.1), step_record("125m", 0.9)]
    records += [*cell_records(16, 10.0, 70.0, "auto"), *cell_records(16, 10.0, 50.0, "blockwise"), *cell_records(4, 10.0, 20.0, "auto")]
    assert _gpu_table.speed_up(records) == {16: 7.0, 4: 2.0}
    text = _gpu_table.table(records)
    assert "| 1.5b at T=2048: MFU | 50.0 % | 52.0 % | yes |" in text
    assert "| moe at T=2048: MFU | 35.0 % | 10.0 % | no |" in text
    assert "| 16 cells side by side over one at a time | 6 | 7.00 | yes |" in text
    nothing = _gpu_table.table([{"section": "moe", "case": {"kind": "step"}, "failed": "crash", "message": "a | b"}])
    assert nothing.count("not measured") == 3 and "| moe |  | – | crash | a / b |" in nothing


def test_a_contestant_is_shown_once_by_its_turns():
    shared = {"section": "attention", "case": {"kind": "attention", "seq_len": 8, "rows": 1, "segments": True}, "name": "xla"}
    shared |= {"rate": 2e12, "scratch_bytes": 0, "compile_s": 1.0, "difference": 0.0}
    peak = {"section": "device", "case": {"kind": "device"}, "name": "versions", "peak_flops": 1e13}
    text = _gpu_table.table([peak, shared | {"ms": 5.0, "in_turns": False}, shared | {"ms": 7.0, "in_turns": True}])
    assert "| T=8, 1 rows, documents | xla | 7.000 | 2.00 | 20.0 % |" in text and "5.000" not in text
