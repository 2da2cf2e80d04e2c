"""The runs of a group: what each is asked, what data it has, where it goes on, how it ended."""

import dataclasses
from pathlib import Path

from gammalm.data.load import open_split
from gammalm.errors import DataError
from gammalm.training.checkpoint import Checkpointer
from gammalm.training.load import restore_imported


@dataclasses.dataclass
class Run:
    """One run to train: its config, its folder, and the name it goes by in messages."""

    config: object
    workdir: Path
    name: str = "train"


@dataclasses.dataclass
class Outcome:
    """How one run ended. `validation`, `goodput`: those rows at the last step; `error`: what stopped it, or None; `halted`: that was its
    own numbers."""

    steps: int
    tokens: int
    seconds: float
    train_loss: float | None = None
    validation: dict | None = None
    goodput: dict | None = None
    error: str | None = None
    halted: bool = False


class Lane:
    """One run inside a group: its data, its checkpoints, its metrics."""

    def __init__(self, run: Run):
        c = run.config
        self.run, self.config = run, c
        self.error: str | None = None
        how = dict(seq_len=c.data.seq_len, packing=c.data.packing, mixture=c.data.mixture, seed=c.seed, loss=c.data.loss)
        self.train = open_split(c.data.path, "train", batch=c.batch.sequences, **how)
        self.validation = open_split(c.data.path, "validation", batch=c.batch.sequences // c.batch.micro_batches, **how)
        if self.train.vocab_size > c.model.vocab_size:
            raise DataError(
                f"{c.data.path}: its tokenizer has {self.train.vocab_size} tokens, config.model.vocab_size is {c.model.vocab_size}. "
                "Give the model at least as many, or prepare the data with a smaller --vocab-size."
            )

    def tokens(self, step: int) -> int:
        return step * self.config.batch.sequences * self.config.data.seq_len


@dataclasses.dataclass
class Restored:
    """Where a group goes on: the step, the state of all lanes, and per lane what its checkpoint said (`extra`; {} at the beginning) and
    the newest step that it has on disk (-1: none)."""

    step: int
    state: object
    extras: list[dict]
    saved: list[int]


def restore(lanes: list[Lane], checkpointers: list[Checkpointer], program) -> Restored:
    """The newest step that all lanes have; the beginning where there is none, which is γ-initialization or an imported model's weights.

    A lane that is further (it was trained alone before) repeats steps: they come out the same. Raises CheckpointError, and DataError
    where a lane began with another tokenizer.
    """
    taken = [c.restore_latest(program.abstract_state) for c in checkpointers]
    newest = min((restored[0] if restored else 0) for restored in taken)
    there = [c.agreed_steps() for c in checkpointers]
    common = max(set.intersection(*map(set, there)) & set(range(newest + 1)), default=0)
    states, extras = [], []
    for lane, checkpointer, restored in zip(lanes, checkpointers, taken, strict=True):
        if common:
            step, state, extra = restored
            if step != common:
                state, extra = checkpointer.restore(common, program.abstract_state)
            lane.error, tokenizer = extra["error"], extra["tokenizer"]
        else:
            state, extra, tokenizer = program.init(lane.config), {}, None
            if imported := restore_imported(lane.run.workdir, program.abstract_state):
                weights, tokenizer = imported
                state |= weights
        states.append(state)
        extras.append(extra)
        if tokenizer not in (None, lane.train.tokenizer_sha256):
            raise DataError(
                f"{lane.run.workdir}: its run began with another tokenizer than that of {lane.config.data.path}. Token numbers would "
                "mean other text: give config.data.path the folder it began with, or choose another --workdir."
            )
    return Restored(common, program.stack(states), extras, [max(steps, default=-1) for steps in there])
