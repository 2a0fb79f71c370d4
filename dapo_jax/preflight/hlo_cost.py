"""Counts what one compiled program costs a device, from its optimised, partitioned HLO text.

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
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from dapo_jax.preflight import hlo_text
from dapo_jax.preflight.hlo_text import Computation, Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Nothing is read or written: values are named, or other instructions do the work.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"}
FREE |= {"add-dependency", "opt-barrier", "optimization-barrier", "send", "recv"}
FREE |= {"send-done", "recv-done", "partition-id", "replica-id"}
# Custom calls that carry information for the TPU's compiler and compute nothing.
MARKERS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "SliceId"}
MARKERS |= {"GatherScatterIndicesBitpacked", "AsyncCollectiveStart", "AsyncCollectiveDone"}
SLICES = ("dynamic-slice", "slice", "gather")  # read a part of operand 0
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # rewrite a part of operand 0: this operand
POINTWISE = ("convert", "copy", "reshape", "transpose")  # in a fusion: as much as is asked for


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that runs `times` times.

    bytes: of a device and one execution; the output of an all-gather, the input of all others.
    groups: the devices that exchange, as places in the (flattened) mesh of the program, or of a
    slice where there are several; of a permute the devices that its pairs connect. Empty for an
    exchange between slices, over the data centre's network.
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
    """What one run of a program costs one device; hbm_bytes: read and written outside kernels."""

    flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    def __sub__(self, other: "Cost") -> "Cost":
        """The cost that remains of this one without the other, which is a part of it."""
        return Cost(
            self.flops - other.flops,
            self.hbm_bytes - other.hbm_bytes,
            _minus(self.collectives, other.collectives),
            _minus(self.kernels, other.kernels),
        )


def _minus(more: tuple, less: tuple) -> tuple:
    """The collectives or kernels that run more often in `more`, by how much more often."""
    times = collections.Counter()
    for sign, items in ((1, more), (-1, less)):
        for item in items:
            times[dataclasses.replace(item, times=0.0)] += sign * item.times
    return tuple(dataclasses.replace(item, times=n) for item, n in times.items() if n)


def count(text: str, *, loop_times: Mapping[str, float] = MappingProxyType({})) -> Cost:
    """Counts the cost of the program whose `compiled.as_text()` this is.

    loop_times: how often the loops run whose length only the run decides, by the JAX name stack of
    the loop, as "jit(update)/while" (the op_name of its instruction). A defaultdict serves where
    all take the same number. Raises ValueError with the name of a loop that is missing.
    """
    counter = _Counter(hlo_text.parse(text), loop_times)
    total = counter.executed(counter.program.entry)
    return Cost(
        total.flops,
        total.hbm_bytes,
        tuple(Collective(*collective, times) for collective, times in total.collectives.items()),
        tuple(Kernel(*kernel, times) for kernel, times in total.kernels.items()),
    )


@dataclasses.dataclass
class _Total:
    """A running sum of costs; collectives and kernels: their fields -> times."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "_Total", times: float) -> None:
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for mine, theirs in ((self.collectives, other.collectives), (self.kernels, other.kernels)):
            for key, runs in theirs.items():
                mine[key] += runs * times


class _Counter:
    """Adds up the costs of a program's computations, each of which is looked at once."""

    def __init__(self, program: hlo_text.Program, loop_times: Mapping[str, float]):
        self.program, self.computations = program, program.computations
        self.loop_times = loop_times
        self.executed = functools.cache(self._executed)
        self.fused = functools.cache(self._fused)

    def _executed(self, name: str) -> _Total:
        """The cost of a computation whose instructions run one by one."""
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
                branches = [self.executed(branch) for branch in i.branches]
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
        """The cost of a fused computation without its bytes, which are those of the fusion."""
        total, computation = _Total(), self.computations[name]
        for i in computation.instructions.values():
            if i.opcode == "fusion":
                total.add(self.fused(i.attribute("calls")), 1)
            elif not _continues(i, computation):
                total.flops += _flops(i, computation)
                total.collectives.update(self.collective(_scattered(i, computation), computation))
                total.kernels.update(_kernel(i, computation))
        return total

    def times(self, computation: Computation, loop: Instruction) -> float:
        """How often a loop's body runs: printed, worked out, or given by the caller."""
        times = loop.trip_count
        if times is None:
            times = self.static_times(computation, loop)
        if times is not None:
            return times
        try:
            return self.loop_times[loop.op_name]
        except KeyError:
            raise ValueError(
                f"how often the loop {loop.op_name!r} runs is not in the program: give it in "
                "loop_times"
            ) from None

    def static_times(self, computation: Computation, loop: Instruction) -> int | None:
        """The length of a loop from one constant to below another, as the TPU's loops are."""
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
        unchanged = same.opcode == "get-tuple-element" and int(same.attribute("index")) == index
        first, end, by = (i.constant for i in (start, limit, one))
        if None in (first, end, by) or by < 1 or not unchanged:
            return None
        return max(0, -((first - end) // by))

    def collective(self, i: Instruction, computation: Computation) -> dict:
        """{(kind, bytes, group size, groups): 1} if the instruction is one, else {}."""
        if i.opcode not in COLLECTIVES:
            return {}
        moved = [i] if i.opcode == "all-gather" else computation.operands(i)
        groups = hlo_text.device_groups(i.attributes, self.program.partitions)
        return {(i.opcode, sum(m.bytes for m in moved), max(map(len, groups)), groups): 1}

    def hbm_bytes(self, i: Instruction, computation: Computation) -> float:
        """The bytes read and written by an instruction that is executed by itself."""
        read = 0.0
        for position, operand in enumerate(computation.operands(i)):
            size = operand.hbm_bytes
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

    def part_read(self, c: Computation, name: str, root: float, untouched: float) -> float:
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

    def sizes_written(self, i: Instruction, computation: Computation) -> list[int]:
        """Bytes of each array of the result that an instruction writes, wherever they lie."""
        whole = [array.bytes for array in i.arrays]
        if i.opcode in UPDATES:
            return [_update(i, computation)]
        if i.opcode != "fusion":
            return whole
        fused = self.computations[i.attribute("calls")]
        root = fused.instructions[fused.root]
        if root.target == "AsyncCollectiveStart":  # a shard as it came in, then the output
            return [size if n == 1 else 0 for n, size in enumerate(whole)]
        if root.opcode == "tuple":
            return [self.new_bytes(fused, name)[0] for name in root.operands]
        return [self.new_bytes(fused, root.name)[0]] if len(whole) == 1 else whole

    def new_bytes(self, c: Computation, name: str) -> tuple[int, int | None]:
        """(bytes of a value that are not those of a parameter, that parameter's number)."""
        i = c.instructions[name]
        if i.opcode == "parameter":
            return 0, int(i.literal)
        if i.opcode == "bitcast":
            return self.new_bytes(c, i.operands[0])
        if i.opcode in UPDATES:
            size, parameter = self.new_bytes(c, i.operands[0])
            return size + (_update(i, c) if parameter is not None else 0), parameter
        if i.opcode == "fusion" and len(i.arrays) == 1:
            inner = self.computations[i.attribute("calls")]
            size, parameter = self.new_bytes(inner, inner.root)
            if parameter is None:
                return size, None
            outer, parameter = self.new_bytes(c, i.operands[parameter])
            return size + outer, parameter
        return (0 if _continues(i, c) else i.bytes), None


def _update(i: Instruction, computation: Computation) -> int:
    """The bytes of operand 0 that an update in place rewrites."""
    return computation.operands(i)[UPDATES[i.opcode]].arrays[0].bytes


def _part(i: Instruction, computation: Computation) -> float:
    """The part of operand 0 that a slice or gather reads."""
    whole = math.prod(computation.operands(i)[0].arrays[0].dims)
    return min(1.0, math.prod(i.arrays[0].dims) / whole)


def _kernel(i: Instruction, computation: Computation) -> dict:
    """{(name, bytes): 1} of a custom call that computes, else {}; a Mosaic kernel's own name."""
    if i.target in (None, *MARKERS):
        return {}
    name = re.sub(r"\.\d+$", "", i.name) if i.target == "tpu_custom_call" else i.target
    return {(name, i.hbm_bytes + sum(o.hbm_bytes for o in computation.operands(i))): 1}


def _continues(i: Instruction, computation: Computation) -> bool:
    """Whether this goes on with a collective that another fusion has started.

    The TPU's compiler repeats it in every fusion that it overlaps with, up to the one that ends it.
    """
    if i.target == "AsyncCollectiveDone":
        return True
    if i.opcode not in COLLECTIVES or "chain_id=" not in i.attributes:
        return False
    return all(user.target != "AsyncCollectiveStart" for user, _ in computation.users[i.name])


def _scattered(i: Instruction, computation: Computation) -> Instruction:
    """A fused all-reduce of which each device takes a slice, as what it is: a reduce-scatter."""
    users = [user.opcode for user, _ in computation.users[i.name]]
    is_scattered = i.opcode == "all-reduce" and users == ["dynamic-slice"]
    return i._replace(opcode="reduce-scatter") if is_scattered else i


def _between_slices(i: Instruction, computation: Computation) -> dict:
    """{(kind, bytes, group size, ()): 1} of a send that is a collective between slices, else {}."""
    found = hlo_text.slice_exchange(i.attributes)
    if found is None:
        return {}
    kind, group_size = found
    size = computation.operands(i)[0].bytes * (group_size if kind == "all-gather" else 1)
    return {(kind, size, group_size, ()): 1}


def _flops(i: Instruction, computation: Computation) -> int:
    """The FLOP of a dot or a convolution, two for each product that is summed; else 0."""
    if i.opcode not in ("dot", "convolution"):
        return 0
    left, right = (operand.arrays[0].dims for operand in computation.operands(i))
    out = i.arrays[0].dims
    if i.opcode == "dot":
        contracted = [left[axis] for axis in i.numbers("lhs_contracting_dims")]
        return 2 * math.prod(out) * math.prod(contracted)
    in_labels, kernel_labels, out_labels = hlo_text.DIM_LABELS.search(i.attributes).groups()
    windows = [
        _products(left[in_labels.index(axis)], right[kernel_labels.index(axis)], out[n], **window)
        for n, axis in enumerate(out_labels)
        if axis.isdigit()
        for window in [hlo_text.window(i.attributes, int(axis))]
    ]
    features = out[out_labels.index("b")] * out[out_labels.index("f")]
    return 2 * features * right[kernel_labels.index("i")] * math.prod(windows)


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
