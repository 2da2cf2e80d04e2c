"""The measuring process of gpu_check.py: a case per line on standard input, records as lines on standard output, {"done": true} last.

What fails in a case becomes a record; only a crash or the caller's patience ends the process. Nothing but jax, flax, optax and numpy is
imported, and of gammalm only what needs no more. Shape legend: gammalm/models/parts.py; N rows, A experts of a row, C cells.
"""

import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import jax  # noqa: E402  (gammalm need not be installed)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from gammalm.models.decoder import Model  # noqa: E402
from gammalm.models.experts import choose_backend, expert_ffn  # noqa: E402
from gammalm.models.flops import training_flops_per_token  # noqa: E402
from gammalm.models.kernels import attend, choose_attention, head_sizes  # noqa: E402
from gammalm.sharding.devices import compiler_options, peak_flops  # noqa: E402
from gammalm.sharding.mesh import make_mesh  # noqa: E402
from gammalm.training.step import init_state, make_step, over_cells, scalars  # noqa: E402

MARGIN = 0.95  # of the device's memory that a program may need by the compiler's own count: buffers do not fill the pool without gaps
ROUNDS = 20  # at most, and at least LEAST, of what is timed; SECONDS long for all contestants of a case together
LEAST = 3
SECONDS = 4.0
WARMUP = 2


class DoesNotFit(Exception):
    """A program whose arguments, results and scratch exceed the device's memory: `memory` as in `compiled`, `limit` in bytes."""

    def __init__(self, memory: dict, limit: int):
        self.memory, self.limit = memory, limit
        super().__init__(f"needs {memory['compiled_bytes'] / 2**30:.1f} GiB of {limit / 2**30:.1f}")


def failure(error: BaseException) -> dict:
    """What is recorded of an exception: its kind and the first lines of what it says."""
    text = str(error) or repr(error)
    if isinstance(error, DoesNotFit):
        kind = "does not fit"
    else:
        kind = "out of memory" if "RESOURCE_EXHAUSTED" in text or "ut of memory" in text else type(error).__name__
    return {"failed": kind, "message": " ".join(text.split())[:300]}


def memory_stat(name: str) -> int | None:
    """One of the allocator's own counts in bytes; CPUs have none."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def compiled(function, *arguments, donate=()):
    """(executable, {"compile_s", "argument_bytes", "scratch_bytes", "compiled_bytes"}); arguments may be abstract. Raises DoesNotFit."""
    begin = time.perf_counter()
    program = jax.jit(function, donate_argnums=donate, compiler_options=compiler_options()).lower(*arguments).compile()
    about = {"compile_s": round(time.perf_counter() - begin, 2)}
    m = program.memory_analysis()
    about |= {"argument_bytes": m.argument_size_in_bytes, "scratch_bytes": m.temp_size_in_bytes}
    about["compiled_bytes"] = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    limit = memory_stat("bytes_limit")
    if limit and about["compiled_bytes"] > MARGIN * limit:
        raise DoesNotFit(about, limit)
    return program, about


def take_turns(calls: dict, seconds: float = SECONDS) -> dict[str, float]:
    """Median seconds of each call when all run in turns; each is waited for."""
    spent = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(ROUNDS):
        if done >= LEAST and time.perf_counter() - begin > seconds:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


@jax.jit
def _distance(a, b):
    """|a − b| / |b| over all leaves, fp32."""
    square = lambda leaf: jnp.sum(jnp.square(leaf.astype(jnp.float32)))  # noqa: E731
    total = lambda tree: sum(map(square, jax.tree.leaves(tree)))  # noqa: E731
    return jnp.sqrt(total(jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), a, b)) / total(b))


def compete(contestants: dict, work: float, emit, compared=lambda result: result) -> None:
    """Measures each of `contestants`, name -> function that returns (call, what is known of its program), and then all in turns.

    A record per contestant once it ran by itself, another after the turns: ms, rate = `work` per second, and by how much its first result
    differs (`compared` of it) from that of the first contestant that ran. What fails is recorded and takes no part in the turns.
    """
    calls, known, reference = {}, {}, None
    for name, make in contestants.items():
        try:
            call, about = make()
            first = compared(jax.block_until_ready(call()))
            if reference is None:
                reference = first
            about["difference"] = float(_distance(first, reference))
            seconds = take_turns({name: call}, 0.5)[name]
        except Exception as error:  # whatever a kernel does not take, in whatever way it says so
            emit({"name": name, **failure(error), **getattr(error, "memory", {})})
            continue
        finally:
            first = None
            gc.collect()
        calls[name], known[name] = call, about
        emit({"name": name, **about, "ms": 1e3 * seconds, "rate": work / seconds, "in_turns": False})
    reference = None
    if len(calls) > 1:
        for name, seconds in take_turns(calls).items():
            emit({"name": name, **known[name], "ms": 1e3 * seconds, "rate": work / seconds, "in_turns": True})


def config_of(name: str, case: dict) -> SimpleNamespace:
    """The config `name` of _gpu_configs.json as attributes, with what the case changes."""
    sections = json.loads((HERE / "_gpu_configs.json").read_text("utf-8"))[name]
    model = sections["model"]
    for key in ("remat", "kernel"):
        if key in case:
            model[{"kernel": "attention_kernel"}.get(key, key)] = case[key]
    if "backend" in case:
        model["moe"]["backend"] = case["backend"]
    sections |= {"batch": {"micro_batches": 1}, "train": {"steps": 10_000, "spike": "off"}}
    return json.loads(json.dumps(sections), object_hook=lambda d: SimpleNamespace(**d))


def tokens(seed: int, rows: int, seq_len: int, vocabulary: int):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocabulary, (rows, seq_len + 1)).astype(np.int32))


# ---- cases -----------------------------------------------------------------------------------------------------------------------


def device(case: dict, emit) -> None:
    """What runs here, and two ceilings: a bf16 product of two square matrices, a copy."""
    d = jax.devices()[0]
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    found |= {"python": platform.python_version(), "platform": d.platform, "kind": d.device_kind, "peak_flops": peak_flops(d)}
    found |= {"memory_limit": memory_stat("bytes_limit"), "backend": getattr(d.client, "platform_version", "")}
    found["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        found["driver"] = f"unknown: {type(error).__name__}"
    emit({"name": "versions", **found})

    n = case["size"]
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    for name, call, work in (
        ("product, FLOP/s", lambda: product(a, b), 2 * n**3),
        ("copy, bytes read and written/s", functools.partial(jax.jit(lambda x: x + 1), jnp.zeros((16, n, n), jnp.bfloat16)), 64 * n**2),
    ):
        jax.block_until_ready([call() for _ in range(WARMUP)])
        seconds = take_turns({name: lambda call=call: [call() for _ in range(5)]}, 1.0)[name] / 5
        emit({"name": name, "ms": 1e3 * seconds, "rate": work / seconds})


def step(case: dict, emit) -> None:
    """Training steps of one model with the largest of case["rows"] sequences that fits; a record for each that was tried."""
    rows = list(case["rows"])
    while rows:
        tried = rows.pop(0)
        about = {"name": f"{tried} sequences", "sequences": tried}
        try:
            emit(about | _one_step(case, tried))
            return
        except Exception as error:
            emit(about | failure(error) | getattr(error, "memory", {}))
            if isinstance(error, DoesNotFit):
                rows = _worth_trying(rows, tried, error)
            elif failure(error)["failed"] != "out of memory":
                return
        gc.collect()


def _worth_trying(rows: list[int], tried: int, error: DoesNotFit) -> list[int]:
    """Of the smaller `rows` those that should fit, by what `tried` needed; at least the last, which may show that nothing fits."""
    arguments, scratch = error.memory["argument_bytes"], error.memory["scratch_bytes"]
    fixed = min(scratch, arguments / 3)  # gradients, as large as the parameters; the rest grows with the rows
    return [n for n in rows if arguments + fixed + (scratch - fixed) * n / tried <= MARGIN * error.limit] or rows[-1:]


def _one_step(case: dict, rows: int) -> dict:
    c, T = config_of(case["model"], case), case["seq_len"]
    model = Model(c.model)
    batch = {"tokens": tokens(0, rows, T, c.model.vocab_size)}
    init = lambda seed: init_state(model, c, seed)  # noqa: E731
    fixed, seed = scalars(c), jnp.uint32(0)
    program, about = compiled(make_step(model, c), jax.eval_shape(init, seed), batch, fixed, donate=0)
    before = memory_stat("peak_bytes_in_use")
    state = jax.block_until_ready(jax.jit(init)(seed))
    losses = []

    def call():
        nonlocal state
        state, metrics = program(state, batch, fixed)
        losses.append(metrics["loss"])
        return state

    for _ in range(WARMUP):
        jax.block_until_ready(call())
    seconds = take_turns({"": call})[""]
    rate, peak = rows * T / seconds, peak_flops(jax.devices()[0])
    used = memory_stat("peak_bytes_in_use")
    here = jax.default_backend()
    chosen = {"attention": choose_attention(c.model.attention_kernel, here, c.model.dtype, head_sizes(c.model), T)}
    if c.model.ffn == "moe":
        chosen["experts"] = choose_backend(c.model.moe.backend, here)
    return about | chosen | {
        "ms": 1e3 * seconds,
        "rate": rate,
        "mfu": peak and rate * training_flops_per_token(model, T) / peak,
        "peak_bytes": used if used != before else None,  # the process's highest: another attempt's where it did not rise
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "steps": len(losses),
    }  # fmt: skip


def attention(case: dict, emit) -> None:
    """Forward and backward of attention alone, bf16; documents, where asked for, are four of unequal length in each row."""
    B, T, H, K = case["rows"], case["seq_len"], case["heads"], case["head_dim"]
    q, k, v, dy = (jax.random.normal(jax.random.key(i), (B, T, H, K), jnp.bfloat16) for i in range(4))
    segments = None
    if case["segments"]:
        ends = jnp.asarray([T // 8, T // 3, T // 2 + 1])
        segments = jnp.broadcast_to(1 + jnp.searchsorted(ends, jnp.arange(T), side="right").astype(jnp.int32), (B, T))

    def xla(q, k, v, segments):
        mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")

    def ours(name, q, k, v, segments):
        return attend(q[:, :, :, None], k, v, segments, name)[:, :, :, 0]

    def contestant(name):
        function = xla if name == "xla" else functools.partial(ours, name)

        def both(q, k, v, segments, dy):
            y, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
            return y, pull(dy)

        def make():
            program, about = compiled(both, q, k, v, segments, dy)
            return lambda: program(q, k, v, segments, dy), about

        return make

    causal = 3 * 2 * 2 * B * H * K * T * T / 2  # two products forward, twice as much backward, half of the square; documents not counted
    compete({name: contestant(name) for name in case["kernels"]}, causal, emit)


def experts(case: dict, emit) -> None:
    """Forward and backward of the routed experts alone, bf16 rows and fp32 weights, each row with random experts."""
    N, D, F, E, A = (case[name] for name in ("rows_N", "d_model", "d_expert", "n_experts", "top_k"))
    rng = np.random.default_rng(0)
    shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    w = {name: jax.random.normal(jax.random.key(i), s) * s[1] ** -0.5 for i, (name, s) in enumerate(shapes.items())}
    x_ND, dy_ND = (jax.random.normal(jax.random.key(i), (N, D), jnp.bfloat16) for i in (10, 11))
    ids_NA = jnp.asarray(np.argsort(rng.random((N, E)), axis=1)[:, :A].astype(np.int32))
    gates_NA = jnp.asarray(rng.random((N, A), np.float32))

    def contestant(name):
        def both(x, ids, gates, w, dy):
            y, pull = jax.vjp(lambda x, gates, w: expert_ffn(x, ids, gates, w, name)[0], x, gates, w)
            return y, pull(dy)

        def make():
            choose_backend(name, jax.default_backend())  # says at once what is not installed
            program, about = compiled(both, x_ND, ids_NA, gates_NA, w, dy_ND)
            return lambda: program(x_ND, ids_NA, gates_NA, w, dy_ND), about

        return make

    compete({name: contestant(name) for name in case["backends"]}, 3 * 3 * 2 * N * A * D * F, emit)


@functools.cache
def _cell_program(name: str, case: str, cells: int | None):
    """(compiled step of one cell or of `cells` side by side, what is known of it, jitted init of one cell's state)."""
    case = json.loads(case)
    c = config_of(name, case)
    model = Model(c.model)
    init = jax.jit(lambda seed: init_state(model, c, seed))
    shape = jax.ShapeDtypeStruct((case["rows"], case["seq_len"] + 1), jnp.int32)
    arguments = jax.eval_shape(init, jnp.uint32(0)), {"tokens": shape}, jax.eval_shape(lambda: scalars(c))
    function = make_step(model, c)
    if cells:
        function = over_cells(function, "vmap", make_mesh({}, jax.devices()[:1]))
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct((cells, *a.shape), a.dtype), arguments)
    return *compiled(function, *arguments, donate=0), init, c


def cells(case: dict, emit) -> None:
    """Steps of C runs, one after another and side by side; each has its own seed, batch and learning rate. Losses are compared."""
    C = case["cells"]
    same = json.dumps({k: v for k, v in case.items() if k != "cells"})

    def prepared(cells):
        program, about, init, c = _cell_program(case["model"], same, cells)
        states = [init(jnp.uint32(i)) for i in range(C)]
        batches = [{"tokens": tokens(i, case["rows"], case["seq_len"], c.model.vocab_size)} for i in range(C)]
        each = [scalars(c) | {"learning_rate": jnp.float32(1e-3 * (i + 1))} for i in range(C)]
        return program, dict(about), states, batches, each

    def one_at_a_time():
        program, about, states, batches, each = prepared(None)

        def call():
            losses = []
            for i in range(C):
                states[i], metrics = program(states[i], batches[i], each[i])
                losses.append(metrics["loss"])
            return losses, states

        return call, about

    def side_by_side():
        program, about, *lists = prepared(C)
        stack = jax.jit(lambda trees: jax.tree.map(lambda *a: jnp.stack(a), *trees))
        state, batch, scalar = map(stack, lists)

        def call():
            nonlocal state
            state, metrics = program(state, batch, scalar)
            return metrics["loss"], state

        return call, about

    ways = {"one at a time": one_at_a_time, "side by side": side_by_side}
    compete(ways, C * case["rows"] * case["seq_len"], emit, compared=lambda result: jnp.asarray(result[0]))


KINDS = {f.__name__: f for f in (device, step, attention, experts, cells)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def emit(record: dict) -> None:
        answers.write(json.dumps(record) + "\n")

    for line in sys.stdin:
        case = json.loads(line)
        try:
            KINDS[case["kind"]](case, emit)
        except Exception as error:  # a case that could not even begin
            emit(failure(error))
        gc.collect()
        emit({"done": True})


if __name__ == "__main__":
    main()
