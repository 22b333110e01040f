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
        shapes = {one.name: one.shape for one in instructions}
        steps = [self._alone(one, shapes) for one in instructions]
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

    def _alone(self, one: Instruction, shapes: Mapping[str, str]) -> Schedule:
        """Returns the cost of an instruction, without collectives that it begins, carries or
        ends.
        """
        found = Schedule()
        if one.opcode == "while":
            found.add(
                self.computation(one.attribute("body") or ""),
                _turns(one, self._module) or self._trips,
            )
        elif one.opcode == "conditional":
            branches = [self.computation(name) for name in _branches(one)]
            found.add(max(branches, key=lambda branch: branch.busy_cycles, default=Schedule()), 1)
        elif one.opcode == "call":
            found.add(self.computation(one.attribute("to_apply") or ""), 1)
        else:
            cycles = one.number("estimated_cycles") or 0
            kernel = kernel_cycles(one, shapes, self._chip) if is_kernel(one) and not cycles else 0
            found.compute_cycles, found.kernel_cycles = cycles, kernel
            if cycles or kernel:
                found.operations[_title(one), self._module.source(one)] += cycles + kernel
        return found


def _turns(loop: Instruction, module: Module) -> int | None:
    """Returns the turns of a loop that counts from zero; None if the number is an argument of the
    program.
    """
    known = loop.number("known_trip_count")
    if known is not None:
        return known
    condition = _by_name(module, loop.attribute("condition"))
    for one in condition.values():
        if (
            one.opcode == "compare"
            and one.attribute("direction") == "LT"
            and len(one.operands) == 2
        ):
            bound = _whole_constant(condition.get(one.operands[1]))
            if bound is not None:
                return math.ceil(bound / _stride(loop, module, condition.get(one.operands[0])))
    return None


def _stride(loop: Instruction, module: Module, counter: Instruction | None) -> int:
    """Returns the increment of the counter per turn: 1 unless the loop is unrolled and adds another
    constant.
    """
    body = _by_name(module, loop.attribute("body"))
    results = [one for one in body.values() if one.opcode == "tuple"]
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
    return {one.name: one for one in module.computations.get(computation or "", [])}


def _whole_constant(one: Instruction | None) -> int | None:
    is_whole = (
        one
        and one.opcode == "constant"
        and re.match(r"[su]32\[\]", one.shape)
        and one.rest[:1].isdigit()
    )
    return int(one.rest.partition(")")[0]) if one and is_whole else None


def _branches(one: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
    pair = (one.attribute("true_computation"), one.attribute("false_computation"))
    return re.findall(r"[\w.\-]+", listed[1]) if listed else [name for name in pair if name]


def _title(one: Instruction) -> str:
    """Returns the end of JAX's name of an operation: the primitive, a product's equation or a
    kernel's name.
    """
    if is_kernel(one):
        return one.name.partition(".")[0]
    parts = one.op_name.split("/") if one.op_name else [one.name]
    is_product = len(parts) > 1 and parts[-1] == "dot_general" and "->" in parts[-2]
    return parts[-2] if is_product else parts[-1]


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
    shapes = {one.name: one.shape for one in instructions}
    fused: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, one in enumerate(instructions):
        kind = one.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            is_start = one.opcode.endswith("-start")
            end = _span(instructions, index)[1] if is_start else index
            size = _wire_bytes(
                kind, one, shapes, instructions[end].shape if is_start else one.shape
            )
            yield Transfer(size, range(index + 1, end))
        elif one.opcode in ("fusion", "async-start", "call-start", "custom-call-start"):
            places = [index] if one.opcode == "fusion" else _span(instructions, index)
            for channel, size in _inside(one, module):
                sizes[channel] = size
                fused.setdefault(channel, []).extend(places)
    for channel, places in fused.items():
        first, last = places[0], places[-1]
        carriers = [index for index in places if _carries_computation(instructions[index])]
        yield Transfer(sizes[channel], [*carriers, *range(first + 1, last)])


def _inside(one: Instruction, module: Module) -> Iterator[tuple[str, int]]:
    """Yields the collectives of a called computation, with their channel and bytes."""
    name = (
        one.attribute("calls") or one.attribute("to_apply") or one.attribute("called_computations")
    )
    called = module.computations.get(name or "", [])
    shapes = {inner.name: inner.shape for inner in called}
    for inner in called:
        kind = inner.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            channel = inner.attribute("channel_id") or inner.name
            yield channel, _wire_bytes(kind, inner, shapes, inner.shape)


def _carries_computation(one: Instruction) -> bool:
    """Returns whether an instruction runs a collective in parallel with another operation's
    computation.
    """
    called = one.attribute("calls") or ""
    return one.opcode == "fusion" and not any(name in called for name in _OPEN_FUSIONS)


def _span(instructions: Sequence[Instruction], start: int) -> tuple[int, int]:
    """Returns the span of an asynchronous operation: from its operands to its done, else to the
    end.
    """
    names, first = {instructions[start].name}, start
    for index in range(start + 1, len(instructions)):
        one = instructions[index]
        if names & set(one.operands):
            if one.opcode.endswith("-done"):
                return first, index
            if one.opcode.endswith("-update"):
                names.add(one.name)
                first = index if not instructions[start].operands else first
    return first, len(instructions) - 1


def _wire_bytes(kind: str, one: Instruction, shapes: Mapping[str, str], result: str) -> int:
    """Returns the bytes of the whole array, doubled for an all-reduce."""
    if kind in ("reduce-scatter", "all-reduce"):
        given = sum(shape_bytes(shapes.get(name, "")) for name in one.operands)
        return (2 if kind == "all-reduce" else 1) * (given or shape_bytes(result))
    return shape_bytes(result)


_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of queries-by-keys size in a splash kernel, by phase.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FUSED_BACKWARD_PRODUCTS = 5  # of a `dkv` that also computes the queries' gradient


def is_kernel(one: Instruction) -> bool:
    """Returns whether an instruction runs a custom kernel of the TPU."""
    return one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.rest


def kernel_cycles(one: Instruction, shapes: Mapping[str, str], chip: Chip) -> int:
    """Returns the cycles of a custom kernel at the chip's peak of arithmetic or memory, the larger.

    JAX's splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`, JAX 0.10) states no
    cost; its products are counted.
    """
    if chip.clock_ghz is None:
        return 0
    flops = one.number("flops") or _splash_flops(one, shapes)
    seconds = max(
        flops / (chip.tflops * 1e12), (one.number("bytes_accessed") or 0) / (chip.hbm_gb_s * 1e9)
    )
    return round(seconds * chip.clock_ghz * 1e9)


def _splash_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns the FLOPs of causal splash attention from its queries, [..., heads, length,
    head_dim], and its keys.
    """
    splash = _SPLASH.search(one.name + one.op_name)
    given = [array for name in one.operands for array in arrays(shapes.get(name, ""))]
    floats = [dims for kind, dims in given if kind[0] in "fb" and len(dims) >= 2]
    if not splash or len(floats) < 2:
        return 0
    queries, keys = floats[0], floats[1]
    products = _SPLASH_PRODUCTS[splash[1]]
    if splash[1] == "dkv" and any(len(dims) > len(queries) for _, dims in arrays(one.shape)):
        # returns the queries' gradient by blocks of keys: one more axis
        products = _FUSED_BACKWARD_PRODUCTS
    grid = next((dims for kind, dims in given if kind[0] == "s" and len(dims) == 3), None)
    share = _computed_share(queries[-2], keys[-2], _blocks(one, splash[1]), grid)
    return share * products * 2 * math.prod(queries) * keys[-2]


def _blocks(one: Instruction, phase: str) -> tuple[int, int] | None:
    """Returns the rows of queries and of keys per block, as splash kernels state them for the
    profiler.
    """
    suffix = "" if phase == "fwd" else f"_{phase}"
    found = [re.search(rf'block_{side}{suffix}\\?":\s*(\d+)', one.rest) for side in ("q", "kv")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


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
