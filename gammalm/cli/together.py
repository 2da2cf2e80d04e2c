"""What `train` and `grid` share as long work: several processes, a notice to stop, programs compiled once for all runs on a machine."""

import argparse
import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

KEPT = 0.3  # seconds that a program has to take to compile


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Options by which processes find each other (docs/hosts.md)."""
    group = parser.add_argument_group("several processes (docs/hosts.md; Slurm and Open MPI need none of these)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; auto: as JAX finds it (TPU VMs); none: one process")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")


@contextlib.contextmanager
def together(args: argparse.Namespace) -> Iterator:
    """Joins the other processes, if any, and gives the notice to stop (preemption.Notice) to ask during the block."""
    keep_compiled()
    from gammalm.sharding.processes import joined
    from gammalm.training.preemption import Notice

    with joined(args.coordinator, args.processes, args.process_id), Notice() as notice:
        yield notice


def keep_compiled() -> None:
    """Compiled programs stay in $GAMMALM_CACHE or ~/.cache/gammalm, unless JAX_COMPILATION_CACHE_DIR names another.

    Those of small models compile in less than a second, which JAX by itself would not keep. Where the folder cannot be written none is,
    which is said.
    """
    import jax

    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = compiled_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    else:
        print(f"compiled programs cannot be kept in {folder}: every start compiles. GAMMALM_CACHE names another folder.", file=sys.stderr)


def compiled_folder() -> Path:
    """Below the user's cache folder, by kind of CPU: machines may share a home, and a program for one CPU may not run on another."""
    from gammalm.data.fetch import cache_folder

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    kind = hashlib.blake2b(features.encode(), digest_size=4).hexdigest()
    return cache_folder() / "jax" / f"{platform.machine()}-{kind}"
