"""Compiled programs are kept by default: the second start of `gammalm train` on a machine compiles nothing new."""

import json
import os
import subprocess
import sys

import pytest

from .test_loop import config

COUNTING = """
import collections, json, sys
import jax
from gammalm.cli.main import main
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
status = main(sys.argv[1:])
print(json.dumps([status, seen["cache_hits"], seen["cache_misses"]]))
"""


@pytest.mark.full
def test_the_second_start_compiles_nothing_new(corpus, tmp_path):
    c = config(corpus, 2, **{"train.validation_batches": 1, "batch.micro_batches": 1})
    (tmp_path / "config.json").write_text(c.to_json_best_effort())
    # As on a user's machine, but that programs which compile in no time are kept too: otherwise the count would depend on the machine.
    env = os.environ | {"GAMMALM_CACHE": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    del env["JAX_COMPILATION_CACHE_DIR"]
    counts = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", COUNTING, "train", "--config", str(tmp_path / "config.json"), "--workdir", str(tmp_path / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        status, hits, misses = json.loads(done.stdout.splitlines()[-1])
        assert status == 0, done.stderr
        counts.append((hits, misses))
    assert counts[0][1] > 0 and list((tmp_path / "cache" / "jax").glob("*/*")), "without being asked to"
    assert counts[1][1] == 0 and counts[1][0] >= counts[0][1], counts
