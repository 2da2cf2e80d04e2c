"""What one sequence has written so far: its tokens, its text, where it stops, and how much of the text is certain by now.

Text is kept in bytes. A stop string may span tokens and a character may be spelled in several, so a stream gives out what can neither
become part of a stop nor is half of a character. Nothing here depends on how many tokens arrive at once.
"""

import codecs
import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Generated:
    """`tokens` that were drawn, with those of the stop; `text` before the stop. `cut`: tokens left out of the prompt's beginning.

    `reason` it ended: "end" of the document | "stop" | "length" asked for | "context" of the model full.
    """

    tokens: tuple[int, ...]
    text: str
    reason: str
    cut: int


class Output:
    """Takes tokens until `reason` says why there are no more.

    `stops` are texts, `stop_tokens` sequences of ids; what is first complete ends the text, of several that one token completes the one
    that begins first. `limit` tokens are taken at most, and `reason_at_limit` is the reason then.
    """

    def __init__(
        self, to_bytes: Callable[[Sequence[int]], bytes], eod_id: int, stops: Sequence[str], stop_tokens: Sequence[Sequence[int]],
        limit: int, reason_at_limit: str,
    ):  # fmt: skip
        self._to_bytes, self._eod_id = to_bytes, eod_id
        self._stops = [stop.encode() for stop in stops]
        self._stop_tokens = [list(stop) for stop in stop_tokens]
        self._limit, self._reason_at_limit = limit, reason_at_limit
        self._longest = max(map(len, self._stops), default=1)
        self._text, self._given = bytearray(), 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens: list[int] = []
        self.reason = ""

    def take(self, token: int) -> None:
        """The next token, an id."""
        self.tokens.append(token)
        fresh = max(0, len(self._text) - self._longest + 1)  # no stop that ends in this token begins before
        self._text += self._to_bytes([token])
        ends = [at for stop in self._stops if (at := self._text.find(stop, fresh)) >= 0]
        ends += [len(self._text) - len(self._to_bytes(stop)) for stop in self._stop_tokens if self.tokens[-len(stop) :] == stop]
        if token == self._eod_id:
            self.reason = "end"
        elif ends:
            self.reason = "stop"
            del self._text[min(ends) :]
        elif len(self.tokens) == self._limit:
            self.reason = self._reason_at_limit

    def piece(self) -> str:
        """The text that is certain and was not given out before."""
        certain = len(self._text) - (0 if self.reason else self._held())
        fresh = bytes(self._text[self._given : certain])
        self._given = max(self._given, certain)
        return self._decoder.decode(fresh, final=bool(self.reason))

    def text(self) -> str:
        """All of it; bytes that are no UTF-8 become U+FFFD."""
        return self._text.decode("utf-8", errors="replace")

    def _held(self) -> int:
        """Bytes at the end of the text with which a stop may have begun."""
        held = [n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n])]
        for stop in self._stop_tokens:
            held += [len(self._to_bytes(stop[:n])) for n in range(1, len(stop)) if self.tokens[-n:] == stop[:n]]
        return max(held, default=0)
