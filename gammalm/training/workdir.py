"""What a run keeps in its folder beside checkpoints: its config, the versions it ran with, its metrics.

    <workdir>/config.json  versions.json  init_table.json  metrics.jsonl  monitors.jsonl  monitors/  checkpoints/  tensorboard/
"""

import functools
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import jax

import gammalm
from gammalm.config import from_json, leaves, to_json
from gammalm.config_checks import MEASURED
from gammalm.errors import ConfigError
from gammalm.files import append_jsonl, make_folder, read_jsonl, write_json_atomic, write_text_atomic
from gammalm.initializers import init_table
from gammalm.quiet_tf import import_tensorflow
from gammalm.sharding import processes
from gammalm.training.load import IMPORTED
from gammalm.training.trackers import open_tracker, require

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# Leaves that may change when a run goes on: what is said and kept, where it is computed, how it is rounded. The state has room for all.
MAY_CHANGE = (
    "data.path", "train.log_every", "train.validate_every", "train.checkpoint_every", "train.checkpoints_kept", "train.stall_timeout",
    "train.tracker", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context", "mesh.tensor", "mesh.dcn_data", "mesh.dcn_fsdp",
    "model.attention_kernel", "model.moe.backend", "model.dtype", "model.residual_dtype", *MEASURED,
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """What a result depends on beside its config: packages, Python, the device kind and count, the commit of a checkout."""
    found = {"gammalm": gammalm.__version__, "commit": _commit(), "python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    device = jax.devices()[0]
    found |= {"platform": device.platform, "device": device.device_kind, "devices": str(jax.device_count())}
    return found | ({"processes": str(jax.process_count())} if jax.process_count() > 1 else {})


def _commit() -> str:
    """Short commit hash with + for local changes; "none" outside a checkout of gammalm's own."""
    root = Path(gammalm.__file__).parents[1]
    if not (root / ".git").exists():
        return "none"
    try:
        git = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10)
        commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return f"{commit}{'+' if changed else ''}" if commit else "none"


def prepare(workdir: Path, config, specs) -> None:
    """Makes the folder and records config and init table. Raises ConfigError where it cannot be written, another config's run is in
    it, or the tracker's package is missing.

    An imported model that no step was taken from fixes `model` alone: data, schedule and batch are free. It was not drawn: no init table.
    """
    require(config.train.tracker)
    make_folder(workdir)
    saved, imported = workdir / "config.json", (workdir / IMPORTED).exists()
    begun = (workdir / "checkpoints").exists() or read_jsonl(workdir / "metrics.jsonl")
    if saved.exists() and (begun or imported):
        before, now = leaves(from_json(saved)), leaves(config)
        free = [name for name in now if name in MAY_CHANGE or not (begun or name.startswith("model."))]
        changed = {name: f"{name} {before.get(name)!r} -> {now[name]!r}" for name in now if before.get(name) != now[name]}
        refused = [text for name, text in changed.items() if name not in free]
        if refused:
            raise ConfigError(
                f"{workdir} holds a run with another config ({', '.join(refused[:5])}). Choose another --workdir, or the same config."
            )
        if begun and changed:
            processes.say(f"{workdir} goes on with {', '.join(changed.values())}")
    to_json(config, saved)
    if not imported:
        c = config.model
        write_json_atomic(workdir / "init_table.json", init_table(specs, config.init, d_model=c.d_model, n_layers=c.n_layers))


class Rows:
    """A file of rows, each of a kind and a step, that one run adds to. Rows past `step`, which a killed run left, are dropped: those steps
    run again.

    Process 0 alone writes; the others keep the same rows in memory, so that all decide alike by what is there. Made by all at once.
    """

    def __init__(self, file: Path, step: int):
        self._file = file
        rows = read_jsonl(file)
        self._kept = [row for row in rows if row["step"] <= step]
        self.dropped = [row for row in rows if row["step"] > step]
        processes.exchange(f"{file.stem} read")
        if self.dropped and processes.leads():
            self._rewrite()

    def rewind(self, step: int) -> None:
        """Drops the rows past `step`, to which a run was rolled back, but for those that tell of rolling back."""
        self._kept = [row for row in self.rows() if row["step"] <= step or row["kind"] == "rollback"]
        if processes.leads():
            self._rewrite()

    def _rewrite(self) -> None:
        write_text_atomic(self._file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._kept))

    def add(self, row: dict) -> None:
        if processes.leads():
            append_jsonl(self._file, row)
        else:
            self._kept.append(row)

    def rows(self) -> list[dict]:
        return read_jsonl(self._file) if processes.leads() else self._kept


class Metrics(Rows):
    """metrics.jsonl, TensorBoard and, where its config (None: none) names one, the tracker of one run."""

    def __init__(self, workdir: Path, step: int, config=None):
        super().__init__(workdir / "metrics.jsonl", step)
        self._versions, self._board, self._tracker = workdir / "versions.json", None, None
        if not processes.leads():
            return
        import_tensorflow()
        from clu import metric_writers

        writers = [metric_writers.SummaryWriter(str(workdir / "tensorboard"))]
        if config is not None and (tracker := open_tracker(config.train.tracker, workdir, config)):
            self._tracker = tracker
            writers.append(tracker)
        # In a thread of its own: the first scalar makes TensorFlow import much of itself.
        self._board = metric_writers.AsyncWriter(metric_writers.MultiWriter(writers))

    def record_versions(self, step: int) -> None:
        """versions.json says what a run began with; where it goes on with others, a row "resumed" says so."""
        if not processes.leads():
            return
        if step == 0 or not self._versions.exists():
            write_json_atomic(self._versions, versions())
        elif json.loads(self._versions.read_text(encoding="utf-8")) != versions():
            self.write("resumed", step, {"versions": versions()})

    def write(self, kind: str, step: int, values: dict) -> None:
        """Adds one row; numbers go to TensorBoard and the tracker as `kind/name` too."""
        self.add({"kind": kind, "step": step, **values})
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        by_layer = {name: value for name, value in values.items() if isinstance(value, list)}
        numbers |= {f"{kind}/{name}/{layer}": x for name, value in by_layer.items() for layer, x in enumerate(value)}
        numbers |= {f"{kind}/{domain}": row["loss"] for domain, row in values.get("domains", {}).items()}
        self.show(step, numbers)

    def show(self, step: int, numbers: dict[str, float]) -> None:
        """Numbers for TensorBoard and the tracker alone."""
        if self._board is not None:
            self._board.write_scalars(step, numbers)

    def close(self, failed: bool = False) -> None:
        """`failed`: the run has halted, which a tracker shows."""
        if self._tracker is not None:
            self._tracker.failed = failed
        if self._board is not None:
            self._board.close()
