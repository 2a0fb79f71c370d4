"""What one compiled program costs a chip, counted in its optimised, partitioned HLO text.

XLA's own cost analysis counts the body of a loop once; here every loop counts in full. The rules
were read off what the TPU compiler prints, where a dot is a convolution, memory other than HBM is
marked S(n) in a layout, and a collective may be spread over the fusions it overlaps with.

Not counted: arithmetic that is no dot or convolution; what is inside a kernel (a custom call) and
the bytes it moves; the padding of tiled layouts; partial sums that a collective keeps in HBM.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Nothing is read or written: values are named, or other instructions do the work.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"}
FREE |= {"add-dependency", "opt-barrier", "optimization-barrier", "send", "recv"}
FREE |= {"send-done", "recv-done", "partition-id", "replica-id"}
# Custom calls that the TPU's compiler uses as notes to itself.
NOTES = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "SliceId"}
NOTES |= {"GatherScatterIndicesBitpacked", "AsyncCollectiveStart", "AsyncCollectiveDone"}
SLICES = ("dynamic-slice", "slice", "gather")  # read a part of operand 0
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # rewrite a part of operand 0: this operand
POINTWISE = ("convert", "copy", "reshape", "transpose")  # in a fusion: as much as is asked for

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")  # bf16[8,128]{1,0:T(8,128)S(1)}
_SPACE = re.compile(r"S\((\d+)\)")  # of a layout: HBM where there is none
_BITS = re.compile(r"\D+(\d+)")  # of an element type: s32, bf16, f8e4m3fn, c64
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_MEGASCALE = re.compile(  # a chip of each of the slices "{1,2}x{0:3}", or chips {{100000,200000}}
    r'_xla_megascale_target="?\{+([^}]*)\}.*_xla_megascale_transfer_type="(\w+)"'
)
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"  # 'data'=4,'model'=4
    r"(?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))?"  # [4,4]T(1,0), or a list
    r" \{([^}]*)\}"  # the axes of a group: 'data', or a part of one 'data':(1)2
)
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that runs `times` times.

    bytes: of a chip and one execution; the output of an all-gather, the input of all others.
    groups: the chips that exchange, as places in the (flattened) mesh of the program, or of a slice
    where there are several; of a permute the chips that its pairs connect. Empty for an exchange
    between slices, over the data centre's network.
    """

    kind: str
    bytes: int
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    times: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A custom call that runs `times` times; bytes: its operands and outputs in HBM, whole."""

    name: str
    bytes: int
    times: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a chip and one run of the program. hbm_bytes: read and written outside of kernels."""

    flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]


def count(hlo_text: str, *, loop_times: Mapping[str, float] = MappingProxyType({})) -> Cost:
    """The cost of the program whose `compiled.as_text()` this is.

    loop_times: how often the loops run whose length only the run decides, by the JAX name stack of
    the loop, as "jit(update)/while" (the op_name of its instruction). A defaultdict serves where
    all take the same number. ValueError names a loop that is missing.
    """
    program = _Program(hlo_text, loop_times)
    total = program.executed(program.entry)
    return Cost(
        total.flops,
        total.hbm_bytes,
        tuple(Collective(*collective, times) for collective, times in total.collectives.items()),
        tuple(Kernel(*kernel, times) for kernel, times in total.kernels.items()),
    )


class _Array(NamedTuple):
    """An array in an instruction's result; `hbm` is False where it lies in another memory."""

    dims: tuple[int, ...]
    bits: int
    hbm: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * self.bits // 8


class _Instruction(NamedTuple):
    name: str
    opcode: str
    arrays: tuple[_Array, ...]  # of the result, tuples flattened
    operands: tuple[str, ...]
    literal: str  # what stands between the brackets
    attributes: str

    def attribute(self, key: str) -> str:
        """The computation, or the one word, that an attribute names."""
        return re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)[1]

    def numbers(self, key: str) -> list[int]:
        """Those of an attribute like lhs_contracting_dims={1,2}."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return _integers(found[1]) if found else []


class _Computation:
    """Instructions by name, the result, and who uses what: (instruction, operand number)."""

    def __init__(self):
        self.instructions: dict[str, _Instruction] = {}
        self.users = collections.defaultdict(list)
        self.root = ""

    def add(self, instruction: _Instruction, root: bool) -> None:
        self.instructions[instruction.name] = instruction
        for position, operand in enumerate(instruction.operands):
            self.users[operand].append((instruction, position))
        if root:
            self.root = instruction.name

    def parameter(self, number: int) -> str:
        return self._parameters[number]

    @functools.cached_property
    def _parameters(self) -> dict[int, str]:
        parameters = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.literal): i.name for i in parameters}

    def origin(self, name: str) -> _Instruction:
        """Where a value comes from, past copies."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def started(self, done: _Instruction) -> _Instruction:
        """An asynchronous instruction as if it were not, from its -done."""
        start = done
        while not start.opcode.endswith("-start"):
            start = self.instructions[start.operands[0]]
            if start.opcode in ("parameter", "get-tuple-element"):
                raise ValueError(f"{done.name} ends what another computation has started")
        return start._replace(opcode=start.opcode.removesuffix("-start"), arrays=done.arrays)


@dataclasses.dataclass
class _Total:
    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "_Total", times: float) -> None:
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for mine, theirs in ((self.collectives, other.collectives), (self.kernels, other.kernels)):
            for key, count in theirs.items():
                mine[key] += count * times


class _Program:
    def __init__(self, text: str, loop_times: Mapping[str, float]):
        self.computations, self.entry = _parse(text)
        self.loop_times = loop_times
        partitions = _PARTITIONS.search(text.split("\n", 1)[0])
        self.partitions = int(partitions[1]) if partitions else 1
        self.executed = functools.cache(self._executed)
        self.fused = functools.cache(self._fused)

    def _executed(self, name: str) -> _Total:
        """One run of a computation whose instructions run one by one."""
        total, computation = _Total(), self.computations[name]
        for i in computation.instructions.values():
            if i.opcode == "send":
                total.collectives.update(_between_slices(i, computation))
            if i.opcode in FREE or i.opcode.endswith(("-start", "-update")):
                continue
            if i.opcode.endswith("-done"):
                i = computation.started(i)
            if i.opcode == "while":
                times = self.times(computation, i)
                total.add(self.executed(i.attribute("body")), times)
                total.add(self.executed(i.attribute("condition")), times + 1)
            elif i.opcode == "conditional":
                branches = [self.executed(branch) for branch in _branches(i)]
                total.add(max(branches, key=lambda b: (b.flops, b.hbm_bytes)), 1)
            elif i.opcode in ("call", "async"):
                key = "to_apply" if "to_apply=" in i.attributes else "calls"
                total.add(self.executed(i.attribute(key)), 1)
            elif i.opcode == "custom-call":
                total.kernels.update(_kernel(i, computation))
            else:
                total.hbm_bytes += self.hbm_bytes(i, computation)
                if i.opcode == "fusion":
                    total.add(self.fused(i.attribute("calls")), 1)
                else:
                    total.flops += _flops(i, computation)
                    total.collectives.update(self.collective(i, computation))
        return total

    def _fused(self, name: str) -> _Total:
        """All of a fused computation but its bytes, which are those of the fusion."""
        total, computation = _Total(), self.computations[name]
        for i in computation.instructions.values():
            if i.opcode == "fusion":
                total.add(self.fused(i.attribute("calls")), 1)
            elif not _continues(i, computation):
                total.flops += _flops(i, computation)
                total.collectives.update(self.collective(_scattered(i, computation), computation))
                total.kernels.update(_kernel(i, computation))
        return total

    def times(self, computation: _Computation, loop: _Instruction) -> float:
        """How often a loop's body runs: printed, worked out, or given by the caller."""
        printed = _TRIPS.search(loop.attributes)
        times = int(printed[1]) if printed else self.static_times(computation, loop)
        if times is not None:
            return times
        op_name = _OP_NAME.search(loop.attributes)
        name = op_name[1] if op_name else loop.name
        try:
            return self.loop_times[name]
        except KeyError:
            raise ValueError(
                f"how often the loop {name!r} runs is not in the program: give it in loop_times"
            ) from None

    def static_times(self, computation: _Computation, loop: _Instruction) -> int | None:
        """Of a loop that counts from one constant to below another (the TPU's are printed so)."""
        condition = self.computations[loop.attribute("condition")]
        body = self.computations[loop.attribute("body")]
        test = condition.instructions[condition.root]
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        counter, limit = (condition.origin(name) for name in test.operands)
        if counter.opcode != "get-tuple-element":
            return None
        index = int(counter.attribute("index"))
        start, step = (
            c.origin(c.instructions[of].operands[index])
            for c, of in ((computation, loop.operands[0]), (body, body.root))
        )
        if step.opcode != "add":
            return None
        same, one = (body.origin(name) for name in step.operands)
        constants = [_constant(i) for i in (start, limit, one)]
        unchanged = same.opcode == "get-tuple-element" and int(same.attribute("index")) == index
        if None in constants or constants[2] < 1 or not unchanged:
            return None
        start, limit, step = constants
        return max(0, -((start - limit) // step))

    def collective(self, i: _Instruction, computation: _Computation) -> dict:
        """{(kind, bytes, group size, groups): 1} if the instruction is one, else {}."""
        if i.opcode not in COLLECTIVES:
            return {}
        arrays = i.arrays
        if i.opcode != "all-gather":
            arrays = [a for name in i.operands for a in computation.instructions[name].arrays]
        groups = _groups(i.attributes, self.partitions)
        return {(i.opcode, sum(a.bytes for a in arrays), max(map(len, groups)), groups): 1}

    def hbm_bytes(self, i: _Instruction, computation: _Computation) -> float:
        """Read and written by an instruction that is executed by itself."""
        read = 0.0
        for position, name in enumerate(i.operands):
            size = sum(a.bytes for a in computation.instructions[name].arrays if a.hbm)
            if not size:
                continue
            if i.opcode == "fusion":
                fused = self.computations[i.attribute("calls")]
                read += size * self.part_read(fused, fused.parameter(position), 1.0, 0.0)
            elif position == 0 and i.opcode in SLICES:
                read += size * _part(i, computation)
            elif position > 0 or i.opcode not in UPDATES:
                read += size
        return read + sum(
            size
            for size, array in zip(self.sizes_written(i, computation), i.arrays, strict=True)
            if array.hbm
        )

    def part_read(self, c: _Computation, name: str, root: float, untouched: float) -> float:
        """The part of a value in a fusion that is needed.

        root: the part of the computation's result that is; untouched: the same of a value that is
        in the result as it came in, which nothing is done for in the outermost fusion.
        """
        part = untouched if name == c.root else 0.0
        for user, position in c.users[name]:
            first = position == 0
            if user.opcode == "tuple":
                part += untouched
            elif user.opcode == "bitcast" or (first and user.opcode in UPDATES):
                part += self.part_read(c, user.name, root, untouched)
            elif user.opcode in POINTWISE:
                part += self.part_read(c, user.name, root, root)
            elif first and user.opcode in SLICES:
                part += _part(user, c)
            elif user.opcode == "fusion":
                inner = self.computations[user.attribute("calls")]
                needed = self.part_read(c, user.name, root, root)
                as_is = self.part_read(c, user.name, root, untouched)
                part += self.part_read(inner, inner.parameter(position), needed, as_is)
            elif not _continues(user, c):
                part += 1.0
        return min(part, 1.0)

    def sizes_written(self, i: _Instruction, computation: _Computation) -> list[int]:
        """Bytes of each array of the result that an instruction writes, wherever they lie."""
        whole = [array.bytes for array in i.arrays]
        if i.opcode in UPDATES:
            update = computation.instructions[i.operands[UPDATES[i.opcode]]]
            return [update.arrays[0].bytes]
        if i.opcode != "fusion":
            return whole
        fused = self.computations[i.attribute("calls")]
        root = fused.instructions[fused.root]
        if _target(root) == "AsyncCollectiveStart":  # a shard as it came in, then the output
            return [size if n == 1 else 0 for n, size in enumerate(whole)]
        if root.opcode == "tuple":
            return [self.new_bytes(fused, name)[0] for name in root.operands]
        return [self.new_bytes(fused, root.name)[0]] if len(whole) == 1 else whole

    def new_bytes(self, c: _Computation, name: str) -> tuple[int, int | None]:
        """(bytes of a value that are not those of a parameter, that parameter's number)."""
        i = c.instructions[name]
        if i.opcode == "parameter":
            return 0, int(i.literal)
        if i.opcode == "bitcast":
            return self.new_bytes(c, i.operands[0])
        if i.opcode in UPDATES:
            size, parameter = self.new_bytes(c, i.operands[0])
            update = c.instructions[i.operands[UPDATES[i.opcode]]].arrays[0].bytes
            return size + (update if parameter is not None else 0), parameter
        if i.opcode == "fusion" and len(i.arrays) == 1:
            inner = self.computations[i.attribute("calls")]
            size, parameter = self.new_bytes(inner, inner.root)
            if parameter is None:
                return size, None
            outer, parameter = self.new_bytes(c, i.operands[parameter])
            return size + outer, parameter
        return (0 if _continues(i, c) else sum(a.bytes for a in i.arrays)), None


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """(computations by name, the name of the one that the program runs)."""
    computations, entry, name = {}, "", ""
    for line in _whole_lines(text):
        if header := _COMPUTATION.match(line):
            name = header[2]
            computations[name] = _Computation()
            entry = name if header[1] else entry
        elif start := _INSTRUCTION.match(line):
            instruction = _instruction(start[2], line[start.end() :])
            computations[name].add(instruction, root=bool(start[1]))
    return computations, entry


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, and those that an attribute with line breaks goes on in put behind the first."""
    whole = ""
    for line in text.split("\n"):
        if line.startswith(('"', "}}")):
            whole += line
        else:
            yield whole
            whole = line
    yield whole


def _instruction(name: str, text: str) -> _Instruction:
    """From `shape opcode(operands), attributes`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    close = _closing(text, opcode.end() - 1)
    literal = text[opcode.end() : close - 1]
    return _Instruction(
        name,
        opcode[1],
        tuple(_array(*found) for found in _ARRAY.findall(text[:end])),
        tuple(_NAME.findall(literal)),
        literal,
        text[close:],
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` has closed."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.end()
    raise ValueError(f"a bracket does not close: {text[start : start + 80]!r}")


def _array(kind: str, dims: str, layout: str) -> _Array:
    bits = _BITS.match(kind)  # none: a token; pred takes a byte
    space = _SPACE.search(layout)
    size = 8 if kind == "pred" else int(bits[1]) if bits else 0
    return _Array(tuple(_integers(dims.replace("<=", ""))), size, not space or space[1] == "0")


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _constant(i: _Instruction) -> int | None:
    is_integer = i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal)
    return int(i.literal) if is_integer else None


def _branches(i: _Instruction) -> list[str]:
    """The computations that a conditional chooses from."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
    if listed:
        return _NAME.findall(listed[1])
    return [i.attribute("true_computation"), i.attribute("false_computation")]


def _target(i: _Instruction) -> str | None:
    """What a custom call calls; of any other instruction None."""
    return _TARGET.search(i.attributes)[1] if i.opcode == "custom-call" else None


def _kernel(i: _Instruction, computation: _Computation) -> dict:
    """{(name, bytes): 1} of a custom call that computes, else {}; a Mosaic kernel's own name."""
    target = _target(i)
    if target in (None, *NOTES):
        return {}
    arrays = [a for name in i.operands for a in computation.instructions[name].arrays]
    name = re.sub(r"\.\d+$", "", i.name) if target == "tpu_custom_call" else target
    return {(name, sum(a.bytes for a in (*arrays, *i.arrays) if a.hbm)): 1}


def _continues(i: _Instruction, computation: _Computation) -> bool:
    """Whether this goes on with a collective that another fusion has started.

    The TPU's compiler repeats it in every fusion that it overlaps with, up to the one that ends it.
    """
    if _target(i) == "AsyncCollectiveDone":
        return True
    if i.opcode not in COLLECTIVES or "chain_id=" not in i.attributes:
        return False
    users = computation.users[i.name]
    return all(_target(user) != "AsyncCollectiveStart" for user, _ in users)


def _scattered(i: _Instruction, computation: _Computation) -> _Instruction:
    """A fused all-reduce of which each chip takes a slice, as what it is: a reduce-scatter."""
    users = [user.opcode for user, _ in computation.users[i.name]]
    is_scattered = i.opcode == "all-reduce" and users == ["dynamic-slice"]
    return i._replace(opcode="reduce-scatter") if is_scattered else i


def _between_slices(i: _Instruction, computation: _Computation) -> dict:
    """{(kind, bytes, group size, ()): 1} of a send that is a collective between slices, else {}."""
    found = _MEGASCALE.search(i.attributes)
    if not found:
        return {}
    members = re.findall(r"(\d+)(?::(\d+))?", found[1])  # 1,2 or 1:4
    group_size = sum(int(last or first) - int(first) + 1 for first, last in members)
    kind = found[2].lower().replace("_", "-")
    size = sum(a.bytes for a in computation.instructions[i.operands[0]].arrays)
    size *= group_size if kind == "all-gather" else 1
    return {(kind, size, group_size, ()): 1}


def _part(i: _Instruction, computation: _Computation) -> float:
    """The part of operand 0 that a slice or gather reads."""
    whole = math.prod(computation.instructions[i.operands[0]].arrays[0].dims)
    return min(1.0, math.prod(i.arrays[0].dims) / whole)


def _flops(i: _Instruction, computation: _Computation) -> int:
    """Of a dot or a convolution, two for each product that is summed; else 0."""
    if i.opcode not in ("dot", "convolution"):
        return 0
    left, right = (computation.instructions[name].arrays[0].dims for name in i.operands)
    out = i.arrays[0].dims
    if i.opcode == "dot":
        contracted = [left[axis] for axis in i.numbers("lhs_contracting_dims")]
        return 2 * math.prod(out) * math.prod(contracted)
    in_labels, kernel_labels, out_labels = _LABELS.search(i.attributes).groups()
    windows = [
        _products(left[in_labels.index(axis)], right[kernel_labels.index(axis)], out[n], **window)
        for n, axis in enumerate(out_labels)
        if axis.isdigit()
        for window in [_window(i.attributes, int(axis))]
    ]
    features = out[out_labels.index("b")] * out[out_labels.index("f")]
    return 2 * features * right[kernel_labels.index("i")] * math.prod(windows)


def _window(attributes: str, axis: int) -> dict[str, int]:
    """How a convolution moves along a spatial axis, as in {size=64 stride=63 lhs_dilate=64}."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    keys = dict(key.split("=") for key in window[1].split())

    def value(key: str, default: str) -> str:
        return keys[key].split("x")[axis] if key in keys else default

    return {
        "stride": int(value("stride", "1")),
        "pad": int(value("pad", "0_0").split("_")[0]),
        "spread": int(value("lhs_dilate", "1")),
        "kernel_spread": int(value("rhs_dilate", "1")),
    }


@functools.cache
def _products(size, kernel, out, *, stride, pad, spread, kernel_spread) -> int:
    """(output, kernel) places of a spatial axis that meet an input, not padding or a hole.

    This is what makes the batch of a dot, which becomes such an axis, count as a batch.
    """
    place = np.arange(out) * stride - pad
    places = (place + k * kernel_spread for k in range(kernel))
    return sum(
        int(np.sum((p >= 0) & (p <= (size - 1) * spread) & (p % spread == 0))) for p in places
    )


def _groups(attributes: str, partitions: int) -> tuple[tuple[int, ...], ...]:
    """Which chips exchange: from a list of groups or pairs, the iota form or the mesh's axes."""
    if listed := _LISTED.search(attributes):
        groups = [_integers(group) for group in re.findall(r"\{([\d,]+)\}", listed[0])]
        if "source_target_pairs" in listed[0]:
            groups = _connected(groups)
        groups = groups or [range(partitions)]
    elif iota := _IOTA.search(attributes):
        shape, dims, order = (_integers(part) for part in iota.groups())
        groups = _ordered(dims, order).reshape(shape).tolist()
    else:
        groups = _mesh_groups(_MESH.search(attributes))
    return tuple(tuple(int(chip) for chip in group) for group in groups)


def _ordered(dims: list[int], order: list[int]) -> np.ndarray:
    """0, 1, ... in an array of these dimensions, transposed."""
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or None)


def _mesh_groups(mesh: re.Match) -> list[list[int]]:
    """Of mesh['data'=4,'model'=4] {'model'}, and of parts of axes: 'data':(1)2 of 4 = 1 * 2 * 2."""
    sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(mesh[1])}
    chips = np.arange(math.prod(sizes.values()))
    if mesh[2]:
        chips = _ordered(_integers(mesh[2]), _integers(mesh[3]))
    elif mesh[4]:
        chips = np.array(_integers(mesh[4]))
    cuts = {axis: {1, size} for axis, size in sizes.items()}
    parts = [(a, int(b or 1), int(c or sizes[a])) for a, b, c in _GROUP_AXIS.findall(mesh[5])]
    for axis, before, size in parts:
        cuts[axis] |= {before, before * size}
    pieces = [  # (axis, product of what is before it, size), the most significant first
        (axis, low, high // low)
        for axis, size in sizes.items()
        for low, high in zip(sorted(cuts[axis]), sorted(cuts[axis])[1:], strict=False)
    ]
    chips = chips.reshape([size for *_, size in pieces])
    inside = [
        n
        for axis, before, size in parts
        for n, (name, low, _) in enumerate(pieces)
        if name == axis and before <= low < before * size
    ]
    outside = [n for n in range(len(pieces)) if n not in inside]
    members = math.prod(chips.shape[n] for n in inside)
    return chips.transpose(outside + inside).reshape(-1, members).tolist()


def _connected(pairs: list[list[int]]) -> list[list[int]]:
    """The chips that a permute's (source, target) pairs connect, as groups."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        for chip in joined:
            group_of[chip] = joined
    return sorted({min(group): sorted(group) for group in group_of.values()}.values())
