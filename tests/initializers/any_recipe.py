"""The marked Python blocks of docs/recipes.md, for tests that run them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def recipe(mark: str) -> dict:
    """What the block that begins with the comment `# mark` defines."""
    (block,) = re.findall(rf"^```python\n# {mark}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(block, f"{PAGE.name}, {mark}", "exec"), names)
    return names
