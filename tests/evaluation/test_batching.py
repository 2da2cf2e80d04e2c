"""What has to be read to score requests: cut, merged, grouped, in rows of few lengths; held against the plain definition of each."""

import itertools
import random

import numpy as np
import pytest

from gammalm.errors import DataError
from gammalm.evaluation.batching import FANS, TOKEN, Request, fan_of, groups_of, reads_of, row_lengths


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


@pytest.mark.parametrize("request_", [Request([], [1]), Request([1], []), Request([1, 2], [5] * 11)])
def test_what_cannot_be_asked_is_refused(request_):
    with pytest.raises(DataError, match="Request 1 .* 1 to 10,"):
        reads_of([Request([1], [2]), request_], 10)


@pytest.mark.parametrize("seed", range(3))
def test_groups_share_what_they_say_and_lose_nothing(seed):
    reads, _ = reads_of(random_requests(seed), 60)
    groups = groups_of(reads)
    assert sorted(id(read) for group in groups for read in group.reads) == sorted(map(id, reads))
    for group in groups:
        assert 1 <= len(group.reads) <= FANS[-1] and (group.shared > 0) == (len(group.reads) > 1)
        assert len({tuple(tokens_of(read)[: group.shared]) for read in group.reads}) == 1
        assert all(group.shared <= ask.position for read in group.reads for ask in read.asks)
        assert group.end == max(len(read) for read in group.reads) - group.shared
    before = sum(map(len, reads))
    assert sum((len(group.reads) - 1) * group.shared for group in groups) > before / 2


def test_groups_are_the_questions_of_choices_and_what_is_alone_does_not_spoil_them():
    """A lone request that shares a few tokens comes before a question in order, and a longer beginning holds all together."""
    rng = random.Random(1)
    instruction = [7] * 3
    requests, expected = [], []
    for _ in range(20):
        question = instruction + [rng.randrange(100) for _ in range(30)]
        expected.append(tuple(question))
        requests += [Request(question, [200 + choice, 5, 6]) for choice in range(4)]
        requests.append(Request(instruction + [rng.randrange(100) for _ in range(9)], [1]))
    groups = groups_of(reads_of(requests, 100)[0])
    shared = [group for group in groups if group.shared]
    assert {(tuple(tokens_of(group.reads[0])[: group.shared]), len(group.reads)) for group in shared} == {(q[:-1], 4) for q in expected}
    assert sum(len(group.reads) for group in groups if not group.shared) == 20


def test_a_beginning_of_very_many_is_dealt_out_evenly():
    requests = [Request([5] * 50, [number, 1]) for number in range(33)]
    assert [len(group.reads) for group in groups_of(reads_of(requests, 100)[0])] == [11, 11, 11]


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


def test_fans_hold_their_rows():
    assert [fan_of(rows) for rows in (1, 2, 3, 4, 5, 9, 16)] == [2, 2, 4, 4, 6, 12, 16]
