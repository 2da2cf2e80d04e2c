"""How this process deals with memory that XLA gives back."""

import ctypes
import sys


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next step; call it before JAX starts its threads. Without glibc it does nothing.

    XLA:CPU allocates its scratch, hundreds of MB, anew for each step. Given back to the system in between, the page faults made a
    small step 1.2 to 1.5 times as long (docs/benchmarks.md). GPU and TPU backends keep their memory anyway.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(-8, 1)  # M_ARENA_MAX: one heap, which may grow to any size; those of threads end at 64 MB
    mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GiB stay
