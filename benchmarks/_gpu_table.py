"""The records of gpu_check.py as Markdown: goals beside what was measured, a table per kind of case, and all that failed."""

MFU_GOALS = {"1.5b": 0.50, "moe": 0.35}  # section -> least MFU of its best case
CELLS_GOAL = (16, 6.0)  # cells, and how many times the throughput of one at a time
CONVENTION = "MFU: 6 FLOP per matrix parameter and token, causal attention counted once, recomputation not counted; dense bf16 peak."
SAID = ("model", "remat", "kernel", "backend", "seq_len", "segments", "rows_N", "cells")  # of a case that failed


def grid(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "Nothing was measured.\n"
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *rows))


def gib(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**30:.1f}"


def share(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f} %"


def measured(records: list[dict], *kinds: str) -> list[dict]:
    """What was timed in cases of `kinds`; of a contestant that ran alone and then in turns, the turns."""
    last = {}
    for r in records:
        if r["case"]["kind"] in kinds and "ms" in r:
            last[str((r["section"], r["case"], r["name"]))] = r
    return list(last.values())


def peak(records: list[dict]) -> float | None:
    return next((r["peak_flops"] for r in records if "peak_flops" in r), None)


def speed_up(records: list[dict]) -> dict[int, float]:
    """Cells -> throughput side by side over one at a time, where both ran in turns; the best of several attention kernels."""
    rates: dict[str, dict] = {}
    for r in measured(records, "cells"):
        if r["in_turns"]:
            rates.setdefault(str(r["case"]), {"cells": r["case"]["cells"]})[r["name"]] = r["rate"]
    found: dict[int, float] = {}
    for pair in rates.values():
        if len(pair) == 3:
            found[pair["cells"]] = max(found.get(pair["cells"], 0.0), pair["side by side"] / pair["one at a time"])
    return found


def goals(records: list[dict]) -> str:
    rows = []
    for section, least in MFU_GOALS.items():
        best = max((r["mfu"] for r in measured(records, "step") if r["section"] == section and r["mfu"]), default=None)
        rows.append([f"{section} at T=2048: MFU", share(least), share(best), verdict(best, least)])
    cells, least = CELLS_GOAL
    found = speed_up(records).get(cells)
    text = "–" if found is None else f"{found:.2f}"
    rows.append([f"{cells} cells side by side over one at a time", f"{least:g}", text, verdict(found, least)])
    return grid(["goal", "at least", "measured", "reached"], rows)


def verdict(found: float | None, least: float) -> str:
    return "not measured" if found is None else "yes" if found >= least else "no"


def steps(records: list[dict]) -> str:
    rows = []
    for r in measured(records, "step"):
        c = r["case"]
        rows.append([
            c["model"], r["attention"], r.get("experts", "–"), c["remat"], f"{r['sequences']} x {c['seq_len']}", f"{r['ms']:,.1f}",
            f"{r['rate']:,.0f}", share(r["mfu"]), gib(r["peak_bytes"]), gib(r["compiled_bytes"]), gib(r["scratch_bytes"]),
            f"{r['compile_s']:.0f}", f"{r['first_loss']:.4f} → {r['last_loss']:.4f} in {r['steps']}",
        ])  # fmt: skip
    head = ["model", "attention", "experts", "remat", "sequences", "ms", "tokens/s", "MFU"]
    return grid([*head, "peak GiB", "compiled GiB", "scratch GiB", "compile s", "loss"], rows)


def contest(records: list[dict], kind: str, label) -> str:
    rows, best = [], peak(records)
    for r in measured(records, kind):
        turns = "yes" if r["in_turns"] else "no"
        rows.append([
            label(r["case"]), r["name"], f"{r['ms']:,.3f}", f"{r['rate'] / 1e12:,.2f}", share(best and r["rate"] / best),
            gib(r["scratch_bytes"]), f"{r['compile_s']:.0f}", f"{r['difference']:.1e}", turns,
        ])  # fmt: skip
    return grid(["case", "by", "ms", "TFLOP/s", "of peak", "scratch GiB", "compile s", "difference", "in turns"], rows)


def cells(records: list[dict]) -> str:
    rows = []
    for r in measured(records, "cells"):
        kernel = r["case"].get("kernel", "auto")
        rows.append([str(r["case"]["cells"]), kernel, r["name"], f"{r['ms']:,.2f}", f"{r['rate']:,.0f}", f"{r['difference']:.1e}"])
    return grid(["cells", "attention", "how", "ms", "tokens/s", "difference of losses"], rows)


def failures(records: list[dict]) -> str:
    rows = []
    for r in records:
        if "failed" in r:
            case = ", ".join(f"{name} {value}" for name, value in r["case"].items() if name in SAID)
            rows.append([r["section"], case, r.get("name", "–"), r["failed"], r["message"].replace("|", "/")])
    return grid(["section", "case", "by", "what", "said"], rows) if rows else "Everything ran.\n"


def table(records: list[dict]) -> str:
    """Everything as one Markdown text."""
    about = next((r for r in records if r.get("name") == "versions"), {})
    names = ("kind", "driver", "backend", "jax", "jaxlib", "flax", "optax", "numpy", "python", "xla_flags")
    parts = ["# gpu_check\n", "".join(f"- {name}: {about[name]}\n" for name in names if about.get(name))]
    ceilings = [f"- {r['name']}: {r['rate']:.3g}\n" for r in measured(records, "device")]
    parts += ["".join(ceilings), "## Goals\n", goals(records), CONVENTION + "\n"]
    parts += ["## Training steps\n", steps(records)]
    documents = lambda c: f"T={c['seq_len']}, {c['rows']} rows{', documents' if c['segments'] else ''}"  # noqa: E731
    parts += ["## Attention, forward and backward\n", contest(records, "attention", documents)]
    parts += ["## Routed experts, forward and backward\n", contest(records, "experts", lambda c: f"{c['rows_N']} rows, E={c['n_experts']}")]
    parts += ["## Cells\n", cells(records)]
    parts += ["## What did not run\n", failures(records)]
    return "\n".join(part for part in parts if part)
