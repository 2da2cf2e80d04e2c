"""γ-initialization and the other schemes, each a function `(key, shape, dtype)` like those of `jax.nn.initializers`.

Every scheme is σ times a draw of unit variance, made in fp32 and cast last. σ comes from the fans alone (`Initializer.std`), which is
what the rule table prints; so the table and the drawn weights have one source. Same key, same draw: two γ differ by a constant factor.
Shapes: any; by default axis −2 is the input and axis −1 the output (Flax and Haiku kernels). Other axes multiply both fans, as a
convolution's window does, unless they are named in `batch_axis`.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gammalm.errors import ConfigError

Axes = int | Sequence[int]
MODES = ("fan_in", "fan_out", "fan_avg")


@dataclasses.dataclass(frozen=True)
class Draw:
    """A distribution of unit variance: normal (cut at ±`truncate` standard deviations unless 0), uniform, orthogonal; or constant."""

    distribution: str
    truncate: float = 0.0
    value: float = 0.0

    def sample(self, key: jax.Array, shape: tuple[int, ...], batch_dims: Sequence[int], out_dims: Sequence[int]) -> jax.Array:
        """fp32 array of `shape`. The dimensions matter to orthogonal alone: `out_dims` are columns, one matrix for each of `batch_dims`."""
        if self.distribution == "constant":
            return jnp.full(shape, self.value, jnp.float32)
        if self.distribution == "uniform":
            return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) * math.sqrt(3)
        if self.distribution == "orthogonal":
            return _orthogonal(key, shape, batch_dims, out_dims)
        if not self.truncate:
            return jax.random.normal(key, shape, jnp.float32)
        return jax.random.truncated_normal(key, -self.truncate, self.truncate, shape, jnp.float32) / truncated_std(self.truncate)


def _orthogonal(key: jax.Array, shape: tuple[int, ...], batch_dims: Sequence[int], out_dims: Sequence[int]) -> jax.Array:
    """Haar-distributed matrices times √max(rows, columns), which makes the mean square of an entry 1."""
    row_dims = [i for i in range(len(shape)) if i not in batch_dims and i not in out_dims]
    order = [*batch_dims, *row_dims, *out_dims]
    rows, columns = (math.prod(shape[i] for i in dims) for dims in (row_dims, out_dims))
    matrices = jax.random.orthogonal(key, rows, tuple(shape[i] for i in batch_dims), jnp.float32, columns)
    unit = matrices.reshape([shape[i] for i in order]) * math.sqrt(max(rows, columns))
    return jnp.transpose(unit, [order.index(i) for i in range(len(shape))])


@dataclasses.dataclass(frozen=True)
class Initializer:
    """A scheme: `init(key, shape, dtype)` draws it, `init.std(fan_in, fan_out)` is its standard deviation.

    `text` is how a rule would write it. `gamma` and `base` are set where σ = base^(−γ). `divide_outputs`: the scheme includes a division
    by √(2L) of matrices that write into the residual stream, which a rule table applies.
    """

    text: str
    draw: Draw
    std: Callable[[int | None, int | None], float]
    in_axis: Axes = -2
    out_axis: Axes = -1
    batch_axis: Axes = ()
    gamma: float | None = None
    base: float | None = None
    divide_outputs: bool = False

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype=None) -> jax.Array:
        """Weights of `shape` in `dtype` (fp32 unless given). Raises ConfigError where the shape has no fan and the scheme needs one."""
        shape = tuple(int(size) for size in shape)
        dtype = jnp.float32 if dtype is None else dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ConfigError(f"{self.text}: weights are real numbers, not {jnp.dtype(dtype).name}.")
        fan_in, fan_out, out_dims, batch_dims = self._matrix(shape)
        std = self.std(fan_in, fan_out)
        if self.draw.distribution == "constant":
            return self.draw.sample(key, shape, (), ()).astype(dtype)
        return (self.draw.sample(key, shape, batch_dims, out_dims) * std).astype(dtype)

    def fans(self, shape: Sequence[int]) -> tuple[int | None, int | None]:
        """(fan-in, fan-out) of weights of `shape`; None for a vector. Raises ConfigError where the axes do not describe the shape."""
        return self._matrix(tuple(shape))[:2]

    def _matrix(self, shape: tuple[int, ...]) -> tuple[int | None, int | None, tuple[int, ...], tuple[int, ...]]:
        """(fan-in, fan-out, dimensions of the output, dimensions that count copies)."""
        if len(shape) < 2:
            return None, None, (), ()
        in_dims, out_dims, batch_dims = (self._dims(axes, shape) for axes in (self.in_axis, self.out_axis, self.batch_axis))
        if len({*in_dims, *out_dims, *batch_dims}) < len(in_dims) + len(out_dims) + len(batch_dims):
            raise ConfigError(f"{self.text}: in_axis, out_axis and batch_axis overlap on shape {shape}.")
        # math.prod of the rest is what jax.nn.initializers calls the receptive field: it counts in both fans.
        per_matrix = math.prod(size for i, size in enumerate(shape) if i not in batch_dims)
        fan_in = per_matrix // max(1, math.prod(shape[i] for i in out_dims))
        fan_out = per_matrix // max(1, math.prod(shape[i] for i in in_dims))
        if self.draw.distribution == "orthogonal":  # a matrix of (window × inputs) rows and just the outputs as columns
            fan_out = math.prod(shape[i] for i in out_dims)
        return fan_in, fan_out, out_dims, batch_dims

    def _dims(self, axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not all(-len(shape) <= axis < len(shape) for axis in axes):
            raise ConfigError(f"{self.text}: axis {axes} is outside shape {shape}.")
        return tuple(axis % len(shape) for axis in axes)


def number(name: str, value, minimum: float = 0.0, above: bool = False) -> float:
    """`value` as a float, at least (or `above`) `minimum`; ConfigError for text, booleans, NaN, infinities and values below."""
    bound = f"a finite number {'above' if above else 'of at least'} {minimum:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ConfigError(f"{name} must be {bound}, not {value!r}.")
    if value < minimum or (above and value == minimum):
        raise ConfigError(f"{name} must be {bound}, not {value!r}.")
    return float(value)


def truncated_std(truncate: float) -> float:
    """Standard deviation of N(0, 1) cut at ±truncate: .8796 at 2. What a truncated scheme divides by (science 1)."""
    density = math.exp(-(truncate**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * truncate * density / math.erf(truncate / math.sqrt(2)))


def equivalent_gamma(std: float, fan_in: float) -> float:
    """The γ whose fan_in^(−γ) is `std`: ln(1/std)/ln(fan_in), .589 for std .02 at 768 (science 1).

    Raises ConfigError for std ≤ 0 or fan_in ≤ 1.
    """
    return -math.log(number("std", std, above=True)) / math.log(number("fan_in", fan_in, 1, above=True))


def _fan(kind: str, value: int | None) -> int:
    if not value:
        raise ConfigError(f"this initializer needs a {kind}, and the parameter has none (a vector, or an axis of size 0).")
    return value


def _text(name: str, **arguments) -> str:
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if value not in (None, 0.0))
    return f"{name}({shown})" if shown else name


def _normal(truncate: float | None) -> Draw:
    return Draw("normal", truncate=number("truncate", truncate or 0.0))


def gamma_normal(gamma: float = 1.0, *, in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = (), base: float | None = None,
                 truncate: float | None = None) -> Initializer:
    """W ~ N(0, σ²), σ = d_in^(−γ): the exponent of the standard deviation, ½ the usual scale and 1 the proposed default (science 1 [S]).

    `base` replaces the fan-in in σ; `truncate` cuts at that many standard deviations and keeps σ. An embedding table (V, D) takes
    in_axis=-1, out_axis=-2. Raises ConfigError for a γ that is negative or no number.
    """
    gamma = number("gamma", gamma)
    if base is not None:
        number("base", base, above=True)
    text = f"gamma_normal(gamma={gamma!r}" + "".join(f", {k}={v!r}" for k, v in (("base", base), ("truncate", truncate)) if v) + ")"
    return Initializer(text, _normal(truncate), lambda fan_in, _: (base or _fan("fan-in", fan_in)) ** -gamma, in_axis, out_axis,
                       batch_axis, gamma=gamma, base=base)


def _variance_scaling(text: str, draw: Draw, scale: float, mode: str, axes: dict) -> Initializer:
    """σ = √(scale / fan), fan being the fan-in, the fan-out or their mean."""
    if mode not in MODES:
        raise ConfigError(f"{text}: mode {mode!r} is none of {', '.join(MODES)}.")

    def std(fan_in, fan_out):
        if mode == "fan_avg":
            return math.sqrt(2 * scale / (_fan("fan-in", fan_in) + _fan("fan-out", fan_out)))
        return math.sqrt(scale / _fan(mode.replace("_", "-"), fan_in if mode == "fan_in" else fan_out))

    return Initializer(text, draw, std, **axes)


def lecun_normal(mode: str = "fan_in", *, truncate: float | None = None, **axes) -> Initializer:
    """Variance 1/fan (LeCun et al. 1998). `axes`: in_axis, out_axis, batch_axis, as everywhere below."""
    return _variance_scaling(_text("lecun_normal", mode=mode, truncate=truncate), _normal(truncate), 1.0, mode, axes)


def lecun_uniform(mode: str = "fan_in", **axes) -> Initializer:
    """Variance 1/fan, uniform on ±√(3/fan)."""
    return _variance_scaling(_text("lecun_uniform", mode=mode), Draw("uniform"), 1.0, mode, axes)


def xavier_normal(mode: str = "fan_avg", *, truncate: float | None = None, **axes) -> Initializer:
    """Variance 2/(fan_in + fan_out) (Glorot & Bengio 2010)."""
    return _variance_scaling(_text("xavier_normal", mode=mode, truncate=truncate), _normal(truncate), 1.0, mode, axes)


def xavier_uniform(mode: str = "fan_avg", **axes) -> Initializer:
    """Variance 2/(fan_in + fan_out), uniform."""
    return _variance_scaling(_text("xavier_uniform", mode=mode), Draw("uniform"), 1.0, mode, axes)


def kaiming_normal(mode: str = "fan_in", *, truncate: float | None = None, **axes) -> Initializer:
    """Variance 2/fan, which a ReLU halves (He et al. 2015)."""
    return _variance_scaling(_text("kaiming_normal", mode=mode, truncate=truncate), _normal(truncate), 2.0, mode, axes)


def kaiming_uniform(mode: str = "fan_in", **axes) -> Initializer:
    """Variance 2/fan, uniform."""
    return _variance_scaling(_text("kaiming_uniform", mode=mode), Draw("uniform"), 2.0, mode, axes)


def torch_linear(**axes) -> Initializer:
    """torch.nn.Linear's default: uniform on ±1/√fan_in, that is variance 1/(3·fan_in)."""
    return _variance_scaling("torch_linear", Draw("uniform"), 1 / 3, "fan_in", axes)


def fixed_std(std: float = 0.02, *, truncate: float | None = None, **axes) -> Initializer:
    """N(0, std²) whatever the shape."""
    std = number("std", std, above=True)
    return Initializer(_text("fixed_std", std=std, truncate=truncate), _normal(truncate), lambda *_: std, **axes)


def gpt2(*, n_layers: int | None = None, truncate: float | None = None, **axes) -> Initializer:
    """N(0, .02²), and .02/√(2L) for matrices that write into the residual stream (Radford et al. 2019).

    A rule table knows which these are; by hand, give `n_layers` for those.
    """
    std = 0.02 / math.sqrt(2 * number("n_layers", n_layers, 1)) if n_layers is not None else 0.02
    return Initializer(_text("gpt2", n_layers=n_layers, truncate=truncate), _normal(truncate), lambda *_: std,
                       divide_outputs=n_layers is None, **axes)


def orthogonal(scale: float = 1.0, **axes) -> Initializer:
    """scale × a matrix with orthonormal rows or columns, whichever are fewer (Saxe et al. 2014): σ = scale/√max(fans)."""
    scale = number("scale", scale, above=True)
    return Initializer(_text("orthogonal", scale=scale), Draw("orthogonal"),
                       lambda fan_in, fan_out: scale / math.sqrt(max(_fan("fan-in", fan_in), _fan("fan-out", fan_out))), **axes)


def zeros(**axes) -> Initializer:
    """All 0."""
    return Initializer("zeros", Draw("constant", value=0.0), lambda *_: 0.0, **axes)


def ones(**axes) -> Initializer:
    """All 1: norm gains."""
    return Initializer("ones", Draw("constant", value=1.0), lambda *_: 0.0, **axes)


# The names that jax.nn.initializers uses.
glorot_normal, glorot_uniform, he_normal, he_uniform, normal = xavier_normal, xavier_uniform, kaiming_normal, kaiming_uniform, fixed_std

ZOO = {
    f.__name__: f
    for f in (gamma_normal, lecun_normal, lecun_uniform, xavier_normal, xavier_uniform, kaiming_normal, kaiming_uniform,
              torch_linear, fixed_std, gpt2, orthogonal, zeros, ones)
} | {"glorot_normal": xavier_normal, "glorot_uniform": xavier_uniform, "he_normal": kaiming_normal, "he_uniform": kaiming_uniform,
     "normal": fixed_std}
