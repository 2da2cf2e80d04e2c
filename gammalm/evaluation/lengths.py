"""The few lengths that sequences and caches are made of, so that few programs are compiled."""

SHORTEST = 16


def bucket(tokens: int) -> int:
    """The shortest length that holds so many tokens, of two lengths an octave from 16 on: 16, 24, 32, 48, …"""
    size = SHORTEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
