"""The rule language: one text says which parameters, of which layers, get which initializer.

    PATTERN=INITIALIZER            layers/attn/q=gamma_normal(gamma=0.75)
    PATTERN[LAYERS]=INITIALIZER    ffn/down[6:]=fixed_std(std=0.01)

PATTERN is a regular expression over whole components of the '/'-path, anywhere in it: `q` is layers/attn/q and not layers/attn/q_norm,
`layers/attn` is everything below it, `.*norm` every norm, `.*` everything. LAYERS is a Python index or slice of the model's layers
(`[0]`, `[-1]`, `[6:]`, `[::2]`). INITIALIZER is a name of the zoo, with literal arguments; a `gamma` or `truncate` it leaves out is the
config's. The first rule that matches wins; the preset decides the rest. A rule that decides nothing is an error.
"""

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable

from gammalm.errors import ConfigError
from gammalm.initializers.specs import ParamSpec
from gammalm.initializers.zoo import ZOO, Initializer

_RULE = re.compile(r"(?P<pattern>.+?)(?:\[(?P<layers>-?\d+|-?\d*:-?\d*(?::[1-9]\d*)?)\])?\s*=\s*(?P<call>[A-Za-z_]\w*\s*(?:\(.*\))?)\s*")
_NOT_IN_RULES = ("in_axis", "out_axis", "batch_axis", "axes", "n_layers")  # the parameter's declared axes and role say these


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parsed rule. `layers` is None where the rule holds for every layer and for parameters that are not stacked."""

    text: str
    pattern: re.Pattern
    layers: slice | None
    initializer: Initializer

    def matches(self, path: str) -> bool:
        """Whether the pattern covers whole components of `path`."""
        return self.pattern.fullmatch(path) is not None

    def covers(self, spec: ParamSpec, layer: int, n_layers: int) -> bool:
        """Whether the rule holds for stacked `layer` of `spec` in a model of `n_layers`, whose numbers it names; never if not stacked."""
        return self.layers is None or (spec.layers > 0 and spec.first_layer + layer in range(n_layers)[self.layers])


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' or the list of what is known, for an error message."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def build(name: str, args: tuple, kwargs: dict, init_config, where: str) -> Initializer:
    """The zoo's `name` with these arguments; `gamma` and `truncate` default to the config's. ConfigError: `where`, nearest name."""
    if name not in ZOO:
        raise ConfigError(f"{where}: unknown initializer {name!r}.{nearest(name, ZOO)}")
    factory = ZOO[name]
    settable = [key for key in inspect.signature(factory).parameters if key not in _NOT_IN_RULES]
    for key in kwargs:
        if key not in settable:
            raise ConfigError(f"{where}: {name} takes no argument {key!r}." + (nearest(key, settable) if settable else " It takes none."))
    if len(args) > 1 or (args and settable[:1] in ([], ["truncate"])):
        raise ConfigError(f"{where}: write the arguments of {name} by name: {name}({', '.join(f'{key}=…' for key in settable)}).")
    if args:
        if settable[0] in kwargs:
            raise ConfigError(f"{where}: {name} is given {settable[0]!r} twice.")
        kwargs = {settable[0]: args[0], **kwargs}
    inherited = {key: getattr(init_config, key) for key in ("gamma", "truncate") if key in settable}
    try:
        return factory(**(inherited | kwargs))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def parse_rule(text: str, init_config, where: str) -> Rule:
    """A rule from its text; `where` (init.rules[i]) begins every error message. Arguments are literals: nothing is evaluated."""
    match = _RULE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{where}: {text!r} is no rule; write PATTERN=INITIALIZER or PATTERN[LAYERS]=INITIALIZER, "
                          "such as layers/attn/q[0:6]=gamma_normal(gamma=0.75).")
    where = f"{where} ({text})"
    pattern = path_pattern(match["pattern"], where)
    name, args, kwargs = _parse_call(match["call"], where)
    return Rule(text, pattern, _parse_layers(match["layers"]), build(name, args, kwargs, init_config, where))


def path_pattern(text: str, where: str) -> re.Pattern:
    """What covers whole components of a '/'-path, anywhere in it: to be matched in full. ConfigError, begun by `where`, for bad syntax."""
    try:
        return re.compile(rf"(?:.*/)?(?:{text})(?:/.*)?")
    except re.error as error:
        raise ConfigError(f"{where}: {text!r} is no regular expression: {error}.") from None


def _parse_call(text: str, where: str) -> tuple[str, tuple, dict]:
    """`name(1, key=2)` as (name, (1,), {'key': 2})."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, (), {}
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or any(k.arg is None for k in node.keywords):
            raise ValueError("not one call")
        return node.func.id, tuple(map(ast.literal_eval, node.args)), {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"{where}: {text!r} must be NAME or NAME(argument=literal, …).") from None


def _parse_layers(text: str | None) -> slice | None:
    if text is None:
        return None
    if ":" in text:
        return slice(*(int(part) if part else None for part in text.split(":")))
    return slice(int(text), int(text) + 1 or None)  # [-1]: slice(-1, None)
