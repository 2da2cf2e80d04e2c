"""FLOP that a traced program performs: its matrix products, recomputation and masked halves included, before devices share them out.

Two per multiply-add, as in gammalm.models.flops. Loops count in full, of branches the dearest. A Pallas kernel counts as its author's own
estimate, else as its body times its grid, and splash attention without the blocks above the diagonal, which it skips. Of a grouped
product's rows those in a group count, which only a caller can know. Element-wise work does not count.
"""

import math

import jax


def _subprograms(value):
    """The jaxprs in a parameter of an equation."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _subprograms(v)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
        yield value.jaxpr


def _product(eqn, filled: float) -> float:
    """FLOP of one dot_general or ragged_dot_general: twice the output times the contracted extents, of which `filled` is in a group."""
    numbers = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "dot_general":
        filled = 1.0
    elif len(out) > 2:
        # Groups along the contracted rows: each row is in one group, so the group axis of the result costs nothing.
        out = out[1:]
    return 2.0 * math.prod(out) * math.prod(left[i] for i in contracted) * filled


def flops(jaxpr, filled: float = 1.0) -> float:
    """FLOP of all devices. `jaxpr`: of `jax.make_jaxpr` or `Traced.jaxpr`; `filled`: share of grouped products' rows in groups."""
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            total += _product(eqn, filled)
            continue
        inner = [flops(j, filled) for value in params.values() for j in _subprograms(value)]
        if name == "pallas_call":
            total += _kernel(params, sum(inner))
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "cond":
            total += max(inner, default=0.0)
        elif name == "shard_map":
            mesh = params["mesh"]
            total += math.prod(mesh.shape[axis] for axis in params["newly_manual_axes"]) * sum(inner)
        elif name in ("custom_vjp_call", "custom_jvp_call", "custom_vjp_call_jaxpr"):
            total += inner[0] if inner else 0.0  # the rules for its derivatives stand beside it
        else:
            total += sum(inner)
    return total


def _kernel(params, body: float) -> float:
    estimate = params.get("cost_estimate")
    if estimate is not None and estimate.flops:
        return float(estimate.flops)
    grid = params["grid_mapping"].grid
    blocks = grid[-1]
    causal = (blocks + 1) / (2 * blocks) if "splash" in str(params["name"]) else 1.0
    return math.prod(grid) * body * causal


def of_function(function, *arguments) -> float:
    """FLOP of `function` at these arguments (arrays or ShapeDtypeStructs)."""
    return flops(jax.make_jaxpr(function)(*arguments))
