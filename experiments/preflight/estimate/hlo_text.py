"""Reads the text of an optimised, partitioned HLO program into instructions and device groups.

The parts that `hlo_cost` counts are read: names, opcodes, shapes with their memory space, operands,
and the attributes of loops, convolutions and collectives. The forms are those that the TPU's and
the CPU's compilers print.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (ROOT )?%([\w.\-]+) = ")
OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
NAME = re.compile(r"%([\w.\-]+)")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")  # bf16[8,128]{1,0:T(8,128)S(1)}
MEMORY_SPACE = re.compile(r"S\((\d+)\)")  # in a layout; HBM where there is none
BITS = re.compile(r"\D+(\d+)")  # of an element type: s32, bf16, f8e4m3fn, c64
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
PARTITIONS = re.compile(r"num_partitions=(\d+)")
# A collective between slices: a chip of each slice, "{1,2}x{0:3}", or chips {{100000,200000}}.
MEGASCALE = re.compile(
    r'_xla_megascale_target="?\{+([^}]*)\}.*_xla_megascale_transfer_type="(\w+)"'
)
LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"  # 'data'=4,'model'=4
    r"(?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))?"  # [4,4]T(1,0), or a list
    r" \{([^}]*)\}"  # the axes of a group: 'data', or a part of one 'data':(1)2
)
MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


class Array(NamedTuple):
    """An array in an instruction's result; `hbm` is False where it lies in another memory."""

    dims: tuple[int, ...]
    bits: int
    hbm: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * self.bits // 8


class Instruction(NamedTuple):
    """One line of a computation: `%name = arrays opcode(literal), attributes`.

    A result that is a tuple is flattened. operands: the names inside the brackets of `literal`.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def bytes(self) -> int:
        """The size of the result, in whatever memory it lies."""
        return sum(array.bytes for array in self.arrays)

    @property
    def target(self) -> str | None:
        """The function that a custom call calls; None for any other instruction."""
        return TARGET.search(self.attributes)[1] if self.opcode == "custom-call" else None

    @property
    def constant(self) -> int | None:
        """The value of an integer constant; None for anything else."""
        is_integer = self.opcode == "constant" and re.fullmatch(r"-?\d+", self.literal)
        return int(self.literal) if is_integer else None

    @property
    def branches(self) -> list[str]:
        """The computations that a conditional chooses from."""
        if listed := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            return NAME.findall(listed[1])
        return [self.attribute("true_computation"), self.attribute("false_computation")]

    @property
    def trip_count(self) -> int | None:
        """The turns of a loop, where the compiler has printed them."""
        printed = TRIP_COUNT.search(self.attributes)
        return int(printed[1]) if printed else None

    @property
    def cycles(self) -> int:
        """The compiler's own estimate; 0 where it has none, as of kernels and collectives."""
        estimated = CYCLES.search(self.attributes)
        return int(estimated[1]) if estimated else 0

    @property
    def op_name(self) -> str:
        """The JAX name stack that an instruction comes from, else its own name."""
        found = OP_NAME.search(self.attributes)
        return found[1] if found else self.name

    def attribute(self, key: str) -> str:
        """The computation, or the one word, that an attribute names."""
        return re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)[1]


class Computation:
    """Instructions by name, the result's name, and each value's users: (user, operand number)."""

    def __init__(self):
        self.instructions: dict[str, Instruction] = {}
        self.users = collections.defaultdict(list)
        self.root = ""

    def add(self, instruction: Instruction, *, root: bool) -> None:
        self.instructions[instruction.name] = instruction
        for position, operand in enumerate(instruction.operands):
            self.users[operand].append((instruction, position))
        if root:
            self.root = instruction.name

    def operands(self, i: Instruction) -> list[Instruction]:
        """The instructions whose results `i` takes."""
        return [self.instructions[name] for name in i.operands]

    def origin(self, name: str) -> Instruction:
        """The instruction that a value comes from, past copies."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def started(self, done: Instruction) -> Instruction:
        """An asynchronous instruction as if it were synchronous, from its -done.

        Raises ValueError where another computation has started it.
        """
        start = done
        while not start.opcode.endswith("-start"):
            start = self.instructions[start.operands[0]]
            if start.opcode in ("parameter", "get-tuple-element"):
                raise ValueError(f"{done.name} ends what another computation has started")
        return start._replace(opcode=start.opcode.removesuffix("-start"), arrays=done.arrays)


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole program: its computations by name, the one it runs, and its number of devices."""

    computations: dict[str, Computation]
    entry: str
    partitions: int


def parse(text: str) -> Program:
    """Reads the text of `compiled.as_text()`."""
    computations, entry, name = {}, "", ""
    for line in whole_lines(text):
        if header := COMPUTATION.match(line):
            name = header[2]
            computations[name] = Computation()
            entry = name if header[1] else entry
        elif start := INSTRUCTION.match(line):
            instruction = parse_instruction(start[2], line[start.end() :])
            computations[name].add(instruction, root=bool(start[1]))
    partitions = PARTITIONS.search(text.split("\n", 1)[0])
    return Program(computations, entry, int(partitions[1]) if partitions else 1)


def whole_lines(text: str) -> Iterator[str]:
    """Yields the lines of the text; one that is broken inside an attribute is joined again."""
    whole = ""
    for line in text.split("\n"):
        if line.startswith(('"', "}}")):
            whole += line
        else:
            yield whole
            whole = line
    yield whole


def parse_instruction(name: str, text: str) -> Instruction:
    """Reads `shape opcode(operands), attributes`."""
    end = closing_bracket(text, 0) if text.startswith("(") else text.index(" ")
    opcode = OPCODE.match(text, end)
    close = closing_bracket(text, opcode.end() - 1)
    literal = text[opcode.end() : close - 1]
    return Instruction(
        name,
        opcode[1],
        tuple(parse_array(*found) for found in ARRAY.findall(text[:end])),
        tuple(NAME.findall(literal)),
        literal,
        text[close:],
    )


def closing_bracket(text: str, start: int) -> int:
    """Returns the place behind the partner of the bracket at `start`. ValueError without one."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.end()
    raise ValueError(f"a bracket does not close: {text[start : start + 80]!r}")


def parse_array(kind: str, dims: str, layout: str) -> Array:
    """Reads the parts of `kind[dims]{layout}`."""
    bits = BITS.match(kind)  # none: a token; pred takes a byte
    space = MEMORY_SPACE.search(layout)
    size = 8 if kind == "pred" else int(bits[1]) if bits else 0
    return Array(tuple(integers(dims.replace("<=", ""))), size, not space or space[1] == "0")


def integers(text: str | None) -> list[int]:
    """Reads numbers between commas; [] of nothing."""
    return [int(number) for number in text.split(",")] if text else []


def slice_exchange(attributes: str) -> tuple[str, int] | None:
    """Returns (kind, group size) of a send that is a collective between slices, else None."""
    found = MEGASCALE.search(attributes)
    if not found:
        return None
    members = re.findall(r"(\d+)(?::(\d+))?", found[1])  # 1,2 or 1:4
    group_size = sum(int(last or first) - int(first) + 1 for first, last in members)
    return found[2].lower().replace("_", "-"), group_size


def device_groups(attributes: str, partitions: int) -> tuple[tuple[int, ...], ...]:
    """Returns the devices that exchange with each other in a collective, group by group.

    They are printed as a list of groups or of pairs, in the iota form, or by the mesh's axes.
    """
    if listed := LISTED_GROUPS.search(attributes):
        groups = [integers(group) for group in re.findall(r"\{([\d,]+)\}", listed[0])]
        if "source_target_pairs" in listed[0]:
            groups = connected(groups)
        groups = groups or [range(partitions)]
    elif iota := IOTA_GROUPS.search(attributes):
        shape, dims, order = (integers(part) for part in iota.groups())
        groups = transposed_iota(dims, order).reshape(shape).tolist()
    else:
        groups = mesh_groups(MESH_GROUPS.search(attributes))
    return tuple(tuple(int(device) for device in group) for group in groups)


def transposed_iota(dims: list[int], order: list[int]) -> np.ndarray:
    """Returns 0, 1, ... in an array of these dimensions, transposed."""
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or None)


def mesh_groups(mesh: re.Match) -> list[list[int]]:
    """Returns the groups of mesh['data'=4,'model'=4] {'model'}; 'data':(1)2 is a part of 4."""
    sizes = {axis: int(size) for axis, size in MESH_AXIS.findall(mesh[1])}
    devices = np.arange(math.prod(sizes.values()))
    if mesh[2]:
        devices = transposed_iota(integers(mesh[2]), integers(mesh[3]))
    elif mesh[4]:
        devices = np.array(integers(mesh[4]))
    cuts = {axis: {1, size} for axis, size in sizes.items()}
    parts = [(a, int(b or 1), int(c or sizes[a])) for a, b, c in GROUP_AXIS.findall(mesh[5])]
    for axis, before, size in parts:
        cuts[axis] |= {before, before * size}
    pieces = [  # (axis, product of what is before it, size), the most significant first
        (axis, low, high // low)
        for axis, size in sizes.items()
        for low, high in zip(sorted(cuts[axis]), sorted(cuts[axis])[1:], strict=False)
    ]
    devices = devices.reshape([size for *_, size in pieces])
    inside = [
        n
        for axis, before, size in parts
        for n, (name, low, _) in enumerate(pieces)
        if name == axis and before <= low < before * size
    ]
    outside = [n for n in range(len(pieces)) if n not in inside]
    members = math.prod(devices.shape[n] for n in inside)
    return devices.transpose(outside + inside).reshape(-1, members).tolist()


def connected(pairs: list[list[int]]) -> list[list[int]]:
    """Returns the groups of devices that a permute's (source, target) pairs connect."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        for device in joined:
            group_of[device] = joined
    return sorted({min(group): sorted(group) for group in group_of.values()}.values())
