"""What measurements of a model cost: the stable rank of every matrix of the 1.5b model against full SVDs, and the sink score's memory.

    python benchmarks/analysis.py [--size 1.5b] [--layers 24] [--json FILE]

Ours: Golub-Kahan-Lanczos of every matrix of freshly initialized weights, one stack of layers in memory at a time, drawing not counted.
The other side: np.linalg.svd(compute_uv=False) in fp32 of one matrix of each parameter, timed once and multiplied by how many there are:
extrapolated, as all of them would take an hour. The stable rank of that matrix by both is printed too: they must agree.

Memory: what XLA:CPU plans for temporaries in the sink scores of one sequence (T the size's own) next to those in its losses.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", default="1.5b")
parser.add_argument("--layers", type=int, default=0, help="of the size's own, for a quicker run; both sides are then of so many")
parser.add_argument("--json", metavar="FILE", help="write all measurements there")

GOAL = 20.0  # times faster
MEMORY_GOAL = 1.3  # of a forward pass


class Clock:
    """Wall and CPU seconds of a `with` block."""

    def __enter__(self):
        self.begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_):
        self.wall, self.cpu = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]


def measure(path: str, spec, config) -> dict:
    """Seconds of both sides for all matrices of one parameter, and how well they agree on the first."""
    import jax
    import numpy as np

    from gammalm.analysis.spectral import stable_rank
    from gammalm.analysis.weights import copies_of, matrix_stack
    from gammalm.initializers import init_params
    from gammalm.trees import flat

    m = config.model
    params = init_params({path: spec}, config.init, config.seed, d_model=m.d_model, n_layers=m.n_layers)
    stack = jax.block_until_ready(matrix_stack(flat(params)[path], spec))
    program = stable_rank.lower(stack).compile()
    with Clock() as ours:
        ranks, errors = jax.device_get(program(stack))
    count = len(list(copies_of(spec)))
    first = np.asarray(stack[(0,) * (stack.ndim - 2)])
    with Clock() as svd:
        values = np.linalg.svd(first, compute_uv=False).astype(np.float64)
    rank = (values**2).sum() / values[0] ** 2
    return {
        "path": path, "shape": list(first.shape), "matrices": count, "wall": ours.wall, "cpu": ours.cpu,
        "svd_wall": svd.wall * count, "svd_cpu": svd.cpu * count,
        "stable_rank": float(ranks.flat[0]), "off": float(ranks.flat[0] / rank - 1), "worst_error": float(errors.max()),
    }  # fmt: skip


def sink_memory(config) -> dict:
    """Bytes of temporaries of the sink scores and of the losses of one sequence, both compiled and neither run."""
    import jax
    import jax.numpy as jnp

    from gammalm.analysis.sink import sink_sums
    from gammalm.models.decoder import Model, fresh_buffers
    from gammalm.trees import nested

    model = Model(config.model)
    params = nested({path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in model.specs.items()})
    batch = {"tokens": jax.ShapeDtypeStruct((1, config.data.seq_len + 1), jnp.int32)}
    eps = jax.ShapeDtypeStruct((), jnp.float32)

    def losses(params, batch, eps):
        return model.bind(params).token_losses(batch["tokens"][:, :-1], batch["tokens"][:, 1:], None, eps)

    def sinks(params, batch, eps):
        return sink_sums(model, params, fresh_buffers(model), batch, eps)

    compiled = {"sinks": jax.jit(sinks), "forward": jax.jit(losses)}
    found = {k: f.lower(params, batch, eps).compile().memory_analysis().temp_size_in_bytes for k, f in compiled.items()}
    return found | {"seq_len": config.data.seq_len, "ratio": found["sinks"] / found["forward"]}


def main() -> None:
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from train_step import machine

    from configs.lm import get_config
    from gammalm.analysis.weights import matrix_paths
    from gammalm.models.decoder import param_specs

    config = get_config(f"size={args.size}").copy_and_resolve_references()
    config.model.n_layers = args.layers or config.model.n_layers
    specs = param_specs(config.model)
    report = machine() | {"size": args.size, "layers": config.model.n_layers, "rows": []}
    print(f"{'parameter':20s} {'shape':>14s} {'matrices':>8s} {'seconds':>8s} {'CPU s':>8s} {'SVDs s':>9s} {'CPU s':>9s} {'off':>9s}")
    for path in matrix_paths(specs):
        row = measure(path, specs[path], config)
        report["rows"].append(row)
        print(
            f"{path:20s} {'x'.join(map(str, row['shape'])):>14s} {row['matrices']:8d} {row['wall']:8.1f} {row['cpu']:8.1f}"
            f" {row['svd_wall']:9.1f} {row['svd_cpu']:9.1f} {row['off']:9.1e}",
            flush=True,
        )
    total = {key: sum(row[key] for row in report["rows"]) for key in ("wall", "cpu", "svd_wall", "svd_cpu")}
    report |= total | {"ratio": total["svd_wall"] / total["wall"], "ratio_cpu": total["svd_cpu"] / total["cpu"]}
    print(f"all: {total['wall']:.1f} s against {total['svd_wall']:.1f} s, extrapolated: {report['ratio']:.1f} times faster, goal {GOAL:g}")
    print(f"CPU seconds: {total['cpu']:.1f} against {total['svd_cpu']:.1f}, {report['ratio_cpu']:.1f} times fewer")
    report["sink_memory"] = memory = sink_memory(config)
    print(
        f"sink scores, T = {memory['seq_len']}: {memory['sinks'] / 1e6:.0f} MB of temporaries, a forward pass {memory['forward'] / 1e6:.0f}"
        f" MB: {memory['ratio']:.2f} times, goal {MEMORY_GOAL:g}"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
