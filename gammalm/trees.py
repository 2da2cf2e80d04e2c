"""Parameter trees by their paths: {"layers/attn/q": leaf} and the nested dict {"layers": {"attn": {"q": leaf}}} are the same tree."""

from collections.abc import Mapping
from typing import Any


def nested(flat: Mapping[str, Any]) -> dict:
    """The nested dict of leaves by '/'-separated paths, in their order."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{path: leaf} of a nested dict; every value that is no mapping is a leaf."""
    found: dict = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {prefix + name: value}
    return found
