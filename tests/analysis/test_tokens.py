"""Token gains: the formula, buckets and quantiles against NumPy, bins against a naive sort, merging, errors, and bounded memory."""

import tracemalloc

import numpy as np
import pytest

from gammalm.analysis import buckets
from gammalm.analysis.tokens import STEP, TokenGains, document_numbers, measure, symmetric_gain
from gammalm.errors import DataError, TrainingError


def losses(n, seed=0, ties=False):
    """fp32 losses of two models on n tokens, from 1e-6 to some 20 nats, alike but not equal; with `ties`, of a few values only."""
    rng = np.random.default_rng(seed)
    small = rng.gamma(0.6, 3.0, n).astype(np.float32)
    standard = (small * rng.uniform(0.8, 1.3, n)).astype(np.float32)
    if ties:
        return np.round(small), np.round(small)
    return small, standard


def naive_bins(small, standard, bins):
    """Mean gain of equal-count bins of the sorted difficulties, float64; n must be a multiple of `bins`."""
    order = np.argsort((small.astype(np.float64) + standard) / 2, kind="stable")
    p_small, p_standard = np.exp(-small.astype(np.float64)), np.exp(-standard.astype(np.float64))
    gain = 2 * (p_small - p_standard) / (p_small + p_standard)
    return gain[order].reshape(bins, -1).mean(1), (standard.astype(np.float64) - small)[order].reshape(bins, -1).mean(1)


def test_the_gain_is_the_symmetric_change_of_probability():
    p_small, p_standard = np.array([0.9, 0.2, 1e-3, 0.5]), np.array([0.3, 0.2, 0.4, 0.6])
    gain = symmetric_gain(-np.log(p_small), -np.log(p_standard))
    np.testing.assert_allclose(gain, 2 * (p_small - p_standard) / (p_small + p_standard), rtol=1e-12)
    assert symmetric_gain(200.0, 1.0) == -2 and symmetric_gain(1.0, 200.0) == 2  # where the probabilities themselves would underflow


def test_every_number_lies_in_its_bucket_and_buckets_are_narrow():
    low = buckets.edges()
    assert len(low) == buckets.K + 1 and np.all(np.diff(low) > 0)
    rng = np.random.default_rng(1)
    values = np.exp(rng.uniform(np.log(2.0**-20), np.log(64), 20_000)).astype(np.float32)
    values = np.concatenate([values, low[1:-1].astype(np.float32)])
    at = buckets.bucket_of(values)
    assert np.all(low[at] <= values) and np.all(values < low[at + 1])
    assert np.all(np.diff(low)[1:-1] <= 2.0**-10 * low[1:-2])
    beyond = np.array([0.0, -0.0, -1e-7, 1e-9, 64.0, 1e30], np.float32)
    assert buckets.bucket_of(beyond).tolist() == [0, 0, 0, 0, buckets.K - 1, buckets.K - 1]


@pytest.mark.parametrize("n", [1, 7, 10, 1003, 200_000])
@pytest.mark.parametrize("ties", [False, True])
def test_quantiles_are_those_of_a_sort_to_the_stated_tolerance(n, ties):
    values = losses(n, seed=n, ties=ties)[0]
    count = np.bincount(buckets.bucket_of(values), minlength=buckets.K)
    found = buckets.quantiles(count, 10)
    ranks = [max(-(-i * n // 10), 1) for i in range(11)]  # np.quantile's inverted_cdf, in whole numbers: there 0.3 * 10 is above 3
    exact = np.sort(values)[np.array(ranks) - 1]
    np.testing.assert_allclose(found, exact, rtol=2.0**-10, atol=2.0**-20)
    assert np.all(np.diff(found) >= 0)


def test_bins_have_equal_counts_and_the_gains_of_a_naive_sort():
    small, standard = losses(100_000)
    state = TokenGains()
    state.add(small, standard, np.arange(len(small)) // 50)
    found = state.summary()
    gain, nats = naive_bins(small, standard, 10)
    # Only the tokens of the bucket that an edge falls into can be in another bin, about 1e-3 of a bin, and their gains are alike.
    np.testing.assert_allclose([row["gain"] for row in found.by_difficulty], gain, atol=3e-4)
    np.testing.assert_allclose([row["nats"] for row in found.by_difficulty], nats, atol=3e-3)
    assert {row["tokens"] for row in found.by_difficulty} == {10_000}
    all_gains = symmetric_gain(small, standard)
    assert found.gain == pytest.approx(all_gains.mean(), abs=1e-9)
    assert found.nats == pytest.approx((standard.astype(np.float64) - small).mean(), abs=1e-6)
    assert list(found.histogram) == np.histogram(all_gains, np.linspace(-2, 2, round(4 / STEP) + 1))[0].tolist()
    assert found.unchanged == pytest.approx(np.mean(np.abs(all_gains) < 0.1), abs=1e-9)


def test_ties_are_shared_out_in_proportion():
    # 70 % of the tokens have one difficulty, 1 nat, and half of those the gain of one nat: every bin within them shows their mean.
    small = np.array([0.5] * 150 + [0.5] * 350 + [1.0] * 350 + [5.0] * 150, np.float32)
    standard = np.array([0.5] * 150 + [1.5] * 350 + [1.0] * 350 + [5.0] * 150, np.float32)
    for order in (np.arange(1000), np.random.default_rng(2).permutation(1000)):
        state = TokenGains()
        state.add(small[order], standard[order], order)
        nats = [row["nats"] for row in state.summary().by_difficulty]
        np.testing.assert_allclose(nats, [0, 0.25, *[0.5] * 6, 0.25, 0], atol=1e-12)


def test_parts_in_any_order_give_the_same_state(tmp_path):
    small, standard = losses(30_000, seed=3)
    blocks = np.arange(30_000) // 33
    whole = TokenGains()
    whole.add(small, standard, blocks)
    states = []
    for i in range(3):
        state = TokenGains()
        state.add(small[i::3], standard[i::3], blocks[i::3])  # every block is split between the parts
        state.save(tmp_path / f"{i}.npz")
        states.append(TokenGains.load(tmp_path / f"{i}.npz"))
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = TokenGains()
        for i in order:
            merged.merge(states[i])
        for name, array in vars(whole).items():
            assert np.array_equal(array, vars(merged)[name]), name
        assert merged.summary() == whole.summary()


def test_standard_errors_are_those_of_blocks_not_of_tokens():
    # The gain of a token is that of its block: 200 tokens of a block tell no more than one.
    rng = np.random.default_rng(4)
    blocks = np.repeat(np.arange(1000), 200)
    shift = np.repeat(rng.normal(0, 0.3, 1000), 200)
    small = rng.uniform(2, 4, len(blocks))
    state = TokenGains()
    state.add(small, small + shift, blocks)
    found = state.summary()
    by_block = np.array([shift[200 * i] for i in range(1000)])
    assert found.nats_se == pytest.approx(by_block.std(ddof=1) / np.sqrt(1000), rel=0.4)  # 31 degrees of freedom: ±13 % at one sigma
    assert found.groups == 32
    assert all(row["nats_se"] > 0 for row in found.by_difficulty)


def test_one_block_has_no_standard_error():
    state = TokenGains()
    state.add(*losses(100), np.zeros(100, int))
    found = state.summary()
    assert found.gain_se is None and found.by_difficulty[3]["nats_se"] is None and found.groups == 1


def test_faults_are_said(tmp_path):
    state = TokenGains()
    with pytest.raises(DataError, match="no token"):
        state.summary()
    for bad in (np.nan, np.inf):
        with pytest.raises(TrainingError, match="1 losses of the standard model"):
            state.add([1.0, 2.0], [1.0, bad], [0, 0])
    assert state.tokens == 0
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    for name in ("torn.npz", "missing.npz"):
        with pytest.raises(DataError, match=name):
            TokenGains.load(tmp_path / name)


def test_documents_are_numbered_alike_whatever_the_batch():
    rng = np.random.default_rng(5)
    stream = rng.integers(1, 9, 41)  # 1 ends a document
    rows = np.stack([stream[k * 4 : k * 4 + 5] for k in range(10)])
    expected = np.cumsum(stream[:-1] == 1)
    for size in (1, 5, 10):
        number, found = 0, []
        for begin in range(0, 10, size):
            numbers, number = document_numbers({"tokens": rows[begin : begin + size]}, 1, number)
            found.append(numbers.ravel())
        assert np.array_equal(np.concatenate(found), expected)
    packed = {"tokens": np.zeros((2, 6), int), "segments": np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2]])}
    assert document_numbers(packed, 1, 7)[0].tolist() == [[8, 8, 9, 9, 9], [10, 10, 10, 10, 11]]


def test_parts_of_the_batches_add_up_to_all_of_them():
    rng = np.random.default_rng(6)
    weights = (rng.random((7, 3, 8)) < 0.8).astype(np.float32)
    batches = [{"tokens": rng.integers(0, 5, (3, 9)), "weights": w} for w in weights]
    small, standard = (lambda batch, k=k: (batch["tokens"][:, 1:] * k).astype(np.float32) for k in (0.5, 0.7))
    whole = measure(small, standard, batches, eod_id=1)
    assert whole.tokens == weights.sum()
    merged = TokenGains()
    for i in range(2):
        merged.merge(measure(small, standard, batches, 1, part=(i, 2)))
    assert merged.summary() == whole.summary()


def test_four_billion_tokens_are_counted_like_a_million():
    state = TokenGains()
    state.add(*losses(1_000_000), np.arange(1_000_000) // 700)
    first = state.summary()
    for _ in range(12):
        state.merge(state)
    found = state.summary()
    assert found.tokens == 4_096_000_000 == sum(found.histogram)
    for one, many in zip(first.by_difficulty, found.by_difficulty, strict=True):
        for key in ("low", "high", "gain", "nats"):
            assert many[key] == pytest.approx(one[key], rel=1e-9)


@pytest.mark.full
def test_deciles_of_ten_million_tokens_are_exact_to_the_stated_tolerance():
    state, difficulties = TokenGains(), []
    for i in range(10):
        small, standard = losses(1_000_000, seed=i)
        state.add(small, standard, np.arange(i * 1_000_000, (i + 1) * 1_000_000) // 700)
        difficulties.append((standard.astype(np.float64) + small) / 2)
    edges = [row["low"] for row in state.summary().by_difficulty] + [state.summary().by_difficulty[-1]["high"]]
    exact = np.quantile(np.concatenate(difficulties), np.linspace(0, 1, 11))
    np.testing.assert_allclose(edges, exact, rtol=2.0**-10, atol=2.0**-20)


def peak_and_size(millions):
    """Peak of the memory that `millions` of tokens take, half a million at a time, and the size of the state."""
    small, standard = losses(500_000)
    tracemalloc.start()
    state = TokenGains()
    for i in range(2 * millions):
        state.add(small, standard, np.arange(i * 500_000, (i + 1) * 500_000) // 700)
    state.summary()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, sum(array.nbytes for array in vars(state).values())


@pytest.mark.parametrize("few, many", [(1, 3), pytest.param(1, 100, marks=pytest.mark.full)])
def test_memory_is_flat(few, many):
    first, size = peak_and_size(few)
    last, same = peak_and_size(many)
    assert size == same < 22e6
    assert last < 1.02 * first
