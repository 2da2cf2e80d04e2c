"""The site's two generated pages, as Markdown: every value of the configs, and every option of the command line.

Nothing of them is written twice. What a value must be is its rule in gammalm/config_checks.py, what it means is the comment beside it in
the config file, and the command line explains itself. hooks.py puts the pages into the site; nothing here imports JAX.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

from gammalm.cli import main
from gammalm.cli.main import COMMANDS, build_parser
from gammalm.config import available, configs_folder, leaves, load_config
from gammalm.config_checks import KINDS, NET_RULES, RULES

# Together these have every value that a config of a decoder can have: those of each kind of attention, positions and feed-forward layer.
DECODERS = ("lm", "lm:attention=mla", "lm:style=gpt2", "lm:size=moe-1.5b-a0.25b")
CONFIG_HEAD = """# Config reference

Generated from the config files and their rules. How a config is named and changed: [the config language](../config.md). A value is set by
`--config.NAME=VALUE`, an argument after the colon: `--config lm:size=tiny,gamma=0.5`. *Computed* values follow from the
arguments; an argument of 0, or an empty one, means "as the size says".
"""
CLI_HEAD = """# Command line reference

Generated from the parser: what `gammalm --help` and `gammalm COMMAND --help` print.

| command | does |
|---|---|
"""


# ---- Markdown ------------------------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """`text` as one line of Markdown: what stands in backticks stays code, nothing else is markup, and a bar ends no cell of a table."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([\\*_\[\]])", r"\\\1", part).replace("&", "&amp;").replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def code(text) -> str:
    """`text` as code, also in a table. No text here has backticks."""
    return f"`{text}`".replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


# ---- configs -------------------------------------------------------------------------------------------------------------------------


class Source:
    """What a config file says beside its code: its first paragraph, its arguments, and each `c.group.name = value` with its comment."""

    def __init__(self, file: Path):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.about = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        self._comments, self._alone = {}, {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                beside = token.line[: token.start[1]].strip()
                (self._comments if beside else self._alone)[token.start[0]] = token.string.lstrip("# ")
        self.arguments, self.note = self._arguments(tree)
        self.values = {}  # dotted name -> (whether it is written out, its comment)
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("c."):
                name = ast.unparse(node.targets[0]).removeprefix("c.")
                comment = self._comments.get(node.end_lineno) or self._alone.get(node.lineno - 1) or ""
                self.values[name] = (_literal(node.value), comment)

    def _arguments(self, tree) -> tuple[list[tuple[str, object, str]], str]:
        """Rows (name, default, comment) of ARGS; and the one comment of an ARGS that is a single line."""
        (given,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARGS"]
        pairs = list(zip(given.keys, given.values, strict=True))
        if given.lineno == given.end_lineno:
            return [(key.value, ast.literal_eval(value), "") for key, value in pairs], self._comments.get(given.lineno, "")
        return [(key.value, ast.literal_eval(value), self._comments.get(key.lineno, "")) for key, value in pairs], ""


def _literal(node) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _arguments(source: Source) -> str:
    rows = [(code(name), code(repr(default)), escape(comment)) for name, default, comment in source.arguments]
    note = f"\n{escape(source.note)}.\n" if source.note else ""
    return table(("argument", "default", "meaning"), rows) + note


def _values(name: str, specs: Iterable[str], rules: dict, kinds: dict) -> str:
    """Tables of all values of a config, one per group; `kinds`: value -> the setting under which alone it exists."""
    source = Source(configs_folder() / f"{name}.py")
    found = {}
    for spec in specs:
        found = leaves(load_config(spec)) | found  # the first spec that has a value gives its default
    groups: dict[str, list[str]] = {}
    for leaf in sorted(found, key=list(source.values).index):
        groups.setdefault(leaf.rpartition(".")[0], []).append(leaf)
    parts = []
    for group, members in groups.items():
        about = source.values.get(group, (True, ""))[1]
        parts.append(f"### {name}: {group or 'the run'}\n" + (f"\n{escape(about)}.\n" if about else ""))
        rows = []
        for leaf in members:
            written, comment = source.values[leaf]
            default = code(repr(found[leaf])) + ("" if written else ", computed")
            meaning = escape(comment) + (f". Only with {kinds[leaf]}" if leaf in kinds else "")
            rows.append((code(leaf), default, type(found[leaf]).__name__, escape(rules[leaf][0]), meaning))
        parts.append(table(("value", "default", "type", "must be", "meaning"), rows))
    return "\n".join(parts)


def _sizes(module) -> str:
    fields = [f for f in module.Size.__dataclass_fields__ if f not in ("experts", "warmup_share", "tie_embeddings")]
    rows = [[code(name), *(code(f"{getattr(size, f):g}" if isinstance(getattr(size, f), float) else getattr(size, f)) for f in fields)]
            for name, size in module.SIZES.items()]  # fmt: skip
    return table(["size", *fields], rows)


def config_page() -> str:
    """The page of all configs and grids that come with gammalm."""
    from gammalm.config import load_module

    decoder_rules, only_with = dict(RULES), {}
    for (leaf, kind), rules in KINDS.items():
        decoder_rules |= rules
        only_with |= dict.fromkeys(rules, code(f"{leaf}={kind}"))
    parts = [CONFIG_HEAD]
    for name, specs, rules in (("lm", DECODERS, decoder_rules), ("mlp", ("mlp",), NET_RULES)):
        source = Source(configs_folder() / f"{name}.py")
        parts += [f"## {name}\n\n{escape(source.about)}\n\n### {name}: arguments\n\n{_arguments(source)}"]
        if name == "lm":
            parts += [f"### lm: sizes\n\nWhat the argument `size` sets.\n\n{_sizes(load_module('lm'))}"]
        parts += [_values(name, specs, rules, only_with)]
    parts += ["## Grids\n"]
    for name in available():
        if name.startswith("grids/"):
            source = Source(configs_folder() / f"{name}.py")
            parts += [f"### {name}\n\n{escape(source.about)}\n\n{_arguments(source)}"]
    return "\n".join(parts)


# ---- the command line ----------------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """The page of all commands, each with its actions and options."""
    rows = [f"| [{code(f'gammalm {name}')}](#gammalm-{name}) | {escape(line)} |\n" for name, line in COMMANDS.items()]
    statuses = main.__doc__[main.__doc__.index("Exit status:") :]
    parts = [f"{CLI_HEAD}{''.join(rows)}\n{statuses}"]
    for name in COMMANDS:
        parser = _subparsers(build_parser(name)).choices[name]
        parts += _command(parser, 2)
    return "\n".join(parts)


def _subparsers(parser: argparse.ArgumentParser):
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _command(parser: argparse.ArgumentParser, level: int) -> list[str]:
    """A heading, then what the parser's help says; then the same of each of its actions."""
    formatter = parser._get_formatter()
    parts = [f"{'#' * level} {parser.prog}\n"]
    if parser.description:
        parts.append(escape(parser.description) + "\n")
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts.append(f"```text\n{usage}\n```\n")
    below = _subparsers(parser)
    rows = []
    for action in parser._actions:
        if action is below or isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        words = ", ".join(action.option_strings) or formatter._format_args(action, action.dest)
        if action.option_strings and action.nargs != 0:
            words += " " + formatter._format_args(action, action.dest.upper())
        needed = "**needed.** " if action.required and action.option_strings else ""
        rows.append((code(words), needed + escape(formatter._expand_help(action) if action.help else "")))
    if rows:
        parts.append(table(("option", "meaning"), rows))
    if parser.epilog:
        title, _, example = parser.epilog.partition(":")
        lines = "\n".join(line.strip() for line in example.strip().splitlines())
        parts.append(f"{title.capitalize()}:\n\n```text\n{lines}\n```\n")
    for child in below.choices.values() if below else ():
        parts += _command(child, level + 1)
    return parts
