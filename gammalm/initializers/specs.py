"""What a model declares of one parameter, so that an initializer can be chosen and its fans computed without guessing from the rank.

Axes are logical names: layers (stacking, always axis 0), vocab, positions, embed, heads, kv_heads, head_dim, rank (of a latent), ffn,
experts (copies of a matrix), routes (a router's outputs), scalar (one number for all channels). Shapes follow the repository's legend:
L layers, V vocabulary, D embed, H heads, G kv heads, K head size, F ffn width, E experts.
"""

import dataclasses
import math

from gammalm.errors import ConfigError

ROLES = ("embed", "position", "head", "qk", "vo", "ffn", "gate", "router", "norm", "sink", "bias")
NEVER_FANS = ("layers", "experts")  # copies of a matrix, not connections into a unit


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and fan axes of one parameter.

    `fan_in` and `fan_out` name the axes whose sizes multiply to the fans: q (L,D,H,K) has fan_in=('embed',), fan_out=('heads','head_dim');
    out (L,H,K,D) has fan_in=('heads','head_dim'). Both are empty for norm gains, biases and logits of sinks. `residual_out` marks a matrix
    that writes into the residual stream (attn/out, ffn/down): what depth scaling divides by √(2L). `first_layer` is the number that the
    stack's first layer has in the model, where other stacks come before it.
    Raises ConfigError when the axes do not describe the shape. Source: science 1, [R] for the declared axes.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: tuple[str, ...]
    fan_out: tuple[str, ...]
    role: str
    residual_out: bool = False
    first_layer: int = 0

    def __post_init__(self):
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise ConfigError(f"ParamSpec: axes {self.axes} must name each of the {len(self.shape)} dimensions of shape {self.shape} once.")
        if self.role not in ROLES:
            raise ConfigError(f"ParamSpec: role {self.role!r} is none of {', '.join(ROLES)}.")
        if "layers" in self.axes[1:]:
            raise ConfigError(f"ParamSpec: layers are stacked on axis 0, not as in {self.axes}.")
        for axis in self.fan_in + self.fan_out:
            if axis not in self.axes:
                raise ConfigError(f"ParamSpec: fan axis {axis!r} is none of the axes {self.axes}.")
            if axis in NEVER_FANS:
                raise ConfigError(f"ParamSpec: axis {axis!r} counts copies of a matrix and is never a fan.")
        if set(self.fan_in) & set(self.fan_out):
            raise ConfigError(f"ParamSpec: an axis is either fan-in {self.fan_in} or fan-out {self.fan_out}, not both.")

    @property
    def layers(self) -> int:
        """Layers stacked on axis 0; 0 for a parameter that exists once."""
        return self.shape[0] if self.axes[:1] == ("layers",) else 0

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer's parameter."""
        return self.shape[1:] if self.layers else self.shape

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Axes of one layer's parameter."""
        return self.axes[1:] if self.layers else self.axes

    def fans(self) -> tuple[int | None, int | None]:
        """(fan_in, fan_out) as numbers; None where no axis is declared (norm gains, logits of sinks)."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in names) if names else None for names in (self.fan_in, self.fan_out))
