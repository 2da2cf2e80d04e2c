"""What a sequence has written (gammalm.evaluation.output): stops of texts and of tokens, whole characters, what a stream holds back.

Tokens are letters, the three bytes of one character, and the end of a document, written here as a full stop.
"""

import pytest

from gammalm.evaluation.output import Output

END = 49
TABLE = [bytes([code]) for code in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRST字".encode()] + [b""]


def to_bytes(ids) -> bytes:
    return b"".join(TABLE[i] for i in ids)


def ids(text):
    return [i for part in text for i in ([END] if part == "." else [TABLE.index(bytes([code])) for code in part.encode()])]


def play(tokens, chunk, stops=(), stop_tokens=(), limit=24):
    """(what was written, pieces given out after every `chunk` tokens)."""
    output, pieces = Output(to_bytes, END, stops, stop_tokens, limit, "length"), []
    for place, token in enumerate(tokens):
        output.take(token)
        if (place + 1) % chunk == 0 or output.reason:
            pieces.append(output.piece())
        if output.reason:
            break
    return output, pieces


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize(
    "script, options, text, reason, tokens",
    [
        ("abcabcdefghijklmnop", dict(stops=["cde"]), "abcab", "stop", 8),
        ("abcdefghijklmnopqrstuvwxyz", dict(stops=["rs", "qrst", "w"]), "abcdefghijklmnopq", "stop", 19),
        ("abcdefghijklmnop", dict(stops=["def", "ef", "bcdex"]), "abc", "stop", 6),  # two are complete with f: what begins first
        ("ababac", dict(stop_tokens=[[0, 1, 0, 2]]), "ab", "stop", 6),
        ("abxc", dict(stop_tokens=[[2]], stops=["xx"]), "abx", "stop", 4),
        ("a字b字c", dict(stops=["字c"]), "a字b", "stop", 9),
        ("ab.cdefgh", dict(stops=["c"]), "ab", "end", 3),
        ("abcdefgh", dict(stops=["z"], limit=6), "abcdef", "length", 6),
    ],
)
def test_stops(script, options, text, reason, tokens, chunk):
    """However many tokens come at once: the same text, whose pieces add up to it and never have to be taken back."""
    output, pieces = play(ids(script), chunk, **options)
    assert (output.text(), output.reason, output.tokens) == (text, reason, ids(script)[:tokens])
    assert "".join(pieces) == text


def test_a_stream_gives_whole_characters_as_they_come():
    output, pieces = play(ids("a字b") + ids("字")[:2] + [END], 1)
    assert pieces == ["a", "", "", "字", "b", "", "", "\ufffd"]
    assert output.text() == "a字b\ufffd"


def test_a_stream_holds_back_what_a_stop_may_begin_with():
    _, pieces = play(ids("abcxyabcd"), 1, stops=["abcd"])
    assert pieces == ["", "", "", "abcx", "y", "", "", "", ""]
    _, pieces = play(ids("aababc"), 1, stop_tokens=[ids("abc")])
    assert pieces == ["", "a", "", "ab", "", ""]
