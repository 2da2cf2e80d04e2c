"""The shell of a report page: one HTML file without links to anything outside it, readable on a phone, and a few HTML helpers."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>$title</title>
<style>
:root { --ink: #1b1f27; --soft: #4a5160; --line: #dfe3ea; --paper: #ffffff; --ground: #f4f5f8; --accent: #9a3412; --warn: #fff4e5; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
header.top { margin: .5rem 0 1.5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 0 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
p, ul { margin: .4rem 0 .8rem; max-width: 48rem; }
li { margin: .25rem 0; }
.lead { font-size: 1.05rem; color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1rem 0 0; }
nav a { color: var(--ink); text-decoration: none; border: 1px solid var(--line); background: var(--paper); border-radius: 999px;
  padding: .2rem .8rem; font-size: .9rem; }
nav a:hover, nav a:focus-visible { border-color: var(--accent); color: var(--accent); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 1.2rem 1.3rem; margin: 0 0 1.1rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.1rem 0 0; padding: 0; }
.facts div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .8rem; }
.facts dt { font-size: .82rem; color: var(--soft); }
.facts dd { margin: 0; font-size: 1.2rem; font-weight: 650; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem; align-items: start; }
figure { margin: 0; max-width: 29rem; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; margin: 0 0 1rem; background: linear-gradient(to left, #fff 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to left, #0003, transparent) right / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; min-width: 50%; }
th, td { text-align: left; padding: .38rem .9rem .38rem 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
thead th { font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line); vertical-align: bottom; }
td.n, th.n { text-align: right; }
td.text { white-space: normal; min-width: 6.5rem; }
.findings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
.note { color: var(--soft); font-size: .92rem; }
.warn { background: var(--warn); border-left: 4px solid #c2410c; border-radius: 6px; padding: .5rem .9rem; max-width: none; }
details { margin: .6rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .88em; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .88rem; }
@media (max-width: 40rem) {
  main { padding: 1rem .7rem 3rem; }
  section { padding: 1rem .9rem; border-radius: 10px; }
  h1 { font-size: 1.5rem; }
  .facts { grid-template-columns: 1fr 1fr; }
}
@media print { body { background: #fff; } nav { display: none; } section { break-inside: avoid; border: 0; padding: 0; } }
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def table(headers: Sequence[str], rows: Iterable[Sequence], caption: str, text: Sequence[int] = (), left: Sequence[int] = (0,)) -> str:
    """An HTML table with `caption` above it, in a frame that scrolls sideways.

    Columns in `text` stand left and may wrap, those in `left` stand left, all others (numbers) stand right.
    """

    def kind(column: int) -> str:
        return ' class="text"' if column in text else "" if column in left else ' class="n"'

    head = "".join(f'<th scope="col"{kind(i) if i not in text else ""}>{escape(h)}</th>' for i, h in enumerate(headers))
    lines = "".join(
        "<tr>" + "".join(f"<td{kind(i)}>{escape(str(value))}</td>" for i, value in enumerate(row)) + "</tr>\n" for row in rows
    )
    body = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody></table>"
    return paragraph(caption, "note") + wide(body, caption)


def wide(html: str, label: str) -> str:
    """HTML in a frame that scrolls sideways, and that a screen reader calls by its label."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{html}</div>'


def figure(svg: str, alt: str, width: float = 0.0) -> str:
    """An inline drawing with the text that stands for it; `width`: CSS pixels that it needs to be readable, inside a `wide` frame."""
    style = f' style="min-width:{width:.0f}px;max-width:{1.4 * width:.0f}px"' if width else ""
    return f'<figure role="img" aria-label="{escape(alt)}"{style}>{svg}</figure>'


def figures(drawings: Iterable[str]) -> str:
    """Drawings side by side where there is room."""
    return f'<div class="figures">{"".join(drawings)}</div>'


def section(name: str, title: str, *parts: str) -> str:
    """One section of the page; empty parts are left out, and so is a section without parts."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n{body}\n</section>' if body else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; empty text gives nothing."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def bullets(texts: Iterable[str]) -> str:
    """A list; no texts give nothing."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def findings(said: Mapping[str, Iterable[str]]) -> str:
    """Subjects with what is said of each, side by side where there is room."""
    blocks = (f"<div><h3>{escape(name)}</h3>{bullets(texts)}</div>" for name, texts in said.items())
    return f'<div class="findings">{"".join(blocks)}</div>'


def details(title: str, *parts: str) -> str:
    """Parts that open on demand."""
    return f"<details><summary>{escape(title)}</summary>\n{''.join(parts)}\n</details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Short facts as tiles: (what, value)."""
    return '<dl class="facts">' + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs) + "</dl>"
