"""Checkpoints: bit for bit on any mesh, damage noticed and said, failures raised. (Kills: test_checkpoint_kills.py.)"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gammalm.errors import CheckpointError, ConfigError
from gammalm.training import checkpoint, integrity
from gammalm.training.checkpoint import Checkpointer


class Moments(NamedTuple):  # stands for an optimizer's state
    count: jax.Array
    mu: dict


def state(step: int) -> dict:
    """A tree of every kind of leaf and node we save; every leaf differs from step to step."""
    rng = np.random.default_rng(step)
    weird = np.array([step, np.nan, -0.0, np.inf, 1e-40, 1, 2, 3], np.float32)  # bits that arithmetic would lose
    return {
        "params": {"embed": {"table": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}, "weird": jnp.asarray(weird)},
        "optimizer": (Moments(jnp.int32(step), {"table": jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16)}), (), None),
        "key": jax.random.key_data(jax.random.key(step)),
        "step": jnp.int32(step),
    }


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        assert np.asarray(g).tobytes() == np.asarray(e).tobytes()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """A directory with steps 1, 2, 3, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("three")
    with Checkpointer(directory, keep=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), {"tokens": step * 1000})
    return directory


@pytest.fixture
def damaged(three_steps, tmp_path):
    """A private copy of the three steps and what is said about it."""
    directory = tmp_path / "run"
    shutil.copytree(three_steps, directory)
    said: list[str] = []
    with Checkpointer(directory, keep=3, say=said.append) as checkpointer:
        yield SimpleNamespace(directory=directory, newest=directory / "000000003", checkpointer=checkpointer, said=said)


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path):
    os.truncate(path, path.stat().st_size // 2)


# ---- what comes back


def test_round_trip_keeps_bits_types_structure_and_extra(tmp_path):
    extra = {"tokens": 12, "best": 0.1, "name": "γ½"}
    with Checkpointer(tmp_path / "deep" / "run") as checkpointer:
        assert checkpointer.restore_latest(abstract(state(7))) is None
        checkpointer.save(7, state(7), extra)
        extra["tokens"] = 99  # after save returned: must not reach the file
        checkpointer.wait()
        step, tree, got = checkpointer.restore_latest(abstract(state(0)))
    assert (step, got) == (7, {"tokens": 12, "best": 0.1, "name": "γ½"})
    assert_same_bits(tree, state(7))


MESHES = {
    "1": lambda: NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec()),
    "8": lambda: NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")),
    "2x4": lambda: NamedSharding(jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("fsdp", "data")),
    "explicit": lambda: NamedSharding(jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2), PartitionSpec("a", "b")),
}


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", MESHES)
def test_any_mesh_to_any_mesh_bit_for_bit(tmp_path, source, target):
    assert jax.device_count() == 8, "tests/conftest.py gives eight CPU devices"
    there, here = MESHES[source](), MESHES[target]()
    table = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    tree = {"w": jax.device_put(table, there), "b": jax.device_put(jnp.asarray(table, jnp.bfloat16), there)}
    with Checkpointer(tmp_path) as checkpointer, jax.set_mesh(here.mesh):
        checkpointer.save(1, tree)
        _, got, _ = checkpointer.restore_latest(abstract(tree, here))
    assert_same_bits(got, tree)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_equivalent_to(here, 2)
        assert len(leaf.sharding.device_set) == here.mesh.size


@pytest.mark.parametrize("mesh", ["1", "8"])
def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, mesh):
    n = 1 << 20
    step = jax.jit(lambda x: x * 0.5 - 3, donate_argnums=0)
    make = jax.jit(lambda v: jnp.full((n,), v), out_shardings=MESHES[mesh]())
    control = make(0.0)
    step(control)
    assert control.is_deleted()  # donation does happen on this backend
    with Checkpointer(tmp_path) as checkpointer:
        for i in range(1, 5):
            x = make(float(i))
            checkpointer.save(i, {"x": x})
            for _ in range(3):
                x = step(x)
            x.block_until_ready()
            _, got, _ = checkpointer.restore_latest({"x": jax.ShapeDtypeStruct((n,), jnp.float32)})
            np.testing.assert_array_equal(got["x"], np.full(n, i, np.float32))


def test_many_cells_save_side_by_side(tmp_path):
    cells = [Checkpointer(tmp_path / str(i)) for i in range(12)]
    for step in (1, 2):
        for i, cell in enumerate(cells):
            cell.save(step, {"x": jnp.full((3,), 100 * i + step)})
    for i, cell in enumerate(cells):
        assert cell.restore_latest({"x": jax.ShapeDtypeStruct((3,), jnp.int32)})[1]["x"].tolist() == [100 * i + 2] * 3
        cell.close()


# ---- rotation and order


def test_the_newest_are_kept_and_the_rest_removed(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (5, 10, 1_000_000_000, 1_000_000_001):
            checkpointer.save(step, {"x": jnp.float32(step)})
        checkpointer.wait()
        assert checkpointer.steps() == [1_000_000_000, 1_000_000_001]
    assert sorted(os.listdir(tmp_path)) == ["1000000000", "1000000001"]


def test_the_old_step_is_there_until_the_new_one_is_sealed(tmp_path, monkeypatch):
    go, sealing = threading.Event(), threading.Event()
    seal = checkpoint.seal

    def slow_seal(*args):
        sealing.set()
        assert go.wait(10)
        seal(*args)

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
        monkeypatch.setattr(checkpoint, "seal", slow_seal)
        checkpointer.save(2, state(2))  # returns while sealing is held up: the loop is not
        assert sealing.wait(10)
        assert checkpointer.steps() == [1]
        with Checkpointer(tmp_path, say=lambda _: None) as reader:  # another process meanwhile, an evaluation say
            assert_same_bits(reader.restore_latest(abstract(state(0)))[1], state(1))
        go.set()
        checkpointer.wait()
        assert checkpointer.steps() == [2]


def test_a_step_must_be_newer_than_the_newest(damaged):
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"step {step} cannot be saved, step 3 is there"):
            damaged.checkpointer.save(step, state(step))


def test_keep_nothing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="checkpoints_kept=0"):
        Checkpointer(tmp_path, keep=0)


def test_restore_of_one_step(damaged):
    tree, extra = damaged.checkpointer.restore(2, abstract(state(0)))
    assert_same_bits(tree, state(2))
    assert extra == {"tokens": 2000}
    with pytest.raises(CheckpointError, match=r"no step 4; complete steps: \[1, 2, 3\]"):
        damaged.checkpointer.restore(4, abstract(state(0)))
    flip(files_of(damaged.newest)[0])
    with pytest.raises(CheckpointError, match=r"000000003 is damaged: .* has changed contents"):
        damaged.checkpointer.restore(3, abstract(state(0)))


# ---- damage


@pytest.mark.parametrize("hurt", [flip, truncate, Path.unlink])
def test_damage_in_any_file_is_noticed_said_and_survived(three_steps, tmp_path, hurt):
    names = [p.relative_to(three_steps / "000000003") for p in files_of(three_steps / "000000003")]
    assert len(names) > 6 and Path("checksums.json") in names  # data, metadata, the seal
    for number, name in enumerate(names):
        directory, said = tmp_path / str(number), []
        shutil.copytree(three_steps, directory)
        hurt(directory / "000000003" / name)
        with Checkpointer(directory, keep=3, say=said.append) as checkpointer:
            step, tree, extra = checkpointer.restore_latest(abstract(state(0)))
            assert (step, extra) == (2, {"tokens": 2000}), name
            assert_same_bits(tree, state(2))
            assert name.name in said[0] and "step 3 is damaged" in said[0]
            assert said[1].endswith("using step 2 instead")
            assert (directory / "000000003.damaged").exists() and not (directory / "000000003").exists()


def test_a_renamed_folder_is_damage(damaged):
    damaged.newest.rename(damaged.directory / "000000009")
    assert damaged.checkpointer.restore_latest(abstract(state(0)))[0] == 2
    assert "step 9 is damaged" in damaged.said[0] and "it holds step 3" in damaged.said[0]


def test_a_damaged_step_can_be_saved_again_and_again(damaged):
    for aside in ("000000003.damaged", "000000003.damaged-2"):
        flip(files_of(damaged.directory / "000000003")[0])
        assert damaged.checkpointer.restore_latest(abstract(state(0)))[0] == 2
        assert (damaged.directory / aside).exists()
        damaged.checkpointer.save(3, state(3))
        assert damaged.checkpointer.restore_latest(abstract(state(0)))[0] == 3


def test_a_step_without_seal_gives_way_to_a_new_save(damaged):
    (damaged.newest / integrity.SEAL).unlink()
    damaged.checkpointer.save(3, state(33))
    assert_same_bits(damaged.checkpointer.restore_latest(abstract(state(0)))[1], state(33))
    assert (damaged.directory / "000000003.damaged").exists()


def test_two_damaged_steps_fall_back_to_the_third(damaged):
    for step in (2, 3):
        flip(files_of(damaged.directory / f"00000000{step}")[-1])
    assert damaged.checkpointer.restore_latest(abstract(state(0)))[0] == 1
    assert ["step 3 is damaged" in damaged.said[0], "step 2 is damaged" in damaged.said[1]] == [True, True]


def test_all_damaged_is_an_error_every_time_and_nothing_is_moved(damaged):
    for step in (1, 2, 3):
        truncate(files_of(damaged.directory / f"00000000{step}")[-1])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="every checkpoint is damaged") as error:
            damaged.checkpointer.restore_latest(abstract(state(0)))
        assert all(f"step {step}: " in str(error.value) for step in (1, 2, 3))
    assert sorted(os.listdir(damaged.directory)) == ["000000001", "000000002", "000000003"]


def test_unfinished_saves_do_not_count_and_make_way(damaged):
    for name in ("000000004.saving", "000000005.saving.orbax-checkpoint-tmp", "000000001.deleting"):
        (damaged.directory / name / "d").mkdir(parents=True)
    assert damaged.checkpointer.restore_latest(abstract(state(0)))[0] == 3
    assert len(damaged.said) == 2 and "step 4: its save was not finished" in damaged.said[0] and "step 5" in damaged.said[1]
    damaged.checkpointer.save(4, state(4))
    damaged.checkpointer.wait()
    assert sorted(os.listdir(damaged.directory)) == ["000000002", "000000003", "000000004"]


def test_only_an_unfinished_first_save_means_from_the_start(tmp_path):
    (tmp_path / "000000001.saving").mkdir()
    said = []
    with Checkpointer(tmp_path, say=said.append) as checkpointer:
        assert checkpointer.restore_latest(abstract(state(0))) is None
    assert "step 1: its save was not finished" in said[0]


def test_by_default_damage_is_printed_to_stderr_once_and_logged(damaged, capfd, caplog):
    flip(files_of(damaged.newest)[0])
    with Checkpointer(damaged.directory) as checkpointer:
        checkpointer.restore_latest(abstract(state(0)))
    assert capfd.readouterr().err.count("step 3 is damaged") == 1
    assert "step 3 is damaged" in caplog.text


# ---- what does not fit


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda t: t["params"].update(weird=jnp.zeros((9,))), r"params/weird: saved as float32\[8\], wanted as float32\[9\]"),
        (lambda t: t.update(step=jnp.float32(0)), r"step: saved as int32\[\], wanted as float32\[\]"),
        (lambda t: t.pop("key"), "key: in the checkpoint, not in the model"),
        (lambda t: t["params"].update(gate=jnp.zeros(2)), "params/gate: in the model, not in the checkpoint"),
    ],
)
def test_another_model_is_an_error_that_names_the_path_and_no_damage(damaged, change, path):
    wanted = state(0)
    change(wanted)
    with pytest.raises(CheckpointError, match=f"does not fit this model(.|\n)*{path}(.|\n)*config"):
        damaged.checkpointer.restore_latest(abstract(wanted))
    assert damaged.checkpointer.steps() == [1, 2, 3] and damaged.said == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": 3}}, "a/b: only jax.Array"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "a/b: two leaves"),
        ({"k": jax.random.key(0)}, "k: save jax.random.key_data"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, tree, message):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=message):
        checkpointer.save(1, tree)


def test_extra_must_be_json(tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="plain JSON"):
        checkpointer.save(1, state(1), {"x": jnp.ones(1)})


# ---- failures while saving


@pytest.mark.parametrize("surface", ["save", "wait", "close", "restore"])
def test_a_background_failure_is_raised_by_the_next_call_and_only_once(damaged, monkeypatch, surface):
    checkpointer = damaged.checkpointer

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "seal", fail)
        checkpointer.save(4, state(4))
        act = {"save": lambda: checkpointer.save(5, state(5)), "restore": lambda: checkpointer.restore_latest(abstract(state(0)))}
        with pytest.raises(CheckpointError, match=r"step 4 was not saved: .*Input/output error.*untouched: \[1, 2, 3\]"):
            act.get(surface, lambda: getattr(checkpointer, surface)())()
    assert sorted(os.listdir(damaged.directory)) == ["000000001", "000000002", "000000003"]
    if surface != "close":  # and the object is still good
        checkpointer.save(6, state(6))
        assert checkpointer.restore_latest(abstract(state(0)))[0] == 6


def test_leaving_the_block_raises_a_background_failure_but_never_hides_the_first_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "seal", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state(1))
    said = []
    with pytest.raises(ZeroDivisionError):
        with Checkpointer(tmp_path, say=said.append) as checkpointer:
            checkpointer.save(1, state(1))
            raise ZeroDivisionError
    assert "step 1 was not saved" in said[0]


def test_a_full_disk_is_refused_before_a_byte_is_written(damaged, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))  # needed: the array, 2 % and 1 MiB
    with pytest.raises(CheckpointError, match=r"step 4: it needs about 5,128,576 bytes, 1,000 are free.*\[1, 2, 3\]"):
        damaged.checkpointer.save(4, {"x": jnp.zeros((1000, 1000))})
    assert len(os.listdir(damaged.directory)) == 3


FILLS_UP = """
import resource, sys
import jax.numpy as jnp, numpy as np
from gammalm.errors import CheckpointError
from gammalm.training.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": jnp.ones(8)})
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # writes beyond this end in an error from the system itself
checkpointer.save(2, {"x": jnp.asarray(np.random.default_rng(0).normal(size=300_000))})
try:
    checkpointer.wait()
except CheckpointError as e:
    print("RAISED", e)
print("LEFT", checkpointer.restore_latest({"x": jnp.ones(8)})[1]["x"].sum())
checkpointer.close()
"""


def test_a_disk_that_fills_up_while_writing_is_an_error_and_the_old_step_stays(tmp_path):
    result = subprocess.run([sys.executable, "-c", FILLS_UP, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "RAISED" in result.stdout, result.stderr[-2000:]
    assert "no room for the checkpoint of step 2" in result.stdout and "needs about 2,272,576 bytes" in result.stdout
    assert "LEFT 8.0" in result.stdout
    assert os.listdir(tmp_path) == ["000000001"]
