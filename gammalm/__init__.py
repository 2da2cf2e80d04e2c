"""gammalm: language models with small initialization in JAX, and the experiments that measure what it does.

Importing this package imports nothing heavy; every subpackage says in its docstring what it is for (docs/architecture.md).
"""

__version__ = "0.1.0"
