"""What the recursion needs to know of a decoder: sizes, ε, and the standard deviation of every matrix, whatever initializer it is from.

Standard deviations are dicts by the names that the parameters have below a layer (attn/q, ffn/gate, ffn/experts/down, …; docs/models.md),
so a table of initializers gives them as it stands. A value is one number, or one per layer of its stack.
"""

import dataclasses
import math
from collections.abc import Mapping

from gammalm.errors import ConfigError

GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}  # feed-forward layers of three matrices -> the activation of their gate
NORMS = ("pre", "sandwich", "post")


@dataclasses.dataclass(frozen=True)
class Heads:
    """Ordinary or grouped-query attention; groups share keys and values, which no expectation here depends on."""

    heads: int
    size: int
    qk_norm: bool = False

    def matrices(self) -> dict[str, int]:
        """Name -> fan-in, 0 for d."""
        return {"q": 0, "k": 0, "v": 0, "out": self.heads * self.size}


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): sizes as `config.model.mla` names them; q_rank 0 reads queries from the input."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def matrices(self) -> dict[str, int]:
        """Name -> fan-in, 0 for d."""
        queries = {"q_down": 0, "q_up": self.q_rank} if self.q_rank else {"q": 0}
        return queries | {"kv_down": 0, "k_rope": 0, "k_up": self.kv_rank, "v_up": self.kv_rank, "out": self.heads * self.v_dim}


@dataclasses.dataclass(frozen=True)
class Dense:
    """down(silu(gate x) · up x) of this width; "geglu": with GELU; any other `activation`: down(φ(up x)), φ of activations.py."""

    width: int
    activation: str = "swiglu"

    def matrices(self) -> dict[str, int]:
        """Name -> fan-in, 0 for d."""
        return ({"gate": 0} if self.activation in GATED else {}) | {"up": 0, "down": self.width}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """top_k of n_experts SwiGLUs of width d_expert by a linear router, and n_shared that every token gets, as one SwiGLU."""

    n_experts: int
    top_k: int
    n_shared: int
    d_expert: int
    score: str = "sigmoid"
    route_scale: float = 1.0

    def matrices(self) -> dict[str, int]:
        """Name -> fan-in, 0 for d."""
        names = {"router": 0} | {f"experts/{name}": fan for name, fan in Dense(self.d_expert).matrices().items()}
        return names | ({f"shared/{name}": fan for name, fan in self.shared.matrices().items()} if self.shared else {})

    @property
    def shared(self) -> Dense | None:
        """The shared experts as one."""
        return Dense(self.n_shared * self.d_expert) if self.n_shared else None


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after another; `gate` is none | headwise | elementwise.

    norms: before each branch (pre), before and behind it (sandwich: Gemma 2), or behind it alone (post: OLMo 2); the stream itself passes
    by. parallel: both branches read the same stream (GPT-NeoX).
    """

    depth: int
    attention: Heads | Latent
    ffn: Dense | Mixture
    gate: str = "none"
    norms: str = "pre"
    parallel: bool = False

    def matrices(self) -> dict[str, int]:
        """Name -> fan-in of every matrix of a layer, 0 for d."""
        gate = {} if self.gate == "none" else {"attn/gate": 0}
        attention = {f"attn/{name}": fan for name, fan in self.attention.matrices().items()}
        return attention | gate | {f"ffn/{name}": fan for name, fan in self.ffn.matrices().items()}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder before its first step. `stds` has one dict per stack.

    embed and head: std of the token table and of the output matrix; head None: the table is the output matrix too. ConfigError where a
    std is missing or unknown.
    """

    d_model: int
    vocab_size: int
    stacks: tuple[Stack, ...]
    stds: tuple[Mapping[str, object], ...]
    embed: float
    head: float | None
    eps: float
    rope_theta: float = 10_000.0
    softcap: float = 0.0

    def __post_init__(self):
        if len(self.stds) != len(self.stacks):
            raise ConfigError(f"theory: {len(self.stacks)} stacks need as many dicts of stds, not {len(self.stds)}.")
        for stack, stds in zip(self.stacks, self.stds, strict=True):
            if stack.gate not in ("none", "headwise", "elementwise"):
                raise ConfigError(f"theory: gate={stack.gate!r} is none of none, headwise, elementwise.")
            if stack.norms not in NORMS or stack.norms != self.stacks[0].norms:
                raise ConfigError(f"theory: norms={stack.norms!r} is none of {', '.join(NORMS)}, the same in all stacks.")
            if isinstance(stack.ffn, Mixture) and stack.ffn.score not in ("sigmoid", "softmax"):
                raise ConfigError(f"theory: score={stack.ffn.score!r} is none of sigmoid, softmax.")
            if set(stds) != set(stack.matrices()):
                wrong = ", ".join(sorted(set(stds) ^ set(stack.matrices())))
                raise ConfigError(f"theory: stds must name each matrix of a layer once; missing or unknown: {wrong}.")


def gamma_decoder(*, d_model: int, vocab_size: int, n_layers: int, attention: Heads | Latent, ffn: Dense | Mixture, gamma: float,
                  eps: float, gate: str = "none", tied: bool = True, depth_scale: bool = False, embed_gamma: float | None = None,
                  gammas: Mapping[str, float] | None = None, **rest) -> Decoder:  # fmt: skip
    """A decoder of equal layers whose matrices have std fan_in^(−γ), the table and the head d^(−embed_gamma) (γ where None).

    gammas: exponents by the name of a matrix, for those that differ ("ffn/down", or "ffn" for all below). depth_scale divides what writes
    into the stream by √(2L). rest: rope_theta, softcap. Source: science 1, convention `fan_in`.
    """
    stack = Stack(n_layers, attention, ffn, gate)
    gammas = dict(gammas or {})

    def std(name: str, fan_in: int) -> float:
        prefixes = [name.rsplit("/", n)[0] for n in range(name.count("/") + 1)]  # the whole name first
        exponent = next((gammas[prefix] for prefix in prefixes if prefix in gammas), gamma)
        divide = math.sqrt(2 * n_layers) if depth_scale and name.rpartition("/")[2] in ("out", "down") else 1.0
        return (fan_in or d_model) ** -exponent / divide

    known = {name.rsplit("/", n)[0] for name in stack.matrices() for n in range(name.count("/") + 1)}
    if set(gammas) - known:
        raise ConfigError(f"theory: gammas names {', '.join(sorted(set(gammas) - known))}; known: {', '.join(sorted(known))}.")
    outside = d_model ** -(gamma if embed_gamma is None else embed_gamma)
    stds = {name: std(name, fan_in) for name, fan_in in stack.matrices().items()}
    return Decoder(d_model, vocab_size, (stack,), (stds,), outside, None if tied else outside, eps, **rest)
