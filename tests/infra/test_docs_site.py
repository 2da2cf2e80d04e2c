"""The documentation as a site: it builds without a warning, holds every page, config value and option, and no link leads nowhere."""

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from gammalm.cli.main import COMMANDS, build_parser
from gammalm.config import available, leaves, load_config, load_module
from gammalm.config_checks import KINDS, NET_RULES, RULES

from .docs_pages import PAGES, REPO

SITE = REPO / "docs" / "site"


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return load("reference")


def rows_of(page):
    """First cell -> the other cells of every row of the page's tables."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_config_page_has_every_value_with_its_rule_default_and_meaning(reference):
    page = reference.config_page()
    decoder, net = page.split("\n## mlp\n")
    rows, nets = rows_of(decoder), rows_of(net.partition("\n## Grids\n")[0])
    rules = RULES | {name: rule for kind in KINDS.values() for name, rule in kind.items()}
    assert set(rules) <= set(rows) and set(NET_RULES) <= set(nets)
    for found, needed, config in ((rows, rules, load_config("lm")), (nets, NET_RULES, load_config("mlp"))):
        given = leaves(config)
        for name, (must_be, _) in needed.items():
            default, kind, rule, meaning = found[name]
            assert rule == reference.escape(must_be) and meaning.strip(" |") and "Only with" not in meaning[:9], name
            if name in given:
                assert default.removesuffix(", computed") == reference.code(repr(given[name])) and kind == type(given[name]).__name__
    assert rows["model.moe.top_k"][3].endswith("Only with `model.ffn=moe`")
    assert rows["model.d_model"][0].endswith("computed") and not rows["optimizer.b1"][0].endswith("computed")
    for name in ("lm", "mlp"):
        given = rows_of(page.partition(f"### {name}: arguments\n")[2].partition("\n### ")[0])
        expected = {arg: reference.code(repr(default)) for arg, default in load_module(name).ARGS.items()}
        assert {arg: cells[0] for arg, cells in given.items()} == expected and all(cells[1] for cells in given.values())
    for name in available():
        assert f"\n## {name}\n" in page or f"\n### {name}\n" in page


def test_the_command_page_has_every_command_and_option(reference):
    page = reference.cli_page()
    options = 0
    for name in COMMANDS:
        (parser,) = (p for a in build_parser(name)._actions for key, p in (getattr(a, "choices", None) or {}).items() if key == name)
        section = page.partition(f"\n## gammalm {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for part in [parser, *(p for a in parser._actions if isinstance(a.choices, dict) for p in a.choices.values())]:
            for action in part._actions:
                for flag in action.option_strings:
                    options += 1
                    assert flag in ("-h", "--help") or f"`{flag}" in section or f"{flag} " in section, f"{name} {flag}"
    assert options > 100
    assert "| `--workdir WORKDIR` | **needed.** the --workdir of `gammalm grid` or" in page


def test_text_is_not_taken_for_markup(reference):
    assert reference.escape("a <b> `x<y|z` *all* of q_r | s\n t") == "a &lt;b> `x<y\\|z` \\*all\\* of q\\_r \\| s t"


class Links(HTMLParser):
    """ids of a built page, its links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs.get("id"), attrs.get("name")}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag in ("script", "img", "link", "source", "iframe"):
            self.loads.append(attrs.get("src") or attrs.get("href") or "")


def build(target, config=SITE / "mkdocs.yml"):
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment)


@pytest.mark.full
def test_the_site_is_built_and_whole(tmp_path):
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    done = build(tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {path.relative_to(tmp_path / "site"): Links(path.read_text("utf-8")) for path in (tmp_path / "site").rglob("*.html")}
    names = {"overview", "changelog", "notebooks", "reference/config", "reference/cli", *(page.stem for page in PAGES[1:])}
    assert {str(path.with_suffix("")) for path in pages} == names | {"404"}
    start = pages[Path("index.html")]
    assert {f"{name}.html" for name in names - {"index"}} <= set(start.links)  # the navigation
    for path, page in pages.items():
        assert not [load for load in page.loads if "//" in load], path  # nothing comes from elsewhere
        for link in page.links if path.name != "404.html" else ():
            file, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (path.parent / unquote(file)) if file else path
            target = Path(os.path.normpath(target))
            assert (tmp_path / "site" / target).exists(), f"{path}: {link}"
            assert not anchor or target not in pages or unquote(anchor) in pages[target].ids, f"{path}: {link}"


@pytest.mark.full
def test_a_warning_ends_the_build(tmp_path):
    """A page that nothing lists, and a link to nothing."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    (tmp_path / "docs").mkdir()
    for name, text in {"index.md": "# A\n\n[b](b.md)\n", "c.md": "# C\n"}.items():
        (tmp_path / "docs" / name).write_text(text)
    settings = (SITE / "mkdocs.yml").read_text("utf-8").replace("docs_dir: ..", "docs_dir: docs").replace("hooks: [hooks.py]", "")
    (tmp_path / "mkdocs.yml").write_text(settings + "\nnav: [index.md]\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0 and "b.md" in done.stderr and "c.md" in done.stderr
