"""The best five ways to lay a config out on a topology: mesh shapes, recomputation, micro-batches.

Every way is planned analytically in milliseconds; only those that fit and promise most are compiled, where something can compile.
"""

import itertools

from ml_collections import ConfigDict

from gammalm.errors import ConfigError
from gammalm.models.decoder import Model
from gammalm.plan.estimate import plan
from gammalm.plan.topology import Topology
from gammalm.progress import Progress

BEST = 5
LARGEST_TENSOR = 16  # beyond it, products are too narrow for any device of today
MICRO_BATCHES = (1, 2, 4, 8)
# The activation model knows no fragmentation, and a compile that does not fit is minutes lost.
MARGIN = 0.9


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(count: int, mixture: bool):
    """Every (data, fsdp, expert, tensor) of `count` devices; `expert` is 1 without a mixture of experts."""
    for tensor in (d for d in divisors(count) if d <= LARGEST_TENSOR):
        for expert in divisors(count // tensor) if mixture else (1,):
            for fsdp in divisors(count // tensor // expert):
                yield count // tensor // expert // fsdp, fsdp, expert, tensor


def candidates(config, topology: Topology):
    """Configs that differ from `config` in mesh, remat and micro-batches, each with its analytic plan; what cannot run is left out."""
    model = Model(config.model)
    ways = itertools.product(meshes(topology.count, config.model.ffn == "moe"), ("none", "dots", "full"), MICRO_BATCHES)
    for (data, fsdp, expert, tensor), remat, micro_batches in ways:
        if config.batch.sequences % (data * fsdp * expert * micro_batches):
            continue
        other = ConfigDict(config.to_dict())
        other.mesh.update({"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor, "context": 1})
        other.model.remat, other.batch.micro_batches = remat, micro_batches
        try:
            yield other.lock(), plan(other, topology, compile_step=False, model=model)
        except ConfigError:
            continue


def _without_overlap(found: dict) -> float:
    """Seconds of a step in which nothing hides behind anything else: what ranks plans that one and the same thing bounds."""
    seconds = found["seconds"]
    return sum(seconds[name] or 0.0 for name in ("arithmetic", "hbm", "collectives"))


def search(config, topology: Topology, *, compile_step: bool = True, price: float | None = None, quiet: bool = False) -> list[dict]:
    """The best plans, fastest first, at most BEST. Raises ConfigError where no way fits or the device's speed is not known."""
    ways = list(candidates(config, topology))
    if ways and "seconds" not in ways[0][1]:
        raise ConfigError(f"--search: the speed of {topology.name} is not known, so nothing tells its plans apart. Name another topology.")
    fitting = [(c, p) for c, p in ways if p["memory"]["available"] is None or p["memory"]["total"] <= MARGIN * p["memory"]["available"]]
    if not fitting:
        raise ConfigError(
            f"--search: none of {len(ways)} ways fits {topology.name}. Fewer sequences (batch.sequences) or more devices would help."
        )
    fitting.sort(key=lambda way: (_without_overlap(way[1]), way[1]["memory"]["total"]))
    progress = Progress("plans", min(BEST, len(fitting)), "plans", quiet=quiet)
    best = []
    for way, _ in fitting[:BEST]:
        best.append(plan(way, topology, compile_step=compile_step, price=price))
        progress.advance(1)
    progress.close(f"{len(ways)} ways looked at, {len(fitting)} fit")
    return sorted(best, key=lambda p: (p["memory"]["fits"] is False, p.get("seconds", {}).get("step", float("inf"))))
