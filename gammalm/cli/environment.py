"""What of the environment does not fit this gammalm: asked when something has failed, so that a stale one is named."""

import importlib.metadata
import sys
from pathlib import Path

from gammalm import __version__


def explain(error: Exception) -> str:
    """What to do about an environment that does not fit, of which `error` may have come; nothing where it fits.

    Where gammalm is not installed but found on the path, its packages are known to be missing only if one is.
    """
    try:
        found = misfits(importlib.metadata.distribution("gammalm"))
    except importlib.metadata.PackageNotFoundError:
        found = ["gammalm is not installed in it, only found on the path"] if isinstance(error, ModuleNotFoundError) else []
    if not found:
        return ""
    root = Path(__file__).resolve().parents[2]
    how = f": {sys.executable} -m pip install -e {root}" if (root / "setup.py").exists() else "."
    few = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    return f"the environment of {sys.executable} does not fit: {few}. Install gammalm into it again{how}"


def misfits(installed: importlib.metadata.Distribution) -> list[str]:
    """Clauses: a gammalm that was installed as another version, and each package that it asks for and that is missing or out of bounds."""
    found = [f"it was made for gammalm {installed.version}, and this is {__version__}"] if installed.version != __version__ else []
    try:
        from packaging.requirements import Requirement  # which Matplotlib needs too
    except ImportError:
        return [*found, "packaging is missing"]
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)  # None, or in later Pythons KeyError, where an install broke off
        except (importlib.metadata.PackageNotFoundError, KeyError):
            version = None
        if version is None:
            found.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} is {version}, and gammalm asks for {requirement.specifier}")
    return found
