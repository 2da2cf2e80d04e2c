"""Benchmarks of lm-evaluation-harness while a model trains (config.downstream): the monitor that `monitors.py` asks, and its checks.

The items are read and asked once for all cells that name the same tasks; cells of one program with the same ε share compiled functions.
All processes answer alike; process 0 has the results.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from gammalm.data.shards import TOKENIZER
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import DataError
from gammalm.evaluation.results import numbers_of
from gammalm.evaluation.tasks import open_tasks
from gammalm.sharding import processes
from gammalm.training.lanes import Lane
from gammalm.training.program import Program

_models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # program -> {ε: its model as the harness sees it}


def check_tasks(configs: Iterable) -> None:
    """Raises ConfigError where a config names a task that there is not, with the nearest, or where the harness is not installed, and
    DataError where offline items cannot be had; before any device is used."""
    for asked in dict.fromkeys(_asked(c) for c in configs if c.downstream.tasks):
        _opened(*asked)


class Downstream:
    """The tasks of one run's config.downstream, after each of `steps`. Raises ConfigError and DataError for what cannot be asked of it,
    before anything is trained."""

    def __init__(self, lane: Lane, program: Program):
        c = lane.config
        self.steps = frozenset({*c.downstream.steps, c.train.steps})
        self._config, self._program, self._limit = c, program, c.downstream.limit or None
        self._manager, self._tasks = _opened(*_asked(c))
        path = Path(c.data.path) / TOKENIZER
        self._tokenizer = Tokenizer.load(path)
        if self._tokenizer.sha256 != lane.train.tokenizer_sha256:
            raise DataError(f"{path} is not the tokenizer of the text beside it. Prepare the data again.")
        from gammalm.evaluation.harness import refuse_unwritable

        refuse_unwritable(self._manager.load(self._tasks)["tasks"], c.data.seq_len, program.mesh)

    def measure(self, weights: dict, moved: Callable[[], None]) -> tuple[dict, dict[str, float]]:
        """({"rows": of evaluation.results.rows_of, "requests": what the model was asked}, numbers for TensorBoard); see
        `training.monitoring.Monitor`."""
        from gammalm.evaluation.harness import evaluate

        lm = self._lm
        lm.load(weights["params"], weights["buffers"])
        lm.moved = moved
        try:
            found = evaluate(lm, self._tasks, manager=self._manager, limit=self._limit, process=processes.index())
        finally:
            lm.load({}, {})  # the weights are not kept
        if found is None:
            return {}, {}
        return {name: found[0][name] for name in ("rows", "requests")}, numbers_of(found[0]["rows"])

    @property
    def _lm(self):
        from gammalm.evaluation.generate import Generator
        from gammalm.evaluation.harness import GammaLM
        from gammalm.evaluation.scoring import Scorer

        c, of_eps = self._config, _models.setdefault(self._program, {})
        if c.model.norm_eps not in of_eps:
            how = {"eps": c.model.norm_eps, "max_length": c.data.seq_len, "mesh": self._program.mesh}
            model = self._program.model
            of_eps[c.model.norm_eps] = GammaLM(
                Scorer(model, {}, {}, **how), Generator(model, {}, {}, self._tokenizer, **how), quiet=not processes.leads()
            )
        return of_eps[c.model.norm_eps]


def _asked(config) -> tuple:
    d = config.downstream
    return tuple(d.tasks), d.offline, d.include or None


@functools.cache
def _opened(tasks: tuple[str, ...], offline: bool, include: str | None) -> tuple:
    """(harness.Tasks, names of tasks)."""
    return open_tasks(tasks, offline=offline, include=include, asked_by="downstream.tasks", note=processes.say)[:2]
