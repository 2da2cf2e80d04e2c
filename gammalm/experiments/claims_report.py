"""The claims ledger of a workdir: report/claims.json and report/claims.html from the numbers of the figures that lie in it."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from gammalm.errors import ConfigError
from gammalm.experiments import page
from gammalm.experiments.claims import FIRST_SOURCE, FIXED, TUNED, VERDICTS, Claim, interval, judge
from gammalm.experiments.claims_list import CLAIMS
from gammalm.experiments.claims_second import SECOND_CLAIMS
from gammalm.experiments.results import read_rows
from gammalm.files import write_json_atomic, write_text_atomic

RULE = (
    "Each claim puts one or several measured quantities into a region, such as a difference of losses below zero. Reproduced: the 95 % "
    "interval of each lies inside its region. Opposite: one lies outside; for a direction, it excludes zero on the other side. Not "
    "resolved at this scale: an interval reaches over the edge, or there is one seed and so no interval. Needs scale: nothing was "
    "measured yet, or no run at this scale could show it. Intervals are for one quantity at a time, not corrected for their number."
)
CAPTIONS = "Scale, tokens and seeds of what the verdicts rest on; a verdict is about that scale"
RATES = (
    "Verdicts are given twice: with one learning rate per model size, as in the paper, and with the best rate of those tried for each "
    "initialization, where several were tried: chosen on the losses that are then compared; the captions below say where it is the lowest "
    "or highest tried, so that the best may lie beyond. A difference is second minus first in nats per token: below zero, the second is "
    "better."
)


ALL_CLAIMS = (*CLAIMS, *SECOND_CLAIMS)


def ledger(workdir: str | os.PathLike, claims: Sequence[Claim] = ALL_CLAIMS) -> dict:
    """The ledger as plain data, from whatever figures `workdir` has. Raises ConfigError when `workdir` is no folder."""
    if not Path(workdir).is_dir():
        raise ConfigError(f"{workdir}: no such folder. Give the --workdir of `gammalm figure` or `gammalm grid`.")
    rows, notices, missing, captions = [], [], [], {}
    for figure in sorted({figure for claim in claims for figure in claim.figures}):
        folder = Path(workdir) / "figures" / figure
        if not (folder / "numbers.jsonl").exists():
            missing.append(figure)
            continue
        found, damaged = read_rows(folder / "numbers.jsonl")
        rows += found
        notices += [f"{figure}: {notice}" for notice in damaged]
        captions[figure] = _caption(folder / "caption.txt")
    entries = [judge(claim, rows) for claim in claims]
    counts = {rate: Counter(entry[key] for entry in entries) for rate, key in ((FIXED, "verdict"), (TUNED, "verdict_tuned"))}
    return {
        "rule": RULE,
        "counts": {rate: {verdict: n[verdict] for verdict in VERDICTS} for rate, n in counts.items()},
        "not_measured": sum(not entry["measured"] for entry in entries),
        "missing_figures": missing,
        "notices": notices,
        "captions": captions,
        "claims": entries,
    }


def _caption(path: Path) -> str:
    """What a figure says of itself: scale, sizes, tokens, seeds; and what limits it. Empty without the file."""
    return " ".join(path.read_text(encoding="utf-8").split("\n")).strip() if path.exists() else ""


def write_claims(workdir: str | os.PathLike) -> tuple[dict, Path]:
    """Writes `workdir`/report/claims.json and claims.html; gives the ledger and the path of the page. Raises as `ledger`."""
    found = ledger(workdir)
    folder = Path(workdir) / "report"
    folder.mkdir(exist_ok=True)
    write_json_atomic(folder / "claims.json", found)
    write_text_atomic(folder / "claims.html", page.PAGE.substitute(title="Claims ledger", body=_body(found)))
    return found, folder / "claims.html"


def text_ledger(found: Mapping) -> str:
    """The ledger as an aligned text table: claim, verdicts at both rates, the number that decides, and what is missing."""
    lines = [("claim", "§", "fixed rate", "tuned rate", "measured")]
    lines += [(e["id"], e["section"], _verdict(e), _tuned(e), _deciding(e)) for e in found["claims"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*table, _counted(found["counts"][FIXED]), *_gaps(found)])


# ---- the page ------------------------------------------------------------------------------------------------------------------------


def _body(found: Mapping) -> str:
    entries, missing = found["claims"], found["missing_figures"]
    tiles = [(verdict, str(n)) for verdict, n in found["counts"][FIXED].items()]
    lead = "What the paper and the second source state, what was measured here, and whether they agree."
    top = f'<header class="top"><h1>Claims ledger</h1><p class="lead">{lead}</p>{page.facts(tiles)}</header>'
    short = page.section(
        "rule",
        "How to read this",
        "".join(page.paragraph(gap, "warn") for gap in _gaps(found)),
        page.paragraph(RULE),
        page.paragraph(RATES),
        page.table(
            ["claim", "fixed rate", "tuned rate", "measured", "§"],
            [[e["statement"], _verdict(e), _tuned(e), _deciding(e), e["section"]] for e in entries],
            "All claims; tiles and first verdict are for the fixed rate",
            text=(0, 1, 2, 3),
            left=(4,),
        ),
    )
    blocks: dict[str, list[str]] = {}  # by section of the paper, experiment of the second source
    for entry in entries:
        blocks.setdefault(entry["section"].split(",")[0], []).append(_block(entry, missing))
    titles = {entry["section"].split(",")[0]: entry["source"] for entry in entries}
    said = page.table(["figure", "caption"], found["captions"].items(), CAPTIONS, text=(1,))
    captions = page.section("captions", "What the figures are of", said if found["captions"] else "")
    return "\n".join([top, short, *(page.section(f"s{name}", _title(name, titles[name]), *of) for name, of in blocks.items()), captions])


def _title(name: str, source: str) -> str:
    return f"Section {name}" if source == FIRST_SOURCE else f"{source[0].upper()}{source[1:]}: {name}"


def _block(entry: Mapping, missing: Sequence[str]) -> str:
    tuned = f"; tuned rate: {_tuned(entry)}" if entry["verdict_tuned"] else ""
    where = [f"§ {entry['section']}", *(_link(figure, missing) for figure in entry["figures"])]
    if entry["sizes"]:
        where.append(f"measured on {escape(', '.join(entry['sizes']))}")
    if entry["scale"]:
        where.append(f"scale {escape(', '.join(entry['scale']))}")
    parts = [[rate, part["what"], _number(part), part["verdict"]] for rate, key in RATE_PARTS for part in entry[key]]
    table = page.table(["rate", "what", "value", ""], parts, "Each with its own verdict", text=(1,), left=(0, 2, 3))
    return (
        f'<h3 id="{escape(entry["id"])}">{escape(entry["statement"])}</h3>'
        f"<p><strong>{escape(_verdict(entry))}</strong>{escape(tuned)}</p>"
        + page.paragraph(entry["said"])
        + f'<p class="note">{" · ".join(where)}</p>'
        + (page.details("Its parts", table) if len(parts) > 1 else "")
    )


def _link(figure: str, missing: Sequence[str]) -> str:
    """A figure's id, as a link to the page of all figures where it has been drawn."""
    return figure if figure in missing else f'<a href="../figures/index.html#{figure}">{figure}</a>'


RATE_PARTS = ((FIXED, "parts"), (TUNED, "parts_tuned"))


# ---- small texts ---------------------------------------------------------------------------------------------------------------------


def _verdict(entry: Mapping) -> str:
    """The verdict at the fixed rate; a claim that some figure can measure says so when none has."""
    return entry["verdict"] + (" (not measured yet)" if entry["figures"] and not entry["measured"] else "")


def _tuned(entry: Mapping) -> str:
    """The verdict at the tuned rate, with its sizes where they are not those of the fixed rate."""
    some = f" ({', '.join(entry['sizes_tuned'])})" if entry["sizes_tuned"] != entry["sizes"] else ""
    return entry["verdict_tuned"] + some if entry["verdict_tuned"] else "–"


def _deciding(entry: Mapping) -> str:
    """The first part that has the claim's verdict."""
    part = next((part for part in entry["parts"] if part["verdict"] == entry["verdict"]), None)
    return f"{part['what']} {_number(part)}" if part else "–"


def _number(part: Mapping) -> str:
    return interval(*(part[key] for key in ("value", "low", "high", "seeds")))


def _counted(counts: Mapping[str, int]) -> str:
    return "at the fixed rate: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def _gaps(found: Mapping) -> Iterable[str]:
    """Sentences on what the ledger lacks."""
    if found["missing_figures"]:
        yield f"Figures that have not been drawn in this workdir: {', '.join(found['missing_figures'])}."
    if found["notices"]:
        yield "Reading the numbers: " + " ".join(found["notices"])
