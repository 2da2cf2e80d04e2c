"""Every leaf of the config changes something that can be seen: no knob without a wire.

For each leaf another value, and what shows it: the program of a training step, where arrays lie, the drawn parameters, the traced
scalars, what is asked of the data, or what a run leaves behind. A leaf without an entry fails the last test.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.config import apply_overrides, leaves, load_config
from gammalm.experiments import downstream
from gammalm.experiments.monitors import Monitor
from gammalm.files import read_jsonl
from gammalm.initializers import init_params
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import arrange, between_slices, mesh_shape
from gammalm.training import lanes, loop
from gammalm.training.program import Program, Programs
from gammalm.training.step import init_state, make_step, scalars

SMALL = [
    ("model.d_model", 16), ("model.n_heads", 2), ("model.n_kv_heads", 2), ("model.head_dim", 6), ("model.d_ff", 24),
    ("model.loss_chunk", 16), ("model.dtype", "float32"),
]  # fmt: skip
SPEC = "lm:size=tiny,vocab=32,seq_len=8,batch=8,steps=4"
GPT2 = "lm:size=tiny,style=gpt2,vocab=32,seq_len=8,batch=8,steps=4"
MIXTURE = "lm:size=tiny-moe,attention=mla,vocab=32,seq_len=8,batch=8,steps=4"  # the leaves of the other kinds


def config(changes=(), spec=SPEC):
    known = leaves(load_config(spec))
    return load_config(spec, [(name, value) for name, value in SMALL if name in known] + list(changes))


def step_program(c):
    """The traced step, with the shapes of its arguments; nothing is compiled."""
    model = Model(c.model)
    tokens = jax.ShapeDtypeStruct((c.batch.sequences, c.data.seq_len + 1), jnp.int32)
    batch = {"tokens": tokens} | ({"segments": tokens} if c.data.packing == "documents" else {})
    state = jax.eval_shape(lambda: init_state(model, c, 0))
    return str(jax.make_jaxpr(make_step(model, c))(state, batch, scalars(c)))


def drawn(c):
    """Numbers of two parameters: one that starts the stream, one that writes into it."""
    specs = {path: spec for path, spec in Model(c.model).specs.items() if path in ("embed/table", "layers/attn/out")}
    tree = init_params(specs, c.init, c.seed, d_model=c.model.d_model, n_layers=c.model.n_layers)
    return str([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)])


def placed(c):
    p = Program(c, np.zeros(c.model.vocab_size, np.int32))
    return str([leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(p.abstract_state)] + [p.mesh.shape])


def arranged(c):
    """Numbers of eight devices on the mesh, which lie in two slices turn about."""
    devices = [SimpleNamespace(id=i, slice_index=i % 2, process_index=0, platform="cpu", device_kind="cpu") for i in range(8)]
    sizes = c.mesh.to_dict()
    shape = mesh_shape(sizes, len(devices))
    return str(np.vectorize(lambda device: device.id)(arrange(shape, between_slices(sizes, shape), devices)).tolist())


def traced_scalars(c):
    return str(scalars(c))


class Split:
    """Stands for prepared data: the one thing here that is not the real one (tests/data shows that it heeds what it is asked)."""

    vocab_size, token_bytes, tokenizer_sha256, domains = 32, np.ones(32, np.int32), "same", ["web-en"]
    asked: list = []

    def __init__(self, path, split, **how):
        self.asked.append((path, split, sorted(how.items())))
        self.shape = (how["batch"], how["seq_len"] + 1)

    def batch(self, step, rows=None):
        return {"tokens": np.random.default_rng(step).integers(0, 32, self.shape).astype(np.int32)}

    def validation(self, domain, rows=None):
        for step in range(3):
            yield self.batch(step) | {"weights": np.ones((self.shape[0], self.shape[1] - 1), np.float32)}

    def validation_batches(self, domain):
        return 3

    def epochs(self, step):
        return {"web-en": float(step)}


@pytest.fixture(scope="module")
def programs():
    return Programs(devices=jax.devices()[:1])


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Config -> what is asked of the data."""
    monkeypatch.setattr(lanes, "open_split", Split)

    def ask(c):
        monkeypatch.setattr(Split, "asked", [])
        lanes.Lane(lanes.Run(c, tmp_path))
        return str(Split.asked)

    return ask


@pytest.fixture
def left_behind(monkeypatch, tmp_path, programs):
    """Config -> rows of metrics (without times) and monitors, and checkpoints of a whole run."""
    monkeypatch.setattr(lanes, "open_split", Split)
    timed = ("tokens_per_s", "data_wait", "mfu")

    def run(c):
        workdir = tmp_path / str(len(list(tmp_path.iterdir())))
        loop.train([loop.Run(c, workdir)], programs, monitor=Monitor)
        kept = [row for row in loop.Metrics(workdir, 99).rows() if row["kind"] != "goodput"]
        rows = [{k: v for k, v in row.items() if k not in timed} for row in kept]
        rows += read_jsonl(workdir / "monitors.jsonl")
        return str(rows) + str(sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()))

    return run


@pytest.fixture
def watched(monkeypatch, left_behind):
    """Config -> the seconds that the watchdog of a run is told."""

    def run(c):
        told = []
        real = loop.Watchdog
        with monkeypatch.context() as patch:
            patch.setattr(loop, "Watchdog", lambda seconds: told.append(seconds) or real(seconds))
            left_behind(c)
        return told

    return run


@pytest.fixture
def tracked(monkeypatch, left_behind):
    """Config -> what the tracker of a run is told; its package is not the real one."""
    told = []
    run = SimpleNamespace(log=told.append, define_metric=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run, Settings=dict))

    def train(c):
        told.clear()
        left_behind(c)
        return [sorted(row) for row in told]

    return train


@pytest.fixture
def benchmarked(monkeypatch):
    """Config -> after which steps it is tested on what; the harness and the tokenizer are not the real ones."""
    told = []

    class Tasks:
        def load(self, names):
            return {"tasks": {}}

    def opened(names, offline, include, **_):
        told.append((names, offline, include))
        return Tasks(), names, {}

    def evaluate(lm, tasks, *, limit, **_):
        told.append((tasks, limit))
        return {"rows": [], "requests": {}}, None

    lm = SimpleNamespace(load=lambda *_: None)
    harness = SimpleNamespace(refuse_unwritable=lambda *_: None, GammaLM=lambda *_, **__: lm, evaluate=evaluate)
    monkeypatch.setitem(sys.modules, "gammalm.evaluation.harness", harness)
    monkeypatch.setattr(downstream, "open_tasks", opened)
    monkeypatch.setattr(downstream.Tokenizer, "load", lambda _: SimpleNamespace(sha256=Split.tokenizer_sha256))

    def run(c):
        told.clear()
        downstream._opened.cache_clear()
        lane = SimpleNamespace(config=c, train=Split)
        monitor = downstream.Downstream(lane, type("Any", (), {"mesh": None, "model": Model(c.model)})())
        monitor.measure({"params": {}, "buffers": {}}, lambda: None)
        return str([*told, sorted(monitor.steps)])

    return run


TESTED = [("downstream.tasks", ("some",))]
# Under these, a loss that is above the middle of the two before is a spike: of random tokens every other one.
SPIKY = [("train.spike", "rollback"), ("train.spike_window", 2), ("train.spike_sigma", 1e-6), ("train.steps", 12)]

# Leaf -> (other value, changes under which it is read at all, what shows it).
WIRED = {
    "seed": (1, (), drawn),
    "model.vocab_size": (40, (), step_program),
    "model.d_model": (24, (), step_program),
    "model.n_layers": (3, (), step_program),
    "model.n_heads": (4, (), step_program),
    "model.n_kv_heads": (1, (), step_program),
    "model.head_dim": (8, (), step_program),
    "model.d_ff": (32, (), step_program),
    "model.norm": ("layer", (), step_program),
    "model.residual": ("deepnorm", (), step_program),
    "model.norm_eps": (1e-3, (), traced_scalars),
    "model.gate": ("headwise", (), step_program),
    "model.softmax_sink": ("learned", (), step_program),
    "model.tie_embeddings": (False, (), step_program),
    "model.rope_theta": (5e5, (), step_program),
    "model.qk_norm": (True, (), step_program),
    "model.logit_softcap": (30.0, (), step_program),
    "model.dtype": ("bfloat16", (), step_program),
    "model.residual_dtype": ("float32", (), step_program),
    "model.attention_kernel": ("splash", (), step_program),
    "model.remat": ("full", (), step_program),
    "model.scan_unroll": (2, (), step_program),
    "model.loss_chunk": (64, (), step_program),
    "init.preset": ("xavier_normal", (), drawn),
    "init.gamma": (0.5, (), drawn),
    "init.group_gammas": ((1.0, 1.0, 0.5, 1.0), [("init.preset", "groups")], drawn),
    "init.base_width": (32, [("init.preset", "mup")], drawn),
    "init.depth_scale": (True, (), drawn),
    "init.truncate": (2.0, (), drawn),
    "init.rules": (("out=zeros",), (), drawn),
    "data.path": ("elsewhere", (), "asked"),
    "data.mixture": ("natural", (), "asked"),
    "data.packing": ("documents", (), "asked"),
    "data.loss": ("last", [("data.packing", "documents")], "asked"),
    "data.seq_len": (16, (), "asked"),
    "batch.sequences": (16, (), "asked"),
    "batch.micro_batches": (2, (), step_program),
    "optimizer.kind": ("muon", (), step_program),
    "optimizer.learning_rate": (1.0, (), traced_scalars),
    "optimizer.b1": (0.5, (), step_program),
    "optimizer.b2": (0.5, (), step_program),
    "optimizer.eps": (1e-3, (), step_program),
    "optimizer.weight_decay": (1.0, (), traced_scalars),
    "optimizer.no_decay": (("norm", "embed"), (), step_program),
    "optimizer.clip": (3.0, (), step_program),
    "optimizer.schedule": ("wsd", (), step_program),
    "optimizer.warmup_steps": (2, (), step_program),
    "optimizer.final_fraction": (0.5, (), step_program),
    "optimizer.cooldown_share": (0.75, [("optimizer.schedule", "wsd")], step_program),
    "train.steps": (5, (), step_program),
    "train.log_every": (3, (), "left_behind"),
    "train.validate_every": (2, (), "left_behind"),
    "train.validation_batches": (2, (), "left_behind"),
    "train.checkpoint_every": (2, [("train.checkpoints_kept", 9)], "left_behind"),
    "train.checkpoints_kept": (1, (), "left_behind"),
    "train.stall_timeout": (7.0, (), "watched"),
    "train.tracker": ("wandb", (), "tracked"),
    "train.spike": ("skip", (), step_program),
    "train.spike_window": (3, [("train.spike", "skip")], step_program),
    "train.spike_sigma": (2.0, [("train.spike", "skip")], step_program),
    "train.spike_rollbacks": (1, SPIKY, "left_behind"),
    "monitor.kinds": (("weights",), (), "left_behind"),
    "monitor.points": (2, [("monitor.kinds", ("weights",))], "left_behind"),
    "downstream.tasks": (("other",), TESTED, "benchmarked"),
    "downstream.steps": ((2,), TESTED, "benchmarked"),
    "downstream.limit": (7, TESTED, "benchmarked"),
    "downstream.offline": (True, TESTED, "benchmarked"),
    "downstream.include": ("mine", TESTED, "benchmarked"),
    "mesh.data": (1, [("mesh.data", 2), ("mesh.tensor", -1), ("model.n_heads", 8), ("model.n_kv_heads", 8)], placed),
    "mesh.fsdp": (2, (), placed),
    "mesh.expert": (2, (), placed),
    "mesh.context": (2, (), placed),
    "mesh.tensor": (2, (), placed),
    "mesh.dcn_data": (2, (), arranged),
    "mesh.dcn_fsdp": (2, [("mesh.data", 1), ("mesh.fsdp", 8)], arranged),
}
# The kind of a layer decides which leaves there are, so it is chosen with the config and not by an override.
CHOSEN = {"model.attention": "attention=mla", "model.ffn": "size=tiny-moe", "model.positions": "style=gpt2"}
WIRED_GPT2 = {
    "model.activation": ("silu", (), step_program),
    "model.biases": (False, (), step_program),
    "model.max_positions": (9, (), step_program),
}
WIRED_MIXTURE = {
    "model.mla.q_rank": (6, (), step_program),
    "model.mla.kv_rank": (6, (), step_program),
    "model.mla.nope_dim": (6, (), step_program),
    "model.mla.rope_dim": (6, (), step_program),
    "model.mla.v_dim": (6, (), step_program),
    "model.moe.n_experts": (8, (), step_program),
    "model.moe.top_k": (2, (), step_program),
    "model.moe.n_shared": (2, (), step_program),
    "model.moe.d_expert": (24, (), step_program),
    "model.moe.first_k_dense": (1, (), step_program),
    "model.moe.score": ("softmax", (), step_program),
    "model.moe.route_scale": (2.0, (), step_program),
    "model.moe.bias_rate": (0.5, (), step_program),
    "model.moe.balance_loss": (0.5, (), step_program),
    "model.moe.backend": ("dense", (), step_program),
}


@pytest.mark.parametrize("leaf", [*(leaf for leaf in WIRED if leaf not in CHOSEN), *WIRED_MIXTURE, *WIRED_GPT2])
def test_leaf_changes_something(leaf, request):
    value, context, shows = (WIRED | WIRED_MIXTURE | WIRED_GPT2)[leaf]
    show = request.getfixturevalue(shows) if isinstance(shows, str) else shows
    before = config(context, MIXTURE if leaf in WIRED_MIXTURE else GPT2 if leaf in WIRED_GPT2 else SPEC)
    after = apply_overrides(before, [(leaf, value)])
    assert leaves(before)[leaf] != leaves(after)[leaf], "the test changes nothing"
    assert show(before) != show(after)


@pytest.mark.parametrize("leaf", CHOSEN)
def test_the_kind_of_a_layer_changes_the_step(leaf):
    name, _, kind = CHOSEN[leaf].partition("=")
    spec = SPEC.replace("size=tiny", f"size={kind}") if name == "size" else f"{SPEC},{CHOSEN[leaf]}"
    before, after = config(), config(spec=spec)
    assert leaves(before)[leaf] != leaves(after)[leaf]
    assert step_program(before) != step_program(after)


@pytest.mark.parametrize("shows", [step_program, drawn, traced_scalars])
def test_what_shows_a_change_is_itself_steady(shows):
    """The same config twice gives the same: addresses or counters in a text would make every leaf look wired."""
    assert shows(config()) == shows(config())


def test_every_leaf_is_in_a_table():
    assert set(WIRED) | set(CHOSEN) == set(leaves(config()))
    assert set(WIRED_MIXTURE) | set(CHOSEN) == set(leaves(config(spec=MIXTURE))) - (set(WIRED) - set(CHOSEN))
    assert set(WIRED_GPT2) | set(CHOSEN) == set(leaves(config(spec=GPT2))) - (set(WIRED) - set(CHOSEN))
