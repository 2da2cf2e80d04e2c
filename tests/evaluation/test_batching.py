"""What has to be read to score requests: cut, merged, grouped, in rows of few lengths; held against the plain definition of each."""

import itertools
import random

import numpy as np
import pytest

from gammalm.errors import DataError
from gammalm.evaluation.batching import TOKEN, Request, laid_out, packed, reads_of, row_lengths, trees_of


def tokens_of(read):
    return np.frombuffer(read.tokens, TOKEN).tolist()


def random_requests(seed, count=300, longest=40):
    """Questions with choices after common beginnings, of tokens that need all four bytes."""
    rng = random.Random(seed)
    draw = lambda n: [rng.choice((1, 2, 255, 256, 70_000)) for _ in range(n)]  # noqa: E731
    found = []
    while len(found) < count:
        few_shot = draw(rng.randrange(0, 20))
        for _ in range(rng.randrange(1, 4)):
            question = few_shot + draw(rng.randrange(1, longest))
            found += [Request(question, draw(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 25))]
    return found


@pytest.mark.parametrize("max_length", [7, 25, 1000])
def test_every_request_is_asked_where_its_continuation_begins(max_length):
    requests = random_requests(0)
    reads, cut = reads_of(requests, max_length)
    asked = {}
    for read in reads:
        assert read.asked <= max_length or len(read.asks) == 1
        for index, position, targets in read.asks:
            asked[index] = tokens_of(read)[: position + len(targets)], list(targets)
    assert sorted(asked) == list(range(len(requests)))
    for index, (context, continuation) in enumerate(requests):
        whole = context + continuation
        kept = whole[-max_length - 1 :]  # what the harness's own models read of it
        # Of the sequence, what a causal model has seen when it gives the last target its probability.
        assert asked[index] == (kept[:-1], continuation)
        assert cut[index] == len(whole) - len(kept)
    assert sum(cut) > 0 or max_length == 1000


def test_what_reads_the_same_or_less_is_read_once():
    question = list(range(10))
    requests = [Request(question, [choice]) for choice in (3, 4, 5)]  # the same, but for the choice that nobody reads
    requests += [Request(question, [3, 8]), Request(question[:4], question[4:7])]  # one token more; the beginning of it
    requests.append(Request([9], [3]))
    reads, _ = reads_of(requests, 100)
    assert [tokens_of(read) for read in reads] == [[9], question + [3]]
    assert sorted(ask.index for ask in reads[1].asks) == [0, 1, 2, 3, 4]


def test_a_sequence_is_not_asked_for_more_than_it_may_hold():
    reads, _ = reads_of([Request([1, 2, 3], [choice]) for choice in range(100)], 8)
    assert [read.asked for read in reads] == [8] * 12 + [4]


def test_nor_is_a_row():
    """Sequences that are equal take no tokens of a row beside each other; what is asked of them takes memory."""
    requests = [Request([1, 2, 3], [choice]) for choice in range(100)] + [Request([9], [4, 5])] * 20
    reads, _ = reads_of(requests, 8)
    rows = packed(reads, 16)
    assert sorted(id(read) for row in rows for read in row) == sorted(map(id, reads))
    assert sorted(sum(read.asked for read in row) for row in rows)[-8:] == [16] * 8  # of 140 targets


@pytest.mark.parametrize("request_", [Request([], [1]), Request([1], []), Request([1, 2], [5] * 11)])
def test_what_cannot_be_asked_is_refused(request_):
    with pytest.raises(DataError, match="Request 1 .* 1 to 10,"):
        reads_of([Request([1], [2]), request_], 10)


def seen(until, place):
    """The places that the token at `place` sees of a row, by the definition of `Tree`."""
    return [s for s in range(place + 1) if s == place or until[s] > place]


@pytest.mark.parametrize("length", [60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_sees_its_own_sequence_and_no_other(seed, length):
    reads, _ = reads_of(random_requests(seed, count=150), 60)
    rows = packed(reads, length)
    assert sorted(id(read) for row in rows for read in row) == sorted(map(id, reads))
    for row in rows:
        tokens, until, places = laid_out(row)
        assert 0 < len(tokens) == len(until) <= length
        assert set(np.concatenate(places)) == set(range(len(tokens)))
        for read, place in zip(row, places, strict=True):
            assert tokens[place].tolist() == tokens_of(read)
            assert seen(until, place[-1]) == place.tolist()  # those before it follow: what it sees, they see as far as they are
    held = sum(len(laid_out(row)[0]) for row in rows)
    beginnings = {read.tokens[: 4 * n] for read in reads for n in range(1, len(read) + 1)}
    if length == 200:  # in rows as short as the longest sequence more is read again, and more is free
        assert len(beginnings) <= held < 1.2 * len(beginnings) < 0.5 * sum(map(len, reads))
        assert len(rows) * length < 1.25 * held


def test_a_tree_is_cut_where_little_is_read_again():
    """Between questions, not among the choices of one; and what shares a few tokens alone does not stay together."""
    rng = random.Random(1)
    examples, requests = list(range(40)), []
    for question in range(6):
        asked = [*examples, *(100 + question for _ in range(20))]
        requests += [Request(asked, [200 + choice, 5, 6]) for choice in range(4)]
    requests += [Request([0, 1, *(rng.randrange(300, 400) for _ in range(50))], [7]) for _ in range(3)]
    trees = trees_of(reads_of(requests, 100)[0], 40 + 3 * (20 + 4 * 2))
    assert sorted(len(reads) for _, reads in trees) == [1, 1, 1, 12, 12]
    assert sorted(tokens for tokens, _ in trees) == [52, 52, 52, 40 + 3 * 28, 40 + 3 * 28]


def test_rows_have_few_lengths_and_every_one_is_worth_it():
    lengths = [10] * 100 + [30] * 3 + [500]
    assert row_lengths(lengths, 2048, 10**9) == [512]
    assert row_lengths(lengths, 2048, 2000) == [16, 512]
    assert row_lengths(lengths, 2048, 1000) == [16, 32, 512]  # 24 would hold no more than 16 does
    assert row_lengths(lengths, 500, 2000) == [16, 500]  # no longer than the model reads
    assert row_lengths([17], 2048, 1, multiple=32) == [32]
    assert row_lengths([500], 500, 1, multiple=8) == [504]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_of_lengths_costs_less(seed):
    rng = np.random.default_rng(seed)
    lengths, least = rng.integers(1, 97, 50), int(rng.integers(1, 1500))
    cost = lambda sizes: least * len(sizes) + sum(min(s for s in sizes if s >= n) for n in lengths)  # noqa: E731
    ladder = [16, 24, 32, 48, 64, 96]
    every = [list(some) for n in range(1, 7) for some in itertools.combinations(ladder, n) if some[-1] >= max(lengths)]
    assert cost(row_lengths(lengths, 96, least)) == min(map(cost, every))
