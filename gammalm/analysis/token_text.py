"""A text coloured token by token by its gain, as HTML without links to anything outside it: dark text on light colours.

Blue: the small-initialization model gives the token more probability; orange: the standard one. Source: the first seed's coloured
example; science 6. Shapes: T predicted tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from gammalm.analysis.tokens import symmetric_gain

BETTER, WORSE = (116, 178, 226), (244, 160, 88)  # the full colours; black on either has a contrast above 7
FULL = 1.0  # gain from which on the colour is full: one model gives the token three times the probability
LONGEST = 4  # byte tokens that one character can take
END = "⟨end⟩"  # shown for a token that stands for no text
# Control characters, which HTML does not allow, by their pictures; tab and newline stay.
PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


class Piece(NamedTuple):
    """What is coloured as one: its text as it is shown, losses of both models in nats, gain."""

    text: str
    small: float
    standard: float
    gain: float


def pieces(ids: Sequence[int], small_T, standard_T, decode: Callable[[Sequence[int]], str]) -> Iterator[Piece]:
    """The pieces of `coloured_text`, whose arguments and errors it shares."""
    if not len(ids) - 1 == len(small_T) == len(standard_T):
        raise ValueError(f"{len(ids)} tokens need {len(ids) - 1} losses of each model, not {len(small_T)} and {len(standard_T)}")
    for text, begin, end in _pieces(ids, decode):
        small, standard = (float(np.sum(losses[begin - 1 : end - 1], dtype=np.float64)) for losses in (small_T, standard_T))
        yield Piece(_shown(text), small, standard, float(symmetric_gain(small, standard)))


def coloured_text(ids: Sequence[int], small_T, standard_T, decode: Callable[[Sequence[int]], str]) -> str:
    """An HTML fragment with its legend: `ids` [T+1], of which the first is only context, losses of both models on the others in nats.

    `decode` turns ids into text. A character that is spelled in several byte tokens is one coloured piece, with the sums of their losses,
    which is the loss of the character. Hovering over a piece shows its figures. Raises ValueError where the lengths do not fit.
    """
    parts = [escape(_shown(decode(ids[:1])))]
    for piece in pieces(ids, small_T, standard_T, decode):
        title = f"gain {piece.gain:+.3f}; loss {piece.small:.3f} small, {piece.standard:.3f} standard"
        parts.append(f'<span style="background:{colour(piece.gain)}" title="{title}">{escape(piece.text)}</span>')
    return f'{_legend()}\n<div style="{STYLE};{TEXT}">{"".join(parts)}</div>'


STYLE = "color:#111;background:#fff;padding:.6rem .8rem"
TEXT = "font:15px/1.9 ui-monospace,Menlo,monospace;white-space:pre-wrap;overflow-wrap:anywhere"


def colour(gain: float) -> str:
    """The background of a gain as #rrggbb: white at 0, the full colour from ±FULL on."""
    share = min(abs(gain) / FULL, 1.0)
    return "#" + "".join(f"{round(255 + share * (full - 255)):02x}" for full in (BETTER if gain > 0 else WORSE))


def _legend() -> str:
    steps = [
        f'<span style="background:{colour(gain)};padding:.15rem .5rem">{label}{gain:+.1f}{more}</span>'
        for gain, label, more in (
            (-FULL, "standard better: ", " or less"), (-FULL / 2, "", ""), (0.0, "", ""),
            (FULL / 2, "", ""), (FULL, "small better: ", " or more"),
        )
    ]  # fmt: skip
    says = "Gain = 2 (p_small − p_standard) / (p_small + p_standard), from −2 to 2; ±1 is three times the probability."
    return f'<div style="{STYLE};font:13px/1.8 system-ui,sans-serif"><div>{says}</div><div>{"".join(steps)}</div></div>'


def _pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]):
    """(text, begin, end) of every piece after the first token: single tokens, or the few that together make up whole characters."""
    begin = 1
    while begin < len(ids):
        ends = range(begin + 1, min(begin + LONGEST, len(ids)) + 1)
        end = next((end for end in ends if "\ufffd" not in decode(ids[begin:end])), begin + 1)
        yield decode(ids[begin:end]), begin, end
        begin = end


def _shown(text: str) -> str:
    return text.translate(PICTURES) or END
