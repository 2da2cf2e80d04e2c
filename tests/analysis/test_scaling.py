"""Scaling fits: planted laws come back, intervals cover, units of size do not matter, and what cannot be said is said."""

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq, minimize

from gammalm.analysis import scaling
from gammalm.analysis.scaling import fit_scaling
from gammalm.errors import ConfigError

N_4 = (1e8, 3e8, 8e8, 1.5e9)


def losses(gain=0.79, E=1.7, alpha=0.3, A=400.0, sizes=N_4, seeds=1, noise=0.0, rng=None):
    """Losses of both arms by size and seed. Half of a seed's noise is common to the two arms, and a size has its own."""
    rng = rng or np.random.default_rng(0)
    standard, small = {}, {}
    for N in sizes:
        shared = rng.normal(0, noise, seeds)
        for arm, amplitude in ((standard, A), (small, A * (1 + gain) ** -alpha)):
            own = rng.normal(0, noise, seeds)
            arm[N] = {s: E + amplitude * N**-alpha + shared[s] + own[s] for s in range(seeds)}
    return standard, small


@pytest.mark.parametrize("truth", [{}, {"gain": -0.3}, {"E": 0.5, "alpha": 0.12, "A": 30.0, "gain": 0.2}, {"gain": 0.0}])
def test_a_planted_law_comes_back(truth):
    law = fit_scaling(*losses(**truth)).law
    planted = {"gain": 0.79, "E": 1.7, "alpha": 0.3, "A": 400.0} | truth
    assert (law.E, law.alpha, law.A_standard) == pytest.approx((planted["E"], planted["alpha"], planted["A"]), rel=1e-5)
    assert law.gain == pytest.approx(planted["gain"], abs=1e-5)
    assert law.A_small == pytest.approx(planted["A"] * (1 + planted["gain"]) ** -planted["alpha"], rel=1e-5)
    assert law.residual < 1e-6


def test_a_planted_law_comes_back_from_noisy_losses():
    found = fit_scaling(*losses(seeds=5, noise=0.002), resamples=60)
    for name, planted in (("E", 1.7), ("alpha", 0.3), ("gain", 0.79)):
        low, high = found.intervals[name]
        assert low < planted < high and low < getattr(found.law, name) < high
    assert found.intervals["gain"][1] - found.intervals["gain"][0] < 0.2


def objective(theta, N, means):
    """The Huber loss of log L written out, for theta = E, alpha, ln A_standard and ln A_small at the middle size."""
    x = np.log(N) - np.log(N).mean()
    fit = np.log(theta[0] + np.exp(np.array(theta[2:])[:, None] - theta[1] * x))
    r = np.abs(fit - np.log(means))
    return np.where(r <= 1e-3, 0.5 * r**2, 1e-3 * (r - 0.5e-3)).sum() / 1e-6


def test_no_other_optimizer_finds_a_better_fit():
    for seed in range(3):
        standard, small = losses(noise=0.01, rng=np.random.default_rng(seed))
        law = fit_scaling(standard, small).law
        N = np.array(N_4)
        means = np.array([[arm[n][0] for n in N_4] for arm in (standard, small)])
        middle = np.log(N).mean()
        ours = [law.E, law.alpha, *(np.log(A) - law.alpha * middle for A in (law.A_standard, law.A_small))]
        best = objective(ours, N, means)
        for start in (ours, [1.7, 0.3, -0.6, -0.8], [1.0, 0.15, 0.3, 0.2]):
            found = minimize(objective, start, (N, means), method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-9, "fatol": 1e-10})
            assert best <= found.fun + 1e-4


def test_one_outlier_does_not_bend_the_fit():
    sizes = tuple(np.geomspace(1e7, 1e10, 8))
    standard, small = losses(sizes=sizes)
    small[sizes[3]] = {0: small[sizes[3]][0] * 1.03}
    assert fit_scaling(standard, small).law.gain == pytest.approx(0.79, abs=0.01)  # least squares is off by .046


def test_units_of_size_do_not_matter():
    one = fit_scaling(*losses(seeds=3, noise=0.003), resamples=20)
    standard, small = losses(seeds=3, noise=0.003)
    other = fit_scaling({N / 1e6: v for N, v in standard.items()}, {N / 1e6: v for N, v in small.items()}, resamples=20)
    for name in ("E", "alpha", "gain"):
        assert getattr(one.law, name) == pytest.approx(getattr(other.law, name), rel=1e-5)
        assert one.intervals[name] == pytest.approx(other.intervals[name], rel=1e-4)
    assert other.law.A_standard == pytest.approx(one.law.A_standard * 1e6**-one.law.alpha, rel=1e-4)
    assert [s.gain for s in one.sizes] == pytest.approx([s.gain for s in other.sizes], rel=1e-9)


def test_interpolation_gives_the_size_that_matches():
    sizes = tuple(np.geomspace(1e8, 1e10, 60))
    found = fit_scaling(*losses(sizes=sizes))
    for one in found.sizes[:40:13]:
        size = brentq(lambda N, one=one: 1.7 + 400 * N**-0.3 - one.small, one.N / 2, one.N * 5)
        assert one.gain == pytest.approx(size / one.N - 1, abs=2e-3) and not one.extrapolated
        assert one.difference == pytest.approx(one.small - one.standard)
    assert [one.extrapolated for one in found.sizes] == [N * 1.79 > sizes[-1] for N in sizes]
    assert "extrapolation" in found.notes[-1]


def test_interpolation_goes_down_where_small_is_worse():
    found = fit_scaling(*losses(sizes=tuple(np.geomspace(1e8, 1e10, 60)), gain=-0.4))
    assert [one.gain for one in found.sizes[20:]] == pytest.approx([-0.4] * 40, abs=2e-3)
    assert found.sizes[0].extrapolated and not found.sizes[20].extrapolated
    assert any("negative" in note for note in found.notes)


def test_intervals_come_from_resampled_pairs():
    # Noise that both arms share moves both alike: the difference has none of it.
    standard, small = losses()
    shift = {0: -0.1, 1: 0.0, 2: 0.1}
    found = fit_scaling(*({N: {s: v[0] + d for s, d in shift.items()} for N, v in arm.items()} for arm in (standard, small)), resamples=30)
    for one in found.sizes:
        assert one.difference_interval == pytest.approx((one.difference, one.difference), abs=1e-12)
    low, high = found.intervals["E"]
    assert high - low > 0.05


def test_the_spread_of_resampled_means_is_that_of_students_interval():
    rng = np.random.default_rng(1)
    for seeds in (2, 3, 8):
        runs = [rng.normal(3, 0.1, (2, seeds))]
        drawn = scaling._resampled(runs, 20_000, 0)
        expected = runs[0].std(1, ddof=1) / np.sqrt(seeds) * stats.t.ppf(0.975, seeds - 1) / 1.959964
        np.testing.assert_allclose(drawn.std(0)[:, 0], expected, rtol=0.03)
        np.testing.assert_allclose(drawn.mean(0)[:, 0], runs[0].mean(1), atol=0.02 * expected.max())


def test_what_limits_the_result_is_said():
    def said(*arms, **how):
        return " ".join(fit_scaling(*arms, **how).notes)

    two = fit_scaling(*losses(sizes=N_4[:2]))
    assert two.law is None and "Two sizes" in " ".join(two.notes) and two.sizes[0].gain > 0.5
    assert "hardly tested" in said(*losses(sizes=N_4[:3]))
    assert "bound 0" in said(*losses(E=0.0))
    assert "one seed" in said(*losses())
    assert "two seeds" in said(*losses(seeds=2, noise=0.001), resamples=10)
    assert "two seeds" not in said(*losses(seeds=3, noise=0.001), resamples=10)
    assert "not resolved" in said(*losses(gain=0.0, seeds=3, noise=0.01), resamples=30)
    flat = {N: {0: 3.0} for N in N_4}
    found = fit_scaling(flat, {N: {0: 2.9} for N in N_4})
    assert all(one.gain is None for one in found.sizes) and "no standard model matches" in " ".join(found.notes)
    assert "bound" in " ".join(found.notes) or "flat" in " ".join(found.notes)
    standard, small = losses(seeds=2)
    del small[N_4[0]], small[N_4[1]][1]
    notes = said(standard, small)
    assert "1e+08 is left out" in notes and "3e+08: seeds" in notes


def test_what_cannot_be_fitted_is_refused():
    standard, small = losses()
    with pytest.raises(ConfigError, match="has 1"):
        fit_scaling({N_4[0]: standard[N_4[0]]}, small)
    with pytest.raises(ConfigError, match="finite"):
        fit_scaling({N: {0: np.inf} for N in N_4}, small)


@pytest.mark.full
def test_intervals_cover():
    rng = np.random.default_rng(7)
    found = [fit_scaling(*losses(seeds=5, noise=0.004, rng=rng), resamples=60) for _ in range(30)]
    inside = sum(one.intervals["gain"][0] <= 0.79 <= one.intervals["gain"][1] for one in found)
    assert 26 <= inside <= 30  # .95 expected
    widths = np.mean([one.intervals["gain"][1] - one.intervals["gain"][0] for one in found])
    spread = np.std([one.law.gain for one in found])
    assert 3 < widths / spread < 8  # 5.5 for five seeds of a normal distribution: not wide enough to cover anything
