"""What tests read out of README.md and docs/*.md: code, commands with their marks, Python blocks, links, headings."""

import re
import shlex
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
ENVIRONMENT = re.compile(r"([A-Z_]+=\S+ )+")
# `<!-- not run: network -->` before a block of code: why the test that runs all commands leaves those of the block out.
MARK = re.compile(r"<!-- not run: (\w[\w -]*) -->")
REASONS = {
    "network": "fetches what the tests have no stand-in for",
    "hardware": "several machines or accelerators",
    "lm-eval": "needs lm-evaluation-harness and its tasks; tests/evaluation runs it",
    "wandb": "needs wandb; tests/training/test_trackers.py runs it where it is installed",
    "minutes": "run in the long tier",
    "libtpu": "compiles for a TPU that is not there; tests/plan runs it",
}


def blocks(page: Path) -> list[tuple[list[str], str | None]]:
    """(lines, mark) of each block of code: a fence, or what four blanks set apart. A line that ends in a backslash goes on in the next."""
    found, lines, mark, fenced = [], None, None, False
    for line in re.sub(r" \\\n\s+", " ", page.read_text("utf-8")).splitlines():
        fence = line.startswith("```")
        if fence:
            fenced = not fenced
        if fenced and not fence or not fenced and line.startswith("    "):
            if lines is None:
                lines = []
                found.append((lines, mark))
                mark = None
            lines.append(line.strip())
        elif line.strip():
            lines = None
            if not fence:
                mark = said[1] if (said := MARK.fullmatch(line.strip())) else None
    assert not fenced, f"{page.name}: a fence is not closed"
    return found


def code_lines(page: Path) -> list[str]:
    return [line for lines, _ in blocks(page) for line in lines]


def command(line: str) -> list[str] | None:
    """Its words, if a line is a command of ours; a remark beside it (after two blanks) is cut off, `[--json]` counts as given."""
    line = re.sub(r"\[(--[a-z-]+)\]", r"\1", re.split(r"\s{2,}", ENVIRONMENT.sub("", line, count=1))[0])
    return shlex.split(line) if re.match(r"(gammalm|(\./)?launch/[a-z_]+\.sh)( |$)", line) else None


def marked_commands(page: Path) -> list[tuple[list[str], str | None]]:
    return [(words, mark) for lines, mark in blocks(page) for words in map(command, lines) if words]


def commands(page: Path) -> list[list[str]]:
    return [words for words, _ in marked_commands(page)]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def files_of(page: Path) -> dict[str, str]:
    """Config files that a page writes out: each says its name, `where="decay.py"`."""
    named = ((re.search(r'where="(\w+\.py)"', block), block) for block in python_blocks(page))
    return {name[1]: block for name, block in named if name}


def anchors(page: Path) -> set[str]:
    """What `#…` may name in a page: each heading in lower case, blanks as hyphens, without other signs than hyphens and underscores."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to files or headings that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.name}: {link}")
    return broken
