"""One run on several meshes: the same parameters, the same losses, every device with its share, and no traffic inside the loss.

Shapes: B=8 sequences, T=12 tokens, D=16, V=50; losses in fp32.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.config import apply_overrides
from gammalm.errors import ConfigError
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import batch_sharding, make_mesh, parameter_shardings
from gammalm.training.program import Program
from gammalm.training.step import init_state, scalars

from ..models.reference import small_config

MESHES = {
    "one device": (1, 1, 1), "data": (8, 1, 1), "fsdp": (1, 8, 1), "all": (2, 2, 2), "context": (2, 1, 1, 4), "all but data": (1, 2, 2, 2),
}  # fmt: skip
B, T, D, V, STEPS = 8, 12, 16, 50, 5
TOKEN_BYTES = np.arange(V, dtype=np.int32)


def config(data, fsdp, tensor, context=1):
    return small_config(
        d_model=D, d_ff=24, gate="elementwise", softmax_sink="learned", loss_chunk=8, batch__sequences=B, data__packing="documents",
        optimizer__warmup_steps=0, optimizer__learning_rate=0.02, mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor,
        mesh__context=context,
    )  # fmt: skip


def collective_shapes(line):
    """Shapes of the fp32 results of the collective in a line of a compiled program; none in other lines."""
    found = re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line)
    return [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"f32\[([\d,]*)\]", found[1])] if found else []


def batch(step):
    rng = np.random.default_rng(step)
    segments = np.cumsum(rng.uniform(size=(B, T + 1)) < 0.2, axis=1).astype(np.int32) + 1
    return {"tokens": rng.integers(0, V, (B, T + 1)).astype(np.int32), "segments": segments}


class Ran:
    """Five steps on one mesh from the one-device parameters."""

    def __init__(self, sizes, start=None):
        c = config(*sizes)
        self.program = p = Program(c, TOKEN_BYTES, devices=jax.devices()[: np.prod(sizes)])
        self.start = p.init(c) if start is None else start
        start = jax.tree.map(np.asarray, self.start)  # the step gives its argument away
        state = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), start, p.abstract_state)
        with jax.set_mesh(p.mesh):
            self.step = p._step.lower(state, p.put([batch(0)]), scalars(c)).compile()
        self.start, self.metrics = start, []
        for step in range(STEPS):
            state, metrics = self.step(state, p.put([batch(step)]), scalars(c))
            self.metrics.append(jax.device_get(metrics))
        self.state = state


@pytest.fixture(scope="module")
def ran():
    made = {}

    def run(name):
        if name not in made:
            made[name] = Ran(MESHES[name], None if name == "one device" else run("one device").start)
        return made[name]

    return run


@pytest.mark.parametrize("name", ["data", "fsdp", "all", "context", pytest.param("all but data", marks=pytest.mark.full)])
def test_losses_equal_those_of_one_device(ran, name):
    one, many = ran("one device").metrics, ran(name).metrics
    np.testing.assert_allclose([m["loss"] for m in many], [m["loss"] for m in one], atol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in many], [m["grad_norm"] for m in one], rtol=1e-5)
    assert [m["tokens"] for m in many] == [m["tokens"] for m in one]
    assert one[0]["loss"] != pytest.approx(one[4]["loss"], abs=1e-2), "five steps that moved"


def test_every_device_holds_its_share(ran):
    """Parameters and both moments: D cut by fsdp, heads, FFN and vocabulary by tensor."""
    for name, shapes in {
        "fsdp": {"table": (V, D // 8), "q": (2, D // 8, 4, 6), "down": (2, 24, D // 8), "gain": (2, D // 8)},
        "all": {"table": (V // 2, D // 2), "q": (2, D // 2, 2, 6), "down": (2, 12, D // 2), "gain": (2, D // 2)},
        "data": {"table": (V, D), "q": (2, D, 4, 6), "down": (2, 24, D), "gain": (2, D)},
    }.items():
        state = ran(name).state
        for tree in (state["params"], state["adam"].mu, state["adam"].nu):
            found = {
                "table": tree["embed"]["table"], "q": tree["layers"]["attn"]["q"], "down": tree["layers"]["ffn"]["down"],
                "gain": tree["layers"]["attn_norm"]["gain"],
            }  # fmt: skip
            assert {key: leaf.addressable_shards[0].data.shape for key, leaf in found.items()} == shapes, name


def test_fresh_parameters_are_bit_equal_on_eight_devices(ran):
    """Each device draws its shard alone; the numbers are those of one device."""
    p = ran("all").program
    fresh = p.init(p.config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(fresh):
        node = ran("one device").start
        for key in path:
            node = node[key.key] if hasattr(key, "key") else getattr(node, key.name)
        np.testing.assert_array_equal(leaf, node, err_msg=str(path))
    assert fresh["params"]["embed"]["table"].addressable_shards[0].data.shape == (V // 2, D // 2)


@pytest.mark.parametrize("name", ["fsdp", "all"])
def test_looking_tokens_up_moves_the_table_and_no_activations(name):
    """Forward and backward: what travels is the table [V, D], or a device's own rows; never rows of other devices."""
    rows, length, width, vocab = 16, 32, 24, 1024
    c = small_config(d_model=width, n_heads=8, n_kv_heads=8, d_ff=16, vocab_size=vocab)
    model = Model(c.model)
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), MESHES[name], strict=True)))
    places = parameter_shardings(model.specs, mesh)
    params = jax.eval_shape(lambda: init_state(model, c, 0)["params"])
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)

    def start(params, tokens):
        return jnp.square(model.bind(params).start(tokens, None)[0]).sum()

    with jax.set_mesh(mesh):
        slope = jax.jit(jax.grad(start), in_shardings=(places, batch_sharding(mesh)), out_shardings=places)
        program = slope.lower(params, tokens).compile()
    moved = {shape for line in program.as_text().splitlines() for shape in collective_shapes(line) if shape}
    tensor = mesh.shape["tensor"]
    allowed = {(vocab // tensor, width), (vocab // tensor, width // mesh.shape["fsdp"]), (rows * tensor // 8, length, width)}
    assert moved <= allowed and (vocab // tensor, width) in moved


@pytest.mark.parametrize("name", ["data", "fsdp", "all"])
def test_the_head_gradient_is_summed_over_devices_once(ran, name):
    """Not in the loop over chunks of the loss: no all-reduce of a [V, ·] array outside the entry computation."""
    entry, inside, outside = False, [], []
    for line in ran(name).step.as_text().splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        (outside if entry else inside).extend(shape for shape in collective_shapes(line) if shape[:1] in ((V,), (V // 2,)))
    assert outside and not inside


@pytest.mark.parametrize("name", ["all", "context"])
def test_validation_equals_that_of_one_device(ran, name):
    fed = batch(7)
    fed["weights"] = np.random.default_rng(8).uniform(size=(B, T)).astype(np.float32)

    def sums(on, state):
        p = ran(on).program
        state = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), jax.device_get(state), p.abstract_state)
        return jax.device_get(p.validate(state, p.put([fed]), np.float32(1e-6)))

    state = ran("one device").state
    one, many = sums("one device", state), sums(name, state)
    assert one["nats"] > 100 and one.keys() == many.keys()
    for measure in one:
        np.testing.assert_allclose(many[measure], one[measure], rtol=1e-6)


def test_context_moves_keys_and_values_alone(ran):
    """[4, 12, 2, 6] is what a device gathers of a sequence that lies on four: never the stream [.., .., D], queries or logits."""
    gathers = [line for line in ran("context").step.as_text().splitlines() if re.search(r" all-gather(-start)?\(", line)]
    assert {shape for line in gathers for shape in collective_shapes(line)} == {(B // 2, T, 2, 6)}


def test_batches_and_models_that_do_not_fit_are_refused():
    odd = config(8, 1, 1)
    odd.batch.sequences = 6
    with pytest.raises(ConfigError, match=r"6 sequences.*data x fsdp x expert = 8"):
        Program(odd, TOKEN_BYTES)
    odd = config(1, 8, 1)
    odd.model.d_model = 20
    with pytest.raises(ConfigError, match=r"embed=20, which fsdp=8"):
        Program(odd, TOKEN_BYTES)


MIXTURE_MESHES = {
    "data": (4, 1, 1, 1), "expert": (1, 1, 4, 1), "fsdp, expert": (1, 2, 2, 1), "expert, tensor": (2, 1, 2, 2), "context": (2, 1, 1, 1, 4),
    "expert, context": (1, 2, 2, 1, 2),
}  # fmt: skip


def mixture(sizes, micro_batches=1):
    data, fsdp, expert, tensor, *context = sizes
    return small_config(
        attention="mla", ffn="moe", gate="headwise", d_model=D, n_layers=3, remat="full", loss_chunk=8, model__moe__first_k_dense=1,
        model__moe__n_experts=8, model__moe__balance_loss=0.5, model__moe__bias_rate=0.05, batch__sequences=B,
        batch__micro_batches=micro_batches, data__packing="documents", optimizer__warmup_steps=0, optimizer__learning_rate=0.02,
        optimizer__eps=1e-3,  # Adam would turn the rounding of gradients near zero into whole steps
        mesh__data=data, mesh__fsdp=fsdp, mesh__expert=expert, mesh__tensor=tensor,
        mesh__context=context[0] if context else 1,
    )  # fmt: skip


def steps_of_a_mixture(sizes, backend, micro_batches=1):
    """Metrics of three steps and the last state, from the same parameters on every mesh; some tokens are padding."""
    c = mixture(sizes, micro_batches)
    c = apply_overrides(c, [("model.moe.backend", backend)])
    p = Program(c, TOKEN_BYTES, devices=jax.devices()[: np.prod(sizes)])
    state, metrics = p.init(c), []
    for step in range(3):
        fed = batch(step)
        fed["segments"][:, -2:] = 0
        state, found = p.step(state, p.put([fed]), scalars(c))
        metrics.append(jax.device_get(found))
    return metrics, jax.device_get(state)


@pytest.fixture(scope="module")
def dense_mixture():
    return steps_of_a_mixture((1, 1, 1, 1), "dense")


@pytest.mark.full
@pytest.mark.parametrize(
    "name, micro_batches",
    [
        ("expert", 2), ("fsdp, expert", 1), ("expert, tensor", 1), ("expert, context", 2),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("data", "expert", "context")),  # parts of the others
    ],
)  # fmt: skip
def test_mixtures_equal_the_one_device_reference(dense_mixture, name, micro_batches):
    """Loss, gradient norm, balance loss, loads, bias and parameters, with remat, under micro-batches too."""
    (one, before), (many, after) = dense_mixture, steps_of_a_mixture(MIXTURE_MESHES[name], "auto", micro_batches)
    for ours, theirs in zip(many, one, strict=True):
        for measure in ("load_entropy", "load_max", "load_min", "tokens", "dropped"):
            np.testing.assert_allclose(ours[measure], theirs[measure], rtol=1e-6)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-5)
        np.testing.assert_allclose(ours["balance"], theirs["balance"], rtol=1e-5)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5)
    assert one[0]["dropped"].tolist() == [0, 0] and (np.asarray(one[0]["load_max"]) > 1).all()
    np.testing.assert_array_equal(after["buffers"]["layers"]["ffn"]["bias"], before["buffers"]["layers"]["ffn"]["bias"])
    assert abs(before["buffers"]["layers"]["ffn"]["bias"]).max() > 0.04
    for ours, theirs in zip(*(jax.tree.leaves(state["params"]) for state in (after, before)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.full
def test_every_device_ranks_its_own_tokens():
    """Left to the compiler, choosing experts would gather the affinities [B, T, E] of the whole batch on every device of a CPU mesh."""
    c = mixture(MIXTURE_MESHES["fsdp, expert"])
    p = Program(c, TOKEN_BYTES, devices=jax.devices()[:4])
    with jax.set_mesh(p.mesh):
        program = p._step.lower(p.abstract_state, p.put([batch(0)]), scalars(c)).compile()
    moved = {shape for line in program.as_text().splitlines() for shape in collective_shapes(line)}
    assert moved and (B, T, 8) not in moved
