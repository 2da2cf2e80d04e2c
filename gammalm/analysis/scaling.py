"""Scaling fits: loss against size for two initializations, and how many times larger the standard model must be to match the small one.

    L_standard(N) = E + A_standard N^-alpha,  L_small(N) = E + A_small N^-alpha     one E and alpha for both
    gain = (A_standard / A_small)^(1/alpha) - 1                                     .79: as good as a standard model 79 % larger

Huber loss on log L, many starts. Beside it, without any law, the gain at each size by interpolation of the standard losses in ln N.
Source: science 8, [R]; the fit is that of Hoffmann et al. 2022 (arXiv:2203.15556), approach 3. Shapes: n sizes, R resamples.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares, minimize
from scipy.stats import norm
from scipy.stats import t as student_t

from gammalm.errors import ConfigError

HUBER = 1e-3  # residual of log L from which on it counts linearly
LARGEST_ALPHA = 4.0
RESAMPLES, LEVEL = 300, 0.95
Losses = Mapping[float, Mapping[int, float]]  # size N -> seed -> loss in nats


@dataclasses.dataclass(frozen=True)
class Law:
    """E (nats), alpha, and A of both arms for N in the units given; `gain` of effective size. `residual`: largest |log L - log fit|."""

    E: float
    alpha: float
    A_standard: float
    A_small: float
    gain: float
    residual: float


@dataclasses.dataclass(frozen=True)
class SizeGain:
    """At size N: mean losses, `difference` small - standard, and the gain by interpolation; intervals are (low, high) or None.

    `extrapolated`: the standard model that matches lies outside the sizes trained, on the line through the two nearest ones. `gain` is
    None where there is no such model: the standard loss does not fall towards it.
    """

    N: float
    seeds: int
    standard: float
    small: float
    difference: float
    difference_interval: tuple[float, float] | None
    gain: float | None
    gain_interval: tuple[float, float] | None
    extrapolated: bool


@dataclasses.dataclass(frozen=True)
class Scaling:
    """`law`: the joint fit, None where there are fewer than three sizes. `intervals`: of its E, alpha and gain by name, {} without seeds
    to resample. `notes`: whatever limits what the figures say, in sentences."""

    law: Law | None
    intervals: Mapping[str, tuple[float, float]]
    sizes: tuple[SizeGain, ...]
    notes: tuple[str, ...]


def fit_scaling(standard: Losses, small: Losses, resamples: int = RESAMPLES, seed: int = 0) -> Scaling:
    """The joint law and the gain at each size, with bootstrap intervals at 95 % over the seeds.

    At each size the seeds that both arms have are resampled, the same ones for both, independently of the other sizes; deviations from
    the mean are widened (`widening`). With one seed at any size there are no intervals. Raises ConfigError with fewer than two sizes that
    both arms have, and for losses or sizes not above zero.
    """
    sizes = sorted(set(standard) & set(small))
    notes = [f"Size {N:g} is left out: only one arm has it." for N in sorted(set(standard) ^ set(small))]
    seeds = {N: sorted(set(standard[N]) & set(small[N])) for N in sizes}
    notes += [f"Size {N:g} is left out: the arms share no seed there." for N in sizes if not seeds[N]]
    sizes = [N for N in sizes if seeds[N]]
    notes += [f"Size {N:g}: seeds that only one arm has are left out." for N in sizes if set(standard[N]) ^ set(small[N])]
    if len(sizes) < 2:
        raise ConfigError(f"A scaling fit needs at least two sizes with both initializations and has {len(sizes)}. Train more sizes.")
    runs = [np.array([[arm[N][s] for s in seeds[N]] for arm in (standard, small)]) for N in sizes]
    N_n, means_2n = np.array(sizes, np.float64), np.stack([losses.mean(1) for losses in runs], 1)
    if not (np.all(N_n > 0) and np.all(np.isfinite(means_2n)) and np.all(means_2n > 0)):
        raise ConfigError("A scaling fit takes sizes and losses that are finite and above zero.")

    law = _fit(N_n, means_2n, _starts(means_2n)) if len(sizes) > 2 else None
    drawn_R2n = _resampled(runs, resamples, seed) if min(map(len, seeds.values())) > 1 else None
    by_size, intervals = [], {}
    for i, N in enumerate(sizes):
        gain, extrapolated = _matching(N_n, means_2n, i)
        between = gains = None
        if drawn_R2n is not None:
            between = _interval(drawn_R2n[:, 1, i] - drawn_R2n[:, 0, i])
            gains = _interval([_matching(N_n, means, i)[0] for means in drawn_R2n])
        a, b = map(float, means_2n[:, i])
        by_size.append(SizeGain(float(N), len(seeds[N]), a, b, b - a, between, gain, gains, extrapolated))
    if law is not None and drawn_R2n is not None:
        laws = [_fit(N_n, np.maximum(means, 1e-6), [(law.E, law.alpha)]) for means in drawn_R2n]
        found = {name: _interval([getattr(one, name) for one in laws]) for name in ("E", "alpha", "gain")}
        intervals = {name: interval for name, interval in found.items() if interval is not None}
    notes += _limits(law, intervals, by_size, drawn_R2n is not None, float(means_2n.min()))
    return Scaling(law, intervals, tuple(by_size), tuple(notes))


def _starts(means_2n) -> list[tuple[float, float]]:
    """(E, alpha) to begin from; the amplitudes follow."""
    return [(share * means_2n.min(), alpha) for share in (0.0, 0.4, 0.7, 0.9, 0.98) for alpha in (0.05, 0.15, 0.35, 0.8)]


def _fit(N_n, means_2n, starts) -> Law:
    """The best of the fits from all starts. Sizes are taken in units of their geometric mean, so the units given do not matter."""
    log_N = np.log(N_n)
    x_n = log_N - log_N.mean()
    y_2n = np.log(means_2n)
    top = means_2n.min() * (1 - 1e-6)

    def log_fit(theta):
        E, alpha, *a = theta
        with np.errstate(divide="ignore"):  # E may be 0
            return np.logaddexp(np.log(E), np.array(a)[:, None] - alpha * x_n)

    def residuals(theta):
        return (log_fit(theta) - y_2n).ravel()

    def jacobian(theta):
        fit_2n = log_fit(theta)
        by_a = np.exp(np.array(theta[2:])[:, None] - theta[1] * x_n - fit_2n)
        zeros = np.zeros_like(x_n)
        columns = (np.exp(-fit_2n), -x_n * by_a, np.stack([by_a[0], zeros]), np.stack([zeros, by_a[1]]))
        return np.stack([column.ravel() for column in columns], 1)

    def huber(theta):
        r = residuals(theta) / HUBER
        far = np.abs(r) > 1
        return np.sum(np.where(far, np.abs(r) - 0.5, 0.5 * r * r)), (np.clip(r, -1, 1) / HUBER) @ jacobian(theta)

    # Least squares first, which converges from anywhere; its Huber option stops short where most residuals count linearly.
    lowest, highest = [0, 0, -50, -50], [top, LARGEST_ALPHA, 50, 50]  # amplitudes are logarithms of nats
    best = None
    for E, alpha in starts:
        E, alpha = min(E, 0.999 * top), min(max(alpha, 1e-6), LARGEST_ALPHA)
        start = [E, alpha, *np.clip(np.mean(np.log(means_2n - E) + alpha * x_n, 1), -49, 49)]
        near = least_squares(residuals, start, jacobian, (lowest, highest), x_scale="jac").x
        bounds = list(zip(lowest, highest, strict=True))
        found = minimize(huber, near, jac=True, method="SLSQP", bounds=bounds, options={"maxiter": 300, "ftol": 1e-12})
        if best is None or found.fun < best.fun:
            best = found
    E, alpha, a_standard, a_small = map(float, best.x)
    with np.errstate(over="ignore", divide="ignore"):
        gain = float(np.expm1(np.float64(a_standard - a_small) / alpha))
        A_standard, A_small = (float(np.exp(a + alpha * log_N.mean())) for a in (a_standard, a_small))
    return Law(E, alpha, A_standard, A_small, gain, float(np.abs(residuals(best.x)).max()))


def _matching(N_n, means_2n, i: int) -> tuple[float | None, bool]:
    """(N' / N - 1, whether N' is extrapolated) for the standard model of size N' whose loss is that of the small one of size i.

    Standard losses are joined by straight lines in ln N; the match is the one nearest to size i on the side where it must lie.
    """
    x_n, standard_n, wanted = np.log(N_n), means_2n[0], means_2n[1, i]
    last = len(x_n) - 1
    up = wanted <= standard_n[i]
    for j in range(i, last) if up else range(i - 1, -1, -1):
        low, high = sorted((standard_n[j], standard_n[j + 1]))
        if low <= wanted <= high and low < high:
            return _on_line(x_n, standard_n, wanted, j, x_n[i]), False
    j = last - 1 if up else 0
    if standard_n[j] <= standard_n[j + 1]:
        return None, True
    return _on_line(x_n, standard_n, wanted, j, x_n[i]), True


def _on_line(x_n, y_n, wanted, j: int, at: float) -> float:
    """exp(x - at) - 1 where the line through points j and j+1 has the value `wanted`."""
    x = x_n[j] + (wanted - y_n[j]) * (x_n[j + 1] - x_n[j]) / (y_n[j + 1] - y_n[j])
    with np.errstate(over="ignore"):
        return float(np.expm1(x - at))


def widening(seeds: int) -> float:
    """By how much the deviations of resampled means of two seeds or more are too small, as a factor.

    The spread of n values is too small by sqrt(n/(n-1)), and where it is estimated from n the interval of a mean is Student's, not the
    normal one. With both, the middle 95 % of resampled means are close to their t-interval: at five seeds they would cover 87 % without.
    """
    tail = 0.5 + LEVEL / 2
    return float(np.sqrt(seeds / (seeds - 1)) * student_t.ppf(tail, seeds - 1) / norm.ppf(tail))


def _resampled(runs, resamples: int, seed: int) -> np.ndarray:
    """Mean losses [R, 2, n] of resampled seeds, their deviations widened; one draw of seeds for both arms of a size."""
    rng = np.random.default_rng(seed)
    drawn = []
    for losses in runs:
        seeds = losses.shape[1]
        picked = rng.integers(0, seeds, (resamples, seeds))
        mean = losses.mean(1)
        drawn.append(mean + widening(seeds) * (losses[:, picked].mean(2).T - mean))
    return np.stack(drawn, 2)


def _interval(values) -> tuple[float, float] | None:
    """The middle 95 % of resampled values; None where some of them do not exist or are not finite."""
    values = np.array([np.nan if v is None else v for v in values], np.float64)
    if not np.all(np.isfinite(values)):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _limits(law, intervals, by_size, resampled: bool, lowest: float) -> list[str]:
    """What limits the result, in sentences."""
    notes = []
    if law is None:
        notes.append("Two sizes give four losses for the law's four unknowns: no fit, only interpolation.")
    else:
        if len(by_size) == 3:
            notes.append("Three sizes leave two losses to spare: the law is hardly tested by them.")
        if law.E < 1e-3 * lowest:
            notes.append("E is at its bound 0: these sizes do not show the floor, and alpha is that of a plain power law.")
        if law.E > 0.999 * lowest:
            notes.append("E is at the lowest loss: the curve is flat at these sizes, and alpha and the gain say little.")
        if law.alpha < 1e-3:
            notes.append("Alpha is at its bound 0: the loss hardly depends on size, and the gain says nothing.")
        if law.alpha > 0.999 * LARGEST_ALPHA:
            notes.append(f"Alpha is at its bound {LARGEST_ALPHA:g}: the loss falls at the first sizes alone, and the gain says little.")
        if law.gain < 0:
            notes.append("The gain is negative: the small initialization does worse, as a standard model that is smaller.")
        if resampled and "gain" not in intervals:
            notes.append("The gain has no interval: some resamples have no finite one, so it is not resolved.")
        elif resampled and intervals["gain"][0] <= 0 <= intervals["gain"][1]:
            notes.append("The interval of the gain holds 0: its sign is not resolved.")
    if not resampled:
        notes.append("No intervals: there is a size with one seed.")
    elif min(one.seeds for one in by_size) < 3:
        notes.append("There is a size with two seeds: intervals leave the truth out more often than 5 % of the time.")
    if outside := [f"{one.N:g}" for one in by_size if one.extrapolated and one.gain is not None]:
        notes.append(f"At size {', '.join(outside)} the interpolated gain is an extrapolation: the match is outside the sizes trained.")
    if nowhere := [f"{one.N:g}" for one in by_size if one.gain is None]:
        notes.append(f"At size {', '.join(nowhere)} no standard model matches: its loss does not fall with size there.")
    return notes
