"""The compiled functions that runs of one shape share: creating a state, a step, a validation batch.

A program serves one run (`cells=None`) or C runs side by side, whose states, batches and scalars then have a leading cell axis.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gammalm.config import leaves
from gammalm.config_checks import MEASURED
from gammalm.errors import ConfigError
from gammalm.initializers import STEP_PRESETS
from gammalm.models.decoder import Model
from gammalm.models.kernels import kernel_of
from gammalm.sharding.devices import compiler_options
from gammalm.sharding.mesh import batch_sharding, check_batch, make_mesh, on_mesh, parameter_shardings
from gammalm.training.optimizer import moments_like
from gammalm.training.step import SCALARS, init_state, make_step, make_validation, over_cells

MODES = ("single", "map", "vmap")  # one run after another | one program that walks over its cells | one that batches them

# Besides init.* (but for presets that set learning rates): what may differ between runs that train side by side.
FREE = ("seed", "train.checkpoints_kept", "train.stall_timeout", "train.tracker", "train.spike_rollbacks", *MEASURED, *SCALARS)

WEIGHTS = ("params", "buffers")  # of a state: what the model itself is


def signature(config) -> str:
    """Equal for two configs exactly if one compiled program serves both."""
    read = STEP_PRESETS.get(config.init.preset, ())
    return json.dumps({n: v for n, v in leaves(config).items() if n not in FREE and (not n.startswith("init.") or n in read)})


def batchable(config, mode: str, platform: str):
    """`config` as cells of `mode` can train it on a platform of JAX: under `vmap` with `blockwise` where cuDNN would need a mask.

    JAX's batching rule for cuDNN (0.10 to 0.12) takes no mask that heads or rows share. Raises ConfigError where cuDNN was named.
    """
    c, context = config.model, config.mesh.context
    if mode != "vmap" or (config.data.packing != "documents" and context == 1):
        return config
    if kernel_of(config, platform) != "cudnn":
        return config
    if c.attention_kernel == "cudnn":
        raise ConfigError(
            "model.attention_kernel=cudnn takes no packed documents and no mesh.context under --mode vmap. Set it to auto, or --mode map."
        )
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.attention_kernel = "blockwise"
    return config


class Program:
    """Compiled functions for `config` on a mesh of all devices; `cells` runs at a time in `mode` (see MODES).

    `cell_devices` devices share the cells out between them. Raises ConfigError where the mesh does not fit the model or the batch.
    """

    def __init__(self, config, token_bytes, *, cells: int | None = None, mode: str = "single", cell_devices: int = 1, devices=None):
        self.mesh: Mesh = make_mesh({**config.mesh.to_dict(), "cell": cell_devices}, devices)
        config = batchable(config, mode, self.mesh.devices.flat[0].platform)
        self.model = Model(config.model)
        self.config = config
        self.cells = cells
        check_batch(config.batch.sequences, config.batch.micro_batches, self.mesh)

        lead = () if cells is None else ("cell",)
        self.batch_sharding = batch_sharding(self.mesh, lead)
        self.scalar_sharding = NamedSharding(self.mesh, PartitionSpec(*lead))
        single = NamedSharding(self.mesh, PartitionSpec())
        parameters = parameter_shardings(self.model.specs, self.mesh)
        abstract = jax.eval_shape(lambda: init_state(self.model, config, 0))
        buffers = jax.tree.map(lambda _: single, abstract["buffers"])
        one = dict.fromkeys(abstract, single) | {"params": parameters, "buffers": buffers}
        one |= moments_like(config, self.model.specs, parameters, single)
        self.abstract_state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, one)
        state = one if cells is None else jax.tree.map(lambda s: NamedSharding(self.mesh, PartitionSpec("cell", *s.spec)), one)

        step = make_step(self.model, config)
        validate = make_validation(self.model, token_bytes)
        if cells is not None:
            step, validate = (over_cells(f, mode, self.mesh) for f in (step, validate))
        jit = functools.partial(jax.jit, compiler_options=compiler_options(self.mesh.devices.flat[0].platform, self.mesh.size))
        replicated = (state, self.batch_sharding, self.scalar_sharding)
        self._step = jit(step, in_shardings=replicated, out_shardings=(state, single), donate_argnums=0)
        given = (state["params"], state["buffers"], self.batch_sharding, self.scalar_sharding)
        self._validate = jit(validate, in_shardings=given, out_shardings=single)
        self._stack = jax.jit(lambda states: jax.tree.map(lambda *a: jnp.stack(a), *states), out_shardings=state)
        self._pick = jax.jit(lambda state, i: jax.tree.map(lambda a: a[i], state), out_shardings=one)
        weights = {name: one[name] for name in WEIGHTS}
        self._pick_weights = jax.jit(lambda state, i: jax.tree.map(lambda a: a[i], state), out_shardings=weights)
        self._one = one

    def on_mesh(self):
        """What the functions below run in, and whatever else looks at their arrays."""
        return on_mesh(self.mesh)

    def init(self, config):
        """A fresh state of one run, each shard made where it lives."""
        seed = np.uint32(config.seed)
        if self.mesh.size == 1:
            # Op by op the draws compile once per shape, whatever γ; as one program they would compile again for every γ of a grid.
            return jax.device_put(init_state(self.model, config, seed), self._one)
        with self.on_mesh():
            return jax.jit(lambda seed: init_state(self.model, config, seed), out_shardings=self._one)(seed)

    def stack(self, states):
        """The states of all cells as one with a leading cell axis; a single run's state stays as it is."""
        if self.cells is None:
            return states[0]
        with self.on_mesh():
            return self._stack(states)

    def pick(self, state, cell: int):
        """The state of one cell, equal in structure and numbers to that of a single run."""
        if self.cells is None:
            return state
        with self.on_mesh():
            return self._pick(state, cell)

    def weights(self, state, cell: int) -> dict:
        """{"params", "buffers"} of one cell, as a single run has them; a single run's are the arrays of its state."""
        weights = {name: state[name] for name in WEIGHTS}
        if self.cells is None:
            return weights
        with self.on_mesh():
            return self._pick_weights(weights, cell)

    def rows(self, size: int) -> np.ndarray | None:
        """Of a global batch of `size` rows those that this process's devices need, ascending; None: all of them."""
        if jax.process_count() == 1:
            return None
        shape = (size,) if self.cells is None else (self.cells, size)
        indices = self.batch_sharding.addressable_devices_indices_map(shape).values()
        return np.unique(np.concatenate([np.arange(size)[where[-1]] for where in indices]))

    def put(self, batches: list[dict], size: int | None = None):
        """The cells' host batches as one device batch; with `size`, each holds only `rows(size)` of that many rows."""
        batch = batches[0] if self.cells is None else jax.tree.map(lambda *a: np.stack(a), *batches)
        rows = self.rows(size) if size else None
        if rows is None:
            return jax.device_put(batch, self.batch_sharding)
        axis = 0 if self.cells is None else 1

        def place(local):
            """The global array of which `local` holds the rows `rows`."""

            def shard(where):
                low, high, _ = where[axis].indices(size)
                here = slice(*np.searchsorted(rows, (low, high)))  # rows are ascending, and a shard's are side by side
                return local[(*where[:axis], here, *where[axis + 1 :])]

            shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, self.batch_sharding, shard)

        return jax.tree.map(place, batch)

    def scalars(self, each: list[dict]):
        """The cells' scalars as one tree."""
        return each[0] if self.cells is None else jax.tree.map(lambda *a: jnp.stack(a), *each)

    def step(self, state, batch, scalars):
        """One optimizer step of every cell; `state` is given away. Returns (state, metrics)."""
        with self.on_mesh():
            return self._step(state, batch, scalars)

    def trace(self):
        """The step of a single run, traced for the shapes of its config (jax.stages.Traced): devices may be absent, no array is made."""
        shape = (self.config.batch.sequences, self.config.data.seq_len + 1)
        names = ("tokens", "segments") if self.config.data.packing == "documents" else ("tokens",)
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding) for name in names}
        if self.config.data.loss == "last":
            batch["weights"] = jax.ShapeDtypeStruct((shape[0], shape[1] - 1), jnp.float32, sharding=self.batch_sharding)
        scalars = {name.rsplit(".")[-1]: jax.ShapeDtypeStruct((), jnp.float32, sharding=self.scalar_sharding) for name in SCALARS}
        with self.on_mesh():
            return self._step.trace(self.abstract_state, batch, scalars)

    def validate(self, state, batch, norm_eps):
        """Sums over one validation batch, see `make_validation`."""
        with self.on_mesh():
            return self._validate(state["params"], state["buffers"], batch, norm_eps)


@dataclasses.dataclass
class Programs:
    """Programs already compiled, by what they depend on: cells of a grid that share a shape compile once. `devices`: all by default."""

    devices: Sequence | None = None
    made: dict = dataclasses.field(default_factory=dict)

    def get(self, config, token_bytes, **how) -> Program:
        key = (signature(config), token_bytes.tobytes(), *sorted(how.items()))
        if key not in self.made:
            self.made[key] = Program(config, token_bytes, devices=self.devices, **how)
        return self.made[key]
