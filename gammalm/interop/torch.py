"""γ-initialization of any PyTorch module: every weight gets σ = d_in^(−γ), d_in being what its layer sums over.

The file imports torch and the standard library and nothing else: where gammalm cannot be installed (it needs JAX), copy this one file
under another name. Usage and limits: docs/recipes.md.
Shapes: Linear (out, in), Embedding (V, D), Conv1D of transformers (in, out), convolutions (out, in, *window), stacks of E experts
(E, out, in) or (E, in, out).
"""

import math
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

DRAWN, ZERO, KEPT, UNKNOWN = "drawn", "zero", "kept", "unknown"  # what happens to a parameter

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, *filter(None, [getattr(nn, "RMSNorm", None)]))
SIZES = (("in_features", "out_features"), ("input_size", "output_size"), ("nx", "nf"))  # (nx, nf): Conv1D of transformers
OUT_IN_STACKS = ("_EFD", "_EDF", "_EGD")  # torchtitan writes the axes of its experts into their names
CHUNK = 2**24  # numbers drawn at once in fp32 (more where one row has more): what a draw takes beside the parameters


@dataclass(frozen=True)
class Row:
    """What `gamma_init_` did with one parameter.

    `action`: drawn from N(0, std²); zero (biases); kept (gains and shifts of norms, what `fan_ins` says); unknown, which is kept too.
    `layer` is the class that holds it. `fan_in` and `std` are None unless it is drawn. `tied`: the other names of the same parameter.
    """

    name: str
    shape: tuple[int, ...]
    action: str
    layer: str
    fan_in: int | None = None
    gamma: float | None = None
    std: float | None = None
    tied: tuple[str, ...] = ()


@torch.no_grad()
def gamma_init_(
    module: nn.Module,
    gamma: float = 1.0,
    *,
    gammas: Mapping[str, float] | None = None,
    fan_ins: Mapping[str, int | None] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Row]:
    """Draws the weights of `module` in place from N(0, σ²), σ = fan_in^(−γ); biases become 0, norms stay. Returns one row per parameter.

    Known are Linear, Embedding, convolutions, MultiheadAttention, recurrent layers and what derives from them; Conv1D, routers and stacked
    experts of transformers; torchtitan's experts; and layers that say their sizes as Linear does. A fused q, k, v is one matrix with the
    fan-in of its input; of stacked experts each is its own matrix; a tied head is drawn once. The row `padding_idx` of an embedding is 0.
    Every other parameter stays as it is, is named in a warning and has a row whose action is unknown.

    `gammas`: another γ for names in which a regular expression is found (`re.search`, the first that is), such as {"mlp": 0.75}.
    `fan_ins`: the same for the fan-in, or None to leave a parameter alone; it decides before anything else.
    `seed`: every parameter gets a stream of its own, by the seed and its name. So two γ differ by a factor, and what else the module
    holds changes nothing; CPU and GPU draw other numbers. `generator`: one stream, in the order of the rows. Neither: torch's own.

    Drawn in fp32 and rounded to the parameter's dtype. DTensors are drawn by their own rules, with the fan-in of the whole.
    Raises ValueError, before anything is changed, for parameters on the meta device or partitioned by a wrapper, DTensors on CPUs (their
    shards would repeat each other), a γ or fan-in that is none, a pattern that is none or decides nothing, a fan-in for quantized numbers.
    Source: σ and the fans, docs/initializers.md.
    """
    if seed is not None and generator is not None:
        raise ValueError("gamma_init_: give a seed or a generator, not both.")
    parameters = _collect(module)
    _refuse(parameters)
    rows = _plan(parameters, gamma, gammas or {}, fan_ins or {})
    unknown = [row for row in rows if row.action == UNKNOWN]
    if unknown:
        listed = "\n".join(f"  {row.name} {row.shape} in {row.layer}" for row in unknown)
        warnings.warn(
            f"gamma_init_ leaves {len(unknown)} parameters as they are: it does not know what their layers do with them.\n{listed}\n"
            'Say it with fan_ins={"part of the name": fan-in}; None in its place leaves the parameter without this warning.',
            stacklevel=3,  # past the wrapper of no_grad
        )
    for row, (parameter, owners) in zip(rows, parameters, strict=True):
        if row.action == ZERO:
            parameter.zero_()
        elif row.action == DRAWN:
            own = generator if seed is None else _stream(parameter.device, seed, row.name)
            _draw(parameter, row.std, own)
            for _, owner, _ in owners:
                if getattr(owner, "padding_idx", None) is not None and isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
                    _zero_row(parameter, owner.padding_idx)
    return rows


def format_rows(rows: Iterable[Row]) -> str:
    """The rows as aligned text, one line each."""
    lines = [("name", "shape", "action", "fan_in", "gamma", "std", "layer", "tied")]
    for row in rows:
        numbers = ("-" if value is None else f"{value:.6g}" for value in (row.fan_in, row.gamma, row.std))
        lines.append((row.name, "x".join(map(str, row.shape)), row.action, *numbers, row.layer, " ".join(row.tied)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


# A parameter with everything that holds it: (name in the module, holder, name in the holder), once for each tie.
Held = tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]


def _collect(module: nn.Module) -> list[Held]:
    """Every parameter once, in the order of `named_parameters`."""
    found: dict[int, Held] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False):
            holders = found.setdefault(id(parameter), (parameter, []))[1]
            holders.append((f"{prefix}.{name}" if prefix else name, owner, name))
    return list(found.values())


def _refuse(parameters: list[Held]) -> None:
    """ValueError for parameters whose values or shapes are not here to be drawn."""

    def check(faulty, why: str) -> None:
        names = [owners[0][0] for parameter, owners in parameters if faulty(parameter)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"gamma_init_: {', '.join(names[:3])}{more}: {why}")

    check(lambda p: p.is_meta, "on the meta device. Call module.to_empty(device=…) first, tie tied weights again (tie_weights() of "
          "transformers) and fill norms and buffers, which gamma_init_ does not.")  # fmt: skip
    check(lambda p: p.numel() == 0, "without a number in it: a wrapper (DeepSpeed's ZeRO 3, the older FSDP) holds the rest elsewhere. "
          "Call gamma_init_ before wrapping.")  # fmt: skip
    check(lambda p: _is_dtensor(p) and p.device.type == "cpu", "a DTensor on CPUs, where torch draws the same numbers into every shard. "
          "Call gamma_init_ before sharding, or on accelerators.")  # fmt: skip


def _is_dtensor(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "device_mesh")


def _plan(parameters: list[Held], gamma: float, gammas: Mapping[str, float], fan_ins: Mapping[str, int | None]) -> list[Row]:
    """The rows, before anything is drawn."""
    for name, value in {"gamma": gamma, **{f"gammas[{key!r}]": value for key, value in gammas.items()}}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"gamma_init_: {name} must be a number of at least 0, not {value!r}.")
    for key, value in fan_ins.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"gamma_init_: fan_ins[{key!r}] must be a whole number of at least 1 or None, not {value!r}.")
    for what, mapping in (("gammas", gammas), ("fan_ins", fan_ins)):
        for key in mapping:
            try:
                re.compile(key)
            except re.error as error:
                raise ValueError(f"gamma_init_: {what}[{key!r}] is no regular expression: {error}.") from None
    used, rows = set(), []

    def chosen(mapping: Mapping, names: list[str], default):
        pattern = next((key for key in mapping if any(re.search(key, name) for name in names)), None)
        used.add((id(mapping), pattern))
        return default if pattern is None else mapping[pattern]

    for parameter, owners in parameters:
        names = [name for name, _, _ in owners]
        decisions = {_decide(owner, name, parameter) for _, owner, name in owners} - {UNKNOWN}
        decision = decisions.pop() if len(decisions) == 1 else UNKNOWN  # ties that differ in their fan-in are nobody's rule
        decision = chosen(fan_ins, names, decision)
        decision = KEPT if decision is None else decision
        row = (names[0], tuple(parameter.shape), DRAWN if isinstance(decision, int) else decision, type(owners[0][1]).__name__)
        numbers = (None, None, None)
        if isinstance(decision, int):
            if _is_quantized(parameter):
                raise ValueError(
                    f"gamma_init_: {names[0]} is quantized ({parameter.dtype}), and fan_ins gives it a fan-in. Call gamma_init_ before "
                    "quantizing, or give None in its place."
                )
            own = float(chosen(gammas, names, gamma))
            numbers = (decision, own, decision**-own)
        rows.append(Row(*row, *numbers, tuple(names[1:])))
    for what, mapping in (("gammas", gammas), ("fan_ins", fan_ins)):
        idle = [key for key in mapping if (id(mapping), key) not in used]
        if idle:
            raise ValueError(f"gamma_init_: {what}[{idle[0]!r}] decides nothing: no parameter that it could decide has such a name.")
    return rows


def _is_quantized(parameter: torch.Tensor) -> bool:
    """Integers, and floats of 8 bits and fewer, are weights only together with a scale that is kept elsewhere."""
    return not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2


def _decide(owner: nn.Module, name: str, parameter: nn.Parameter) -> int | str:
    """The fan-in of a weight, or ZERO, KEPT, UNKNOWN."""
    if _is_quantized(parameter):
        return UNKNOWN
    if isinstance(owner, NORMS) or ("norm" in type(owner).__name__.lower() and parameter.ndim <= 1):
        return KEPT
    weights = _fan_ins(owner)
    biases = {weight.replace("weight", "bias") for weight in weights if "weight" in weight} | {weight + "_bias" for weight in weights}
    if isinstance(owner, nn.MultiheadAttention):
        biases.add("in_proj_bias")  # of its weights of either form
    return weights.get(name, ZERO if name in biases else UNKNOWN)


def _fan_ins(owner: nn.Module) -> dict[str, int]:
    """{name: fan-in} of the weights that this module itself holds, as far as they are known."""
    shapes = {name: tuple(p.shape) for name, p in owner.named_parameters(recurse=False)}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    if isinstance(owner, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return {name: shape[1] for name, shape in matrices.items() if name == "weight"}
    if isinstance(owner, nn.modules.conv._ConvNd):
        window = math.prod(owner.kernel_size)
        return {name: owner.in_channels // owner.groups * window for name, shape in shapes.items() if name == "weight" and len(shape) > 2}
    if isinstance(owner, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
        return {name: shape[1] for name, shape in matrices.items() if "weight" in name}
    for sizes in SIZES:
        in_out = [getattr(owner, size, None) for size in sizes]
        if all(isinstance(size, int) for size in in_out):
            return {
                name: in_out[0]
                for name, shape in shapes.items()
                if name == "weight" and len(shape) in (2, 3) and sorted(shape[-2:]) == sorted(in_out)
            }
    if re.search("(router|gate)$", type(owner).__name__, re.IGNORECASE):  # (experts, D), read as Linear reads; no (D, experts)
        return {name: shape[1] for name, shape in matrices.items() if name == "weight" and shape[0] <= shape[1]}
    return _expert_fan_ins(owner, {name: shape for name, shape in shapes.items() if len(shape) == 3})


def _expert_fan_ins(owner: nn.Module, stacks: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    """{name: fan-in} of stacked experts: by what the module says of itself, else by how its two stacks must fit together."""
    transposed = getattr(owner, "is_transposed", None)  # transformers: (E, in, out) where true, else (E, out, in)
    if isinstance(transposed, bool):
        return {name: shape[1] if transposed else shape[2] for name, shape in stacks.items()}
    if {"gate_up_proj", "down_proj"} <= stacks.keys():
        (_, *wide), (_, *down) = stacks["gate_up_proj"], stacks["down_proj"]
        if wide == [2 * down[1], down[0]]:  # (2F, D) and (D, F)
            return {"gate_up_proj": wide[1], "down_proj": down[1]}
        if wide == [down[1], 2 * down[0]]:  # (D, 2F) and (F, D)
            return {"gate_up_proj": wide[0], "down_proj": down[0]}
    return {name: shape[2] for name, shape in stacks.items() if name.endswith(OUT_IN_STACKS)}


def _stream(device: torch.device, seed: int, name: str) -> torch.Generator:
    """A generator for one parameter. 32 bits, since torch's CPU generator reads no more of a seed."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _draw(parameter: torch.Tensor, std: float, generator: torch.Generator | None) -> None:
    """N(0, std²) into the parameter: the same numbers whatever its dtype and strides."""
    if _is_dtensor(parameter):
        parameter.normal_(0.0, std, generator=generator)
        return
    whole = torch.atleast_1d(parameter)
    if whole.ndim > 2 and whole[0].numel() > CHUNK:  # a stack of large matrices
        for matrix in whole:
            _draw(matrix, std, generator)
        return
    for part in whole.split(max(1, CHUNK * len(whole) // whole.numel())):
        part.copy_(torch.empty(part.shape, dtype=torch.float32, device=part.device).normal_(0.0, std, generator=generator))


def _zero_row(parameter: torch.Tensor, row: int) -> None:
    """Row `row` of a matrix becomes 0."""
    if not _is_dtensor(parameter):
        parameter[row].zero_()
        return
    kept = torch.ones(len(parameter), 1, dtype=parameter.dtype, device=parameter.device)  # parameter[row] of a sharded one may be a copy
    kept[row] = 0
    parameter.mul_(type(parameter).from_local(kept, parameter.device_mesh))  # the same on every device
