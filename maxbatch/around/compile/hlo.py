"""A parser of scheduled HLO text: computations, instructions in order, shapes and source lines. No
JAX.

It reads `compiled.as_text()` of a TPU program; for the grammar see
https://openxla.org/xla/operation_semantics and the printer in XLA's `hlo_instruction.cc`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

# other names end with their bits
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_END = re.compile(r"\}(, execution_thread=\"\w+\")?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", re.S)
_ROW = re.compile(r"^(\d+) (.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    shape: str  # of its result, as printed
    opcode: str
    rest: str  # operands and attributes, as printed

    def attribute(self, name: str) -> str | None:
        """Returns a word or number attribute, such as `calls` or `channel_id`; the first item of a
        list.
        """
        match = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    def number(self, name: str) -> int | None:
        """Returns a number of the backend's own configuration, such as `estimated_cycles`."""
        match = re.search(rf'"{name}":\s*(?:\{{"n":)?"?(\d+)', self.rest)
        return int(match[1]) if match else None

    @cached_property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, or ""."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


def _short(file: str) -> str:
    """Shortens a path to start at its package."""
    place = file.rfind("/maxbatch/")
    return file[place + 1 :] if place >= 0 else file.rpartition("site-packages/")[2]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the dtypes and dimensions of the arrays in a printed shape."""
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _ARRAY.findall(shape)
    ]


def shape_bytes(shape: str) -> int:
    """Returns the bytes of the arrays in a printed shape."""
    return sum(_bits(kind) * math.prod(dims) // 8 for kind, dims in arrays(shape))


def _bits(kind: str) -> int:
    match = re.match(r"[fsuc](\d+)", kind)
    return _BITS[kind] if kind in _BITS else int(match[1]) if match else 0


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the tables of source lines."""

    entry: str
    computations: Mapping[str, list[Instruction]]
    tables: Mapping[str, Mapping[str, str]]

    def source(self, instruction: Instruction) -> str:
        """Returns `file:line` of an instruction's source, or "".

        It is the innermost frame in maxbatch, or else the innermost frame.
        """
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.rest)
        if direct:
            return f"{_short(direct[1])}:{direct[2]}"
        places = list(self._places(instruction.attribute("stack_frame_id")))
        return next(
            (place for place in places if place.startswith("maxbatch/")),
            places[0] if places else "",
        )

    def _places(self, frame: str | None) -> Iterator[str]:
        """Yields `file:line` of a stack's frames, innermost first."""
        frames, seen = self.tables["StackFrames"], set[str]()
        while frame is not None and frame in frames and frame not in seen:
            seen.add(frame)
            ids = dict(re.findall(r"(\w+)=(\d+)", frames[frame]))
            place = dict(
                re.findall(
                    r"(\w+)=(\d+)", self.tables["FileLocations"].get(ids["file_location_id"], "")
                )
            )
            file = self.tables["FileNames"].get(place.get("file_name_id", ""), "").strip('"')
            if file:
                yield f"{_short(file)}:{place.get('line', 0)}"
            frame = ids.get("parent_frame_id")


def read_hlo(text: str) -> Module:
    """Parses scheduled HLO text.

    A computation ends at a `}` before an empty line, possibly followed by its thread, because a
    kernel's text may have lines of `}`. For the same reason, a line that begins no instruction
    continues the previous one.
    """
    entry, name, table = "", None, None
    pieces: dict[str, list[list[str]]] = {}
    tables: dict[str, dict[str, str]] = {kind: {} for kind in _TABLES}
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        opens = _COMPUTATION.match(line) if name is None else None
        if opens:
            name, table = opens[2], None
            pieces[name], entry = [], name if opens[1] else entry
        elif name is not None and _END.fullmatch(line) and not following.strip():
            name = None
        elif name is not None:
            _append(pieces[name], line)
        elif line in tables:
            table = line
        elif table and (row := _ROW.match(line)):
            tables[table][row[1]] = row[2]
    return Module(
        entry, {name: _instructions(instructions) for name, instructions in pieces.items()}, tables
    )


def _append(pieces: list[list[str]], line: str) -> None:
    if _INSTRUCTION.match(line):
        pieces.append([line])
    elif pieces:
        pieces[-1].append(line)


def _instructions(pieces: list[list[str]]) -> list[Instruction]:
    matches = (_INSTRUCTION.match("\n".join(lines)) for lines in pieces)
    return [Instruction(match[1], match[2], match[3], match[4]) for match in matches if match]
