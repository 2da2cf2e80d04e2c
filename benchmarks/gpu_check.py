"""What one GPU does with gammalm, in under eight minutes: training steps, attention kernels, mixture backends, cells of a grid.

    python benchmarks/gpu_check.py --out gpu_check [--sections 1.5b attention …] [--budget 460] [--tiny]

Needs no more than jax, flax, optax and numpy beside this repository, which need not be installed. Sections, most wanted first; each ends
at its share of the budget, and what is left over goes to the next:

    device     kind, driver, versions; a large matrix product and a copy as measured ceilings
    1.5b       training step at T=2048: remat none, dots, full at the largest batch that fits, and the blockwise attention kernel
    attention  kernels against each other, forward and backward, T=2048 and 8192, with and without segments
    experts    backends of a mixture's routed experts against each other
    moe        training step of moe-1.5b-a0.25b, by backend and remat
    cells      1, 4, 16 cells of a 10M model side by side against one at a time
    125m       training step

The measuring is done by a second process (_gpu_worker.py), a fresh one for each section: a crash, a kernel that does not exist or a
compilation without end is recorded, and the rest goes on. `--out` gets results.jsonl (a line as soon as it is known), table.md and
worker.log. `--tiny` runs everything in small shapes, on a CPU too.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from _gpu_table import table

HERE = Path(__file__).resolve().parent
SHARES = {"device": 0.05, "1.5b": 0.32, "attention": 0.15, "experts": 0.12, "moe": 0.17, "cells": 0.10, "125m": 0.09}
LONGEST = 0.6  # of what is left of a section's time: what a case may take that is not its last
MEMORY_SHARE = {"XLA_CLIENT_MEM_FRACTION": "0.92"}  # taken at once; the rest is for cuBLAS, cuDNN and the driver
QUICK_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
KERNELS = ["cudnn", "xla", "blockwise"]  # the slowest to compile last


def cases(tiny: bool) -> dict[str, list[dict]]:
    """Section -> what the worker is asked, in this order. `rows`: sequences of a step, tried in turn until one fits."""
    if tiny:
        small = {"kind": "step", "seq_len": 64, "rows": [4]}
        routed = {"rows_N": 64, "d_model": 32, "d_expert": 16, "n_experts": 8, "top_k": 2}
        return {
            "device": [{"kind": "device", "size": 256}],
            "1.5b": [small | {"model": "tiny", "remat": "none"}],
            "attention": [
                {"kind": "attention", "seq_len": 64, "rows": 2, "heads": 2, "head_dim": 16, "segments": segments, "kernels": KERNELS}
                for segments in (False, True)
            ],
            "experts": [{"kind": "experts", "backends": ["blocked", "ragged", "dense"], **routed}],
            "moe": [small | {"model": "tiny-moe", "remat": "none", "backend": "ragged"}],
            "cells": [{"kind": "cells", "model": "nano", "cells": 2, "rows": 2, "seq_len": 32}],
            "125m": [small | {"model": "tiny", "remat": "full", "kernel": "blockwise"}],
        }
    step = {"kind": "step", "seq_len": 2048}
    large = step | {"model": "1.5b"}
    mixture = step | {"model": "moe-1.5b-a0.25b"}
    small = step | {"model": "125m"}
    routed = {"kind": "experts", "d_model": 1024, "d_expert": 384, "n_experts": 96, "top_k": 8}
    together = {"kind": "cells", "model": "10m", "rows": 8, "seq_len": 512}
    attention = [
        {"kind": "attention", "seq_len": T, "rows": 16384 // T, "heads": 16, "head_dim": 128, "segments": segments, "kernels": KERNELS}
        for segments in (False, True) for T in (2048, 8192)
    ]  # fmt: skip
    return {
        "device": [{"kind": "device", "size": 8192}],
        "1.5b": [
            large | {"remat": "none", "rows": [8, 6, 4, 2, 1]},
            large | {"remat": "dots", "rows": [16, 8, 4, 2, 1]},
            large | {"remat": "full", "rows": [32, 16, 8, 4, 2, 1]},
            large | {"remat": "full", "rows": [16, 8, 4, 2, 1], "kernel": "blockwise"},
        ],
        "attention": attention,
        "experts": [
            routed | {"rows_N": 1024, "backends": ["tokamax", "ragged", "blocked", "dense"]},
            *(routed | {"rows_N": n, "backends": ["tokamax", "ragged", "blocked"]} for n in (8192, 16384)),
        ],
        "moe": [
            mixture | {"remat": "full", "rows": [16, 8, 4, 2, 1], "backend": "auto"},
            mixture | {"remat": "full", "rows": [8, 4, 2, 1], "backend": "ragged"},
            mixture | {"remat": "none", "rows": [8, 4, 2, 1], "backend": "auto"},
        ],
        "cells": [*(together | {"cells": n} for n in (16, 4, 1)), together | {"cells": 16, "kernel": "blockwise"}],
        "125m": [
            small | {"remat": "none", "rows": [32, 16, 8, 4, 2, 1]},
            small | {"remat": "full", "rows": [64, 32, 16, 8, 4, 2, 1]},
        ],
    }  # fmt: skip


class Worker:
    """A process that is sent one case at a time and answers with records; started when first asked, and again after it was lost."""

    def __init__(self, log: Path, command: list[str], environment: dict[str, str]):
        self.log, self.command, self.environment, self.process = log, command, environment, None

    def _start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
                env=os.environ | self.environment,
            )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()

        def read(stdout, lines):
            for line in stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, args=(self.process.stdout, self.lines), daemon=True).start()

    def ask(self, case: dict, deadline: float) -> Iterator[dict]:
        """The records of `case`, as they come. Past `deadline` (time.monotonic) the process is killed, and a last record says so."""
        if self.process is None:
            self._start()
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
        except BrokenPipeError:
            pass  # it is gone: its end is read below
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                yield {"failed": "out of time", "message": "the process was killed while it worked on this"}
                return
            if line is None:
                status = self.process.wait()
                self.process = None
                yield {"failed": "crash", "message": f"the process ended with status {status}: {last_line(self.log)}"}
                return
            record = json.loads(line)
            if "done" in record:
                return
            yield record

    def close(self) -> None:
        """Kills the process and waits until it is gone, and with it its hold on the device's memory."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def environment(tiny: bool) -> dict[str, str]:
    """What is set for the worker: a share of the memory where the user says nothing of it, under its old name or its new one."""
    said = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ)
    return ({} if said else MEMORY_SHARE) | (QUICK_COMPILE if tiny else {})


def last_line(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def run(plan: dict[str, list[dict]], budget: float, worker: Worker, *, fresh: bool) -> Iterator[dict]:
    """The records of all sections of `plan`, each with its section and case; `budget` in seconds, shared out by SHARES.

    `fresh`: a new process for each section, so that the peak of its memory is its own.
    """
    total = sum(SHARES[name] for name in plan)
    start = end = time.monotonic()
    for section, asked in plan.items():
        end += budget * SHARES[section] / total
        for number, case in enumerate(asked, 1):
            here = {"section": section, "case": case}
            left = end - time.monotonic()
            if left <= 0:
                yield here | {"failed": "no time left", "message": "", "at_s": round(time.monotonic() - start, 1)}
                continue
            for record in worker.ask(case, end if number == len(asked) else end - (1 - LONGEST) * left):
                yield here | record | {"at_s": round(time.monotonic() - start, 1)}
        if fresh:
            worker.close()


def brief(record: dict) -> str:
    """One line of a record for the terminal."""
    case = {k: v for k, v in record["case"].items() if k not in ("kind", "kernels", "backends")}
    found = {k: v for k, v in record.items() if k not in ("case", "section", "at_s")}
    return f"{record['at_s']:6.1f} s  {record['section']}  {json.dumps(case)}  {json.dumps(found)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT"), help="folder for the results; $OUT by default")
    parser.add_argument("--sections", nargs="+", choices=SHARES, default=list(SHARES), metavar="SECTION", help=", ".join(SHARES))
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything, 460 by default")
    parser.add_argument("--tiny", action="store_true", help="small shapes, which say nothing about speed")
    args = parser.parse_args()
    if not args.out:
        parser.error("--out: name a folder for the results.")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "worker.log").write_bytes(b"")
    plan = {name: asked for name, asked in cases(args.tiny).items() if name in args.sections}
    worker = Worker(out / "worker.log", [sys.executable, str(HERE / "_gpu_worker.py")], environment(args.tiny))
    records = []
    try:
        with open(out / "results.jsonl", "w", encoding="utf-8") as file:
            for record in run(plan, args.budget, worker, fresh=not args.tiny):
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(brief(record), flush=True)
                (out / "table.md").write_text(table(records), encoding="utf-8")
    finally:
        worker.close()
    print(f"\n{table(records)}")
    return 0 if any("failed" not in record for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
