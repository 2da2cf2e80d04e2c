"""Seed intervals, paired differences, best rates and gaps against SciPy's own tests and direct NumPy arithmetic."""

import itertools

import numpy as np
import pytest
from scipy import stats

from gammalm.experiments import statistics
from gammalm.experiments.statistics import best_rate, best_rates, estimate, gamma_pair, gap_contrasts, gaps, headline, minimum, paired


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(3.0, 0.1, n)
    result = stats.ttest_1samp(values, 0.0)
    low, high = result.confidence_interval(0.95)
    found = estimate(values)
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high), rel=1e-10)
    assert found.n == n


def test_interval_holds_the_truth_19_times_in_20():
    rng = np.random.default_rng(0)
    draws = rng.normal(1.0, 0.3, (2000, 3))
    held = np.mean([e.low <= 1.0 <= e.high for e in map(estimate, draws)])
    assert held == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / 2000))


def test_one_seed_has_no_interval_and_none_no_estimate():
    one = estimate([2.5])
    assert (one.mean, one.low, one.high, one.n, one.sign) == (2.5, None, None, 1, None)
    assert estimate([]) is None


def test_sign_says_whether_zero_is_excluded():
    assert estimate([-0.3, -0.31, -0.32]).sign == -1
    assert estimate([0.3, 0.31, 0.32]).sign == 1
    assert estimate([-0.3, 0.31, 0.1]).sign == 0


def test_paired_is_scipys_paired_test_over_common_seeds():
    rng = np.random.default_rng(3)
    first = {seed: float(v) for seed, v in enumerate(rng.normal(3, 0.2, 6))}
    second = {seed: first[seed] - 0.05 + float(rng.normal(0, 0.01)) for seed in (5, 1, 2, 4)} | {9: 77.0}
    common = [1, 2, 4, 5]
    result = stats.ttest_rel([second[s] for s in common], [first[s] for s in common])
    low, high = result.confidence_interval(0.95)
    found = paired(first, second)
    assert (found.n, found.mean) == (4, pytest.approx(np.mean([second[s] - first[s] for s in common])))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
    assert paired({0: 1.0}, {1: 2.0}) is None


@pytest.mark.parametrize(
    ("losses", "planned", "rate", "edge", "missing"),
    [
        ([3.0, 2.0, 2.5], (), 0.01, "", ()),
        ([2.0, 2.5, 3.0], (), 0.003, "lowest", ()),
        ([3.0, 2.5, 2.0], (0.003, 0.01, 0.03, 0.1), 0.03, "highest", (0.1,)),
    ],
)
def test_best_rate_notes_an_edge_and_what_is_missing(losses, planned, rate, edge, missing):
    by_rate = dict(zip((0.003, 0.01, 0.03), ({0: v, 1: v + 0.1} for v in losses), strict=True))
    best = best_rate(by_rate, planned)
    assert (best.rate, best.edge, best.missing, best.uneven) == (rate, edge, missing, False)
    assert best.estimate.mean == pytest.approx(min(losses) + 0.05)


def test_best_rate_of_one_rate_of_uneven_seeds_and_of_none():
    assert best_rate({0.01: {0: 1.0}}).edge == "only"
    assert best_rate({0.01: {0: 1.0}, 0.03: {0: 1.1, 1: 1.2}}).uneven
    assert best_rate({}) is None


def test_gamma_pair():
    assert gamma_pair([1.0, 0.75, 0.5, 1.25]) == (0.5, 1.0)
    assert gamma_pair([0.75, 1.5]) == (0.75, 1.5)
    assert gamma_pair([1.0, 1.0]) is None


def made_up():
    """Losses of 2 arms × 2 γ's × 2 rates × 4 seeds, and the array [arm, γ, rate, seed] they come from."""
    values = np.random.default_rng(7).normal(3.0, 0.05, (2, 2, 2, 4))
    arms, gammas, rates = ("plain", "adjusted"), (0.5, 1.0), (0.01, 0.03)
    table = {
        (arms[a], gammas[g], rates[r]): {seed: float(v) for seed, v in enumerate(values[a, g, r])}
        for a, g, r in itertools.product(range(2), repeat=3)
    }
    return table, values


ARMS = {"plain": ("", "plain"), "adjusted": ("", "adjusted")}


def test_gaps_and_their_contrasts_against_numpy():
    table, values = made_up()
    best = best_rates(table, {})
    found = gaps(table, best)
    assert [(d.group, d.rate) for d in found] == [(arm, rate) for arm in ("plain", "adjusted") for rate in (0.01, 0.03, None)]
    chosen = values.mean(axis=3).argmin(axis=2)  # [arm, γ] -> rate
    tuned = np.take_along_axis(values, chosen[:, :, None, None], axis=2)[:, :, 0]
    expected = np.concatenate([values[:, 1] - values[:, 0], (tuned[:, 1] - tuned[:, 0])[:, None]], axis=1)  # [arm, rate or best, seed]
    for difference, seeds in zip(found, expected.reshape(6, 4), strict=True):
        assert list(difference.by_seed.values()) == pytest.approx(list(seeds))
        low, high = stats.ttest_1samp(seeds, 0).confidence_interval(0.95)
        assert (difference.estimate.low, difference.estimate.high) == pytest.approx((low, high), rel=1e-9)
    contrasts = gap_contrasts(found, ARMS)
    assert [(c.first, c.second, c.rate) for c in contrasts] == [("plain", "adjusted", rate) for rate in (0.01, 0.03, None)]
    for contrast, seeds in zip(contrasts, expected[1] - expected[0], strict=True):
        assert contrast.estimate.mean == pytest.approx(seeds.mean())
        assert list(contrast.by_seed.values()) == pytest.approx(list(seeds))


def test_arm_differences_against_numpy():
    table, values = made_up()
    found = statistics.arm_differences(table, best_rates(table, {}), ARMS)
    assert [(d.group, d.rate) for d in found] == [(f"γ={g}", rate) for g in ("0.5", "1") for rate in (0.01, 0.03, None)]
    for gamma, rate in itertools.product(range(2), range(2)):
        difference = found[3 * gamma + rate]
        assert difference.estimate.mean == pytest.approx((values[1, gamma, rate] - values[0, gamma, rate]).mean())


def test_only_arms_of_one_size_are_compared():
    table = {(f"{size} · {arm}", 1.0, 0.01): {0: 3.0} for size in ("125m", "350m") for arm in ("plain", "adjusted")}
    arms = {f"{size} · {arm}": (size, arm) for size in ("125m", "350m") for arm in ("plain", "adjusted")}
    found = statistics.arm_differences(table, best_rates(table, {}), arms)
    assert [(d.group, d.first, d.second) for d in found] == [(f"{size} · γ=1", "plain", "adjusted") for size in ("125m", "350m")]


def test_one_rate_is_not_reported_twice_as_fixed_and_best():
    table = {("plain", gamma, 0.01): {0: 3.0 - gamma} for gamma in (0.5, 1.0)}
    found = gaps(table, best_rates(table, {}))
    assert [(d.rate, d.estimate.mean) for d in found] == [(0.01, -0.5)]
    assert headline(found) == found


def test_partial_tables_compare_only_what_is_there():
    table, _ = made_up()
    del table["plain", 1.0, 0.01], table["adjusted", 1.0, 0.01], table["adjusted", 1.0, 0.03]
    found = gaps(table, best_rates(table, {}))
    assert [(d.group, d.rate) for d in found] == [("plain", 0.03), ("plain", None)]
    assert headline(found) == found[1:]
    assert gaps({}, {}) == []


def test_minimum_is_the_vertex_of_the_parabola():
    """Exact for a parabola on uneven places; NumPy's parabola through the three lowest neighbours otherwise; an end is an end."""
    places = (0.5, 0.7, 1.0, 1.4)
    exact = minimum({x: {s: 3 + (x - 0.93) ** 2 + 0.1 * s for s in range(3)} for x in places})
    assert (exact.at, exact.low, exact.high) == pytest.approx((0.93, 0.93, 0.93)) and (exact.n, exact.edge, exact.beyond) == (3, "", 0.0)
    curve = {0.5: 3.0, 0.7: 2.8, 1.0: 2.9, 1.4: 2.7 + 0.15}
    a, b, _ = np.polyfit((0.5, 0.7, 1.0), (3.0, 2.8, 2.9), 2)
    assert minimum({x: {0: y} for x, y in curve.items()}).at == pytest.approx(-b / (2 * a))
    falling = minimum({x: {s: 3 - x + 0.01 * s for s in range(4)} for x in places})
    assert (falling.at, falling.low, falling.high, falling.edge, falling.beyond) == (1.4, 1.4, 1.4, "highest", 1.0)
    rising = minimum({x: {0: 3 + x} for x in places})
    assert (rising.at, rising.low, rising.n, rising.edge) == (0.5, None, 1, "lowest")
    assert minimum({0.5: {0: 1.0}, 1.0: {0: 1.0}}) is None and minimum({x: {i: 1.0} for i, x in enumerate(places)}) is None
    assert minimum({x: {0: 3.0, 1: 3.0} for x in places}).at == 0.5, "a tie goes to the first"


def test_the_interval_of_the_minimum_covers_it():
    """Noise of five or ten seeds around a parabola: about 95 % of the intervals hold the truth, and they shrink with the noise."""
    rng, places = np.random.default_rng(0), (0.5, 0.75, 1.0, 1.25, 1.5)

    def found(noise, seeds=10):
        return minimum({x: dict(enumerate(3 + (x - 0.9) ** 2 + noise * rng.normal(size=seeds))) for x in places}, resamples=200)

    for seeds in (5, 10):
        trials = [found(0.02, seeds) for _ in range(150)]
        assert 0.9 <= sum(one.low <= 0.9 <= one.high for one in trials) / len(trials) <= 0.99
    width = [np.mean([one.high - one.low for one in of]) for of in ([found(0.005) for _ in range(20)], trials)]
    assert 3 < width[1] / width[0] < 5
    assert np.mean([found(1.0).beyond for _ in range(10)]) > 0.025
