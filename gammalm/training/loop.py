"""The training loop: one run, or several that share a program, from their newest checkpoints to their last validation.

Metrics are read a step late, so the device never waits for the host. What a run leaves behind: workdir.py. State = step: the
batches of step n are a pure function of (seed, n), so a run that was killed goes on as if nothing had happened.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from pathlib import Path

import jax
import numpy as np

from gammalm.data.load import open_split
from gammalm.data.loader import Loader
from gammalm.errors import DataError, TrainingError
from gammalm.models.flops import training_flops_per_token
from gammalm.progress import Progress
from gammalm.sharding import processes
from gammalm.sharding.devices import peak_flops
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.diagnose import first_fault
from gammalm.training.load import restore_imported
from gammalm.training.preemption import Notice, Preempted
from gammalm.training.program import Programs
from gammalm.training.step import scalars
from gammalm.training.watchdog import Watchdog
from gammalm.training.workdir import Metrics, prepare

BY_LAYER = ("load_entropy", "load_max", "load_min", "dropped", "balance")  # of each mixture layer, where there are any
TAIL = 0.05  # the share of last steps whose mean loss is reported as the training loss


@dataclasses.dataclass
class Run:
    """One run to train: its config, its folder, and the name it goes by in messages."""

    config: object
    workdir: Path
    name: str = "train"


@dataclasses.dataclass
class Outcome:
    """How one run ended. `validation`: the last validation row; `error`: what stopped it, or None; `halted`: that was its own numbers."""

    steps: int
    tokens: int
    seconds: float
    train_loss: float | None = None
    validation: dict | None = None
    error: str | None = None
    halted: bool = False


class _Lane:
    """One run inside a group: its data, its checkpoints, its metrics."""

    def __init__(self, run: Run):
        c = run.config
        self.run, self.config = run, c
        self.error: str | None = None
        how = dict(seq_len=c.data.seq_len, packing=c.data.packing, mixture=c.data.mixture, seed=c.seed)
        self.train = open_split(c.data.path, "train", batch=c.batch.sequences, **how)
        self.validation = open_split(c.data.path, "validation", batch=c.batch.sequences // c.batch.micro_batches, **how)
        if self.train.vocab_size > c.model.vocab_size:
            raise DataError(
                f"{c.data.path}: its tokenizer has {self.train.vocab_size} tokens, config.model.vocab_size is {c.model.vocab_size}. "
                "Give the model at least as many, or prepare the data with a smaller --vocab-size."
            )

    def tokens(self, step: int) -> int:
        return step * self.config.batch.sequences * self.config.data.seq_len


def train(
    runs: list[Run], programs: Programs, *, mode: str = "single", cell_devices: int = 1, title: str = "", notice: Notice | None = None
) -> list[Outcome]:
    """Trains `runs`, which must share a program, to their last step; returns one Outcome each. Every process calls it alike.

    Raises GammalmError for what stops all of them (data, checkpoints, config, another process that is gone); a run whose numbers go wrong
    ends alone. Raises Preempted, with everything saved, where `notice` was given to stop.
    """
    lanes = [_Lane(run) for run in runs]
    cells = None if mode == "single" else len(lanes)
    how = dict(cells=cells, mode=mode, cell_devices=cell_devices)
    program = programs.get(lanes[0].config, lanes[0].train.token_bytes, **how)
    processes.on_first("prepare", lambda: [prepare(lane.run.workdir, lane.config, program.model.specs) for lane in lanes])
    try:
        with contextlib.ExitStack() as stack:
            checkpointers = [
                stack.enter_context(Checkpointer(lane.run.workdir / "checkpoints", keep=lane.config.train.checkpoints_kept))
                for lane in lanes
            ]
            watchdog = stack.enter_context(Watchdog(lanes[0].config.train.stall_timeout))
            return _Group(lanes, program, checkpointers, title, notice, watchdog).run()
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

    def __init__(self, lanes, program, checkpointers, title, notice, watchdog):
        self.lanes, self.program, self.checkpointers = lanes, program, checkpointers
        self.notice, self.watchdog = notice, watchdog
        self.compiled: set[str] = set()
        self.title = title or lanes[0].run.name
        self.config = lanes[0].config
        self.steps = self.config.train.steps
        self.scalars = program.scalars([scalars(lane.config) for lane in lanes])
        self.start, self.state, self.seconds = self._restore()
        self.metrics = [Metrics(lane.run.workdir, self.start) for lane in lanes]
        if self.start < self.steps:
            for metrics in self.metrics:
                metrics.record_versions(self.start)
        self.last_mark = self.began = time.monotonic()
        self.last_logged = self.start
        self.shown, self.rate, self.waited = math.nan, 0.0, 0.0  # on the progress line
        peak = peak_flops(program.mesh.devices.flat[0])
        flops = training_flops_per_token(program.model, self.config.data.seq_len)
        self.mfu_per_rate = flops / (peak * program.mesh.size) if peak else None

    def _restore(self):
        """(step, state, seconds each spent before) from the newest step that all lanes have; from the beginning where there is none.

        A lane that is further (it was trained alone before) repeats steps: they come out the same. The beginning is γ-initialization, or
        the weights of an imported model.
        """
        taken = [c.restore_latest(self.program.abstract_state) for c in self.checkpointers]
        newest = min((restored[0] if restored else 0) for restored in taken)
        there = [c.agreed_steps() for c in self.checkpointers]
        common = max(set.intersection(*map(set, there)) & set(range(newest + 1)), default=0)
        self.saved = [max(steps, default=-1) for steps in there]
        states, seconds = [], 0.0
        for lane, checkpointer, restored in zip(self.lanes, self.checkpointers, taken, strict=True):
            if common:
                step, state, extra = restored
                if step != common:
                    state, extra = checkpointer.restore(common, self.program.abstract_state)
                seconds = max(seconds, extra["seconds"])
                lane.error, tokenizer = extra["error"], extra["tokenizer"]
            else:
                state, tokenizer = self.program.init(lane.config), None
                if imported := restore_imported(lane.run.workdir, self.program.abstract_state):
                    weights, tokenizer = imported
                    state |= weights
            states.append(state)
            if tokenizer not in (None, lane.train.tokenizer_sha256):
                raise DataError(
                    f"{lane.run.workdir}: its run began with another tokenizer than that of {lane.config.data.path}. Token numbers would "
                    "mean other text: give config.data.path the folder it began with, or choose another --workdir."
                )
        return common, self.program.stack(states), seconds

    def run(self) -> list[Outcome]:
        try:
            if self.start < self.steps:
                self._train()
            self._validate(self.steps)
            return [self._outcome(i) for i in range(len(self.lanes))]
        finally:
            for metrics in self.metrics:
                metrics.close()

    def _train(self) -> None:
        c = self.config.train
        tokens = self.lanes[0].tokens(1) * len(self.lanes)
        self.progress = Progress(self.title, self.steps, "steps", done=self.start, quiet=not processes.leads())
        size = self.config.batch.sequences
        loaders = [Loader(lane.train, self.start, self.program.rows(size)) for lane in self.lanes]
        pending = None
        try:
            if self.start and c.validate_every and self.start % c.validate_every == 0:
                self._validate(self.start)  # where the run ended between saving and validating
            for step in range(self.start, self.steps):
                if self._told_to_stop():
                    if pending is not None:
                        self._read(*pending, loaders, tokens)
                    self._stop(step)
                batch = self.program.put([next(loader)[1] for loader in loaders], size)
                self._compiles_once("step")
                self.state, metrics = self.program.step(self.state, batch, self.scalars)
                if pending is not None:
                    self._read(*pending, loaders, tokens)
                pending = (step + 1, metrics)
                if step + 1 == self.steps or (step + 1) % c.checkpoint_every == 0:
                    self._read(*pending, loaders, tokens)
                    pending = None
                    self._save(step + 1)
                if c.validate_every and (step + 1) % c.validate_every == 0:
                    if pending is not None:
                        self._read(*pending, loaders, tokens)
                        pending = None
                    self._validate(step + 1)
                if all(lane.error for lane in self.lanes):
                    break
        finally:
            for loader in loaders:
                loader.close()
        self.progress.close(f"loss {self.shown:.4f}" if math.isfinite(self.shown) else "")

    def _read(self, step: int, metrics, loaders, tokens: int) -> None:
        """Fetches the metrics of a finished step, looks for faults, writes rows, moves the progress line."""
        values = jax.device_get(metrics)
        if self.program.cells is None:
            values = {name: np.asarray(value)[None] for name, value in values.items()}
        for i, lane in enumerate(self.lanes):
            if values["halted"][i] and not lane.error:
                self._halt(i, step)
        alive = [i for i, lane in enumerate(self.lanes) if not lane.error]
        self.shown = float(np.mean(values["loss"][alive])) if alive else math.nan
        now = time.monotonic()
        self.watchdog.beat(f"step {step} of {self.title}")
        if step % self.config.train.log_every and step != self.steps:
            self.progress.advance(1, self._note())
            return
        elapsed, self.last_mark = max(now - self.last_mark, 1e-9), now
        self.rate = tokens * (step - self.last_logged) / elapsed
        self.last_logged = step
        self.waited = sum(loader.take_waited() for loader in loaders) / elapsed
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
        fault = first_fault(self.program, self.program.pick(self.state, i), lane.train.batch(step - 1), lane.config)
        lane.error = f"step {step}: loss or gradient is not finite: {fault}. Parameters were left as before the step."
        self.metrics[i].write("halted", step, {"error": lane.error})

    def _save(self, step: int) -> None:
        for i, checkpointer in enumerate(self.checkpointers):
            if step > self.saved[i]:
                self.saved[i] = step
                extra = {"seconds": self._seconds(), "error": self.lanes[i].error, "tokenizer": self.lanes[i].train.tokenizer_sha256}
                checkpointer.save(step, self.program.pick(self.state, i), extra)

    def _compiles_once(self, what: str) -> None:
        """Compiling may take longer than any stall."""
        if what not in self.compiled:
            self.compiled.add(what)
            self.watchdog.rest()

    def _told_to_stop(self) -> bool:
        return self.notice is not None and self.notice.due()

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
        limit = self.config.train.validation_batches
        split = self.lanes[0].validation
        tables: list[dict] = [{} for _ in self.lanes]
        batches = {domain: min(split.validation_batches(domain), limit or 10**9) for domain in split.domains}
        batches = {domain: count for domain, count in batches.items() if count}  # a single token has no context: nothing to predict
        if not any(_lacks(lane, metrics, step) for lane, metrics in zip(self.lanes, self.metrics, strict=True)):
            return
        self._compiles_once("validation")
        progress = Progress("validation", sum(batches.values()), "batches", quiet=not processes.leads())
        size = self.config.batch.sequences // self.config.batch.micro_batches
        rows = self.program.rows(size)
        for domain, count in batches.items():
            sums = [dict.fromkeys(("nats", "tokens", "bytes"), 0.0) for _ in self.lanes]
            pending = None  # read a batch late, as in training

            def read(found, sums=sums, domain=domain):
                for name, values in jax.device_get(found).items():
                    for total, value in zip(sums, np.atleast_1d(values), strict=True):
                        total[name] += float(value)
                self.watchdog.beat(f"a batch of {domain}, validation at step {step} of {self.title}")
                progress.advance(1, domain)

            for batch in itertools.islice(split.validation(domain, rows), count):
                if self._told_to_stop():
                    self._stop(step)
                batch = self.program.put([batch] * len(self.lanes), size)
                found = self.program.validate(self.state, batch, self.scalars["norm_eps"])
                if pending is not None:
                    read(pending)
                pending = found
            read(pending)
            for i, total in enumerate(sums):
                tables[i][domain] = total
        for lane, metrics, table in zip(self.lanes, self.metrics, tables, strict=True):
            if not _lacks(lane, metrics, step):
                continue
            whole = {name: sum(row[name] for row in table.values()) for name in ("nats", "tokens", "bytes")}
            rows = {domain: {**_losses(row), "tokens": int(row["tokens"])} for domain, row in table.items()}
            epochs = {domain: round(times, 4) for domain, times in lane.train.epochs(step).items()}
            metrics.write("validation", step, {"tokens": lane.tokens(step), **_losses(whole), "domains": rows, "epochs": epochs})

    def _outcome(self, i: int) -> Outcome:
        lane, rows = self.lanes[i], self.metrics[i].rows()
        tail = [row["loss"] for row in rows if row["kind"] == "train" and row["step"] > (1 - TAIL) * self.steps]
        step = max((row["step"] for row in rows if row["kind"] == "train"), default=0)
        return Outcome(
            steps=step, tokens=lane.tokens(step), seconds=self._seconds(),
            train_loss=float(np.mean(tail)) if tail else None, validation=_validation_at(rows, self.steps), error=lane.error,
            halted=lane.error is not None,
        )  # fmt: skip


def _losses(total: dict) -> dict:
    """Mean loss in nats per token and bits per byte of text."""
    return {
        "loss": total["nats"] / max(total["tokens"], 1),
        "bits_per_byte": total["nats"] / math.log(2) / max(total["bytes"], 1),
    }


def _lacks(lane, metrics, step: int) -> bool:
    """Whether a lane is to be validated at `step`."""
    return not lane.error and not _validation_at(metrics.rows(), step)


def _validation_at(rows: list[dict], step: int) -> dict | None:
    return next((row for row in rows if row["kind"] == "validation" and row["step"] == step), None)
