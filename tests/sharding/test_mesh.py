"""The mesh from the config and where parameters go on it; every misfit is a ConfigError that names the dimension."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from gammalm.config import load_config
from gammalm.errors import ConfigError
from gammalm.models import parts
from gammalm.models.decoder import param_specs
from gammalm.sharding.devices import peak_flops
from gammalm.sharding.mesh import (
    AXES,
    BATCH_AXES,
    arrange,
    batch_sharding,
    between_slices,
    check_batch,
    make_mesh,
    mesh_shape,
    parameter_shardings,
)


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [
        (dict(data=-1, fsdp=1, tensor=1), 8, (1, 8, 1, 1, 1, 1)),
        (dict(data=2, fsdp=-1, tensor=2), 8, (1, 2, 2, 1, 1, 2)),
        (dict(data=-1, fsdp=2, tensor=1, cell=4), 8, (4, 1, 2, 1, 1, 1)),
        (dict(data=-1, fsdp=1, expert=4, tensor=1), 8, (1, 2, 1, 4, 1, 1)),
        (dict(data=-1, context=4), 8, (1, 2, 1, 1, 4, 1)),
        (dict(data=1, fsdp=1, tensor=1), 1, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_shape(sizes, devices, shape):
    assert mesh_shape(sizes, devices) == shape
    mesh = make_mesh(sizes, jax.devices()[:devices])
    assert tuple(mesh.shape[axis] for axis in AXES) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=-1, fsdp=3, tensor=1), r"fsdp=3.*does not divide 8 devices"),
        (dict(data=2, fsdp=2, tensor=1), r"data=2, fsdp=2, expert=1, context=1, tensor=1 needs 4 devices and there are 8"),
        (dict(data=16, fsdp=1, tensor=1), r"needs 16 devices and there are 8"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(sizes)


def devices_in(slices: int, each: int, kind="cpu", **attributes):
    """Stand-ins for devices whose numbers go round the slices."""
    return [
        SimpleNamespace(id=i, slice_index=i % slices, process_index=0, platform=kind, device_kind=kind, **attributes)
        for i in range(slices * each)
    ]


def numbers(sizes, devices):
    shape = mesh_shape(sizes, len(devices))
    return np.vectorize(lambda device: device.id)(arrange(shape, between_slices(sizes, shape), devices))


def test_slices_lie_along_the_axes_they_are_given_to():
    """Only `data` crosses between the slices {0, 2, 4, 6} and {1, 3, 5, 7}; with dcn_fsdp, only `fsdp` does."""
    mesh = numbers(dict(data=4, fsdp=2, dcn_data=2), devices_in(2, 4)).reshape(4, 2) % 2
    assert (mesh == [[0, 0], [0, 0], [1, 1], [1, 1]]).all()
    mesh = numbers(dict(data=2, fsdp=4, dcn_fsdp=2), devices_in(2, 4)).reshape(2, 4) % 2
    assert (mesh == [[0, 0, 1, 1], [0, 0, 1, 1]]).all()
    mesh = numbers(dict(data=2, fsdp=4, tensor=2, dcn_data=2, dcn_fsdp=2), devices_in(4, 4)).reshape(2, 4, 2) % 4
    assert (mesh[..., 0] == [[0, 0, 1, 1], [2, 2, 3, 3]]).all() and (mesh[..., 0] == mesh[..., 1]).all()


def test_processes_are_slices_where_devices_name_none():
    devices = [SimpleNamespace(id=i, process_index=i % 2, platform="cpu", device_kind="cpu") for i in range(8)]
    assert (numbers(dict(data=2, fsdp=4, dcn_data=2), devices).reshape(2, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]).all()


def test_the_order_on_one_slice_is_that_of_the_numbers():
    devices = devices_in(1, 8)
    assert (numbers(dict(data=2, fsdp=2, tensor=2), devices).ravel() == np.arange(8)).all()


def on_a_torus(fsdp: int, tensor: int) -> np.ndarray:
    """Places [fsdp, tensor, 3] of a mesh over a 4 x 4 torus of TPUs, whose numbers say nothing of where they are."""
    places = [(x, y, 0) for x in range(4) for y in range(4)]
    order = np.random.default_rng(0).permutation(16)
    devices = [
        SimpleNamespace(id=i, coords=places[k], core_on_chip=0, process_index=0, platform="tpu", device_kind="TPU v5 lite")
        for i, k in enumerate(order)
    ]
    shape = mesh_shape(dict(fsdp=fsdp, tensor=tensor), 16)
    return np.array([[device.coords for device in row] for row in arrange(shape, between_slices({}, shape), devices).reshape(fsdp, tensor)])


def test_neighbours_on_the_torus_are_neighbours_in_the_mesh():
    """A 4 x 4 torus as 4 x 4: each axis of the mesh runs along one axis of the torus."""
    coords = on_a_torus(4, 4)
    along = [{tuple(np.abs(step)) for step in np.diff(coords, axis=axis).reshape(-1, 3)} for axis in (0, 1)]
    assert all(len(steps) == 1 and sum(*steps) == 1 for steps in along) and along[0] != along[1]


def test_an_axis_of_the_torus_may_be_split():
    """2 x 8 on 4 x 4: the axis of 8 takes one axis of the torus and half of the other, and every device is there once."""
    coords = on_a_torus(2, 8)
    assert len({tuple(place) for place in coords.reshape(-1, 3)}) == 16
    for row in coords:
        assert sorted(len(set(row[:, axis])) for axis in (0, 1)) == [2, 4]


def test_models_and_the_mesh_mean_the_same_axes():
    """Each of the two rooms imports nothing of the other."""
    assert parts.BATCH_AXES == BATCH_AXES


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        (dict(data=4, fsdp=2, dcn_data=3), devices_in(2, 4), r"dcn_data=3 does not divide data=4"),
        (dict(data=4, fsdp=2, dcn_data=4), devices_in(2, 4), r"dcn_data=4 needs 4 slices and the devices are in 2 \(slices\)"),
        (dict(data=4, fsdp=2, dcn_fsdp=2), devices_in(1, 8), r"dcn_fsdp=2 needs 2 slices and the devices are in 1 \(processes\)"),
        (dict(data=4, fsdp=2), devices_in(2, 4, "tpu"), r"the TPUs are in 2 slices. Set mesh.dcn_data=2"),
    ],
)
def test_slices_that_do_not_fit(sizes, devices, message):
    with pytest.raises(ConfigError, match=message):
        numbers(sizes, devices)


def specs(size="tiny", **changes):
    c = load_config(f"lm:size={size}", [(f"model.{name}", value) for name, value in changes.items()])
    return param_specs(c.model)


def test_parameters_are_cut_along_the_table():
    mesh = make_mesh(dict(data=2, fsdp=2, tensor=2))
    found = parameter_shardings(specs(tie_embeddings=False, qk_norm=True), mesh)
    assert found["embed"]["table"].spec == PartitionSpec("tensor", "fsdp")
    assert found["head"]["kernel"].spec == PartitionSpec("fsdp", "tensor")
    assert found["layers"]["attn"]["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert found["layers"]["attn"]["out"].spec == PartitionSpec(None, "tensor", None, "fsdp")
    assert found["layers"]["attn"]["q_norm"]["gain"].spec == PartitionSpec(None, None)
    assert found["layers"]["ffn"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers"]["ffn_norm"]["gain"].spec == PartitionSpec(None, "fsdp")


def test_experts_are_shared_out():
    """Each device of the expert axis has whole experts; the router, its bias and the shared experts are on all of them."""
    found = parameter_shardings(specs("tiny-moe"), make_mesh(dict(data=1, fsdp=2, expert=2, tensor=2)))["layers"]["ffn"]
    assert found["experts"]["up"].spec == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert found["experts"]["down"].spec == PartitionSpec(None, "expert", "tensor", "fsdp")
    assert found["router"].spec == PartitionSpec(None, "fsdp", None)
    assert found["shared"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    with pytest.raises(ConfigError, match=r"layers/ffn/experts/.* has experts=16, which expert=3"):
        parameter_shardings(specs("tiny-moe"), AbstractMesh((1, 1, 1, 3, 1, 1), AXES))


def test_sizes_of_the_paper_fit_common_meshes():
    """Each device of an abstract 16 x 4 mesh holds 1/64 of every matrix of the 1.5B model."""
    specs = param_specs(load_config("lm:size=1.5b").model)
    for path, spec in specs.items():
        pieces = math.prod({"embed": 16, "vocab": 4, "heads": 4, "kv_heads": 4, "ffn": 4}.get(axis, 1) for axis in spec.axes)
        assert pieces == (16 if spec.role == "norm" else 64), path
    parameter_shardings(specs, AbstractMesh((1, 1, 16, 1, 1, 4), AXES))  # raises nothing: every size divides


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (dict(data=1, fsdp=1, tensor=8), dict(n_heads=8, n_kv_heads=8, d_ff=180), r"layers/ffn/.* has ffn=180, which tensor=8"),
        (dict(data=1, fsdp=8, tensor=1), dict(d_model=60), r"embed=60, which fsdp=8"),
        (dict(data=4, fsdp=1, tensor=2), dict(n_kv_heads=1), r"layers/attn/[kv] has kv_heads=1, which tensor=2"),
        (dict(data=4, fsdp=1, tensor=2), dict(vocab_size=501), r"embed/table has vocab=501, which tensor=2"),
    ],
)
def test_a_dimension_the_mesh_does_not_divide(sizes, changes, message):
    with pytest.raises(ConfigError, match=message):
        parameter_shardings(specs(**changes), make_mesh(sizes))


def test_a_batch_the_mesh_does_not_divide():
    mesh = make_mesh(dict(data=2, fsdp=2, tensor=2))
    check_batch(16, 4, mesh)
    with pytest.raises(ConfigError, match=r"6 sequences in 1 micro-batches are 6 rows each, which data x fsdp x expert = 4"):
        check_batch(6, 1, mesh)
    with pytest.raises(ConfigError, match=r"8 sequences in 4 micro-batches.*multiple of 16"):
        check_batch(8, 4, mesh)


GOLDEN = {
    "tiny-moe-mla_data2_fsdp2_expert2": ("lm:size=tiny-moe,attention=mla", dict(data=2, fsdp=2, expert=2)),
    "tiny_data2_context2_tensor2": ("lm:size=tiny", dict(data=2, context=2, tensor=2)),
    "1.5b_fsdp16_tensor4": ("lm:size=1.5b", dict(fsdp=16, tensor=4)),
    "1.5b_data16_fsdp16": ("lm:size=1.5b", dict(data=16, fsdp=16)),
    "moe-3b-a0.5b_fsdp16_expert16": ("lm:size=moe-3b-a0.5b", dict(fsdp=16, expert=16)),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_shardings(name):
    """Every parameter with its logical axes, where they are cut and what a device holds; how 256 sequences and their activations lie.

    GAMMALM_UPDATE_GOLDEN=1 rewrites the files.
    """
    spec, sizes = GOLDEN[name]
    mesh = AbstractMesh(mesh_shape(sizes, math.prod(sizes.values())), AXES)
    config = load_config(spec)
    found = param_specs(config.model)
    placed = parameter_shardings(found, mesh)
    lines = []
    for path in sorted(found):
        node = placed
        for part in path.split("/"):
            node = node[part]
        cut = ", ".join(f"{axis}:{over}" if over else axis for axis, over in zip(found[path].axes, node.spec, strict=True))
        lines.append(f"{path}  {found[path].shape} ({cut}) -> {node.shard_shape(found[path].shape)}")
    read, inner = (256, config.data.seq_len + 1), (256, config.data.seq_len, config.model.d_model)
    lines.append(f"tokens of a batch  {read} -> {batch_sharding(mesh).shard_shape(read)}")
    lines.append(f"activations  {inner} -> {NamedSharding(mesh, parts.TOKENS).shard_shape(inner)}")
    text = "\n".join(lines) + "\n"
    golden = Path(__file__).parent / "golden" / f"{name}.txt"
    if os.environ.get("GAMMALM_UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12), ("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12), ("cpu", None), ("NVIDIA L40", None), ("NVIDIA A10", None), ("TPU v4 lite", None),
    ],
)  # fmt: skip
def test_peak_of_a_device_by_its_name(kind, peak):
    """As JAX names devices. A card that is not in the table is unknown, never taken for one with a similar name."""
    assert peak_flops(SimpleNamespace(device_kind=kind)) == peak
