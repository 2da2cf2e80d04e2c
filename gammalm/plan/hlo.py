"""What a compiled program says about itself as text (HLO): collectives with the bytes they move, and HBM traffic, loops counted in full.

Numbers are of one device and one execution. A loop counts as often as its condition says where that compares a counter with a constant;
else once, and `Traffic.loops_unknown` counts it. Names: an instruction is one line, a computation a block of them.
"""

import collections
import dataclasses
import math
import re

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
BITS = {"pred": 8, "token": 0, "bf16": 16, "opaque": 0}  # others end in their size: f32, s8, u4, f8e4m3fn
# These move nothing, or what they move is counted where it is used.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "partition-id",
    "replica-id", "opt-barrier", "domain", "async-update", "call-start", "add-dependency", "custom-call-start", "custom-call-update",
}  # fmt: skip
CUSTOM_FREE = ("AllocateBuffer", "AsyncCollective", "ConcatBitcast", "AssumeGather", "Sharding")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    given: str  # what stands in its brackets
    rest: str  # attributes
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.given)

    def called(self, attribute: str) -> str:
        """The computation that an attribute names; empty where there is none."""
        match = re.search(rf"\b{attribute}=\{{?%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


@dataclasses.dataclass
class Traffic:
    """Collectives: kind -> [count, bytes that one device sends]; `hbm`: bytes read and written in HBM by one device.

    `cycles`: what the TPU compiler expects its instructions to take one after another, collectives left out; 0 elsewhere.
    """

    collectives: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    hbm: float = 0.0
    cycles: float = 0.0
    instructions: int = 0  # of the text, whatever runs how often
    loops_unknown: int = 0
    opaque: float = 0.0  # calls whose text does not say what they do: a TPU7x hands gathers to its sparse cores so


def _matching(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computation -> its instructions by name, in order; and the name of the computation that is run."""
    found: dict[str, dict[str, Instruction]] = {}
    entry = here = ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            here = head[2]
            found[here] = {}
            entry = here if head[1] else entry
            continue
        line = line.strip()
        start = re.match(r"(ROOT )?%?([\w.\-]+) = ", line)
        if not start or not here:
            continue
        i = start.end()
        end = _matching(line, i) if line[i] == "(" else line.index(" ", i)
        call = re.match(r" *([\w\-]+)\(", line[end:])
        if not call:
            continue
        opened = end + call.end() - 1
        closed = _matching(line, opened)
        given = line[opened + 1 : closed - 1]
        found[here][start[2]] = Instruction(start[2], line[i:end], call[1], given, line[closed:], bool(start[1]))
    return found, entry


def arrays(shape: str, hbm_only: bool = False) -> list[float]:
    """Bytes of each array of a shape; 0 for what a TPU keeps in another memory, S(n) in its layout, where `hbm_only`."""
    sizes = []
    for kind, extents, layout in _ARRAY.findall(shape):
        width = re.search(r"[a-z](\d+)", kind)
        bits = BITS.get(kind, int(width[1]) if width else 0)
        elsewhere = hbm_only and "S(" in layout
        sizes.append(0.0 if elsewhere else math.prod(int(n) for n in extents.split(",") if n) * bits / 8)
    return sizes


def group_size(rest: str, everyone: int) -> int:
    """Devices that one group of a collective has."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(groups[2])
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return groups[1].count(",") + 1
    return everyone


def sent_bytes(kind: str, bytes_in: float, bytes_out: float, group: int) -> float:
    """Bytes that one device must send: a ring's, or a direct exchange's."""
    share = (group - 1) / group
    if kind == "collective-permute":
        return bytes_in
    return {"all-reduce": 2 * bytes_in, "all-gather": bytes_out}.get(kind, bytes_in) * share


class _Walk:
    """One walk over a program, from the computation that is run into loops and calls, each as often as it is executed."""

    def __init__(self, text: str, devices: int):
        self.found, self.entry = parse(text)
        self.devices = devices
        self.seen: set[str] = set()
        self.result = Traffic(instructions=sum(map(len, self.found.values())))

    def visit(self, name: str, times: float) -> Traffic:
        scope = self.found.get(name, {})
        for i in scope.values():
            if i.op == "while":
                trips = trip_count(self.found.get(i.called("condition"), {}), i.rest)
                self.result.loops_unknown += trips is None
                self.visit(i.called("body"), times * (1 if trips is None else trips))
            elif i.op in ("call", "conditional"):
                branches = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
                names = re.findall(r"%([\w.\-]+)", branches[1] if branches else "")
                names = names or [n for n in map(i.called, ("to_apply", "true_computation", "false_computation")) if n]
                for called in names:
                    self.visit(called, times / len(names))  # of branches one runs, and nobody knows which
            else:
                self.collective(i, scope, times, name)
                self.seen.add(_channel(i))
                self.result.opaque += times * ('custom_call_target="TODO(' in i.rest)
                self.inside(i.called("calls") or i.called("called_computations"), times)
                self.result.hbm += times * moved_bytes(i, scope, self.found)
                cycles = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
                self.result.cycles += times * int(cycles[1]) if cycles else 0.0
        return self.result

    def inside(self, name: str, times: float) -> None:
        """Collectives in what a fusion or an asynchronous call holds."""
        for i in self.found.get(name, {}).values():
            # A TPU may spread one collective over a chain of fusions, each of which shows it.
            if _channel(i) not in self.seen:
                self.collective(i, self.found[name], times, name)
            self.seen.add(_channel(i))
            self.inside(i.called("calls"), times)

    def collective(self, i: Instruction, scope, times: float, computation: str) -> None:
        kind = i.op.removesuffix("-start")
        if kind not in COLLECTIVES:
            return
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as TPUs write it: a fusion of the sum and of the slice of it that a device keeps
        # A ragged exchange is also given where to write and four lists of rows.
        taken = sum(_sizes(i.operands[:1] if kind.startswith("ragged") else i.operands, scope))
        given = sum(_results(i))
        group = group_size(i.rest, self.devices)
        if group > 1:
            row = self.result.collectives.setdefault(kind, [0.0, 0.0])
            row[0] += times
            row[1] += times * sent_bytes(kind, taken, given, group)


def traffic(text: str, devices: int) -> Traffic:
    """Counts of the program `text` (`compiled.as_text()`) that runs on `devices` devices."""
    walk = _Walk(text, devices)
    return walk.visit(walk.entry, 1)


def _channel(i: Instruction) -> tuple[str, str]:
    """What tells the collectives of a program apart, as far as it writes one down. Ragged exchanges all have the same."""
    channel = re.search(r"channel_id=(\d+)", i.rest)
    return i.op.removesuffix("-start"), channel[1] if channel else i.name


def _results(i: Instruction, hbm_only: bool = False) -> list[float]:
    """Bytes of each result of an instruction. The shape of an asynchronous start is (operands, results, ...), of sums the results."""
    sizes = arrays(i.shape, hbm_only)
    if not i.op.endswith("-start") or i.op in ("all-reduce-start", "copy-start"):
        return sizes
    given = len(i.operands)
    return sizes[given : given + (1 if i.op.startswith(("ragged", "slice")) else given)]


def trip_count(condition: dict[str, Instruction], rest: str = "") -> int | None:
    """How often a loop runs: what XLA wrote down, or the one constant that its counter, from 0 in steps of 1, is compared with."""
    if noted := re.search(r"known_trip_count[^\d]*(\d+)", rest):
        return int(noted[1])
    constants = [i.given for i in condition.values() if i.op == "constant" and i.shape.startswith("s32[]")]
    return int(constants[0]) if len(constants) == 1 and constants[0].isdigit() else None


def _sizes(names, scope, hbm_only: bool = False) -> list[float]:
    return [sum(arrays(scope[name].shape, hbm_only)) if name in scope else 0.0 for name in names]


def moved_bytes(i: Instruction, scope, found) -> float:
    """Bytes that one instruction reads and writes in HBM. A slice of an array counts as the slice, an update in place as the update."""
    if i.op in FREE or i.op.endswith("-done") or (i.op == "custom-call" and any(name in i.rest for name in CUSTOM_FREE)):
        return 0.0
    out, reads = _results(i, hbm_only=True), _sizes(i.operands, scope, hbm_only=True)
    if i.op == "copy-start":  # its shape is (result, operand, ...)
        return out[0] + reads[0]
    if i.op == "slice-start":
        return out[0] + (_results(i)[0] if reads[0] else 0.0)
    if i.op in ("dynamic-slice", "gather", "slice"):
        return 2 * sum(out)
    if i.op in ("dynamic-update-slice", "scatter"):
        return 2 * sum(reads[1:])
    if i.op == "fusion":
        return sum(_fusion_writes(i, out, found)) + sum(_fusion_reads(i, reads, found))
    return sum(out) + sum(reads)


def _relabels(i: Instruction) -> bool:
    """Whether it is its operand under another shape or layout."""
    return i.op == "bitcast" or (i.op == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in i.rest and len(i.operands) == 1)


def _origin(name: str, inner) -> str:
    """The instruction of a fusion that `name` is, relabelling left out."""
    while name in inner and _relabels(inner[name]):
        name = inner[name].operands[0]
    return name


def _fusion_reads(i: Instruction, reads: list[float], found) -> list[float]:
    """Of each operand what is read: an operand that is only sliced counts as its slices, one that is handed on in place as nothing."""
    inner = found.get(i.called("calls"), {})
    users = collections.defaultdict(list)
    for user in inner.values():
        for name in user.operands:
            users[_origin(name, inner)].append(user)
    handed_on = {int(n) for n in re.findall(r"\{[\d,]*\}: \((\d+),", i.rest)}
    for p in inner.values():
        number = int(p.given) if p.op == "parameter" else -1
        if number < 0 or number >= len(reads) or not reads[number]:
            continue
        using = [user for user in users[p.name] if not _relabels(user)]
        if number in handed_on:
            reads[number] = 0.0
        elif using and all(user.op in ("dynamic-slice", "slice", "gather") for user in using):
            reads[number] = min(reads[number], sum(sum(arrays(user.shape)) for user in using))
        elif using and all(user.op == "dynamic-update-slice" and _origin(user.operands[0], inner) == p.name for user in using):
            reads[number] = 0.0
    return reads


def _fusion_writes(i: Instruction, out: list[float], found) -> list[float]:
    """Of each output what is written: of one that is updated in place the update, of one handed on as it came nothing."""
    inner = found.get(i.called("calls"), {})
    root = next((r for r in inner.values() if r.root), None)
    if root is None:
        return out
    handed_on = {int(n or 0) for n in re.findall(r"\{(\d*)\}: \(\d+,", i.rest)}
    results = root.operands if root.op == "tuple" else [root.name]
    for k, name in enumerate(results[: len(out)]):
        made = inner.get(_origin(name, inner))
        while made is not None and made.op == "convert":
            made = inner.get(_origin(made.operands[0], inner))
        if made is not None and made.op == "dynamic-update-slice":
            out[k] = min(out[k], _sizes(made.operands[1:2], inner)[0])
        elif k in handed_on and made is not None and made.op == "parameter":
            out[k] = 0.0
    return out
