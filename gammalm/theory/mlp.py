"""Variance through a fully connected net and through a stack of pre-norm branches, forward and backward, and the stds that keep it.

Forward: Var z_l = n_in·σ²·E[x²_{l−1}] (+ the variance of the biases), E[x_l²] = c_φ·Var z_l. Backward: Var δ_{l−1} = n_out·σ²·d_φ·Var δ_l.
Weights are independent of variance σ², of any distribution; for ReLU without biases the means hold at any width, otherwise as the layers
widen. c_φ and d_φ are taken at the variance that arrives. Float64 NumPy. Source: science 10; He et al. 2015 (arXiv:1502.01852).
Legend: L matrices, n_0 … n_L widths, z what a matrix gives, x what enters it, δ the gradient of z; [...] the shape of the inputs' moments.
"""

import dataclasses
import itertools
import math

import numpy as np

from gammalm.errors import ConfigError
from gammalm.theory.activations import ACTIVATIONS, c_phi, d_phi

DIRECTIONS = ("forward", "backward", "compromise")


@dataclasses.dataclass(frozen=True)
class Mlp:
    """Matrices n_0 × n_1, n_1 × n_2, … with the activation between them and not behind the last.

    stds: of each matrix. bias_stds: of each layer's biases; empty: biases are 0. ConfigError for numbers that do not fit.
    """

    widths: tuple[int, ...]
    activation: str
    stds: tuple[float, ...]
    bias_stds: tuple[float, ...] = ()

    def __post_init__(self):
        _check(self.widths, self.activation)
        for name, given in (("stds", self.stds), ("bias_stds", self.bias_stds)):
            if len(given) != len(self.widths) - 1 and (name == "stds" or given):
                raise ConfigError(f"theory: {len(self.widths) - 1} matrices need as many {name}, not {len(given)}.")


@dataclasses.dataclass(frozen=True)
class Signals:
    """Mean squares in a net before training, [L, ...]. entering: of x_{l−1}, which enters matrix l. variance: of z_l.

    gradient: of the loss's derivative by z_l, where its mean square at the outputs is 1. input_gradient [...]: by the input.
    """

    entering: np.ndarray
    variance: np.ndarray
    gradient: np.ndarray
    input_gradient: np.ndarray

    @property
    def weight_gradient(self) -> np.ndarray:
        """Mean square of one example's derivative by an entry of matrix l, in the same unit."""
        return self.entering * self.gradient

    @property
    def forward_gain(self) -> np.ndarray:
        """Mean square of the outputs over that of the inputs, [...]."""
        return self.variance[-1] / self.entering[0]


def signals(net: Mlp, second_moment=1.0) -> Signals:
    """What passes through `net`. second_moment: mean square of an input's entries, one number or one for each input, of any shape.

    Inputs of different size pass differently (but for ReLU without biases): give each its own, then average the results.
    """
    x, entering, variance = np.asarray(second_moment, np.float64), [], []
    for i, (fan_in, std) in enumerate(zip(net.widths, net.stds, strict=False)):
        entering.append(x)
        variance.append(fan_in * std**2 * x + (net.bias_stds[i] ** 2 if net.bias_stds else 0.0))
        x = c_phi(net.activation, variance[-1]) * variance[-1]
    gradient = [np.ones_like(x)]
    for fan_out, std, z in zip(net.widths[:1:-1], net.stds[:0:-1], variance[-2::-1], strict=True):
        gradient.append(fan_out * std**2 * d_phi(net.activation, z) * gradient[-1])
    below = net.widths[1] * net.stds[0] ** 2 * gradient[-1]  # nothing bends between the input and the first matrix
    return Signals(np.stack(entering), np.stack(variance), np.stack(gradient[::-1]), below)


def critical_stds(widths, activation: str, direction: str = "forward", second_moment=1.0, signal=1.0) -> tuple[float, ...]:
    """One std per matrix, so that every z has variance `signal`, or every δ has the same variance, or in between.

    forward: σ² = 1/(c_φ·n_in), of the first matrix signal/(n_0·second_moment). backward: 1/(d_φ·n_out), of the first 1/n_1. compromise: 2
    over the sum of the two denominators, which is Glorot's for linear and Kaiming's fan_avg for ReLU. c_φ and d_φ are those at the
    variance that these stds bring about. ConfigError for an unknown direction or activation.
    """
    _check(widths, activation, direction)
    z, stds = None, []
    for fan_in, fan_out in itertools.pairwise(widths):
        if z is None:
            arriving, forward, backward = second_moment, fan_in * second_moment / signal, fan_out
        else:
            c, d = c_phi(activation, z), d_phi(activation, z)
            arriving, forward, backward = c * z, fan_in * c * z / signal, fan_out * d
        inverse = {"forward": forward, "backward": backward, "compromise": (forward + backward) / 2}[direction]
        stds.append(float(inverse**-0.5))
        z = fan_in * arriving / inverse
    return tuple(stds)


def critical_std(widths, activation: str, direction: str = "forward", second_moment: float = 1.0, gain: float = 1.0) -> float:
    """The one std of all matrices at which the whole net multiplies mean squares by `gain`: outputs over inputs (forward), gradients by the
    inputs over gradients by the outputs (backward), or the product of both (compromise). Raises ConfigError.
    """
    _check(widths, activation, direction)

    def above(std: float) -> bool:
        found = signals(Mlp(tuple(widths), activation, (std,) * (len(widths) - 1)), second_moment)
        gains = {"forward": found.forward_gain, "backward": found.input_gradient}
        return (gains[direction] if direction in gains else gains["forward"] * gains["backward"]) > gain

    low = high = float(np.mean(widths)) ** -0.5
    while above(low):
        low /= 2
    while not above(high):
        high *= 2
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if above(middle) else (middle, high)
    return middle


def stable_band(widths, activation: str, second_moment: float = 1.0, factor: float = 10.0) -> tuple[float, float] | None:
    """The stds, the same for all matrices, at which the net changes neither signals nor gradients by more than `factor` from end to end.

    In root mean square; (lowest, highest), or None where the two directions leave nothing.
    """
    low, high = (
        [critical_std(widths, activation, direction, second_moment, factor**power) for direction in DIRECTIONS[:2]] for power in (-2, 2)
    )
    return (max(low), min(high)) if max(low) < min(high) else None


@dataclasses.dataclass(frozen=True)
class PreNorm:
    """x ← x + branch(norm(x)), branch after branch, each of them an Mlp from the stream's width to the same; `eps` of every norm."""

    branches: tuple[Mlp, ...]
    eps: float = 0.0

    def __post_init__(self):
        ends = {n for branch in self.branches for n in (branch.widths[0], branch.widths[-1])}
        if len(ends) != 1:
            raise ConfigError(f"theory: branches of a stack begin and end with one width, not {sorted(ends)}.")


@dataclasses.dataclass(frozen=True)
class StackSignals:
    """Mean squares in a stack, for L branches. stream [L+1]: before each branch, and at the end. added [L]: by each branch.

    gradient [L+1]: of the loss's derivative by the stream at these places, 1 at the end.
    """

    stream: np.ndarray
    added: np.ndarray
    gradient: np.ndarray


def stack_signals(stack: PreNorm, second_moment: float = 1.0) -> StackSignals:
    """What passes through a pre-norm stack as its width grows: each branch adds its variance, since its last matrix is independent of the
    stream, and so does its gradient. Norms are RMSNorm, or LayerNorm of a stream without a mean, with gains 1.
    """
    stream, added, gains = [float(second_moment)], [], []
    for branch in stack.branches:
        below = stream[-1] + stack.eps
        found = signals(branch, stream[-1] / below)
        added.append(float(found.variance[-1]))
        gains.append(1 + float(found.input_gradient) / below)
        stream.append(stream[-1] + added[-1])
    gradient = np.cumprod([1.0, *gains[::-1]])[::-1]
    return StackSignals(np.array(stream), np.array(added), gradient)


def _check(widths, activation: str, direction: str = DIRECTIONS[0]) -> None:
    if len(widths) < 2 or min(widths) < 1:
        raise ConfigError(f"theory: widths are those of the input, the hidden layers and the output, each at least 1, not {tuple(widths)}.")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"theory: activation {activation!r} is none of {', '.join(ACTIVATIONS)}.")
    if direction not in DIRECTIONS:
        raise ConfigError(f"theory: direction {direction!r} is none of {', '.join(DIRECTIONS)}.")
