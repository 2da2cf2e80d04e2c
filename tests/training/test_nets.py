"""Small supervised nets: all cells as one program against NumPy in float64 and against cells alone; devices; divergence; every leaf."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gammalm.config import leaves, load_config
from gammalm.data.examples import Examples
from gammalm.errors import ConfigError
from gammalm.training import nets
from gammalm.training.nets import NetProgram, draw, train_nets
from gammalm.training.preemption import Preempted

WIDTHS = (6, 5, 4, 3)


def config(seed=0, std=0.5, widths=WIDTHS, **changes):
    known = leaves(load_config("mlp:data=wine-red"))
    named = {next(name for name in known if name.rpartition(".")[2] == key): value for key, value in changes.items()}
    fixed = {"model.widths": widths, "batch.examples": 8, "train.epochs": 2, "optimizer.learning_rate": 0.1}
    return load_config(f"mlp:data=wine-red,std={std},seed={seed}", list((fixed | named).items()))


def table(outputs=3, rows=46, inputs=6):
    rng = np.random.default_rng(5)
    x = rng.normal(3, 2, (rows, inputs)).astype(np.float32)
    return Examples(x, (x @ rng.normal(size=(inputs, outputs))).argmax(1).astype(np.int32))


def by_hand(config, examples):
    """The record of one run of plain SGD with ReLU, float64, written out."""
    split = examples.split(config.seed, True)
    x, y = (examples.x_NI.astype(np.float64) - split.mean_I) / split.scale_I, examples.y_N
    params = [(np.float64(layer["kernel"]), np.float64(layer["bias"])) for layer in draw(config).values()]

    def forward(rows):
        streams = [x[rows]]
        for i, (w, b) in enumerate(params):
            z = streams[-1] @ w + b
            streams.append(np.maximum(z, 0) if i < len(params) - 1 else z)
        z = streams[-1] - streams[-1].max(1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        return streams, p, -np.log(p[np.arange(len(rows)), y[rows]]).mean(), (z.argmax(1) == y[rows]).mean()

    found = {"test_loss": [forward(split.test_M)[2]], "test_accuracy": [forward(split.test_M)[3]], "norms": [], "losses": []}
    for epoch in range(config.train.epochs):
        order = np.random.default_rng([config.seed, 2, epoch]).permutation(split.train_M)
        for i in range(0, len(order) // 8 * 8, 8):
            rows = order[i : i + 8]
            streams, p, loss, _ = forward(rows)
            delta = (p - np.eye(3)[y[rows]]) / 8
            gradients = []
            for w, _ in reversed(params):
                h = streams[len(params) - len(gradients) - 1]
                gradients.append((h.T @ delta, delta.sum(0)))
                delta = (delta @ w.T) * (h > 0)
            gradients.reverse()
            found["norms"].append([np.linalg.norm(g) for g, _ in gradients])
            found["losses"].append(loss)
            params = [(w - 0.1 * g, b - 0.1 * h) for (w, b), (g, h) in zip(params, gradients, strict=True)]
        found["test_loss"].append(forward(split.test_M)[2])
        found["test_accuracy"].append(forward(split.test_M)[3])
    return found


def test_all_cells_at_once_are_what_numpy_makes_of_each():
    """Two seeds, three stds, eight devices that share out the three arms."""
    configs, examples = [config(seed, std) for seed in (3, 1) for std in (0.2, 0.5, 1.0)], table()
    for one, record in zip(configs, train_nets(configs, examples), strict=True):
        expected = by_hand(one, examples)
        steps = len(expected["losses"]) // 2
        np.testing.assert_allclose(record["test_loss"], expected["test_loss"], rtol=2e-4)
        np.testing.assert_allclose(record["test_accuracy"], expected["test_accuracy"])
        np.testing.assert_allclose(record["train_loss"], np.reshape(expected["losses"], (2, -1)).mean(1), rtol=2e-4)
        np.testing.assert_allclose(record["gradient_norm"][0], expected["norms"][0], rtol=2e-4)
        np.testing.assert_allclose(record["gradient_norm"][2], np.mean(expected["norms"][steps:], 0), rtol=2e-3)
        assert record["diverged_at"] is None and record["steps"] == 2 * steps and record["parameters"] == 6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3
        np.testing.assert_allclose(record["curve"], expected["losses"], rtol=2e-4)


@pytest.mark.full
def test_cells_do_not_depend_on_their_company_or_devices():
    """Adam, one output: a cell alone, among others, on one device, and with its own learning rate."""
    examples = table(outputs=2)
    configs = [config(0, std, (6, 4, 1), kind="adam", learning_rate=rate) for std, rate in ((0.3, 0.01), (0.6, 0.01), (0.3, 0.05))]
    among = train_nets(configs, examples, devices=jax.devices()[:2])  # three arms on two devices: one is repeated
    assert len({tuple(record["train_loss"]) for record in among}) == 3
    program = NetProgram(configs[0], jax.devices()[:1])
    for one, record in zip(configs, among, strict=True):
        (alone,) = train_nets([one], examples, program=program)
        for name in ("test_loss", "train_loss", "train_accuracy", "test_accuracy"):
            np.testing.assert_allclose(record[name], alone[name], rtol=1e-4, err_msg=name)


def test_what_diverges_is_recorded_and_leaves_the_others_alone():
    examples, fine = table(), config(0, 0.5)
    broken, later, record = train_nets([config(0, 1e25), config(0, 0.5, learning_rate=1e30), fine], examples)
    assert broken["diverged_at"] == 1 and not np.isfinite(broken["train_loss"]).all()
    assert later["diverged_at"] == 2  # the first step is finite, what it leads to is not
    assert record["diverged_at"] is None
    np.testing.assert_allclose(record["test_loss"], by_hand(fine, examples)["test_loss"], rtol=2e-4)


def test_what_the_last_step_leads_to_is_seen_by_the_test_after_it():
    last = [config(0, 0.5, examples=37, epochs=1, learning_rate=rate) for rate in (0.1, 1e30)]
    fine, broken = train_nets(last, table(), devices=jax.devices()[:1])
    assert fine["diverged_at"] is None and broken["steps"] == 1 and broken["diverged_at"] == 2
    assert np.isfinite(broken["train_loss"]).all() and not np.isfinite(broken["test_loss"][-1])


def test_told_to_stop():
    asked = iter([False, True])
    with pytest.raises(Preempted, match="after 1 of 2 epochs"):
        train_nets([config()], table(), devices=jax.devices()[:1], notice=SimpleNamespace(due=lambda: next(asked)))


def test_norms_whose_squares_no_float_holds():
    for scale in (1e-30, 1.0, 1e30):
        g = np.float32([3, -4]) * np.float32(scale)
        assert float(nets._norm(g)) == pytest.approx(5 * scale, rel=1e-5)
    assert float(nets._norm(np.zeros(3, np.float32))) == 0 and np.isnan(nets._norm(np.float32([np.nan, 1])))


def test_cells_that_are_no_program():
    examples = table()
    with pytest.raises(ConfigError, match="may differ in init"):
        train_nets([config(0), config(0, epochs=3)], examples)
    with pytest.raises(ConfigError, match="as many cells at every seed"):
        train_nets([config(0), config(0, 0.1), config(1)], examples)
    with pytest.raises(ConfigError, match="batch.examples=99 is more than the 37 training examples"):
        train_nets([config(0, examples=99)], examples)


CHANGES = {
    "seed": 1, "model.widths": (6, 4, 4, 3), "model.activation": "gelu", "model.biases": False, "init.preset": "xavier_uniform",
    "init.gamma": 0.5, "init.truncate": 1.0, "init.rules": ("layer2/kernel=fixed_std(std=0.3)",), "data.standardize": False,
    "batch.examples": 4, "optimizer.kind": "adam", "optimizer.learning_rate": 0.2, "train.epochs": 1,
}  # fmt: skip
ELSEWHERE = ("data.name", "data.path")  # read by data.examples, see tests/data/test_examples.py


def test_every_leaf_is_looked_at():
    assert set(CHANGES) | set(ELSEWHERE) == set(leaves(load_config("mlp:")))


@pytest.mark.full
def test_every_leaf_changes_something():
    examples, usual = table(), {"model.widths": WIDTHS, "batch.examples": 8, "train.epochs": 2, "init.preset": "fan_in"}
    configs = {name: load_config("mlp:data=wine-red", list((usual | {name: value}).items())) for name, value in CHANGES.items()}
    first = load_config("mlp:data=wine-red", list(usual.items()))
    program = NetProgram(first, jax.devices()[:1])
    (expected,) = train_nets([first], examples, program=program)
    for name, one in configs.items():
        same = (one.model, one.optimizer.kind) == (first.model, first.optimizer.kind)
        (record,) = train_nets([one], examples, program=program if same else None)
        assert record["test_loss"] != expected["test_loss"], name
