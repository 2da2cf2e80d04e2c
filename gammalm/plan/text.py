"""Plans as text for a terminal: one plan in full, several as a table."""

from gammalm.plan.memory import KINDS


def size(n: float | None) -> str:
    """Bytes in decimal units, three digits."""
    if n is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if abs(n) < 999.5 else f"{n:.0f} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def amount(n: float) -> str:
    """Hours: three digits, or whole ones with thousands set apart."""
    return f"{n:.3g}" if n < 1000 else f"{n:,.0f}"


def verdict(memory: dict) -> str:
    """Whether it fits, and by how much."""
    if memory["fits"] is None:
        return f"needs {size(memory['total'])} per device; how much there is, is not known"
    word, by = ("fits", "left") if memory["fits"] else ("DOES NOT FIT", "too much")
    return f"{word}: {size(memory['total'])} of {size(memory['available'])} per device, {size(abs(memory['left']))} {by}"


def layout(plan: dict) -> str:
    """Mesh, recomputation and micro-batches on one line."""
    mesh = " ".join(f"{axis}={n}" for axis, n in plan["mesh"].items()) or "one device"
    return f"{mesh}, remat {plan['remat']}, {plan['micro_batches']} micro-batch{'es' * (plan['micro_batches'] > 1)}"


def describe_plan(plan: dict) -> str:
    """One plan, a line per fact."""
    m, t = plan["memory"], plan["traffic"]
    kinds = ", ".join(f"{kind} {size(m[kind])}" for kind in KINDS if kind in m)
    if plan["method"] == "compiled":
        how = f"compiled in {plan['compile_seconds']:.0f} s"
    else:
        how = "analytic: a model of the step, nothing was compiled"
    lines = [
        f"{plan['topology']}: {plan['chips']} chips ({plan['devices']} x {plan['device']}), {layout(plan)}",
        f"  {how}; {plan['kernels']}",
        f"  {verdict(m)} (reserve {size(m['reserve'])})",
        f"  per device: {kinds}",
    ]
    if m["dense_mask"]:
        lines.append(f"  of which a dense mask of attention: {size(m['dense_mask'])}")
    lines.append(f"  FLOP per token: {plan['flop_per_token']:.4g}, of which the model's {100 * plan['model_flop_share']:.0f} %")
    if t is not None:
        moved = ", ".join(f"{n:.0f} {kind} {size(sent)}" for kind, (n, sent) in sorted(t["collectives"].items())) or "none"
        lines.append(f"  a step moves {size(t['hbm_bytes'])} in HBM; collectives, bytes sent per device: {moved}")
        if t["loops_unknown"]:
            lines.append(f"  {t['loops_unknown']} loops of unknown length are counted once")
        if t["opaque"]:
            lines.append(f"  {t['opaque']:.0f} calls do not say what they move: collectives and bytes are at least these")
    if "seconds" in plan:
        s = plan["seconds"]
        parts = ", ".join(f"{name} {duration(s[name])}" for name in ("arithmetic", "hbm", "collectives"))
        compiler = f"; compiler's estimate {duration(s['compiler'])}" if s["compiler"] else ""
        cost = "" if plan["cost"] is None else f", cost {plan['cost']:,.2f}"
        lines.append(f"  roofline {duration(s['roofline'])} a step ({parts}){compiler}")
        at_most = "" if s["compiler"] else "at most "
        lines.append(
            f"  predicted: {at_most}{100 * plan['mfu']:.0f} % MFU, {plan['tokens_per_second']:,.0f} tokens/s; {plan['steps']:,} steps: "
            f"{amount(plan['hours'])} h, {amount(plan['chip_hours'])} chip-hours{cost}"
        )
    return "\n".join(lines)


def heading(rows: list[tuple[str, dict]]) -> str:
    """What holds for all plans of a table."""
    plan = rows[0][1]
    if plan["method"] == "compiled":
        how = "compiled"
    else:
        how = "analytic: models of the steps, nothing was compiled; times are at least, MFU at most"
    return f"{plan['topology']}: {plan['chips']} chips ({plan['devices']} x {plan['device']}), {how}"


def table(rows: list[tuple[str, dict]], totals: dict | None = None) -> str:
    """Several plans, one line each, named; HBM is of one device. `totals`: hours, chip_hours and cost of all, for a last line."""
    priced = any(plan.get("cost") is not None for _, plan in rows)
    head = ["", "HBM", "fits", "step", "MFU", "hours", "chip-hours"] + ["cost"] * priced

    def sums(found: dict) -> list[str]:
        return [amount(found["hours"]), amount(found["chip_hours"])] + ([f"{found['cost']:,.2f}"] if priced else [])

    lines = [head]
    for name, plan in rows:
        fits = {True: "yes", False: "NO", None: "?"}[plan["memory"]["fits"]]
        row = [name, size(plan["memory"]["total"]), fits]
        if "seconds" in plan:
            row += [duration(plan["seconds"]["step"]), f"{100 * plan['mfu']:.0f} %", *sums(plan)]
        lines.append(row + ["-"] * (len(head) - len(row)))
    if totals is not None:
        lines.append([f"all {len(rows)}, one after another", "", "", "", "", *sums(totals)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
