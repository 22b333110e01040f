"""What a compiled program sends between devices, read from its optimised HLO."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_OPERATION = re.compile(rf"= (.+?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*?\{\n(.*?)^\}", re.M | re.S)
_BYTES = {
    "pred": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "u16": 2,
}


class Collective(NamedTuple):
    kind: str
    num_bytes: int  # of the result on one device, each time
    axes: frozenset[str]  # mesh axes along which devices exchange
    times: int  # how often it runs


class Loop(NamedTuple):
    body: str
    trip_count: int | None  # None: a bound that is known only when it runs


def computations(text: str) -> tuple[str, dict[str, str]]:
    """The name of the entry, and the lines of every computation by its name."""
    found = _COMPUTATION.findall(text)
    return next(name for entry, name, _ in found if entry), {name: body for _, name, body in found}


def loops(body: str) -> list[Loop]:
    """The loops that a computation runs."""
    lines = [line for line in body.splitlines() if " while(" in line]
    counts = [re.search(r'known_trip_count[^\d]*"(\d+)"', line) for line in lines]
    bodies = [re.search(r"body=%?([\w.-]+)", line) for line in lines]
    return [
        Loop(b.group(1), int(n.group(1)) if n else None)
        for b, n in zip(bodies, counts, strict=True)
        if b
    ]


def collectives(text: str, mesh: dict[str, int], trips: int) -> list[Collective]:
    """Every collective of a program, those in loops as often as these run.

    Args:
      text: optimised HLO.
      mesh: sizes of the axes, in the order in which devices are numbered.
      trips: turns of a loop whose bound is an argument.
    """
    entry, bodies = computations(text)
    found: list[Collective] = []

    def visit(name: str, times: int) -> None:
        inner = {loop.body: loop.trip_count or trips for loop in loops(bodies[name])}
        for line in bodies[name].splitlines():
            operation = _OPERATION.search(line)
            if operation:
                shapes, kind = operation.groups()
                found.append(Collective(kind, _num_bytes(shapes), _axes(line, mesh), times))
            for called in re.findall(r"(?:calls|to_apply|body)=%?([\w.-]+)", line):
                visit(called, times * inner.get(called, 1))
            branches = re.search(r"branch_computations=\{(.*?)\}", line)
            for called in re.findall(r"[\w.-]+", branches.group(1)) if branches else []:
                visit(called, times)

    visit(entry, 1)
    return found


def bytes_over(found: list[Collective], axis: str) -> int:
    """Bytes that a device receives in collectives along a mesh axis."""
    return sum(c.num_bytes * c.times for c in found if axis in c.axes)


def _num_bytes(shapes: str) -> int:
    sizes = [
        (kind, [int(n) for n in dims.split(",") if n]) for kind, dims in _ARRAY.findall(shapes)
    ]
    return sum(_BYTES[kind] * math.prod(dims) for kind, dims in sizes)


def _axes(line: str, mesh: dict[str, int]) -> frozenset[str]:
    shape = tuple(mesh.values())
    return frozenset(
        axis
        for group in _groups(line, math.prod(shape))
        for axis, along in zip(mesh, np.unravel_index(group, shape), strict=True)
        if len(set(along.tolist())) > 1
    )


def _groups(line: str, num_devices: int) -> list[list[int]]:
    """The groups of devices that talk to each other."""
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        groups, dims, order = (_numbers(part) if part else None for part in iota.groups())
        devices = np.arange(num_devices).reshape(dims)
        return (devices.transpose(order) if order else devices).reshape(groups).tolist()
    named = re.search(
        r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}:]*)\}",
        line,
    )
    if named:
        axes, dims, order, talking = named.groups()
        sizes = [int(n) for n in re.findall(r"=(\d+)", axes)]
        names = re.findall(r"(\w+)'?=", axes)
        moved = [names.index(name) for name in re.findall(r"\w+", talking)]
        devices = np.arange(num_devices)
        if dims:
            devices = devices.reshape(_numbers(dims)).transpose(_numbers(order))
        devices = np.moveaxis(devices.reshape(sizes), moved, range(-len(moved), 0))
        return devices.reshape(-1, math.prod(sizes[axis] for axis in moved)).tolist()
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)+)\}", line)
    if listed:
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    assert "replica_groups={}" in line, line
    return [list(range(num_devices))]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
