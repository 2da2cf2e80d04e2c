"""Names of hardware: what is read from them, what is refused, and what is known of each kind."""

import subprocess
import sys

import pytest

from gammalm.errors import ConfigError
from gammalm.plan import topology
from gammalm.sharding.devices import known


@pytest.mark.parametrize(
    "name, platform, count", [("h100:8", "gpu", 8), ("h200:1", "gpu", 1), ("H100:4", "gpu", 4), ("cpu", "cpu", 1)]
)
def test_what_nothing_compiles_for(name, platform, count):
    found = topology.load(name)
    assert (found.platform, found.count, found.devices) == (platform, count, None)


@pytest.mark.parametrize("name", ["foo:1", "h100", "h100:0", "h100:2x4", "v5e:256", "v5p:4x4", "tpu7x:", "b200:8", "cpu:4", "v5e:1x-1", ""])
def test_what_is_refused(name):
    with pytest.raises(ConfigError, match="v5e:16x16"):
        topology.load(name)


def test_every_kind_is_in_the_device_table():
    for kind in [*topology.TPUS.values(), *topology.GPUS.values()]:
        device = known(kind)
        assert device and device.hbm and device.hbm_rate and device.link_rate, kind


@pytest.mark.parametrize("name", ["v5e:16x32", "v6e:100x100", "v5p:24x24x24", "tpu7x:32x32x32"])
def test_more_chips_than_a_pod_has(name):
    with pytest.raises(ConfigError, match="no .* pod has more than"):
        topology.load(name)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topology, "has_libtpu", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'gammalm\[plan\]'.*--analytic"):
        topology.load("v5e:4x4")
    found = topology.load("tpu7x:2x2x2", compile_step=False)
    assert (found.platform, found.kind, found.count, found.devices) == ("tpu", "TPU7x", 16, None)


def test_the_environment_is_set_before_jax():
    """The module must not import JAX: what it sets would come too late."""
    code = "import sys, os; from gammalm.plan import topology; topology.quiet_environment('v5e:4x4');"
    code += "print('jax' in sys.modules, os.environ['JAX_PLATFORMS'], os.environ['TPU_SKIP_MDS_QUERY'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "cpu", "1"]
