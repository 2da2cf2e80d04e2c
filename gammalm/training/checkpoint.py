"""Checkpoints of a training state: Orbax writes them, in the background; we decide when one counts, and verify it before use.

On disk, below the directory of one run:

    000000100/                  a complete step: Orbax's files and checksums.json (with the tree's shapes and the caller's extra)
    000000200.saving…/          a save in progress, or what a killed process left of one
    000000050.deleting/         a step being rotated away
    000000150.damaged/          a step that failed its checksums, kept for inspection; never read

A step gets its plain name by one rename, after its checksums are on the disk: killed at any moment, a save leaves the step whole
or not there. One run at a time may write to a directory; others may read it meanwhile.

The processes of one run call every method alike, on a directory that all see. Each writes the shards of its devices; process 0 seals,
names and removes; before use each verifies every file, and what is damaged for one is refused by all.
"""

import errno
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from gammalm.errors import CheckpointError, ConfigError, TrainingError
from gammalm.files import DISK_FULL, sync_folder
from gammalm.sharding import processes
from gammalm.training.integrity import SEAL, inspect, seal

STEP_NAME = re.compile(r"\d{9,}")
LEFTOVER_NAME = re.compile(r"(\d{9,})\.(saving|deleting).*")
FULL_ERRNOS = (*DISK_FULL, errno.EFBIG)
PATHS_SHOWN = 12  # of a tree that does not fit, in the error

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # the message is printed already; do not let logging's last resort print it again


def say_stderr(message: str) -> None:
    """Prints one line for whoever watches the run."""
    print(f"checkpoint: {message}", file=sys.stderr, flush=True)


class Checkpointer:
    """Saves and restores one run's state below `directory`, keeping the newest `keep` complete steps.

    A context manager; `close` (or leaving the block) waits for the save in progress. `say` gets one line whenever a step is
    refused, set aside or left over. Every failure is a CheckpointError; those of a background save are raised by the next
    `save`, `wait`, `restore…` or `close`. Raises ConfigError for keep < 1.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 2, say: Callable[[str], None] = say_stderr):
        if keep < 1:
            raise ConfigError(f"train.checkpoints_kept={keep}: at least one checkpoint must be kept.")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._say_line = say
        self._orbax = ocp.StandardCheckpointer(async_options=ocp.options.AsyncOptions(timeout_secs=int(processes.BARRIER_SECONDS)))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    # ---- saving

    def save(self, step: int, tree: Any, extra: dict[str, Any] | None = None) -> None:
        """Saves `tree` (any pytree of jax.Array) and `extra` (JSON) as `step`; returns when the arrays may be donated or changed.

        Writing goes on in the background. Raises CheckpointError: an earlier background save failed; `step` is not beyond the
        newest complete step; a leaf is no jax.Array; `extra` is no JSON; the disk has no room.
        """
        self.wait()
        arrays = _flatten(tree)
        shapes = {path: [str(x.dtype), list(x.shape)] for path, x in arrays.items()}
        try:
            # Through text at once: what the caller changes later must not reach the file.
            facts = json.loads(json.dumps({"step": step, "tree": shapes, "extra": extra or {}}))
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"step {step}: `extra` must be plain JSON: {e}.") from e
        needed = int(sum(x.nbytes for x in arrays.values()) * 1.02) + 2**20  # with Orbax's metadata
        processes.on_first("save", lambda: self._make_ready(step, needed))
        try:
            self._orbax.save(self._saving(step), arrays)
        except Exception as e:  # Orbax raises what its layers raise
            raise self._failure(step, needed, e) from e
        self._pending = self._pool.submit(self._finish, step, facts, needed)

    def _make_ready(self, step: int, needed: int) -> None:
        newest = max(self.steps(), default=-1)
        if step <= newest:
            raise CheckpointError(
                f"{self.directory}: step {step} cannot be saved, step {newest} is there already. "
                "Continue from the newest step (restore_latest), or start a new directory."
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._require_space(step, needed)
        except OSError as e:
            raise self._failure(step, needed, e) from e

    def _finish(self, step: int, facts: dict[str, Any], needed: int) -> None:
        """The background half: wait for Orbax, seal, give the step its name, rotate. Only the first process touches names."""
        try:
            self._orbax.wait_until_finished()
            if not processes.leads():
                return
            seal(self._saving(step), facts)
            if self._folder(step).exists():  # without its seal, or `save` had refused
                self._set_aside(step, [f"{SEAL} is missing"])
            os.rename(self._saving(step), self._folder(step))
            sync_folder(self.directory)
        except Exception as e:
            failure = self._failure(step, needed, e)
            processes.announce(processes.FAULT, str(failure))  # at once: the others would wait for this one's shards
            raise failure from e
        try:
            for old in self.steps()[: -self.keep]:
                # Renamed first: a half-deleted step must never look like a damaged one.
                doomed = self.directory / f"{old:09d}.deleting"
                os.rename(self._folder(old), doomed)
                shutil.rmtree(doomed)
        except OSError as e:
            raise CheckpointError(f"{self.directory}: step {step} is saved, but an older one could not be removed: {e}.") from e

    def _require_space(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise CheckpointError(self._no_room(step, needed, free))

    def _no_room(self, step: int, needed: int, free: int) -> str:
        return (
            f"{self.directory}: no room for the checkpoint of step {step}: it needs about {needed:,} bytes, {free:,} are free. "
            f"Free some space and start again; complete steps, untouched: {self.steps() or 'none'}."
        )

    def _failure(self, step: int, needed: int, cause: Exception) -> CheckpointError:
        """The error for a save that failed for `cause`; clears away what it wrote."""
        free = shutil.disk_usage(self.directory).free if self.directory.exists() else 0
        text = " ".join(str(cause).split())
        # TensorStore reports errno by its text alone.
        full = getattr(cause, "errno", None) in FULL_ERRNOS or any(os.strerror(n) in text for n in FULL_ERRNOS)
        self._sweep(announce=False)
        if full:
            return CheckpointError(f"{self._no_room(step, needed, free)} (…{text[-200:]})")
        return CheckpointError(
            f"{self.directory}: the checkpoint of step {step} was not saved: {type(cause).__name__}: {text[:600]}. "
            f"Complete steps, untouched: {self.steps() or 'none'}."
        )

    def wait(self) -> None:
        """Returns when no save is in progress. Raises CheckpointError if the last one failed (once), on every process."""
        if self._pending is None:
            return
        wait_for([self._pending])
        pending, self._pending = self._pending, None
        own = pending.exception()
        try:
            told = processes.exchange("saved", own and str(own))
        except TrainingError as late:
            raise own or late from None
        if own:
            raise own
        for process, text in enumerate(told):
            if text:
                raise CheckpointError(f"{processes.describe(process)}: {text}")

    def close(self) -> None:
        """`wait`, then release the threads; the object is of no use afterwards. Raises CheckpointError as `wait` does."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None and processes.count() > 1:
            self._pool.shutdown(wait=False)  # the others may be gone, or wait elsewhere: first they must hear of the error
            return
        try:
            self.close()
        except CheckpointError as e:
            if error is None:
                raise
            self._say(str(e))  # the error on its way out is the first cause: do not put this one in its place

    # ---- restoring

    def steps(self) -> list[int]:
        """Complete steps on disk, ascending; complete means sealed, not yet verified. The save in progress is not among them."""
        return [step for step in self._named_steps() if (self._folder(step) / SEAL).exists()]

    def agreed_steps(self) -> list[int]:
        """`steps` as process 0 sees them; every process asks alike."""
        return processes.exchange("steps", self.steps())[0]

    def restore_latest(self, abstract_tree: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, tree, extra) of the newest step that passes its checksums, or None where nothing was ever completed.

        `abstract_tree`: pytree of jax.ShapeDtypeStruct (or arrays); each leaf comes back bit for bit on that leaf's sharding,
        whatever mesh it was saved from; without a sharding, on the first device. Damaged newer steps are said aloud and set aside as
        `<step>.damaged`. Raises CheckpointError if all steps are damaged (nothing is moved), or the tree does not fit.
        """
        self.wait()
        refused: list[tuple[int, list[str]]] = []
        for step in reversed(processes.exchange("steps named", self._named_steps())[0]):
            facts, faults, there = self._verify(step)
            if not faults:
                break
            if there:  # else the run that writes has rotated it away meanwhile
                refused.append((step, faults))
        else:
            if refused:
                raise CheckpointError(
                    f"{self.directory}: every checkpoint is damaged, and nothing is restarted from zero unasked:\n"
                    + "".join(f"  step {step}: {_few(faults)}\n" for step, faults in refused)
                    + "Put back a copy, or move this directory away to train from step 0."
                )
            step, facts = None, {}
        for damaged, faults in refused:
            self._set_aside(damaged, faults)
        for unfinished in self._leftovers("saving"):
            if step is None or unfinished > step:
                self._say(f"step {unfinished}: its save was not finished (the process ended meanwhile); it does not count")
        if step is None:
            return None
        if refused:
            self._say(f"using step {step} instead")
        return step, self._load(step, facts, abstract_tree), facts["extra"]

    def restore(self, step: int, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
        """(tree, extra) of exactly `step`, verified first, as `restore_latest`. Raises CheckpointError: absent, damaged, does not fit."""
        self.wait()
        return self._verified(step, abstract_tree)

    def _verified(self, step: int, abstract_tree: Any, *, part: bool = False) -> tuple[Any, dict[str, Any]]:
        facts, faults, there = self._verify(step)
        if not there:
            raise CheckpointError(f"{self.directory}: there is no step {step}; complete steps: {self.steps() or 'none'}.")
        if faults:
            raise CheckpointError(f"{self._folder(step)} is damaged: {_few(faults)}. Use another step: {self.steps()}.")
        return self._load(step, facts, abstract_tree, part=part), facts["extra"]

    def restore_part(self, step: int, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
        """As `restore`, for a tree that is only a part of what was saved: the rest is neither read nor allocated."""
        self.wait()
        return self._verified(step, abstract_tree, part=True)

    def _verify(self, step: int) -> tuple[dict[str, Any], list[str], bool]:
        """(facts, faults that any process finds, whether the folder is there for process 0)."""
        facts, faults = inspect(self._folder(step))
        if not faults and facts["step"] != step:
            faults = [f"it holds step {facts['step']}: the folder was renamed"]
        told = processes.exchange("verified", [self._folder(step).exists(), faults])
        if processes.count() > 1:
            faults = [f"{fault} (for {processes.describe(p)})" for p, (_, theirs) in enumerate(told) for fault in theirs]
        return facts, faults, told[0][0]

    def _load(self, step: int, facts: dict[str, Any], abstract_tree: Any, *, part: bool = False) -> Any:
        wanted, saved = _flatten(abstract_tree, abstract=True), facts["tree"]
        differences = [f"{path}: in the checkpoint, not in the model" for path in saved if path not in wanted and not part]
        for path, leaf in wanted.items():
            if path not in saved:
                differences.append(f"{path}: in the model, not in the checkpoint")
            elif saved[path] != [str(leaf.dtype), list(leaf.shape)]:
                dtype, shape = saved[path]
                differences.append(f"{path}: saved as {dtype}{shape}, wanted as {leaf.dtype}{list(leaf.shape)}")
        if differences:
            raise CheckpointError(
                f"{self._folder(step)} does not fit this model ({len(differences)} of {len(wanted)} arrays; the files are whole):\n  "
                + "\n  ".join(differences[:PATHS_SHOWN] + ["…"] * (len(differences) > PATHS_SHOWN))
                + "\nRun with the config that saved it (config.json beside it), or use another workdir."
            )
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here) for path, x in wanted.items()
        }
        try:
            how = ocp.args.PyTreeRestore(
                item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=part
            )
            with ocp.PyTreeCheckpointer() as reader:
                arrays = reader.restore(self._folder(step), args=how)
        except Exception as e:
            raise CheckpointError(
                f"{self._folder(step)}: the files are whole, but Orbax {ocp.__version__} cannot restore them: {type(e).__name__}: {e}"
            ) from e
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), [arrays[path] for path in wanted])

    # ---- names on disk

    def _folder(self, step: int) -> Path:
        return self.directory / f"{step:09d}"

    def _saving(self, step: int) -> Path:
        return self.directory / f"{step:09d}.saving"

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []

    def _named_steps(self) -> list[int]:
        return sorted(int(name) for name in self._names() if STEP_NAME.fullmatch(name))

    def _leftovers(self, kind: str) -> list[int]:
        matches = (LEFTOVER_NAME.fullmatch(name) for name in self._names())
        return sorted({int(m[1]) for m in matches if m and m[2] == kind})

    def _sweep(self, *, announce: bool = True) -> None:
        """Removes what killed or failed saves left. Called by a process about to write, with no save of its own in progress."""
        if not processes.leads():
            return
        for step in self._leftovers("saving") if announce else []:
            self._say(f"step {step}: removing an unfinished save")
        for name in self._names():
            if LEFTOVER_NAME.fullmatch(name):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def _set_aside(self, step: int, faults: list[str]) -> None:
        """Gives a damaged step another name, so that a later save of the same step has its place."""
        self._say(f"step {step} is damaged and not used: {_few(faults)}")
        if not processes.leads():
            return
        aside = self.directory / f"{step:09d}.damaged"
        number = 1
        while aside.exists():
            number += 1
            aside = self.directory / f"{step:09d}.damaged-{number}"
        os.rename(self._folder(step), aside)

    def _say(self, message: str) -> None:
        if not processes.leads():
            return
        self._say_line(f"{self.directory}: {message}")
        log.warning("%s: %s", self.directory, message)


def _few(faults: list[str]) -> str:
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")


def _flatten(tree: Any, *, abstract: bool = False) -> dict[str, Any]:
    """{path: leaf} in tree order, paths joined by "/". Flat, so that the file does not depend on how Orbax sees optimizer states.

    Raises CheckpointError naming a path that is no array (`abstract`: that has no shape and dtype) or that two leaves share.
    """
    flat: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if path in flat:
            raise CheckpointError(f"{path}: two leaves of the tree have this path; rename one.")
        if not isinstance(leaf, jax.Array) and not (abstract and isinstance(leaf, jax.ShapeDtypeStruct)):
            raise CheckpointError(f"{path}: only jax.Array leaves can be saved, not {type(leaf).__name__}; put other values in `extra`.")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise CheckpointError(f"{path}: save jax.random.key_data(key) instead of a typed key.")
        flat[path] = leaf
    return flat
