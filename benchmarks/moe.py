"""Our mixture layer against that of `transformers`' DeepSeek-V3 on torch CPU, and what the number of experts costs each backend.

    python benchmarks/moe.py [--quick] [--json FILE] [--peer-python .venv-parity/bin/python]

Forward and backward of one layer: router, routed experts, one shared expert; the same weights, inputs and cotangent on both sides, whose
losses and gradient norms must agree. Processes, turns and figures are those of train_step.py. Second table: the routed experts alone with
more and more of them at equal work per token, in milliseconds and in scratch memory of the compiled program.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from train_step import HERE, KEEP_FREED_MEMORY, WARMUP, Contestant, machine, take_turns

SHAPES = {
    "small": dict(d_model=512, d_expert=256, n_experts=96, top_k=8, batch=4, seq_len=512),
    "1.5b": dict(d_model=1024, d_expert=384, n_experts=96, top_k=8, batch=4, seq_len=512),  # one layer of moe-1.5B-a0.25B
}
EXPERTS = (16, 32, 64, 96)
SCALING = dict(d_model=512, d_expert=256, top_k=8, batch=4, seq_len=512, dtype="float32")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}  # relative, of the two sides' gradient norms


def write_arrays(path: str, size: dict) -> None:
    """fp32 weights of the layer, x and d_y [B, T, D]; routing by such weights is uneven, as in training."""
    rng = np.random.default_rng(0)
    d, f, e = size["d_model"], size["d_expert"], size["n_experts"]
    shapes = {
        "router": (d, e), "gate": (e, d, f), "up": (e, d, f), "down": (e, f, d),
        "shared_gate": (d, f), "shared_up": (d, f), "shared_down": (f, d),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5) for name, shape in shapes.items()}
    # Values that bf16 has too: both sides then choose the same experts in bf16.
    for name in ("x", "d_y"):
        values = rng.standard_normal((size["batch"], size["seq_len"], d), np.float32)
        arrays[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.savez(path, **arrays)


def layer_program(spec: dict):
    """(weights, x, d_y, function of these) of the whole layer."""
    from types import SimpleNamespace

    import jax.numpy as jnp
    from flax import nnx

    from gammalm.models.moe import MoE

    m = SimpleNamespace(n_experts=spec["n_experts"], top_k=spec["top_k"], n_shared=1, d_expert=spec["d_expert"],
                        score="sigmoid", route_scale=1.0, backend="auto")  # fmt: skip
    arrays = np.load(spec["arrays"])
    graphdef, state = nnx.split(MoE(SimpleNamespace(d_model=spec["d_model"], moe=m)))
    own = {("router",): "router"}
    for name in ("gate", "up", "down"):
        own |= {("experts", name): name, ("shared", name): f"shared_{name}"}
    flat = {path: v for path, v in nnx.to_flat_state(state)}
    buffers = {path: v[...] for path, v in flat.items() if path not in own}
    weights = {path: jnp.asarray(arrays[name]) for path, name in own.items()}

    def function(weights, x_BTD):
        values = weights | buffers
        module = nnx.merge(graphdef, nnx.from_flat_state([(path, v.replace(values[path])) for path, v in flat.items()]))
        return module(x_BTD, None)[0]

    dtype = jnp.dtype(spec["dtype"])
    return weights, jnp.asarray(arrays["x"], dtype), jnp.asarray(arrays["d_y"], dtype), function


def experts_program(spec: dict):
    """The same of the routed experts alone, every token with `top_k` random ones."""
    import jax.numpy as jnp

    from gammalm.models.experts import expert_ffn

    rng = np.random.default_rng(0)
    d, f, e, n = spec["d_model"], spec["d_expert"], spec["n_experts"], spec["batch"] * spec["seq_len"]
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    weights = {name: jnp.asarray(rng.standard_normal(s, np.float32) * s[1] ** -0.5) for name, s in shapes.items()}
    x_ND, d_y_ND = (jnp.asarray(rng.standard_normal((n, d), np.float32), spec["dtype"]) for _ in range(2))
    ids_NA = jnp.asarray(np.argsort(rng.random((n, e)), axis=1)[:, : spec["top_k"]].astype(np.int32))
    gates_NA = jnp.full(ids_NA.shape, 1 / spec["top_k"], jnp.float32)
    return weights, x_ND, d_y_ND, lambda weights, x_ND: expert_ffn(x_ND, ids_NA, gates_NA, weights, spec["backend"])[0]


def our_worker(spec: dict) -> None:
    sys.path.insert(0, str(HERE.parent))
    from gammalm.memory import keep_freed_memory

    keep_freed_memory()  # as `gammalm train` does
    import jax
    import jax.numpy as jnp

    from gammalm.sharding.devices import compiler_options

    weights, x, d_y, function = (experts_program if "backend" in spec else layer_program)(spec)

    def loss(weights, x, d_y):
        return jnp.sum(function(weights, x).astype(jnp.float32) * d_y.astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=compiler_options()).lower(weights, x, d_y).compile()
    squares = [np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(step(weights, x, d_y)[1])]
    about = {"jax": jax.__version__, "python": sys.version.split()[0], "temporary": step.memory_analysis().temp_size_in_bytes}
    print(json.dumps(about | {"gradient_norm": float(np.sqrt(np.sum(squares)))}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        value, gradients = step(weights, x, d_y)
        jax.block_until_ready(gradients)
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": float(value)}), flush=True)


def ours(name: str, spec: dict) -> Contestant:
    return Contestant(name, sys.executable, [str(Path(__file__).resolve()), "--worker"], spec)


def peer(python: str, spec: dict, parameters: str, malloc: dict | None) -> Contestant:
    name = f"transformers, {parameters} parameters{', freed memory kept' if malloc else ''}"
    return Contestant(name, python, [str(HERE / "_peer_moe.py")], {**spec, "parameters": parameters}, malloc)


def against_peer(spec: dict, python: str, repeats: int) -> dict:
    """Results of the peer (fp32 parameters, and in bf16 also bf16 parameters) and of ours, last; our speed over each peer's."""
    kinds = [(p, m) for p in ("float32", "bfloat16") if p in ("float32", spec["dtype"]) for m in (None, KEEP_FREED_MEMORY)]
    makers = [lambda kind=kind: peer(python, spec, *kind) for kind in kinds] + [lambda: ours("gammalm", spec)]
    results = take_turns(makers, repeats)
    norms = [r["versions"]["gradient_norm"] for r in results]
    if max(norms) - min(norms) > TOLERANCE[spec["dtype"]] * min(norms):
        raise SystemExit(f"The two sides do not compute the same: gradient norms {norms}.")
    for r in results:
        shares = [results[-1][key] / r[key] for key in ("tokens_per_s", "tokens_per_cpu_s")]
        r |= {"ratio": shares[0], "ratio_cpu": shares[1]}
        print(
            f"{r['name']:58s} {r['tokens_per_s']:8,.0f} tok/s {r['tokens_per_cpu_s']:8,.0f} tok/CPU s   ours over it {shares[0]:5.2f}"
            f" {shares[1]:5.2f}   gradient norm {r['versions']['gradient_norm']:.6g}",
            flush=True,
        )
    return {"dtype": spec["dtype"], "results": results}


def by_experts(backend: str, spec: dict, repeats: int) -> list[dict]:
    """Milliseconds and scratch of one backend with each number of experts, which take turns."""
    makers = [lambda e=e: ours(f"{e}", {**spec, "backend": backend, "n_experts": e}) for e in EXPERTS]
    rows = []
    for e, r in zip(EXPERTS, take_turns(makers, repeats), strict=True):
        row = {"backend": backend, "experts": e, "ms": 1e3 * statistics.median(r["wall"]), "temporary": r["versions"]["temporary"]}
        row["cpu_ms"] = 1e3 * spec["batch"] * spec["seq_len"] / r["tokens_per_cpu_s"]
        rows.append(row | {key + "_of_first": row[key] / rows[0][key] if rows else 1.0 for key in ("ms", "cpu_ms", "temporary")})
    for row in rows:
        print(
            f"{backend:10s} {row['experts']:4d} experts {row['ms']:8,.0f} ms {row['ms_of_first']:5.2f}   {row['cpu_ms']:8,.0f} CPU ms"
            f" {row['cpu_ms_of_first']:5.2f}   {row['temporary'] / 2**20:8,.0f} MiB scratch {row['temporary_of_first']:5.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=str(HERE.parent / ".venv-parity/bin/python"), help="a Python with torch and transformers")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="against the peer; none of them for the second table alone")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--skip-experts", action="store_true", help="no table of numbers of experts")
    parser.add_argument("--quick", action="store_true", help="the small shape alone, few repeats")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peer; XLA uses one per core")
    parser.add_argument("--json", metavar="FILE", help="write all measurements there")
    args = parser.parse_args()
    if not set(args.shapes) <= set(SHAPES):
        parser.error(f"--shapes: there are {', '.join(SHAPES)}.")
    shapes = args.shapes[:1] if args.quick else args.shapes
    if shapes and not Path(args.peer_python).exists():
        parser.error(f"--peer-python: there is no {args.peer_python}. launch/test.sh makes .venv-parity, or name a Python with torch.")

    report = machine() | {"warmup": WARMUP, "peer": [], "experts": []}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            path = f"{folder}/{shape}.npz"
            write_arrays(path, SHAPES[shape])
            for dtype in args.dtypes:
                spec = {**SHAPES[shape], "dtype": dtype, "arrays": path, "threads": args.threads}
                print(f"\n{shape}, {dtype}: {spec}", flush=True)
                report["peer"].append({"shape": shape, **against_peer(spec, args.peer_python, 3 if args.quick else 11)})
    if not args.skip_experts:
        print(f"\nnumber of experts: {SCALING}")
        installed = ["tokamax"] if importlib.util.find_spec("tokamax") else []
        for backend in ["blocked", "dense", "ragged", *installed]:
            repeats = 3 if args.quick or backend != "blocked" else 11
            report["experts"] += by_experts(backend, {**SCALING, "threads": args.threads}, repeats)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        our_worker(json.loads(sys.argv[2]))
    else:
        main()
