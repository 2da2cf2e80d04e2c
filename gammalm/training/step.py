"""The training step as a pure function: (state, batch, scalars) -> (state, metrics).

Shape legend: B sequences of a step, M micro-batches, T predicted tokens per sequence, C cells, L mixture layers, E experts.
State: {"step", "params", "buffers", "adam", "halted"}, {"muon"} where Muon moves the matrices (optimizer.py), and {"recent": [N]} where
spikes are watched for (spikes.py); batch: {"tokens": [B, T+1]} and, for packed documents, {"segments": [B, T+1]}; {"weights": [B, T]}
where not all targets count.
Scalars are what may differ between runs that share the program: peak learning rate, weight decay, ε of the norms.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gammalm.initializers import init_params
from gammalm.models.decoder import fresh_buffers
from gammalm.training import spikes
from gammalm.training.optimizer import apply_adamw, decay_mask, direction, schedule_factor

SCALARS = ("optimizer.learning_rate", "optimizer.weight_decay", "model.norm_eps")


def scalars(config) -> dict:
    """The traced scalars of one run, fp32."""
    return {
        "learning_rate": jnp.float32(config.optimizer.learning_rate),
        "weight_decay": jnp.float32(config.optimizer.weight_decay),
        "norm_eps": jnp.float32(config.model.norm_eps),
    }


def init_state(model, config, seed):
    """Step 0: γ-initialized parameters, zero moments. Pure; jit it with `out_shardings` to create each shard in place."""
    c = config.model
    params = init_params(model.specs, config.init, seed, d_model=c.d_model, n_layers=c.n_layers)
    state = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "buffers": fresh_buffers(model),
        "halted": jnp.zeros((), jnp.bool_),
    } | direction(config, model.specs).init(params)
    return state if config.train.spike == "off" else state | {"recent": spikes.nothing_seen(config.train.spike_window)}


def split_batch(batch):
    """Inputs [.., T], targets, target weights (fp32 0 or 1) and segments of the inputs (None without packing of documents).

    The weights are the batch's own where it has any. Else a document never predicts the next one's first token, and padding (segment 0)
    is never predicted.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    if "weights" in batch:
        return inputs, targets, batch["weights"], None if segments is None else segments[..., :-1]
    if segments is None:
        return inputs, targets, jnp.ones(targets.shape, jnp.float32), None
    weights = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
    return inputs, targets, weights.astype(jnp.float32), segments[..., :-1]


def loss_and_gradients(model, params, buffers, batch, norm_eps, micro_batches: int):
    """Mean loss over the counted tokens of the whole batch, its fp32 gradients, the number of counted tokens, and the mixtures' measures.

    Micro-batches are weighted by their counted tokens: the result is that of one large batch. The gradients are those of the loss plus
    the weighted balance loss, whose mean is over sequences that hold any token and whose sum is over layers. Measures are those of
    moe.measures summed over the batch, but `balance` is that mean.
    """
    inputs, targets, weights, segments = split_batch(batch)
    count = jnp.sum(weights)
    weights = weights / jnp.maximum(count, 1)
    c = model.config
    rows = inputs.shape[0] if segments is None else jnp.maximum(jnp.sum(jnp.any(segments > 0, axis=-1)), 1)
    balance = c.moe.balance_loss / rows if c.ffn == "moe" else 0.0

    def loss_of(params, inputs, targets, weights, segments):
        loss, measured = model.bind(params, buffers).loss(inputs, targets, weights, segments, norm_eps)
        return loss + (balance * jnp.sum(measured["balance"]) if measured else 0.0), (loss, measured)

    def mean_balance(measured):
        return measured and measured | {"balance": measured["balance"] / rows}

    differentiate = jax.grad(loss_of, has_aux=True)
    if micro_batches == 1:
        gradients, (loss, measured) = differentiate(params, inputs, targets, weights, segments)
        return loss, gradients, count, mean_balance(measured)

    def cut(a):
        # Interleaved, so that each device keeps its own rows: [B, T] -> [M, B/M, T].
        return None if a is None else a.reshape(-1, micro_batches, a.shape[-1]).swapaxes(0, 1)

    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, differentiate(params, *part)), None

    parts = tuple(map(cut, (inputs, targets, weights, segments)))
    one = jax.eval_shape(differentiate, params, *jax.tree.map(lambda a: a[0], parts))
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), one)
    (gradients, (loss, measured)), _ = jax.lax.scan(accumulate, zero, parts)
    return loss, gradients, count, mean_balance(measured)


def move_bias(bias_LE, load_LE, rate: float):
    """The selection bias after a step: up by `rate` for experts with less than the mean load, down for those with more.

    Source: the loss-free balancing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    load_LE = load_LE.astype(jnp.float32)
    return bias_LE + rate * jnp.sign(jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE)


def load_measures(measured) -> dict:
    """What is logged of the mixtures, per layer [L]: entropy of the load as a share of ln E, largest and smallest load over the mean,
    drops, balance loss."""
    load_LE = measured["load"].astype(jnp.float32)
    share = load_LE / jnp.maximum(jnp.sum(load_LE, axis=-1, keepdims=True), 1)
    entropy = 0.0 - jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / math.log(max(load_LE.shape[-1], 2))
    return {
        "load_entropy": entropy,
        "load_max": jnp.max(share, axis=-1) * load_LE.shape[-1],
        "load_min": jnp.min(share, axis=-1) * load_LE.shape[-1],
        "dropped": measured["dropped"],
        "balance": measured["balance"],
    }


def global_norm(tree):
    """Euclidean norm over all leaves, fp32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def make_step(model, config):
    """The step function of `config`. It reads everything of the config but SCALARS, which come as an argument.

    A non-finite loss or gradient leaves the state as it was and sets `halted`, which later steps respect: the parameters that
    led to it are still there to be examined. Where config.train.spike is not "off", a step whose loss is a spike moves nothing but the
    step's number, and metrics hold `spike` and the `spike_bound` that it was above.
    """
    c, spike_policy = config.optimizer, config.train.spike
    mask = decay_mask(model.specs, c.no_decay)
    transform = direction(config, model.specs)

    def step(state, batch, scalars):
        params, buffers = state["params"], state["buffers"]
        loss, gradients, count, measured = loss_and_gradients(
            model, params, buffers, batch, scalars["norm_eps"], config.batch.micro_batches
        )
        norm = global_norm(gradients)
        rate = scalars["learning_rate"] * schedule_factor(c, config.train.steps, state["step"])
        if c.clip:
            factor = jnp.minimum(1.0, c.clip / jnp.maximum(norm, 1e-30))
            gradients = jax.tree.map(lambda g: g * factor, gradients)
        towards, moments = transform.update(gradients, state)
        new = {
            "step": state["step"] + 1,
            "params": apply_adamw(params, towards, mask, rate, scalars["weight_decay"]),
            "buffers": buffers,
        } | moments
        found = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens": count}
        if measured:
            bias_LE = move_bias(buffers["layers"]["ffn"]["bias"], measured["load"], config.model.moe.bias_rate)
            new["buffers"] = {"layers": {"ffn": {"bias": bias_LE}}}
            found |= load_measures(measured)
        halted = state["halted"] | ~jnp.isfinite(loss) | ~jnp.isfinite(norm)
        if spike_policy == "off":
            return _unless(halted, new, state) | {"halted": halted}, found | {"halted": halted}
        bound = spikes.bound(state["recent"], config.train.spike_sigma)
        spike = (loss > bound) & ~halted
        counts = {"step": new.pop("step"), "recent": spikes.remember(state["recent"], state["step"], loss)}
        state = _unless(halted | spike, new, state) | _unless(halted, counts, state) | {"halted": halted}
        return state, found | {"halted": halted, "spike": spike, "spike_bound": bound}

    return step


def _unless(stays, new, state):
    """The parts `new` of the state; as they were in `state` where `stays` (bool)."""
    return jax.tree.map(lambda n, o: jnp.where(stays, o, n), new, {name: state[name] for name in new})


def over_cells(function, mode: str, mesh):
    """`function` for arguments with a leading cell axis: cells one after another (`map`) or side by side (`vmap`).

    Where the mesh has several devices on its `cell` axis, each device takes its share of the cells.
    """

    def over(*stacked):
        if mode == "vmap":
            return jax.vmap(function)(*stacked)
        return jax.lax.map(lambda args: function(*args), stacked)

    if mesh.shape["cell"] == 1:
        return over
    by_cell = PartitionSpec("cell")
    return jax.shard_map(over, mesh=mesh, in_specs=by_cell, out_specs=by_cell, axis_names={"cell"}, check_vma=False)


def make_validation(model, token_bytes):
    """(params, buffers, batch, norm_eps) -> summed nats, counted tokens and bytes of text they stand for, all fp32.

    `batch` has "tokens" [B, T+1], "weights" [B, T] and, for packed documents, "segments". `token_bytes` [V] int32.
    """

    def validate(params, buffers, batch, norm_eps):
        inputs, targets, weights, segments = split_batch(batch)
        losses, _ = model.bind(params, buffers).token_losses(inputs, targets, segments, norm_eps)
        return {
            "nats": jnp.sum(losses * weights),
            "tokens": jnp.sum(weights),
            "bytes": jnp.sum(jnp.asarray(token_bytes)[targets] * weights),
        }

    return validate
