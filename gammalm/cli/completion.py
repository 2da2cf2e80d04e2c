"""`gammalm completion SHELL`: a script that completes subcommands, options, their choices, and the values of configs.

Everything in it is read off the parsers and the table of config values when it is printed; completing then runs nothing of gammalm's.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
EPILOG = """examples:
  gammalm completion bash >> ~/.bashrc
  gammalm completion zsh >> ~/.zshrc             (after compinit)
  gammalm completion fish > ~/.config/fish/completions/gammalm.fish
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="what makes a shell complete commands, options and values of configs",
        description="Print a script for your shell that completes subcommands, options and their choices, names of configs with their "
        "sizes, and --config.NAME=VALUE. Print it again when gammalm changes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    commands = list(read_commands())
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](commands), end="")
    return 0


# ---- what there is to complete ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag, its help, whether a value follows it, and the values that are known (none: any)."""

    flag: str
    help: str
    takes: bool
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """What can follow the words `path` ("", "train", "data prepare"): further words with their help, and options."""

    path: str
    words: dict[str, str]
    options: tuple[Option, ...]


def read_commands() -> Iterator[Command]:
    """Every command and the commands below it, as their parsers say."""
    from gammalm.cli.main import COMMANDS, build_parser

    yield from (command for command in _walk(build_parser(None), "") if not command.path)
    for name in COMMANDS:
        yield from _walk(_below(build_parser(name))[name], name)


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def _walk(parser: argparse.ArgumentParser, path: str) -> Iterator[Command]:
    words, options = {}, []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            options += [_option(action, flag) for flag in action.option_strings if flag.startswith("--")]
        else:
            words |= dict.fromkeys(map(str, action.choices or ()), "")
    if parser.get_default("overrides") is not None:  # it takes --config.NAME=VALUE
        options += [Option(f"--config.{name}", must_be, True, values) for name, (must_be, values) in config_values().items()]
    yield Command(path, words, tuple(options))
    for name, below in _below(parser).items():
        yield from _walk(below, f"{path} {name}".strip())


def _option(action: argparse.Action, flag: str) -> Option:
    values = tuple(map(str, action.choices or ()))
    if flag in ("--config", "--grid"):
        values = tuple(specs())
    return Option(flag, (action.help or "").replace("%%", "%"), action.nargs != 0, values)


def specs() -> list[str]:
    """Names of configs and grids, and each config with its sizes: lm, lm:size=tiny, ..."""
    from gammalm.config import available, load_module

    names = available()
    sizes = {name: getattr(load_module(name), "SIZES", ()) for name in names if not name.startswith("grids/")}
    return [*names, *(f"{name}:size={size}" for name, known in sizes.items() for size in known)]


def config_values() -> dict[str, tuple[str, tuple[str, ...]]]:
    """{name: (what it must be, the values that are known)} of every value that a decoder's config can have."""
    from gammalm.config_checks import KINDS, RULES

    rules = RULES | {name: rule for kind in KINDS.values() for name, rule in kind.items()}
    return {name: (must_be, _named(must_be)) for name, (must_be, _) in rules.items()}


def _named(must_be: str) -> tuple[str, ...]:
    if must_be == "true or false":
        return ("true", "false")
    return tuple(must_be.removeprefix("one of ").split(", ")) if must_be.startswith("one of ") else ()


# ---- shells ----------------------------------------------------------------------------------------------------------------------

# The line is split here, not by the shell: bash breaks words at : and =, of which specs and values of configs are full. What is offered is
# then cut to what comes after the last of these. Runs in bash from 3.2 (macOS) on, and in zsh.
BASH = """_gammalm() {
    local line="${COMP_LINE:0:$COMP_POINT}" path="" last="" before="" words="" marks="" trim="" word current
    local leaves=%(leaves)s
    current="${line##* }"
    for word in ${line%% *}; do
        case "${path:+$path }$word" in
        %(paths)s) path="${path:+$path }$word" ;;
        esac
        last="$word"
    done
    case "$last" in *=*) last="" ;; esac
    case "$current" in
    --*=*) last="${current%%%%=*}" before="${current%%%%=*}=" ;;
    esac
    case "$path:$last" in
%(values)s    *:--config.*)
        case "$last" in
%(known)s        esac
        ;;
    *)
        [ -n "$before" ] || case "$path" in
%(words)s        esac
        ;;
    esac
    case " $words :$current" in
    *" --config. "*":--config."*) words="$leaves" ;;
    esac
    case "$COMP_WORDBREAKS" in *:*) marks=":" ;; esac
    case "$COMP_WORDBREAKS" in *=*) marks="$marks=" ;; esac
    [ -z "$marks" ] || trim="${current%%"${current##*[$marks]}"}"
    COMPREPLY=()
    while IFS= read -r word; do
        word="$before$word"
        [ "$word" = "$before" ] || COMPREPLY+=("${word#"$trim"}")
    done < <(compgen -W "$words" -- "${current#"$before"}")
    case "${COMPREPLY[*]}" in
    *[.=]) compopt -o nospace 2>/dev/null ;;
    esac
}
complete -o bashdefault -o default -F _gammalm gammalm
"""


def bash(commands: list[Command], mark: str = "=") -> str:
    """The script; `mark`: what stands between the name of a config's value and the value."""
    options = [(command.path, option) for command in commands for option in command.options]
    leaves = {option.flag: option for _, option in options if _is_leaf(option)}
    values = {f"{path}:{option.flag}": " ".join(option.values) for path, option in options if option.takes and not _is_leaf(option)}
    words = {
        command.path: " ".join([*command.words, *dict.fromkeys("--config." if _is_leaf(o) else o.flag for o in command.options)])
        for command in commands
    }
    return BASH % {
        "leaves": shlex.quote(" ".join(f"{flag}{mark}" for flag in leaves)),
        "paths": " | ".join(f'"{command.path}"' for command in commands if command.path),
        "values": _cases(values, 4),
        "known": _cases({flag: " ".join(option.values) for flag, option in leaves.items() if option.values}, 8),
        "words": _cases(words, 8),
    }


def _cases(lines: dict[str, str], indent: int) -> str:
    """Branches of a `case`, those with the same words together."""
    together: dict[str, list[str]] = {}
    for pattern, words in lines.items():
        together.setdefault(words, []).append(f'"{pattern}"')
    blank = " " * indent
    return "".join(f"{blank}{' | '.join(patterns)}) words={shlex.quote(words)} ;;\n" for words, patterns in together.items())


def _is_leaf(option: Option) -> bool:
    return option.flag.startswith("--config.")


def zsh(commands: list[Command]) -> str:
    """The same function, which zsh runs as bash would; but it puts a blank after whatever it completes, so there is no = before it."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash(commands, mark="")


FISH = """function __gammalm_at
    set -l path
    for word in (commandline -opc)[2..]
        if contains -- (string join ' ' -- $path $word) %s
            set path $path $word
        end
    end
    contains -- "$path" $argv
end
"""


def fish(commands: list[Command]) -> str:
    lines = [FISH % " ".join(shlex.quote(c.path) for c in commands if c.path)]
    for c in commands:
        lines += [f"{_at([c.path])} -f -a {_fish(word)} -d {_fish(_line(text))}\n" for word, text in c.words.items()]
    where: dict[Option, list[str]] = {}  # an option of several commands is one line
    for c in commands:
        for option in c.options:
            where.setdefault(option, []).append(c.path)
    for option, paths in where.items():
        values = f" -r{' -f' if option.values else ''}" if option.takes else ""
        values += f" -a {_fish(' '.join(option.values))}" if option.values else ""
        lines.append(f"{_at(paths)} -l {option.flag[2:]}{values} -d {_fish(_line(option.help))}\n")
    return "".join(lines)


def _at(paths: list[str]) -> str:
    return f"complete -c gammalm -n {_fish('__gammalm_at ' + ' '.join(map(_fish, paths)))}"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _line(text: str) -> str:
    """A short remark beside a candidate."""
    text = " ".join(text.split())
    return text if len(text) <= 70 else text[:69].rsplit(" ", 1)[0] + "…"
