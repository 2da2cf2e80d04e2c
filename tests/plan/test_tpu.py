"""The training step compiled for TPUs that are not there: memory of known models, collectives, time by depth. Needs libtpu.

libtpu is never in the environment of the tests, where any `import jax` would look for a TPU: `launch/test.sh` puts it in a folder of its
own and names that in GAMMALM_LIBTPU, and each plan is made by `gammalm plan` in a process that has it on its path.
"""

import json
import os
import subprocess
import sys

import pytest

from gammalm.plan.topology import has_libtpu

FOLDER = os.environ.get("GAMMALM_LIBTPU")
WITHOUT = "no libtpu: launch/test.sh --full installs it, or pip install 'gammalm[plan]'"
pytestmark = pytest.mark.skipif(not (FOLDER or has_libtpu()), reason=WITHOUT)


def planned(*arguments):
    """The plan as `--json` has it, compiled anew."""
    command = [sys.executable, "-m", "gammalm.cli.main", "plan", "--json", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_COMPILATION_CACHE"))}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), FOLDER]))
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["method"] == "compiled" and "attention splash" in found["kernels"] and found["memory"]["fits"]
    return found


@pytest.mark.full
def test_the_paper_s_largest_model_on_a_pod():
    """1.5b-16h, 4 sequences of 2048 a chip, full remat: at most 2.15 GB beside the state, which is what MaxText 0.2.5 takes."""
    found = planned(
        "--config", "lm:size=1.5b-16h,batch=1024", "--config.mesh.fsdp=256", "--config.mesh.data=1", "--topology", "v5e:16x16"
    )  # fmt: skip
    memory, traffic = found["memory"], found["traffic"]
    assert memory["temporary"] <= 2.15e9
    state = memory["parameters"] + memory["optimizer"] + memory["buffers"]
    assert state == pytest.approx(12 * found["parameters"] / 256, rel=0.001)
    assert memory["arguments"] == state + memory["batch"] and memory["batch"] <= 1e6
    assert memory["total"] == memory["arguments"] + memory["temporary"] + memory["program"]
    # Full remat: layers forward twice and backward, the head once; splash attention has 4 blocks in each direction, 10/16 of the square.
    assert 0.74 < found["model_flop_share"] < 0.78
    assert traffic["loops_unknown"] == traffic["opaque"] == 0
    whole = 2 * found["parameters"] * 255 / 256  # in bf16
    sent = sum(bytes_ for _, bytes_ in traffic["collectives"].values())
    assert 2 * whole < sent < 8 * whole  # weights come in three passes, gradients go in fp32, scattered or summed
    assert found["seconds"]["roofline"] < found["seconds"]["compiler"] < 3 * found["seconds"]["roofline"]


# Temporary bytes of a device as measured (docs/plan.md). A tenth more is a regression, a tenth less makes the page untrue.
MEASURED = {
    "lm:size=1.5b --config.mesh.fsdp=256 --topology v5e:16x16": 1.31e9,
    "lm:size=1.5b --config.mesh.fsdp=256 --topology v6e:16x16": 1.32e9,
    "lm:size=1.5b --config.mesh.fsdp=128 --topology v5p:4x4x8": 2.07e9,
    "lm:size=1.5b --config.mesh.fsdp=128 --topology tpu7x:4x4x4": 2.55e9,
    "lm:size=moe-3b-a0.5b --config.mesh.fsdp=16 --config.mesh.expert=8 --topology v5p:4x4x8": 6.55e9,
    "lm:size=moe-3b-a0.5b --config.mesh.fsdp=32 --config.mesh.expert=8 --topology v6e:16x16": 3.85e9,
}


@pytest.mark.long
@pytest.mark.parametrize("arguments", MEASURED)
def test_memory_is_what_the_page_says(arguments):
    found = planned("--config", *arguments.split(), "--config.mesh.data=1")
    assert found["memory"]["temporary"] == pytest.approx(MEASURED[arguments], rel=0.1)


@pytest.mark.long
def test_gradients_are_scattered_along_one_side_of_a_torus():
    found = planned("--config", "lm:size=125m,batch=64", "--config.mesh.fsdp=4", "--config.mesh.data=4", "--topology", "v5e:4x4")
    collectives = found["traffic"]["collectives"]
    assert collectives["all-gather"][0] >= 12 and collectives["reduce-scatter"][0] >= 12
    weights = 2 * found["parameters"]  # in bf16
    assert weights < collectives["all-gather"][1] < 4 * weights


@pytest.mark.long
def test_depth_costs_no_compile_time():
    """Twice the layers are the same program, whose loop runs twice as often. The machine has other work: hence the margin."""
    shallow, deep = (
        planned("--config", "lm:size=125m,batch=16", f"--config.model.n_layers={n}", "--topology", "v5e:2x2") for n in (12, 24)
    )
    assert deep["program_instructions"] <= 1.02 * shallow["program_instructions"]
    assert deep["compile_seconds"] <= 1.15 * shallow["compile_seconds"] + 5
    assert deep["traffic"]["hbm_bytes"] > 1.5 * shallow["traffic"]["hbm_bytes"]
