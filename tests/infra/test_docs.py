"""The documents say what is so: commands parse with the real command line and their configs hold, files, names and sections exist."""

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gammalm.cli.main import COMMANDS, build_parser, main
from gammalm.cli.options import split_overrides
from gammalm.config import leaves, load_config, validate
from gammalm.config_checks import KINDS, NET_RULES
from gammalm.data.mixture import group_weights
from gammalm.errors import ConfigError
from gammalm.experiments.grid import load_grid

from .docs_pages import MARK, PAGES, REASONS, REPO, anchors, broken_links, code_lines, commands, files_of, marked_commands, python_blocks

OPEN_MIX = {f"{domain}-{lang}": 1 for domain in ("web", "encyclopaedia", "code") for lang in ("en", "zh")} | {"math-en": 1}
ALL = [pytest.param(page, words, id=f"{page.name}: {shlex.join(words)[:100]}") for page in PAGES for words in commands(page)]


def test_commands_are_found():
    """The two commands and every subcommand are shown in the README; nothing below checks an empty list."""
    shown = [words[:2] for words in commands(REPO / "README.md")]
    assert {words[1] for words in shown if words[0] == "gammalm"} == set(COMMANDS)
    assert [["./launch/quickstart.sh"], ["./launch/test.sh"]] == shown[:2]
    assert len(ALL) > 30


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Works in a folder with the config files that a page writes out."""

    def write(page: Path) -> None:
        for name, text in files_of(page).items():
            (tmp_path / name).write_text(text)

    monkeypatch.chdir(tmp_path)
    return write


@pytest.mark.parametrize("page, words", ALL)
def test_a_command_can_be_run(page, words, beside):
    """It parses, its overrides name leaves, its config holds, its presets and rules decide, its mixture is one."""
    program, *argv = words
    if program != "gammalm":
        check_script(program, argv)
        if "--" not in argv:
            return
        argv = argv[argv.index("--") + 1 :]  # what it hands on
    assert argv[0] in COMMANDS or argv[0] in ("--help", "--version")
    overrides, rest = split_overrides(argv)
    if "--help" in rest:
        with pytest.raises(SystemExit) as ended:
            build_parser(rest[0]).parse_args(rest)
        assert ended.value.code == 0
        return
    args = build_parser(rest[0]).parse_args(rest)  # SystemExit for an unknown option or a missing one
    if getattr(args, "config", None) is None:
        assert not overrides
        return
    beside(page)
    file = args.config.partition(":")[0]
    if file.endswith(".py") and not file.startswith("configs/") and not Path(file).exists():
        return  # the reader's own file: its name is an example
    if args.command == "grid":
        load_grid(args.config, overrides)
        return
    config = validate(load_config(args.config, overrides))
    check_init(config)
    if config.data.path == "data/open-mix":
        group_weights(config.data.mixture, OPEN_MIX)


def check_script(program: str, argv: list[str]) -> None:
    script = REPO / program
    assert script.stat().st_mode & 0o111
    text = script.read_text("utf-8")
    if "--dry-run" in text:  # a launcher: checks its arguments itself, and with nothing on PATH runs nothing
        word = "--dry-run" if "--help" not in argv else "--help"
        argv = [*argv[:1], word, *argv[1:]] if argv[:1] in (["build"], ["run"]) else [word, *argv]
        done = subprocess.run([shutil.which("bash"), script, *argv], env={"PATH": ""}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    for word in argv:
        if word.startswith("--"):
            assert re.search(rf"^[^#\n]*{word}\b.*\)$", text, re.MULTILINE), f"{program} knows no {word}"
        elif "/" in word:
            assert (REPO / word).exists()


def check_init(config) -> None:
    from gammalm.initializers import init_table
    from gammalm.models.decoder import param_specs

    m = config.model
    assert init_table(param_specs(m), config.init, d_model=m.d_model, n_layers=m.n_layers)


def test_a_command_that_cannot_be_run_is_seen(beside):
    page = REPO / "README.md"
    for bad in (["--config", "lm:size=tiny,gamma=-1"], ["--config", "lm", "--config.seeed=1"], ["--config", "lm:size=200m"]):
        with pytest.raises(ConfigError):
            test_a_command_can_be_run(page, ["gammalm", "train", "--workdir", "w", *bad], beside)
    with pytest.raises(SystemExit):
        test_a_command_can_be_run(page, ["gammalm", "train", "--config", "lm", "--wrokdir", "w"], beside)
    with pytest.raises(ConfigError):
        rule = "--config.init.rules=('nothing=zeros',)"
        test_a_command_can_be_run(page, ["gammalm", "inspect", "--config", "lm:size=tiny", rule], beside)
    with pytest.raises(AssertionError):
        check_script("launch/test.sh", ["--fulll"])
    with pytest.raises(AssertionError, match="--nodes must be a whole number"):
        check_script("launch/slurm.sh", "--nodes two --gpus-per-node 8 --time 30 -- train --config lm --workdir runs/x".split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_refusal_is_shown_as_it_is(page, tmp_path, monkeypatch, capsys):
    """A session, `$ gammalm …` with what it prints: the very message, before anything is written."""
    monkeypatch.chdir(tmp_path)
    lines = code_lines(page)
    for command, printed in zip(lines, lines[1:], strict=False):
        if command.startswith("$ gammalm "):
            assert main(shlex.split(command)[2:]) == 2
            assert capsys.readouterr().err == printed + "\n"
            assert not list(tmp_path.iterdir())


def test_links_and_files_exist():
    """Relative links of every page with their anchors, and each path of the repository that pages or the code's own texts name."""
    missing = []
    named = re.compile(r"(?<![\w./~-])(?:gammalm|configs|launch|tests|docs|benchmarks|notebooks)/[\w./-]*\w\.(?:py|md|sh|png|txt)\b")
    pages = [*PAGES, REPO / "CHANGELOG.md", REPO / "notebooks" / "README.md"]
    for page in pages:
        missing += broken_links(page)
    for page in [*pages, *(REPO / "gammalm").rglob("*.py"), *(REPO / "configs").rglob("*.py")]:
        paths = set(named.findall(page.read_text("utf-8")))
        missing += [f"{page.relative_to(REPO)}: {path}" for path in sorted(paths) if not (REPO / path).exists()]
    assert missing == []


def test_a_broken_link_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A γ-title, `code` [x](y.md)\n\n[a](#a-γ-title-code-x) [b](#b) [c](none.md) [d](page.md#b) [e](https://x.y/z)\n")
    assert anchors(page) == {"a-γ-title-code-x"}
    assert broken_links(page) == [f"page.md: {link}" for link in ("y.md", "#b", "none.md", "page.md#b")]


def test_marks_are_known_and_stand_before_commands(tmp_path):
    for page in PAGES:
        marks = [mark for _, mark in marked_commands(page) if mark]
        assert set(marks) <= set(REASONS), f"{page.name}: {set(marks) - set(REASONS)}"
        assert len(MARK.findall(page.read_text("utf-8"))) <= len(marks), f"{page.name}: a mark without a command after it"
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: network -->\n\n    gammalm a\n\n    gammalm b\n\nText\n\n    gammalm c\n```\ngammalm d\n```\n")
    assert marked_commands(page) == [(["gammalm", name], "network" if name in "ab" else None) for name in "abcd"]


def test_the_index_lists_every_page():
    links = re.findall(r"\]\((\w+\.md)\)", (REPO / "docs/index.md").read_text("utf-8"))
    assert sorted(links) == sorted(page.name for page in PAGES[1:] if page.name != "index.md")


def test_sections_that_the_code_cites_exist():
    sections = set(re.findall(r"^## (\d+)\.", (REPO / "docs/science.md").read_text("utf-8"), re.MULTILINE))
    cited = re.compile(r"science(?:\.md)?,? (?:sections? )?(\d+)(?:\.\d)?(?: and (\d+))?")
    numbers = set()
    for folder in ("gammalm", "configs", "docs"):
        for file in (REPO / folder).rglob("*.*"):
            if file.suffix in (".py", ".md"):
                numbers |= {n for pair in cited.findall(file.read_text("utf-8")) for n in pair if n}
    assert {"1", "2", "3", "5", "9"} <= numbers <= sections


def test_values_of_the_config_are_named_right():
    known = set(leaves(load_config("lm"))).union(NET_RULES, *KINDS.values())
    groups = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    for page in PAGES:
        for name in re.findall(rf"`(?:--config\.)?((?:{groups})\.[a-z_0-9]+)\b(?!\.|\()", page.read_text("utf-8")):
            assert name in known, f"{page.name}: {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_compiles_and_its_imports_exist(page):
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "gammalm":
                if node.module == "gammalm.interop.torch" and importlib.util.find_spec("torch") is None:
                    continue  # torch is in the parity environment alone
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page.name}: {ast.unparse(node)}"


def test_the_five_lines_of_the_readme():
    """Run as they stand, they give the std that they promise: 1/256, within four standard errors."""
    (block,) = python_blocks(REPO / "README.md")
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    for weights, count in ((names["layer"].kernel, 256 * 384), (names["table"].embedding, 1000 * 256)):
        assert weights[...].size == count
        assert float(weights[...].std()) == pytest.approx(1 / 256, rel=4 / (2 * count) ** 0.5)


def test_the_version_is_in_the_changelog():
    import gammalm

    newest = re.search(r"^## \[([^\]]+)\]", (REPO / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest[1] == gammalm.__version__
