"""The coloured text: nothing of the text is lost or becomes markup, colours follow the gains, and dark text stays legible on them."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from gammalm.analysis.token_text import END, colour, coloured_text
from gammalm.analysis.tokens import symmetric_gain

BYTES = [b"", b"<b>", b" &amp;", b"\n\tx", "é".encode()[:1], "é".encode()[1:], b'"', b"\x00", *("漢".encode()[i : i + 1] for i in range(3))]


def decode(ids):
    return b"".join(BYTES[i] for i in ids).decode("utf-8", errors="replace")


class Reader(HTMLParser):
    """Text of the page after its legend, and (text, style, title) of each coloured piece."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.pieces, self.all = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert tag in ("div", "span"), f"markup out of the text: {tag}"
        self.tags.append(dict(attrs))

    def handle_endtag(self, tag):
        self.tags.pop()

    def handle_data(self, data):
        if self.tags:
            self.all.append(data)
            if "title" in self.tags[-1]:
                self.pieces.append((data, self.tags[-1]["style"], self.tags[-1]["title"]))


def read(ids, small, standard):
    return Reader(coloured_text(ids, np.array(small, np.float32), np.array(standard, np.float32), decode))


def test_the_text_is_all_there_and_is_no_markup():
    ids = [1, 2, 3, 6, 0, 7, 1]
    found = read(ids, [1.0] * 6, [1.5] * 6)
    assert [piece[0] for piece in found.pieces] == [" &amp;", "\n\tx", '"', END, "\u2400", "<b>"]
    assert "<b>" in found.all  # the first token, uncoloured


def test_a_character_of_several_tokens_is_one_piece_with_the_loss_of_all():
    found = read([0, 4, 5, 8, 9, 10, 6], [1.0, 0.5, 1.0, 0.2, 0.1, 3.0], [1.0, 1.5, 1.0, 0.2, 0.1, 2.0])
    assert [piece[0] for piece in found.pieces] == ["é", "漢", '"']
    assert "loss 1.500 small, 2.500 standard" in found.pieces[0][2]
    assert f"gain {symmetric_gain(1.5, 2.5):+.3f}" in found.pieces[0][2]
    assert colour(symmetric_gain(3.0, 2.0)) in found.pieces[2][1]


def test_half_a_character_is_shown_for_what_it_is():
    assert [piece[0] for piece in read([1, 4, 1, 10], [1.0] * 3, [1.0] * 3).pieces] == ["\ufffd", "<b>", "\ufffd"]


def luminance(hexadecimal):
    """Relative luminance of #rrggbb as WCAG 2 defines it."""
    channels = [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_follow_the_gain_and_stay_legible():
    assert colour(0.0) == "#ffffff"
    for sign in (-1, 1):
        shades = [luminance(colour(sign * gain)) for gain in (0, 0.2, 0.5, 1, 2)]
        assert shades[:4] == sorted(shades[:4], reverse=True) and shades[3] == shades[4]
        assert (shades[-1] + 0.05) / (luminance("#111111") + 0.05) > 7
    better, worse = colour(0.5), colour(-0.5)
    assert int(better[5:], 16) > int(better[1:3], 16) and int(worse[5:], 16) < int(worse[1:3], 16)  # blue, and orange


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 tokens need 2 losses"):
        coloured_text([1, 2, 3], [1.0], [1.0], decode)


def test_nothing_is_loaded_from_elsewhere():
    assert not re.search(r"https?:|src=|<link|<script", coloured_text([1, 2], [1.0], [2.0], decode))
