"""The time of a compiled TPU program, modelled from its schedule. No JAX.

The TPU compiler's HLO is scheduled, and every fusion carries the compiler's estimate of its cycles.
Summed over loops, the estimates are the computation of an update. Collectives are counted in bytes,
exposed or overlapped by computation. This is a model: nothing is measured, and it leaves out waits
for memory, the host or other chips.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from maxbatch.around.compile.hlo import Instruction, Module, arrays, shape_bytes
from maxbatch.system.hardware.chips import Chip

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Exposed fusions of a collective, without computation of another operation.
_OPEN_FUSIONS = ("all-reduce-scatter", "reduce-scatter-fusion")


@dataclasses.dataclass(frozen=True)
class Operation:
    """The cost of one operation of the model in an update, over all turns."""

    name: str  # JAX's name
    source: str  # `file:line`
    cycles: int


@dataclasses.dataclass
class Schedule:
    """Figures of a program's schedule, with a loop's body counted once per turn."""

    compute_cycles: float = 0
    kernel_cycles: float = 0  # of custom kernels, by their cost; not in `compute_cycles`
    hidden_collective_bytes: float = 0  # while computation runs
    exposed_collective_bytes: float = 0
    # cycles by name and source
    operations: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)

    def add(self, other: Schedule, times: int) -> None:
        """Adds the cost of a loop or a call, times its runs."""
        self.compute_cycles += times * other.compute_cycles
        self.kernel_cycles += times * other.kernel_cycles
        self.hidden_collective_bytes += times * other.hidden_collective_bytes
        self.exposed_collective_bytes += times * other.exposed_collective_bytes
        for key, cycles in other.operations.items():
            self.operations[key] += times * cycles

    @property
    def busy_cycles(self) -> float:
        """Cycles of computation, kernels included."""
        return self.compute_cycles + self.kernel_cycles

    def dearest(self, number: int) -> list[Operation]:
        return [
            Operation(*key, cycles=round(cycles))
            for key, cycles in self.operations.most_common(number)
        ]

    def seconds(self, chip: Chip) -> float | None:
        """Returns the modelled time: the longer of computation and hidden transfer, plus the
        exposed transfer.

        Returns None if the chip's compiler counts no cycles.
        """
        if chip.clock_ghz is None:
            return None
        rate = chip.ici_gb_s * 1e9
        busy = self.busy_cycles / (chip.clock_ghz * 1e9)
        return max(busy, self.hidden_collective_bytes / rate) + self.exposed_collective_bytes / rate


def schedule_of(module: Module, chip: Chip, trips: int = 1) -> Schedule:
    """Returns the figures of the schedule of a program.

    Args:
      chip: its peak and bandwidth turn a kernel's cost into cycles.
      trips: turns of a loop whose number is an argument, such as the loop over micro-batches.
    """
    return _Reader(module, chip, trips).computation(module.entry)


class _Reader:
    """Reads the computations of a module, each once."""

    def __init__(self, module: Module, chip: Chip, trips: int) -> None:
        self._module, self._chip, self._trips = module, chip, trips
        self._known: dict[str, Schedule] = {}

    def computation(self, name: str) -> Schedule:
        """Returns the cost of one run of a computation."""
        if name not in self._known:
            self._known[name] = self._read(self._module.computations.get(name, []))
        return self._known[name]

    def _read(self, instructions: Sequence[Instruction]) -> Schedule:
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        steps = [self._alone(instruction, shapes) for instruction in instructions]
        total = Schedule()
        for step in steps:
            total.add(step, 1)
        for transfer in transfers(instructions, self._module):
            behind = any(steps[index].busy_cycles for index in transfer.meanwhile)
            if behind:
                total.hidden_collective_bytes += transfer.num_bytes
            else:
                total.exposed_collective_bytes += transfer.num_bytes
        return total

    def _alone(self, instruction: Instruction, shapes: Mapping[str, str]) -> Schedule:
        """Returns the cost of an instruction, without collectives that it begins, carries or
        ends.
        """
        schedule = Schedule()
        if instruction.opcode == "while":
            schedule.add(
                self.computation(instruction.attribute("body") or ""),
                _turns(instruction, self._module) or self._trips,
            )
        elif instruction.opcode == "conditional":
            branches = [self.computation(name) for name in _branches(instruction)]
            schedule.add(
                max(branches, key=lambda branch: branch.busy_cycles, default=Schedule()), 1
            )
        elif instruction.opcode == "call":
            schedule.add(self.computation(instruction.attribute("to_apply") or ""), 1)
        else:
            cycles = instruction.number("estimated_cycles") or 0
            kernel = (
                kernel_cycles(instruction, shapes, self._chip)
                if is_kernel(instruction) and not cycles
                else 0
            )
            schedule.compute_cycles, schedule.kernel_cycles = cycles, kernel
            if cycles or kernel:
                schedule.operations[_title(instruction), self._module.source(instruction)] += (
                    cycles + kernel
                )
        return schedule


def _turns(loop: Instruction, module: Module) -> int | None:
    """Returns the turns of a loop that counts from zero; None if the number is an argument of the
    program.
    """
    known = loop.number("known_trip_count")
    if known is not None:
        return known
    condition = _by_name(module, loop.attribute("condition"))
    for instruction in condition.values():
        if (
            instruction.opcode == "compare"
            and instruction.attribute("direction") == "LT"
            and len(instruction.operands) == 2
        ):
            bound = _whole_constant(condition.get(instruction.operands[1]))
            if bound is not None:
                return math.ceil(
                    bound / _stride(loop, module, condition.get(instruction.operands[0]))
                )
    return None


def _stride(loop: Instruction, module: Module, counter: Instruction | None) -> int:
    """Returns the increment of the counter per turn: 1 unless the loop is unrolled and adds another
    constant.
    """
    body = _by_name(module, loop.attribute("body"))
    results = [instruction for instruction in body.values() if instruction.opcode == "tuple"]
    index = int((counter and counter.attribute("index")) or -1)
    if not results or not 0 <= index < len(results[-1].operands):
        return 1
    added = body.get(results[-1].operands[index])
    while added and added.opcode in ("copy", "copy-start", "copy-done") and added.operands:
        added = body.get(added.operands[0])
    if added is None or added.opcode != "add":
        return 1
    return next(
        (stride for name in added.operands if (stride := _whole_constant(body.get(name)))), 1
    )


def _by_name(module: Module, computation: str | None) -> dict[str, Instruction]:
    return {
        instruction.name: instruction
        for instruction in module.computations.get(computation or "", [])
    }


def _whole_constant(instruction: Instruction | None) -> int | None:
    is_whole = (
        instruction
        and instruction.opcode == "constant"
        and re.match(r"[su]32\[\]", instruction.shape)
        and instruction.rest[:1].isdigit()
    )
    return int(instruction.rest.partition(")")[0]) if instruction and is_whole else None


def _branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
    pair = (instruction.attribute("true_computation"), instruction.attribute("false_computation"))
    return re.findall(r"[\w.\-]+", listed[1]) if listed else [name for name in pair if name]


def _title(instruction: Instruction) -> str:
    """Returns the end of JAX's name of an operation: the primitive, a product's equation or a
    kernel's name.
    """
    if is_kernel(instruction):
        return instruction.name.partition(".")[0]
    scopes = instruction.op_name.split("/") if instruction.op_name else [instruction.name]
    is_product = len(scopes) > 1 and scopes[-1] == "dot_general" and "->" in scopes[-2]
    return scopes[-2] if is_product else scopes[-1]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective in the order of a computation's instructions."""

    num_bytes: int  # bytes sent: the whole array, twice for an all-reduce
    meanwhile: Sequence[int]  # instructions between its start and its end


def transfers(instructions: Sequence[Instruction], module: Module) -> Iterator[Transfer]:
    """Yields the collectives among a computation's own instructions.

    A collective is one blocking instruction; or a start and a done (a call on SparseCores; from
    libtpu 0.0.46 on, an update between them passes the operands); or part of fusions, where one
    channel counts once even across several. `async_collective_name` marks a start and a done that
    the compiler joined again because nothing runs between them (`ConvertAsyncCollectivesToSync` in
    XLA), so it blocks.
    """
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    fused: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, instruction in enumerate(instructions):
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            is_start = instruction.opcode.endswith("-start")
            end = _span(instructions, index)[1] if is_start else index
            size = _wire_bytes(
                kind,
                instruction,
                shapes,
                instructions[end].shape if is_start else instruction.shape,
            )
            yield Transfer(size, range(index + 1, end))
        elif instruction.opcode in ("fusion", "async-start", "call-start", "custom-call-start"):
            places = [index] if instruction.opcode == "fusion" else _span(instructions, index)
            for channel, size in _inside(instruction, module):
                sizes[channel] = size
                fused.setdefault(channel, []).extend(places)
    for channel, places in fused.items():
        first, last = places[0], places[-1]
        carriers = [index for index in places if _carries_computation(instructions[index])]
        yield Transfer(sizes[channel], [*carriers, *range(first + 1, last)])


def _inside(instruction: Instruction, module: Module) -> Iterator[tuple[str, int]]:
    """Yields the collectives of a called computation, with their channel and bytes."""
    name = (
        instruction.attribute("calls")
        or instruction.attribute("to_apply")
        or instruction.attribute("called_computations")
    )
    called = module.computations.get(name or "", [])
    shapes = {inner.name: inner.shape for inner in called}
    for inner in called:
        kind = inner.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            channel = inner.attribute("channel_id") or inner.name
            yield channel, _wire_bytes(kind, inner, shapes, inner.shape)


def _carries_computation(instruction: Instruction) -> bool:
    """Returns whether an instruction runs a collective in parallel with another operation's
    computation.
    """
    called = instruction.attribute("calls") or ""
    return instruction.opcode == "fusion" and not any(name in called for name in _OPEN_FUSIONS)


def _span(instructions: Sequence[Instruction], start: int) -> tuple[int, int]:
    """Returns the span of an asynchronous operation: from its operands to its done, else to the
    end.
    """
    names, first = {instructions[start].name}, start
    for index in range(start + 1, len(instructions)):
        instruction = instructions[index]
        if names & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return first, index
            if instruction.opcode.endswith("-update"):
                names.add(instruction.name)
                first = index if not instructions[start].operands else first
    return first, len(instructions) - 1


def _wire_bytes(kind: str, instruction: Instruction, shapes: Mapping[str, str], result: str) -> int:
    """Returns the bytes of the whole array, doubled for an all-reduce."""
    if kind in ("reduce-scatter", "all-reduce"):
        given = sum(shape_bytes(shapes.get(name, "")) for name in instruction.operands)
        return (2 if kind == "all-reduce" else 1) * (given or shape_bytes(result))
    return shape_bytes(result)


_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of queries-by-keys size in a splash kernel, by phase.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FUSED_BACKWARD_PRODUCTS = 5  # of a `dkv` that also computes the queries' gradient


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction runs a custom kernel of the TPU."""
    return (
        instruction.opcode == "custom-call"
        and 'custom_call_target="tpu_custom_call"' in instruction.rest
    )


def kernel_cycles(instruction: Instruction, shapes: Mapping[str, str], chip: Chip) -> int:
    """Returns the cycles of a custom kernel at the chip's peak of arithmetic or memory, the larger.

    JAX's splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`, JAX 0.10) states no
    cost; its products are counted.
    """
    if chip.clock_ghz is None:
        return 0
    flops = instruction.number("flops") or _splash_flops(instruction, shapes)
    seconds = max(
        flops / (chip.tflops * 1e12),
        (instruction.number("bytes_accessed") or 0) / (chip.hbm_gb_s * 1e9),
    )
    return round(seconds * chip.clock_ghz * 1e9)


def _splash_flops(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns the FLOPs of causal splash attention from its queries, [..., heads, length,
    head_dim], and its keys.
    """
    splash = _SPLASH.search(instruction.name + instruction.op_name)
    given = [array for name in instruction.operands for array in arrays(shapes.get(name, ""))]
    floats = [dims for kind, dims in given if kind[0] in "fb" and len(dims) >= 2]
    if not splash or len(floats) < 2:
        return 0
    queries, keys = floats[0], floats[1]
    products = _SPLASH_PRODUCTS[splash[1]]
    if splash[1] == "dkv" and any(
        len(dims) > len(queries) for _, dims in arrays(instruction.shape)
    ):
        # returns the queries' gradient by blocks of keys: one more axis
        products = _FUSED_BACKWARD_PRODUCTS
    grid = next((dims for kind, dims in given if kind[0] == "s" and len(dims) == 3), None)
    share = _computed_share(queries[-2], keys[-2], _blocks(instruction, splash[1]), grid)
    # Two arrays tell segments apart. A third one has the places of queries, unless all are seen.
    if sum(kind == "s32" and len(dims) >= 2 and dims[-1] != 1 for kind, dims in given) == 2:
        share = 1.0
    return share * products * 2 * math.prod(queries) * keys[-2]


def _blocks(instruction: Instruction, phase: str) -> tuple[int, int] | None:
    """Returns the rows of queries and of keys per block, as splash kernels state them for the
    profiler.
    """
    suffix = "" if phase == "fwd" else f"_{phase}"
    matches = [
        re.search(rf'block_{side}{suffix}\\?":\s*(\d+)', instruction.rest) for side in ("q", "kv")
    ]
    return (int(matches[0][1]), int(matches[1][1])) if matches[0] and matches[1] else None


def _computed_share(
    queries: int, keys: int, blocks: tuple[int, int] | None, grid: tuple[int, ...] | None
) -> float:
    """Returns the share of the products that a causal kernel computes; blocks cut by the mask are
    computed whole.

    Args:
      blocks: rows of queries and of keys in a block; None if unknown.
      grid: visited blocks, [heads, by queries, by keys], narrower for a window; None if unknown.
    """
    if blocks is None:
        return 0.5
    block_q, block_kv = blocks
    rows, columns = max(1, keys // block_q), max(1, keys // block_kv)
    causal = sum(min(columns, math.ceil((row + 1) * block_q / block_kv)) for row in range(rows)) / (
        rows * columns
    )
    visited = grid[1] * grid[2] * block_q * block_kv / (queries * keys) if grid else 1.0
    return min(causal, visited)
