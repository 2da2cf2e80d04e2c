"""The training step compiled for TPUs that are not there: memory of a known model, compile time by depth. Needs libtpu.

Each program is compiled in a process of its own, as `gammalm plan` does: libtpu's settings must be made before JAX is imported.
"""

import json
import subprocess
import sys

import pytest

from gammalm.plan.topology import has_libtpu

pytestmark = [pytest.mark.full, pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed: pip install 'gammalm[plan]'")]


def planned(*arguments):
    command = [sys.executable, "-m", "gammalm.cli.main", "plan", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_memory_and_collectives_of_a_small_model():
    """Parameters are gathered and gradients scattered along a torus axis; nothing but the state is kept between steps."""
    found = planned("--config", "lm:size=125m,batch=64", "--config.mesh.fsdp=4", "--config.mesh.data=4", "--topology", "v5e:4x4")
    memory, traffic = found["memory"], found["traffic"]
    state = memory["parameters"] + memory["optimizer"]
    assert state <= memory["arguments"] <= 1.05 * state + 1e6  # padding, and the batch
    assert 0.3e9 < memory["temporary"] < 1.5e9 and memory["fits"]
    assert traffic["loops_unknown"] == 0 and traffic["collectives"]["all-gather"][0] >= 12
    assert 0.6 < found["model_flop_share"] < 0.8
    assert found["seconds"]["compiler"] is None or found["seconds"]["compiler"] > found["seconds"]["roofline"] / 2


def test_the_paper_s_largest_model_fits_a_pod():
    """24 layers of 1.5B, 4 sequences a chip, full remat: at most 2.15 GB beside the state."""
    found = planned(
        "--config", "lm:size=1.5b-16h,batch=1024", "--config.mesh.fsdp=256", "--config.mesh.data=1", "--topology", "v5e:16x16"
    )  # fmt: skip
    assert found["memory"]["temporary"] <= 2.15e9
    assert found["memory"]["arguments"] <= 80e6


def test_compile_time_does_not_grow_with_depth():
    """Twice the layers are the same program: the compiled text says so exactly, where seconds on a shared machine would not."""
    shallow, deep = (
        planned("--config", "lm:size=125m,batch=16", f"--config.model.n_layers={n}", "--topology", "v5e:2x2") for n in (12, 24)
    )
    assert deep["program_instructions"] <= 1.02 * shallow["program_instructions"]
    assert deep["compile_seconds"] <= 1.15 * shallow["compile_seconds"] + 5
    assert deep["traffic"]["hbm_bytes"] > 1.5 * shallow["traffic"]["hbm_bytes"]
