"""Which tasks of lm-evaluation-harness an evaluation is of, and where their items are from. Importing this imports no harness."""

import os
from collections.abc import Callable, Sequence

from gammalm.errors import ConfigError


def open_tasks(
    names: Sequence[str], *, offline: bool = False, include: str | None = None, asked_by: str = "--tasks",
    note: Callable[[str], None] = lambda line: None,
) -> tuple:  # fmt: skip
    """(harness.Tasks, names of tasks, groups and tags in it, facts about the items for results) that `names` mean; no item is read.

    `offline`: items from the package registry (offline.py), fetched if need be, of which `note` gets a line. `include`: folder of further
    tasks as YAML files. Raises ConfigError, which `asked_by` opens, for a name that there is not, with the nearest; and where the harness
    is not installed; DataError where offline items cannot be had.
    """
    if offline and include:
        raise ConfigError("Offline evaluation has its own tasks and takes no folder of others. Leave one of them out.")
    if offline:  # before the harness is imported, which imports the library that reads them
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    from gammalm.evaluation import harness

    if offline:
        from gammalm.evaluation.offline import offline_tasks

        manager, data = offline_tasks(note)
    else:
        manager, data = harness.Tasks(include_path=include), {"source": "harness"}
    return manager, harness.named_tasks(manager, names, asked_by), data
