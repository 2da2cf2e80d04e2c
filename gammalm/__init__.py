"""gammalm: language models with small initialization in JAX, and the experiments that measure what it does.

Importing this package imports nothing heavy; every subpackage says in its docstring what it is for (docs/architecture.md).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # before anything that an older Python cannot read
    raise ImportError(
        f"gammalm needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {sys.version.split()[0]}. launch/quickstart.sh finds one."
    )

__version__ = "0.1.0"
