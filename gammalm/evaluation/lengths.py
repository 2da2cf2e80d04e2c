"""The few lengths that sequences and caches are made of, so that few programs are compiled; and what compiling one is worth."""

import jax

SHORTEST = 16
PROGRAM_FLOP = {"cpu": 3e10, "default": 1e15}  # of a device in the time in which a program compiles


def bucket(tokens: int) -> int:
    """The shortest length that holds so many tokens, of two lengths an octave from 16 on: 16, 24, 32, 48, …"""
    size = SHORTEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def program_tokens(parameters: int) -> int:
    """Tokens that a device reads with so many active parameters while a program compiles: a further program has to save as much padding."""
    return int(PROGRAM_FLOP.get(jax.default_backend(), PROGRAM_FLOP["default"]) / (2 * parameters))
