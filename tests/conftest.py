"""Settings of every test, made before JAX is imported: CPU only, eight host devices, strict ranks, a shared compilation cache."""

import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # gammalm and configs, installed or not

os.environ |= {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),  # the same for programs that tests start
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip(),
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Programs compile once for all tests, workers and runs: a second run of the suite spends its time on the tests.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
