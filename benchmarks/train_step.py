"""Our training step against a `transformers` Llama of the same shape on torch CPU, and what each of our choices buys.

    python benchmarks/train_step.py [--quick] [--json FILE] [--peer-python .venv-parity/bin/python]

Every contestant is a process of its own that stays alive; they take turns step by step, so that all see the same machine load.
A contestant prints one JSON line when it has loaded, then one for each line it reads: wall and CPU seconds of one step, and the loss.
The first steps (compilation, first touch of memory) are not counted. Reported: medians of tokens/s and the ratio of medians.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
WARMUP = 2  # steps of each contestant that are not counted
PAUSE = 0.02  # seconds between turns: the last one's worker threads go to sleep

# What gammalm/memory.py sets for our own process: the peer is measured with it too, or the ratio would measure the allocator.
KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}

SHAPES = {
    "small": dict(n_layers=4, d_model=256, n_heads=4, head_dim=64, d_ff=704, vocab_size=4096, seq_len=256, batch=16, learning_rate=1e-3),
    "125m": dict(n_layers=12, d_model=768, n_heads=12, head_dim=64, d_ff=2048, vocab_size=50304, seq_len=512, batch=2, learning_rate=6e-4),
}

# What differs from the step as it is: leaves of config.model, attention.BLOCK as `block`, `options=False` for XLA's own compiler
# options, `keep_memory=False` for glibc's own way with freed memory.
CHOICES = {
    "as it is": {},
    "all logits at once (loss_chunk=0)": {"loss_chunk": 0},
    "layers unrolled, not scanned": {"scan_unroll": 4},
    "remat=dots": {"remat": "dots"},
    "remat=full": {"remat": "full"},
    "fp32 residual stream": {"residual_dtype": "float32"},
    "fp32 everywhere": {"dtype": "float32", "residual_dtype": "float32"},
    "attention in blocks of 64": {"block": 64},
    "attention in one block": {"block": 256},
    "XLA's default compiler options": {"options": False},
    "freed memory given back": {"keep_memory": False},
}


def our_worker(spec: dict) -> None:
    """The real step: `Program` of a config made by configs/lm.py."""
    sys.path.insert(0, str(HERE.parent))
    from gammalm.memory import keep_freed_memory

    choice = dict(spec["choice"])
    if choice.pop("keep_memory", True):
        keep_freed_memory()  # as `gammalm train` does
    import jax

    from configs.lm import get_config
    from gammalm.models import attention
    from gammalm.training import program, step

    config = get_config("size=125m,gate=none,eps=1e-5,steps=1000")
    config.batch.sequences, config.data.seq_len = spec["batch"], spec["seq_len"]
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = spec["learning_rate"], "constant", 0
    config.model.n_kv_heads = spec["n_heads"]
    config.model.dtype = config.model.residual_dtype = spec["dtype"]
    config.model.remat = "none"
    attention.BLOCK = choice.pop("block", attention.BLOCK)
    if not choice.pop("options", True):
        program.compiler_options = lambda *_: {}
    for name in ("n_layers", "d_model", "n_heads", "head_dim", "d_ff", "vocab_size"):
        config.model[name] = spec[name]
    config.model.update(choice)

    run = program.Program(config, np.ones(spec["vocab_size"], np.int32))
    state, scalars = run.init(config), run.scalars([step.scalars(config)])
    batches = [run.put([{"tokens": tokens}]) for tokens in np.load(spec["tokens"])]
    print(json.dumps({"jax": jax.__version__, "python": sys.version.split()[0]}), flush=True)
    for i, _ in enumerate(sys.stdin):
        wall, cpu = time.perf_counter(), time.process_time()
        state, metrics = run.step(state, batches[i % len(batches)], scalars)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}), flush=True)


class Contestant:
    """A worker process and its measured steps."""

    def __init__(self, name: str, python: str, script: list[str], spec: dict, more_env: dict | None = None):
        self.name, self.spec, self.steps = name, spec, []
        threads = str(spec["threads"])
        # Nothing but the CPU; torch's thread count is set in its worker, XLA takes one thread per core.
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **(more_env or {})}
        self.process = subprocess.Popen(
            [python, *script, json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.versions = self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker ended.\n{self.process.stderr.read()[-3000:]}")
        return json.loads(line)

    def step(self) -> None:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self._read())
        time.sleep(PAUSE)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def result(self) -> dict:
        counted = self.steps[WARMUP:]
        tokens = self.spec["batch"] * self.spec["seq_len"]
        return {
            "name": self.name,
            "tokens_per_s": tokens / statistics.median(s["wall"] for s in counted),
            "tokens_per_cpu_s": tokens / statistics.median(s["cpu"] for s in counted),
            "losses": [self.steps[0]["loss"], self.steps[-1]["loss"]],
            "wall": [s["wall"] for s in counted],
            "versions": self.versions,
        }


def take_turns(makers: list, repeats: int) -> list[dict]:
    """Results of all contestants after `repeats` counted steps each, in turns."""
    with contextlib.ExitStack() as stack:
        contestants = []
        for make in makers:
            contestants.append(make())
            stack.callback(contestants[-1].close)
        for _ in range(WARMUP + repeats):
            for contestant in contestants:
                contestant.step()
        return [contestant.result() for contestant in contestants]


def ours(name: str, spec: dict, **choice) -> Contestant:
    return Contestant(name, sys.executable, [str(Path(__file__).resolve()), "--worker"], {**spec, "choice": choice})


def peer(python: str, spec: dict, malloc: dict | None = None) -> Contestant:
    name = "the same, freed memory kept" if malloc else "transformers Llama, torch"
    return Contestant(name, python, [str(HERE / "_peer_llama.py")], spec, malloc)


def show(title: str, results: list[dict]) -> None:
    print(f"\n{title}\n{'':36s}    tok/s  of first  tok/CPU s  of first   loss first -> last")
    first = results[0]
    for r in results:
        shares = [r[key] / first[key] for key in ("tokens_per_s", "tokens_per_cpu_s")]
        print(
            f"{r['name']:36s} {r['tokens_per_s']:8,.0f} {shares[0]:9.2f} {r['tokens_per_cpu_s']:10,.0f} {shares[1]:9.2f}"
            f"   {r['losses'][0]:.3f} -> {r['losses'][1]:.3f}",
            flush=True,
        )


def machine() -> dict:
    """Date, commit and what of the CPU decides which kernels run."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    commit = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cpu_flags": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}),
        "load_before": list(os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=str(HERE.parent / ".venv-parity/bin/python"), help="a Python with torch and transformers")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--skip-choices", action="store_true", help="no table of what each choice buys")
    parser.add_argument("--quick", action="store_true", help="the small shape alone, few repeats")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peer; XLA uses one per core")
    parser.add_argument("--json", metavar="FILE", help="write all measurements there")
    args = parser.parse_args()
    if not Path(args.peer_python).exists():
        parser.error(f"--peer-python: there is no {args.peer_python}. launch/test.sh makes .venv-parity, or name a Python with torch.")

    report = machine() | {"peer": [], "choices": []}
    with tempfile.TemporaryDirectory() as folder:
        for shape in ["small"] if args.quick else args.shapes:
            size = SHAPES[shape]
            path = f"{folder}/{shape}.npy"
            rows = (4, size["batch"], size["seq_len"] + 1)
            # Zipf-like tokens: a loss that falls, and repeated rows in the embedding's gradient as in text.
            ids = np.random.default_rng(0).zipf(1.2, rows) % size["vocab_size"]
            np.save(path, ids.astype(np.int32))
            for dtype in args.dtypes:
                spec = {**size, "dtype": dtype, "tokens": path, "threads": args.threads}
                makers = [
                    lambda spec=spec: peer(args.peer_python, spec),
                    lambda spec=spec: peer(args.peer_python, spec, KEEP_FREED_MEMORY),
                    lambda spec=spec: ours("gammalm", spec),
                ]
                results = take_turns(makers, 3 if args.quick else 15 if shape == "small" else 5)
                show(f"{shape}, {dtype}, {size['batch']} x {size['seq_len']} tokens", results)
                report["peer"].append({"shape": shape, "dtype": dtype, **_ratios(results), "results": results})
        if not args.skip_choices:
            spec = {**SHAPES["small"], "dtype": "bfloat16", "tokens": f"{folder}/small.npy", "threads": args.threads}
            makers = [lambda name=name, choice=choice: ours(name, spec, **choice) for name, choice in CHOICES.items()]
            report["choices"] = take_turns(makers, 2 if args.quick else 9)
            show("what each choice buys: small, bfloat16", report["choices"])
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def _ratios(results: list[dict]) -> dict:
    """Our tokens/s over those of the peer as it comes, and of the peer with our way of keeping memory."""
    plain, kept, mine = (r["tokens_per_s"] for r in results)
    return {"ratio": mine / plain, "ratio_same_malloc": mine / kept}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        our_worker(json.loads(sys.argv[2]))
    else:
        main()
