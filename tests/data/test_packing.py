"""Packing and mixing against plain references: every token once, no document predicts the next, shares exact at every prefix."""

import random

import numpy as np
import pytest

from gammalm.data.mixture import PERIOD, Pattern, group_weights
from gammalm.data.packing import concat_windows, pack_documents, pieces
from gammalm.errors import DataError


def documents(seed, n, longest):
    rng = random.Random(seed)
    lengths = np.array([rng.choice([1, 2, 3, rng.randrange(1, longest)]) for _ in range(n)], np.int64)
    return np.cumsum(lengths) - lengths, lengths


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_every_token_but_the_first_of_its_document_is_predicted_once(seq_len):
    starts, lengths = documents(seq_len, 400, 3 * seq_len + 5)
    index = pack_documents(starts, lengths, seq_len)
    predicted = []
    for w in range(len(index)):
        sizes = index.length[index.first[w] : index.first[w + 1]]
        assert 0 < sizes.sum() <= seq_len + 1
        for p in range(index.first[w], index.first[w + 1]):
            predicted += range(index.start[p] + 1, index.start[p] + index.length[p])
    expected = [t for s, n in zip(starts, lengths, strict=True) for t in range(s + 1, s + n)]  # the naive list
    assert sorted(predicted) == expected


def test_pieces_stay_within_their_document():
    starts, lengths = documents(3, 200, 100)
    piece_start, piece_length = pieces(starts, lengths, 16)
    owner = np.searchsorted(starts, piece_start, side="right") - 1
    assert (piece_start >= starts[owner]).all() and (piece_start + piece_length <= starts[owner] + lengths[owner]).all()
    assert (piece_length >= 2).all() and (piece_length <= 17).all()


def test_fill_is_measured_and_close_to_the_best_possible():
    starts, lengths = documents(5, 5000, 300)
    index = pack_documents(starts, lengths, 128)
    held = sum(int(index.length[index.first[w] : index.first[w + 1]].sum()) for w in range(len(index)))
    assert index.fill == pytest.approx(held / (len(index) * 129))
    assert index.fill > 0.98


def test_a_piece_takes_the_fullest_window_with_room():
    # capacity 10: 7 | 6 | then 4 fits only beside 6, 3 beside 7, and 2 opens a new one
    starts, lengths = np.array([0, 7, 13, 17, 20]), np.array([7, 6, 4, 3, 2])
    index = pack_documents(starts, lengths, 9)
    windows = [sorted(index.length[index.first[w] : index.first[w + 1]].tolist()) for w in range(len(index))]
    assert sorted(windows) == [[2], [3, 7], [4, 6]]


def test_no_documents_no_windows():
    assert len(pack_documents(np.zeros(0, np.int64), np.zeros(0, np.int64), 8)) == 0
    assert [concat_windows(n, 10) for n in (1, 10, 11, 100)] == [1, 1, 2, 10]


TOKENS = {"web-en": 300, "web-zh": 100, "code-en": 500, "math-en": 100}


def test_named_mixtures():
    natural = group_weights("natural", TOKENS)
    assert natural == pytest.approx({"web-en": 0.3, "web-zh": 0.1, "code-en": 0.5, "math-en": 0.1})
    dense = group_weights("paper_dense", TOKENS)  # 13.5 : 4.5 : 9 over what is there
    assert dense == pytest.approx({"web-en": 13.5 / 27 * 0.75, "web-zh": 13.5 / 27 * 0.25, "code-en": 4.5 / 27, "math-en": 9 / 27})


def test_weights_by_domain_and_language():
    assert group_weights("web:3,math-en:1", TOKENS) == pytest.approx({"web-en": 0.5625, "web-zh": 0.1875, "math-en": 0.25})
    assert group_weights("web-zh:1, code:0", TOKENS) == {"web-zh": 1.0}


@pytest.mark.parametrize(
    "mixture, told",
    [("wiki:1", "no 'wiki' but web, code, math"), ("web", "NAME:WEIGHT"), ("web:-1", "NAME:WEIGHT"), ("web:nan", "NAME:WEIGHT")]
    + [("web:0", "weight 0"), ("web:1,web:2", "twice"), ("web:inf", "NAME:WEIGHT")],
)
def test_mixtures_that_cannot_be(mixture, told):
    with pytest.raises(DataError, match=told):
        group_weights(mixture, TOKENS)


def test_a_named_mixture_without_any_of_its_domains_says_what_to_use():
    with pytest.raises(DataError, match="natural"):
        group_weights("paper_dense", {"text-und": 5})


def test_pattern_keeps_the_shares_at_every_prefix_and_counts_each_group_up():
    shares = {"a": 0.61, "b": 0.3, "c": 0.0899, "rare": 0.0001}
    pattern = Pattern(shares)
    owner, nth = pattern(np.arange(3 * PERIOD))
    for k, (group, share) in enumerate(shares.items()):
        mine = owner == k
        assert nth[mine].tolist() == list(range(mine.sum()))  # the naive count
        gap = np.abs(np.cumsum(mine) - share * np.arange(1, 3 * PERIOD + 1))
        assert gap.max() < 6, group  # sequences away from the exact share, at any point of three periods
    for n in (0, 1, 17, PERIOD, 2 * PERIOD + 99):
        assert pattern.seen(n) == {g: int((owner[:n] == k).sum()) for k, g in enumerate(shares)}
