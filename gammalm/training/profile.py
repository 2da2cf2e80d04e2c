"""`gammalm train --profile A:B`: a trace of steps A to B in <workdir>/profile, for XProf or TensorBoard (docs/training.md)."""

import contextlib
from pathlib import Path

import jax

from gammalm.sharding import processes

STEP = "train"  # the steps' name in the trace; each with its number


class Profile:
    """Traces the steps `span` = (first, last) into `folder`; None: none. Process 0 traces, its own devices. `done`: steps made already."""

    def __init__(self, folder: Path, span: tuple[int, int] | None, done: int):
        self.folder, self._span = folder, span if processes.leads() else None
        self._tracing = False
        if span and span[1] <= done:
            processes.say(f"profile: step {span[1]} was made already, by an earlier start of this run; nothing is traced")

    def starts(self, step: int) -> bool:
        """Whether tracing is to begin before `step` (from 1): where a run is taken up within the span, at the first step it makes."""
        return self._span is not None and not self._tracing and self._span[0] <= step <= self._span[1]

    def ends(self, step: int) -> bool:
        """Whether `step` is the last one to trace."""
        return self._tracing and step >= self._span[1]

    def start(self) -> None:
        """Begins tracing; the steps before should be done."""
        self._tracing = True
        jax.profiler.start_trace(str(self.folder))

    def stop(self) -> None:
        """Ends tracing, once and for all; what is to be in the trace must be done. Writes the files."""
        if self._tracing:
            self._tracing, self._span = False, None
            jax.profiler.stop_trace()
            processes.say(f"profile: {self.folder}")

    def step(self, step: int):
        """A context in which `step` is dispatched: its name and number in the trace."""
        return jax.profiler.StepTraceAnnotation(STEP, step_num=step) if self._tracing else contextlib.nullcontext()
