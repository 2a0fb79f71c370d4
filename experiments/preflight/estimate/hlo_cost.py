"""Counts the cost of a compiled program on one device, from its optimised, partitioned HLO text.

The TPU's compiler writes its own estimate of the cycles into the text, for every fusion, copy and
convolution; loops are counted in full here. The rest is listed without an estimate: exchanges
between devices, copies that run behind the core, and kernels (custom calls).
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from experiments.preflight.estimate import hlo_text
from experiments.preflight.estimate.hlo_text import Computation, Instruction

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KERNEL = "tpu_custom_call"  # the target of custom calls that compute something


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that runs `times` times.

    bytes: of a device and one execution; the output of an all-gather, the input of all others.
    groups: the devices that exchange, as places in the (flattened) mesh of the program, or of a
    slice where there are several; of a permute the devices that its pairs connect. Empty for an
    exchange between slices, over the data centre's network. waits: True where the core is idle
    meanwhile.
    """

    kind: str
    bytes: int
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    waits: bool
    times: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run of a program on one device.

    cycles: of its core, as the compiler estimates them. copied_bytes: from HBM, behind the core.
    kernels: (name, number of executions) pairs.
    """

    cycles: float
    copied_bytes: float
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[tuple[str, float], ...] = ()

    def __sub__(self, other: "Cost") -> "Cost":
        """The rest of this cost without the other, which is a part of it."""
        exchanged = _times(self)
        exchanged.subtract(_times(other))
        kernels = collections.Counter(dict(self.kernels))
        kernels.subtract(dict(other.kernels))
        return Cost(
            self.cycles - other.cycles,
            self.copied_bytes - other.copied_bytes,
            tuple(Collective(*key, n) for key, n in exchanged.items() if n),
            tuple((name, n) for name, n in kernels.items() if n),
        )


def _times(cost: Cost) -> collections.Counter:
    """Counts each collective's executions, by its other fields."""
    return collections.Counter({dataclasses.astuple(c)[:-1]: c.times for c in cost.collectives})


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of a program with a dynamic loop: an update's micro-batches, or a block's steps.

    fixed: without the loop's turns. turn: of one turn. plain_turn: of one turn in which the cheaper
    branch of every conditional runs, as in a decode step without truncated distributions.
    """

    fixed: Cost
    turn: Cost
    plain_turn: Cost


def program_cost(text: str) -> ProgramCost:
    """Counts the cost of a program, and of a turn of its dynamic loop."""
    program = hlo_text.parse(text)

    def cost(turns: int, branch: Callable = max) -> Cost:
        return _count(program, collections.defaultdict(lambda: turns), branch)

    fixed = cost(0)
    return ProgramCost(fixed, cost(1) - fixed, cost(1, min) - cost(0, min))


def count(
    text: str,
    *,
    loop_times: Mapping[str, float] = MappingProxyType({}),
    branch: Callable = max,
) -> Cost:
    """Counts the cost of the program whose `compiled.as_text()` this is.

    loop_times: the turns of the loops of dynamic length, by the JAX name stack of the loop, as
    "jit(update)/while" (the op_name of its instruction). branch: the branch of a conditional that
    runs, with the most cycles (max) or with the fewest (min). Raises ValueError with the name of a
    loop that is missing.
    """
    return _count(hlo_text.parse(text), loop_times, branch)


def _count(program: hlo_text.Program, loop_times: Mapping[str, float], branch: Callable) -> Cost:
    total = _Counter(program, loop_times, branch).executed(program.entry)
    return Cost(
        total.cycles,
        total.copied_bytes,
        tuple(Collective(*collective, times) for collective, times in total.collectives.items()),
        tuple(total.kernels.items()),
    )


@dataclasses.dataclass
class _Total:
    """A running sum of costs; collectives: their fields -> times; kernels: name -> times."""

    cycles: float = 0.0
    copied_bytes: float = 0.0
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "_Total", times: float) -> None:
        self.cycles += other.cycles * times
        self.copied_bytes += other.copied_bytes * times
        for mine, theirs in ((self.collectives, other.collectives), (self.kernels, other.kernels)):
            for key, runs in theirs.items():
                mine[key] += runs * times


class _Counter:
    """Adds up the costs of a program's computations, each of which is read once."""

    def __init__(
        self, program: hlo_text.Program, loop_times: Mapping[str, float], branch: Callable
    ):
        self.program, self.computations = program, program.computations
        self.loop_times, self.branch = loop_times, branch
        self.executed = functools.cache(self._executed)
        self.fused = functools.cache(self._fused)

    def _executed(self, name: str) -> _Total:
        """The cost of a computation whose instructions run one by one."""
        total, computation = _Total(), self.computations[name]
        for i in computation.instructions.values():
            total.cycles += i.cycles
            if i.opcode == "while":
                times = self.times(computation, i)
                total.add(self.executed(i.attribute("body")), times)
                total.add(self.executed(i.attribute("condition")), times + 1)
            elif i.opcode == "conditional":
                branches = [self.executed(branch) for branch in i.branches]
                total.add(self.branch(branches, key=lambda b: b.cycles), 1)
            elif i.opcode in ("call", "async-start"):
                key = "to_apply" if "to_apply=" in i.attributes else "calls"
                total.add(self.executed(i.attribute(key)), 1)
            elif i.opcode == "fusion":
                total.add(self.fused(i.attribute("calls")), 1)
            elif i.opcode == "send":
                total.collectives.update(_between_slices(i, computation))
            elif i.opcode in ("copy-done", "slice-done"):
                total.copied_bytes += _copied_bytes(i, computation)
            elif i.opcode.removesuffix("-done") in COLLECTIVES:
                waits = not i.opcode.endswith("-done")
                i = i if waits else computation.started(i)
                total.collectives.update(self.collective(i, computation, waits=waits))
            elif i.target == KERNEL:
                total.kernels[re.sub(r"\.\d+$", "", i.name)] += 1
        return total

    def _fused(self, name: str) -> _Total:
        """The exchanges of a fused computation, whose cycles are those of the fusion."""
        total, computation = _Total(), self.computations[name]
        for i in computation.instructions.values():
            if i.opcode == "fusion":
                total.add(self.fused(i.attribute("calls")), 1)
            elif i.opcode in COLLECTIVES and not _continues(i, computation):
                i, waits = _scattered(i, computation), "chain_id=" not in i.attributes
                total.collectives.update(self.collective(i, computation, waits=waits))
        return total

    def times(self, computation: Computation, loop: Instruction) -> float:
        """Returns the turns of a loop: printed, worked out, or given by the caller."""
        times = loop.trip_count
        if times is None:
            times = self.static_times(computation, loop)
        if times is not None:
            return times
        try:
            return self.loop_times[loop.op_name]
        except KeyError:
            raise ValueError(
                f"the turns of the loop {loop.op_name!r} are not in the program: give them in "
                "loop_times"
            ) from None

    def static_times(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns the turns of a loop from one constant to below another, else None."""
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

    def collective(self, i: Instruction, computation: Computation, *, waits: bool) -> dict:
        """Returns {the fields of a Collective but its times: 1}."""
        moved = [i] if i.opcode == "all-gather" else computation.operands(i)
        groups = hlo_text.device_groups(i.attributes, self.program.partitions)
        return {(i.opcode, sum(m.bytes for m in moved), max(map(len, groups)), groups, waits): 1}


def _copied_bytes(done: Instruction, computation: Computation) -> int:
    """Counts the bytes that an asynchronous copy reads from HBM and writes to it."""
    start = computation.started(done)
    (source,) = computation.operands(start)
    return done.bytes * (source.arrays[0].hbm + done.arrays[0].hbm)


def _continues(i: Instruction, computation: Computation) -> bool:
    """Returns True for the continuation of a collective that another fusion has started.

    The TPU's compiler repeats it in every fusion that it overlaps with, up to the one that ends it.
    """
    if "chain_id=" not in i.attributes:
        return False
    return all(user.target != "AsyncCollectiveStart" for user, _ in computation.users[i.name])


def _scattered(i: Instruction, computation: Computation) -> Instruction:
    """Returns a fused all-reduce as a reduce-scatter, where each device takes a slice of it."""
    users = [user.opcode for user, _ in computation.users[i.name]]
    is_scattered = i.opcode == "all-reduce" and users == ["dynamic-slice"]
    return i._replace(opcode="reduce-scatter") if is_scattered else i


def _between_slices(i: Instruction, computation: Computation) -> dict:
    """The fields of a Collective for a send that is one between slices: {fields: 1}, else {}."""
    found = hlo_text.slice_exchange(i.attributes)
    if found is None:
        return {}
    kind, group_size = found
    size = computation.operands(i)[0].bytes * (group_size if kind == "all-gather" else 1)
    return {(kind, size, group_size, (), False): 1}
