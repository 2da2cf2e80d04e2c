"""Trains small supervised nets, all cells of an experiment in one program: seeds × arms, a leading axis each.

Cells of one seed see the same examples in the same order, so that they are paired, and so that one batch serves all of them. A run that
diverges goes on with what it has, inf or nan, and is recorded as such: that is a result here.
Shape legend: S seeds, K arms (cells of one seed), N steps of an epoch, B examples of a batch, I inputs, O outputs, L layers, E epochs.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from gammalm.config import leaves
from gammalm.data.examples import Examples
from gammalm.errors import ConfigError
from gammalm.initializers import init_params
from gammalm.models.mlp import Net, loss_and_hits
from gammalm.sharding.devices import compiler_options
from gammalm.sharding.mesh import make_mesh, on_mesh
from gammalm.training.preemption import Notice, Preempted

FREE = ("seed", "optimizer.learning_rate")  # besides init.*: in what cells of one program may differ
DIRECTIONS = {"sgd": optax.identity, "adam": optax.scale_by_adam}
CHUNK = 1000  # rows that are tested at a time
POINTS = 20  # of the training loss per epoch, means over as many stretches


def net_signature(config) -> str:
    """Equal for two configs exactly if they can be cells of one program."""
    return json.dumps({name: v for name, v in leaves(config).items() if name not in FREE and not name.startswith("init.")})


def draw(config) -> dict:
    """The parameters that a net of `config` starts with; biases are 0. Raises ConfigError as `initializers.init_params` does."""
    net = Net(config.model)
    init = ConfigDict(config.init.to_dict() | {"depth_scale": False})
    return init_params(net.specs, init, config.seed, d_model=config.model.widths[0], n_layers=1)


class NetProgram:
    """Compiled functions for cells of one shape, which `devices` (all by default) share out along the arms: the mesh axis `cell`."""

    def __init__(self, config, devices=None):
        self.net = Net(config.model)
        self.direction = DIRECTIONS[config.optimizer.kind]()
        self.mesh = make_mesh({"cell": len(devices or jax.devices())}, devices)
        self.cells = NamedSharding(self.mesh, PartitionSpec(None, "cell"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        jit = functools.partial(jax.jit, compiler_options=compiler_options(self.mesh.devices.flat[0].platform, self.mesh.size))
        self.train = jit(self._train, donate_argnums=0)
        self.test = jit(self._test)

    def begin(self, params: Sequence[Sequence[dict]]):
        """The state of all cells, params[s][k]: parameters and the optimizer's memory, [S, K, ...] each, shared out over the mesh."""
        stacked = jax.tree.map(lambda *of: np.stack(of), *(jax.tree.map(lambda *of: np.stack(of), *row) for row in params))
        state = {"params": stacked, "memory": jax.vmap(jax.vmap(self.direction.init))(stacked)}
        return jax.device_put(state, self.cells)

    def _loss(self, params, x_BI, y_B):
        loss_B, hit_B = loss_and_hits(self.net(params, x_BI), y_B)
        return jnp.mean(loss_B), jnp.mean(hit_B)

    def _step(self, state, rate, x_BI, y_B):
        """One step of one cell: (state, loss, accuracy, norm [L] of the gradient of each layer's kernel), all before the step."""
        (loss, accuracy), gradient = jax.value_and_grad(self._loss, has_aux=True)(state["params"], x_BI, y_B)
        norm_L = jnp.stack([_norm(gradient[layer]["kernel"]) for layer in self.net.layers])
        update, memory = self.direction.update(gradient, state["memory"])
        params = jax.tree.map(lambda p, u: p - rate * u, state["params"], update)
        return {"params": params, "memory": memory}, (loss, accuracy, norm_L)

    def _train(self, state, rate_SK, table, rows_NSB):
        """One epoch of every cell. Returns (state, (loss [N, S, K], accuracy [N, S, K], gradient norm [N, S, K, L]))."""
        cells = jax.vmap(jax.vmap(self._step, (0, 0, None, None)))

        def step(state, rows_SB):
            return cells(state, rate_SK, *_pick(table, rows_SB))

        return jax.lax.scan(step, state, rows_NSB)

    def _test(self, params, table, rows_NSB):
        """Mean loss and accuracy [S, K] over all rows, of which −1 is none: N chunks of B rows per seed."""

        def one(params, x_BI, y_B, there_B):
            loss_B, hit_B = loss_and_hits(self.net(params, x_BI), y_B)
            return jnp.stack([jnp.sum(jnp.where(there_B, v, 0)) for v in (loss_B, hit_B)])

        cells = jax.vmap(jax.vmap(one, (0, None, None, None)))
        sums_NSK2 = jax.lax.map(lambda rows_SB: cells(params, *_pick(table, rows_SB), rows_SB >= 0), rows_NSB)
        count_S = jnp.sum(rows_NSB >= 0, axis=(0, 2))
        mean_SK2 = jnp.sum(sums_NSK2, axis=0) / count_S[:, None, None]
        return mean_SK2[..., 0], mean_SK2[..., 1]


def _pick(table, rows_SB):
    """Inputs [S, B, I], scaled, and classes [S, B] of these rows."""
    x_SBI = table["x_NI"][rows_SB].astype(jnp.float32)
    return (x_SBI - table["mean_SI"][:, None]) / table["scale_SI"][:, None], table["y_N"][rows_SB]


def _norm(g):
    """√Σg², without overflow or underflow of the squares."""
    largest = jnp.max(jnp.abs(g))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return scale * jnp.sqrt(jnp.sum(jnp.square(g / scale)))


def train_nets(
    configs: Sequence[ConfigDict], examples: Examples, *, devices=None, program: NetProgram | None = None, notice: Notice | None = None,
    say: Callable = lambda line: None,
) -> list[dict]:  # fmt: skip
    """Trains a net for each config to its last epoch, all as one program; a record each, in their order.

    Configs may differ in `seed`, `init.*` and `optimizer.learning_rate` (`net_signature`); each seed needs as many cells as the others.
    `program`: one made before for configs of this signature, to be used again.

    A record: test_loss and test_accuracy [E+1] from the start, train_loss, train_accuracy [E] (means over the batches of an epoch, each
    before its step), gradient_norm [E+1][L] (of the kernels: at the first step, then mean over an epoch), curve [E × POINTS] of the
    training loss; non-finite numbers as they are. diverged_at: the first step, from 1, with a loss or gradient that is not finite, the
    number after the last where only the test that follows it is not, or None. parameters, steps, seconds (of all cells together).
    Raises ConfigError for cells that are no one program, Preempted where `notice` was given to stop: nothing of them is kept then.
    """
    first, began = configs[0], time.monotonic()
    if len({net_signature(config) for config in configs}) > 1:
        raise ConfigError(f"nets that train together may differ in init.*, {', '.join(FREE)} and nothing else. Train them apart.")
    by_seed: dict[int, list[int]] = {}
    for number, config in enumerate(configs):
        by_seed.setdefault(config.seed, []).append(number)
    if len({len(numbers) for numbers in by_seed.values()}) > 1:
        raise ConfigError("nets that train together need as many cells at every seed. Train the seeds apart.")
    devices = list(devices or jax.devices())[: len(next(iter(by_seed.values())))]
    program = program or NetProgram(first, devices)
    # Devices take equally many arms: the last one is repeated, and its copies are not looked at.
    spare = -len(next(iter(by_seed.values()))) % program.mesh.size
    cells_SK = [numbers + numbers[-1:] * spare for numbers in by_seed.values()]
    splits = [examples.split(seed, first.data.standardize) for seed in by_seed]
    B, M = first.batch.examples, len(splits[0].train_M)
    if B > M:
        raise ConfigError(f"batch.examples={B} is more than the {M} training examples; lower it.")
    with on_mesh(program.mesh):
        table = {"x_NI": examples.x_NI, "y_N": examples.y_N}
        table |= {"mean_SI": np.stack([s.mean_I for s in splits]), "scale_SI": np.stack([s.scale_I for s in splits])}
        table = jax.device_put(table, program.whole)
        state = program.begin([[draw(configs[i]) for i in numbers] for numbers in cells_SK])
        rates = np.array([[configs[i].optimizer.learning_rate for i in numbers] for numbers in cells_SK], np.float32)
        rate_SK = jax.device_put(rates, program.cells)
        tested_NSB = jax.device_put(_chunks([s.test_M for s in splits]), program.whole)
        tests, epochs = [program.test(state["params"], table, tested_NSB)], []
        for epoch in range(first.train.epochs):
            if notice is not None and notice.due():
                raise Preempted(f"told to stop after {epoch} of {first.train.epochs} epochs; the same command begins these nets anew.")
            rows = [np.random.default_rng([seed, 2, epoch]).permutation(s.train_M) for seed, s in zip(by_seed, splits, strict=True)]
            rows_NSB = np.stack(rows).astype(np.int32)[:, : M // B * B].reshape(len(rows), -1, B).swapaxes(0, 1)
            state, metrics = program.train(state, rate_SK, table, jax.device_put(rows_NSB, program.whole))
            tests.append(program.test(state["params"], table, tested_NSB))
            epochs.append(jax.device_get(metrics))
            say(f"epoch {epoch + 1} of {first.train.epochs}, {time.monotonic() - began:.0f} s")
        tests = jax.device_get(tests)
    size = sum(math.prod(spec.shape) for spec in program.net.specs.values())
    shared = {"parameters": size, "steps": first.train.epochs * (M // B), "seconds": time.monotonic() - began}
    places = {number: (s, k) for s, numbers in enumerate(by_seed.values()) for k, number in enumerate(numbers)}
    return [_record(tests, epochs, *places[number]) | shared for number in range(len(configs))]


def _chunks(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of each seed as chunks [N, S, B] of at most CHUNK, filled up with −1."""
    size = min(CHUNK, len(rows[0]))
    filled = [np.append(of, np.full(-len(of) % size, -1)).reshape(-1, size) for of in rows]
    return np.stack(filled, axis=1).astype(np.int32)


def _record(tests, epochs, s: int, k: int) -> dict:
    """The record of cell (s, k) from what all cells left, see `train_nets`."""
    loss_N, accuracy_N, norm_NL = (np.concatenate([metrics[i][:, s, k] for metrics in epochs]) for i in range(3))
    bad_N = np.append(~(np.isfinite(loss_N) & np.isfinite(norm_NL).all(axis=1)), not np.isfinite(tests[-1][0][s, k]))
    per_epoch = [np.split(of, len(epochs)) for of in (loss_N, accuracy_N, norm_NL)]
    return {
        "test_loss": [float(loss[s, k]) for loss, _ in tests],
        "test_accuracy": [float(accuracy[s, k]) for _, accuracy in tests],
        "train_loss": [float(part.mean(dtype=np.float64)) for part in per_epoch[0]],
        "train_accuracy": [float(part.mean(dtype=np.float64)) for part in per_epoch[1]],
        "gradient_norm": [norm_NL[0].tolist(), *(part.mean(0, dtype=np.float64).tolist() for part in per_epoch[2])],
        "curve": [float(part.mean(dtype=np.float64)) for of in per_epoch[0] for part in np.array_split(of, min(POINTS, len(of)))],
        "diverged_at": int(np.argmax(bad_N)) + 1 if bad_N.any() else None,
    }
