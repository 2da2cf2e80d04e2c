"""The training loop: one run, or several that share a program, from their newest checkpoints to their last validation.

Metrics are read a step late, so the device never waits for the host. What a run leaves behind: workdir.py. State = step: the
batches of step n are a pure function of (seed, n), so a run that was killed goes on as if nothing had happened.
"""

import contextlib
import math
import time

import jax
import numpy as np

from gammalm.data.loader import Loader
from gammalm.errors import ConfigError, TrainingError
from gammalm.models.flops import training_flops_per_token
from gammalm.progress import Progress
from gammalm.sharding import processes
from gammalm.sharding.devices import peak_flops
from gammalm.training import goodput, validation
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.diagnose import first_fault
from gammalm.training.lanes import Lane, Outcome, Run, restore
from gammalm.training.monitoring import DOWNSTREAM, Build, Monitors
from gammalm.training.preemption import Notice, Preempted
from gammalm.training.profile import Profile
from gammalm.training.program import Programs
from gammalm.training.step import scalars
from gammalm.training.watchdog import Watchdog
from gammalm.training.workdir import Metrics, prepare

BY_LAYER = ("load_entropy", "load_max", "load_min", "dropped", "balance")  # of each mixture layer, where there are any
TAIL = 0.05  # the share of last steps whose mean loss is reported as the training loss


def train(
    runs: list[Run], programs: Programs, *, mode: str = "single", cell_devices: int = 1, title: str = "", notice: Notice | None = None,
    profile: tuple[int, int] | None = None, monitor: Build | None = None,
) -> list[Outcome]:  # fmt: skip
    """Trains `runs`, which must share a program, to their last step; returns one Outcome each. Every process calls it alike.

    Raises GammalmError for what stops all of them (data, checkpoints, config, another process that is gone); a run whose numbers go wrong
    ends alone. Raises Preempted, with everything saved, where `notice` was given to stop. `profile`: first and last step to trace.
    `monitor`: makes what measures what a lane's config asks for (training/monitoring.py).
    """
    clock = goodput.Goodput()
    if mode != "single" and runs[0].config.train.spike == "rollback":
        raise ConfigError("train.spike=rollback goes back with one run at a time. Use --mode single, or train.spike=skip.")
    with clock.phase("start"):
        lanes = [Lane(run) for run in runs]
        how = dict(cells=None if mode == "single" else len(lanes), mode=mode, cell_devices=cell_devices)
        program = programs.get(lanes[0].config, lanes[0].train.token_bytes, **how)
        processes.on_first("prepare", lambda: [prepare(lane.run.workdir, lane.config, program.model.specs) for lane in lanes])
    try:
        with contextlib.ExitStack() as stack:
            watchdog = stack.enter_context(Watchdog(lanes[0].config.train.stall_timeout))  # first: it sees the last save to its end
            checkpointers = [
                stack.enter_context(Checkpointer(lane.run.workdir / "checkpoints", keep=lane.config.train.checkpoints_kept))
                for lane in lanes
            ]
            return _Group(lanes, program, checkpointers, title, notice, watchdog, clock, profile, monitor).run()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            lost = processes.lost(error)
            if lost:
                raise lost from error
            raise
        raise TrainingError(
            f"{lanes[0].run.name}: the device has too little memory ({' '.join(str(error).split())[:200]}). More batch.micro_batches, "
            "model.remat=full, a smaller model.loss_chunk or a larger mesh.fsdp need less."
        ) from error


class _Group:
    """The lanes of one program, step by step."""

    def __init__(self, lanes, program, checkpointers, title, notice, watchdog, clock, profile, monitor):
        self.lanes, self.program, self.checkpointers = lanes, program, checkpointers
        self.notice, self.watchdog, self.clock = notice, watchdog, clock
        self.compiled: set[str] = set()
        self.title = title or lanes[0].run.name
        self.config = lanes[0].config
        self.steps = self.config.train.steps
        self.scalars = program.scalars([scalars(lane.config) for lane in lanes])
        with clock.phase("start"):
            found = restore(lanes, checkpointers, program)
            self.monitors = Monitors(lanes, program, monitor, found.step)
        self.start, self.state, self.saved, extras = found.step, found.state, found.saved, found.extras
        self.seconds = max(extra.get("seconds", 0.0) for extra in extras)
        self.spent = [extra.get("goodput", {}) for extra in extras]  # before this process, by phase
        self.left_out, self.rollbacks = (extras[0].get(name, 0) for name in ("left_out", "rollbacks"))  # who rolls back is alone
        self.pending = None  # (step, metrics) that was dispatched and not read
        self.spike: dict | None = None  # the one to roll back from
        self.profile = Profile(lanes[0].run.workdir / "profile", profile, self.start)
        self.metrics = [Metrics(lane.run.workdir, self.start, lane.config) for lane in lanes]
        for lane, metrics in zip(lanes, self.metrics, strict=True):
            steps, seconds = goodput.lost_with(metrics.dropped, self.start, lane.tokens(1))
            if steps:
                metrics.write("lost", self.start, {"steps": steps, "seconds": round(seconds / len(lanes), 3)})
        if self.start < self.steps:
            for metrics in self.metrics:
                metrics.record_versions(self.start)
        self.last_mark = self.began = time.monotonic()
        self.last_logged = self.start
        self.shown, self.rate, self.waited = math.nan, 0.0, 0.0  # on the progress line
        peak = peak_flops(program.mesh.devices.flat[0])
        flops = training_flops_per_token(program.model, self.config.data.seq_len)
        self.mfu_per_rate = flops / (peak * program.mesh.size) if peak else None

    def run(self) -> list[Outcome]:
        try:
            if self.start < self.steps:
                self._train()
            self._monitor(self.steps)  # where the run was told to stop between saving its last step and measuring it
            self._validate(self.steps)
            self._account()
            return [self._outcome(i) for i in range(len(self.lanes))]
        finally:
            for lane, metrics in zip(self.lanes, self.metrics, strict=True):
                metrics.close(failed=lane.error is not None)

    def _train(self) -> None:
        self.progress = Progress(self.title, self.steps, "steps", done=self.start, quiet=not processes.leads())
        self.loaders: list[Loader] = []
        step, every = self.start, self.config.train.validate_every
        try:
            if step and every and step % every == 0:
                self._validate(step)  # where the run ended between saving and validating
            self._monitor(step)
            self._open_loaders(step)
            while step < self.steps:
                if self._told_to_stop():
                    self._settle()
                    if self.spike is None:
                        self._stop(step)
                else:
                    step += 1
                    self._advance(step)
                if self.spike is not None:
                    step = self._roll_back(step)
                if all(lane.error for lane in self.lanes):
                    break
        finally:
            self.profile.stop()
            for loader in self.loaders:
                loader.close()
        self.progress.close(f"loss {self.shown:.4f}" if math.isfinite(self.shown) else "")

    def _open_loaders(self, step: int) -> None:
        rows = self.program.rows(self.config.batch.sequences)
        self.loaders = [Loader(lane.train, step + self.left_out, rows) for lane in self.lanes]

    def _advance(self, step: int) -> None:
        """Makes `step` (from 1), reads the one before, saves and validates where that is due."""
        c = self.config.train
        if self.profile.starts(step):
            self._settle()
            self.profile.start()
        with self.clock.phase("data"):
            batch = self.program.put([next(loader)[1] for loader in self.loaders], self.config.batch.sequences)
        late, self.pending = self.pending, None
        with self.profile.step(step):
            self.state, metrics = self._call("step", self.program.step, self.state, batch, self.scalars)
        if late:
            self._read(*late)
        self.pending = (step, metrics)
        save = step == self.steps or step % c.checkpoint_every == 0
        validate = c.validate_every and step % c.validate_every == 0
        if save or validate or self.profile.ends(step) or self.monitors.due(step):
            self._settle()
        if self.profile.ends(step):
            self.profile.stop()
        if self.spike is None:
            self._monitor(step)
        if save and self.spike is None:
            self._save(step)
        if validate and self.spike is None:
            self._validate(step)

    def _settle(self) -> None:
        """Reads the step that is still out, unless it is to be thrown away."""
        late, self.pending = self.pending, None
        if late and self.spike is None:
            self._read(*late)

    def _monitor(self, step: int) -> None:
        """Measures what is due after `step`, which is read, of the lanes that go on. Before it is saved: what is saved has its rows."""

        def moved() -> None:
            self._stop_if_told(step)
            self.watchdog.beat(f"a part of the monitors at step {step} of {self.title}")

        for i, kinds in self.monitors.due(step).items():
            how = step, self.state, self.metrics[i], moved
            if quick := [kind for kind in kinds if kind != DOWNSTREAM]:
                self._call("monitor", self.monitors.measure, i, quick, *how)
            if DOWNSTREAM in kinds:  # minutes, of which compiling is a small part
                self.watchdog.rest()
                with self.clock.phase("monitor"):
                    self.monitors.measure(i, [DOWNSTREAM], *how)
            self.watchdog.beat(f"monitors at step {step} of {self.lanes[i].run.name}")

    def _call(self, phase: str, function, *arguments):
        """Calls a compiled function. The first time it compiles, which may take longer than any stall."""
        first = phase not in self.compiled
        if first:
            self.compiled.add(phase)
            self.watchdog.rest()
        with self.clock.phase("compile" if first else phase):
            return function(*arguments)

    def _read(self, step: int, metrics) -> None:
        """Fetches the metrics of a finished step, looks for faults, writes rows, moves the progress line."""
        with self.clock.phase("step"):
            values = jax.device_get(metrics)
        if self.program.cells is None:
            values = {name: np.asarray(value)[None] for name, value in values.items()}
        for i, lane in enumerate(self.lanes):
            if values["halted"][i] and not lane.error:
                self._halt(i, step)
            if "spike" in values and values["spike"][i] and not lane.error:
                self._meet_spike(i, step, {name: float(values[key][i]) for name, key in (("loss", "loss"), ("bound", "spike_bound"))})
        if self.spike is not None:
            return
        alive = [i for i, lane in enumerate(self.lanes) if not lane.error]
        self.shown = float(np.mean(values["loss"][alive])) if alive else math.nan
        now = time.monotonic()
        self.watchdog.beat(f"step {step} of {self.title}")
        if step % self.config.train.log_every and step != self.steps:
            self.progress.advance(1, self._note())
            return
        elapsed, self.last_mark = max(now - self.last_mark, 1e-9), now
        self.rate = self.lanes[0].tokens(step - self.last_logged) * len(self.lanes) / elapsed
        self.last_logged = step
        self.waited = sum(loader.take_waited() for loader in self.loaders) / elapsed
        for i in alive:
            self.metrics[i].write("train", step, {
                "tokens": self.lanes[i].tokens(step),
                "loss": float(values["loss"][i]),
                "counted_tokens": int(values["tokens"][i]),
                "learning_rate": float(values["learning_rate"][i]),
                "grad_norm": float(values["grad_norm"][i]),
                "tokens_per_s": round(self.rate / len(self.lanes), 1),
                "data_wait": round(self.waited, 4),
                "mfu": self._mfu(),
                **{name: [round(x, 5) for x in values[name][i].tolist()] for name in BY_LAYER if name in values},
            })  # fmt: skip
        self.progress.advance(1, self._note())

    def _note(self) -> str:
        mfu = "unknown" if self._mfu() is None else f"{self._mfu():.1%}"
        return f"loss {self.shown:.4f}, {self.rate:,.0f} tokens/s, data wait {self.waited:.1%}, MFU {mfu}"

    def _mfu(self) -> float | None:
        """Model FLOP/s over the devices' peak (convention: models/flops.py); None where the peak is not known."""
        return None if self.mfu_per_rate is None else round(self.rate * self.mfu_per_rate, 4)

    def _halt(self, i: int, step: int) -> None:
        """Ends lane `i`, whose numbers went wrong in `step`; its state is that before the step."""
        lane = self.lanes[i]
        fault = first_fault(self.program, self.program.pick(self.state, i), lane.train.batch(step - 1 + self.left_out), lane.config)
        lane.error = f"step {step}: loss or gradient is not finite: {fault}. Parameters were left as before the step."
        self.metrics[i].write("halted", step, {"error": lane.error})

    def _meet_spike(self, i: int, step: int, found: dict) -> None:
        """Lane `i` met a spike in `step`, whose update the device did not make. `found`: its loss and the bound."""
        c = self.config.train
        if c.spike == "skip":
            self.metrics[i].write("skipped", step, found)
        elif self.rollbacks < c.spike_rollbacks:
            self.spike = {"spike_step": step, **found}
        else:
            self.lanes[i].error = (
                f"step {step}: its loss, {found['loss']:.4f}, is a spike (above {found['bound']:.4f}), and the run was rolled back "
                f"{self.rollbacks} times already (train.spike_rollbacks). A smaller optimizer.learning_rate may help, in another --workdir."
            )
            self.metrics[i].write("halted", step, {"error": self.lanes[i].error})

    def _roll_back(self, made: int) -> int:
        """Back to the newest checkpoint, which is from before the spike; the batches since then are left out. Returns its step.

        Nothing of it is written but the row: whatever goes on from that checkpoint meets the same spike and does the same.
        """
        spike, self.spike, self.pending, self.state = self.spike, None, None, None
        for loader in self.loaders:
            loader.close()
        self.clock.lose()
        self.watchdog.rest()
        with self.clock.phase("start"):
            found = restore(self.lanes, self.checkpointers, self.program)
        step, self.state = found.step, found.state
        self.left_out += spike["spike_step"] - step
        self.rollbacks += 1
        (metrics,) = self.metrics
        metrics.rewind(step)
        self.monitors.rewind(step)
        # Under the number of the first step that is made again: what resumes from `step` makes it, and this row, again.
        metrics.write("rollback", step + 1, {**spike, "left_out": self.left_out, "steps": made - step})
        processes.say(
            f"{self.title}: step {spike['spike_step']}: its loss, {spike['loss']:.4f}, is a spike (above {spike['bound']:.4f}). "
            f"Back to step {step}; the batches since then are left out."
        )
        self.last_logged, self.last_mark = step, time.monotonic()
        self.progress.advance(step - self.progress.done)
        self._open_loaders(step)
        return step

    def _save(self, step: int) -> None:
        with self.clock.phase("checkpoint"):
            for i, checkpointer in enumerate(self.checkpointers):
                if step > self.saved[i]:
                    self.saved[i] = step
                    lane = self.lanes[i]
                    extra = {
                        "seconds": self._seconds(), "error": lane.error, "tokenizer": lane.train.tokenizer_sha256,
                        "goodput": self._phases(i), "left_out": self.left_out, "rollbacks": self.rollbacks,
                    }  # fmt: skip
                    checkpointer.save(step, self.program.pick(self.state, i), extra)
                    if len(self.lanes) > 1 and processes.count() > 1:
                        checkpointer.wait()  # Orbax names its barriers by the step: two saves would meet in one
        self.clock.keep()

    def _phases(self, i: int) -> dict[str, float]:
        """Lane `i`'s seconds by phase, over all processes that saved; lanes that trained together share theirs."""
        return goodput.add(self.spent[i], self.clock.seconds(), 1 / len(self.lanes))

    def _account(self) -> None:
        """The row "goodput" of each lane that came to its end and has none."""
        with self.clock.phase("checkpoint"):
            for checkpointer in self.checkpointers:
                checkpointer.wait()
        for i, (lane, metrics) in enumerate(zip(self.lanes, self.metrics, strict=True)):
            rows = metrics.rows()
            if lane.error or _row_at(rows, "goodput", self.steps) or (self.start == self.steps and not self.spent[i]):
                continue
            died = [row for row in rows if row["kind"] == "lost"]
            seconds = goodput.add(self._phases(i), {"lost": sum(row["seconds"] for row in died)})
            steps = sum(row["steps"] for row in rows if row["kind"] in ("lost", "rollback"))
            metrics.write("goodput", self.steps, goodput.row(seconds, steps))

    def _told_to_stop(self) -> bool:
        return self.notice is not None and self.notice.due()

    def _stop_if_told(self, step: int) -> None:
        if self._told_to_stop():
            self._stop(step)

    def _stop(self, step: int) -> None:
        """Saves `step`, the number of steps done, and ends."""
        if step > self.start:
            self._save(step)
        for checkpointer in self.checkpointers:
            checkpointer.wait()
        raise Preempted(f"{self.title}: told to stop; saved after step {step} of {self.steps}. The same command again goes on.")

    def _seconds(self) -> float:
        """Wall-clock seconds of each lane: lanes that trained together share theirs."""
        return round(self.seconds + (time.monotonic() - self.began) / len(self.lanes), 2)

    def _validate(self, step: int) -> None:
        """One row per lane that lacks it: token-weighted loss over the whole validation split, by domain and over all."""
        lacking = [
            (i, lane, metrics)
            for i, (lane, metrics) in enumerate(zip(self.lanes, self.metrics, strict=True))
            if not lane.error and not _row_at(metrics.rows(), "validation", step)
        ]
        if not lacking:
            return
        split = self.lanes[0].validation
        batches = validation.batches_of(split, self.config.train.validation_batches)
        progress = Progress("validation", sum(batches.values()), "batches", quiet=not processes.leads())

        def after(domain: str) -> None:
            self.watchdog.beat(f"a batch of {domain}, validation at step {step} of {self.title}")
            progress.advance(1, domain)

        def sums(batch):
            return self._call("validation", self.program.validate, self.state, batch, self.scalars["norm_eps"])

        size = self.config.batch.sequences // self.config.batch.micro_batches
        with self.clock.phase("validation"):
            tables = validation.run(self.program, sums, split, batches, size, lambda: self._stop_if_told(step), after)
        for i, lane, metrics in lacking:
            epochs = {domain: round(times, 4) for domain, times in lane.train.epochs(step + self.left_out).items()}
            metrics.write("validation", step, {"tokens": lane.tokens(step), **validation.summary(tables[i]), "epochs": epochs})

    def _outcome(self, i: int) -> Outcome:
        lane, rows = self.lanes[i], self.metrics[i].rows()
        tail = [row["loss"] for row in rows if row["kind"] == "train" and row["step"] > (1 - TAIL) * self.steps]
        step = max((row["step"] for row in rows if row["kind"] == "train"), default=0)
        return Outcome(
            steps=step, tokens=lane.tokens(step), seconds=self._seconds(),
            train_loss=float(np.mean(tail)) if tail else None, validation=_row_at(rows, "validation", self.steps),
            goodput=_row_at(rows, "goodput", self.steps), error=lane.error, halted=lane.error is not None,
        )  # fmt: skip


def _row_at(rows: list[dict], kind: str, step: int) -> dict | None:
    return next((row for row in rows if row["kind"] == kind and row["step"] == step), None)
