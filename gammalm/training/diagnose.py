"""After a non-finite step: runs it again with a check after every layer, and says where the numbers first go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gammalm.sharding.mesh import batch_sharding
from gammalm.training.step import loss_and_gradients, split_batch


def first_fault(program, state, batch, config) -> str:
    """One sentence naming the first non-finite parameter, layer or gradient of the step that the host's `batch` makes from `state`."""
    model, eps = program.model, config.model.norm_eps

    def check(params, buffers, batch):
        inputs, _, _, segments = split_batch(batch)
        streams = model.bind(params, buffers).finite_by_layer(inputs, segments, eps)
        loss, gradients, *_ = loss_and_gradients(model, params, buffers, batch, eps, config.batch.micro_batches)
        finite = lambda tree: jax.tree.map(_finite_by_layer, tree)  # noqa: E731
        return finite(params), streams, jnp.isfinite(loss), finite(gradients)

    try:
        with jax.set_mesh(program.mesh):
            batch = jax.device_put(batch, batch_sharding(program.mesh))
            whole = NamedSharding(program.mesh, PartitionSpec())  # every process reads all of it
            found = jax.device_get(jax.jit(check, out_shardings=whole)(state["params"], state["buffers"], batch))
    except jax.errors.JaxRuntimeError as error:
        return f"which layer is not known, the check failed ({str(error)[:100]})"
    parameters, (embedded, attended_L, fed_L), loss, gradients = found
    dense = len(jax.tree.leaves(parameters["dense_layers"])[0]) if "dense_layers" in parameters else 0
    bad = _first_bad_path(parameters, dense)
    if bad:
        return f"parameter {bad} is not finite before the step"
    if not embedded:
        return "the embedding output is the first that is not finite"
    for layer, (attended, fed) in enumerate(zip(attended_L, fed_L, strict=True)):
        if not attended or not fed:
            return f"layer {layer}'s {'feed-forward' if attended else 'attention'} branch is the first that is not finite"
    if not loss:
        return "every layer is finite, the loss is not"
    bad = _first_bad_path(gradients, dense)
    return f"the loss is finite, the gradient of {bad} is not" if bad else "run again, the same step is finite: the device may be at fault"


def _finite_by_layer(leaf):
    """bool [L] for a stacked parameter, bool [1] for a vector: finite along all axes but the first."""
    return jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1)


def _first_bad_path(tree, dense: int) -> str | None:
    """The first path that is not finite, with its layer counted over the model, whose first `dense` are another stack."""
    for keys, finite in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not np.all(finite):
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            before = {"layers": dense, "dense_layers": 0}.get(path.split("/")[0])
            return path if before is None else f"{path} (layer {before + int(np.argmin(finite))})"
    return None
