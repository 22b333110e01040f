"""Lists of values that may be too many for memory, such as the files of a dataset.

Blocks of the values are in a temporary file. JSON is made and read part by part, and is the same
text as that of a list in memory.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Generic, TypeVar

_BLOCK = 256  # values that are read at once
_RUN = 1 << 14  # values that are sorted in memory
_MOST_RUNS = 64  # lists that are merged at once
_SIZE_BYTES = 8
_MARK = "\0a long list\0"  # its place in the JSON of what holds it


T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", str, tuple[str, str])


class LongList(Generic[T]):
    """A list that only grows and is read in order, in memory that does not grow with it.

    The temporary file is removed with the list.
    """

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._file: BinaryIO | None = None
        self._end = self._length = 0
        self._rest: list[T] = []  # values after the last block in the file
        for value in values:
            self.append(value)

    def append(self, value: T) -> None:
        self._rest.append(value)
        self._length += 1
        if len(self._rest) == _BLOCK:
            self._write(pickle.dumps(self._rest))
            self._rest = []

    def _write(self, block: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="maxbatch-")  # noqa: SIM115  closed with the list
            weakref.finalize(self, self._file.close)
        self._file.write(len(block).to_bytes(_SIZE_BYTES, "little"))
        self._file.write(block)
        self._file.flush()
        self._end += _SIZE_BYTES + len(block)

    def __iter__(self) -> Iterator[T]:
        begin, end, rest = 0, self._end, tuple(self._rest)
        while begin < end:
            assert self._file is not None, "it holds blocks"
            number = self._file.fileno()
            size = int.from_bytes(os.pread(number, _SIZE_BYTES, begin), "little")
            yield from pickle.loads(os.pread(number, size, begin + _SIZE_BYTES))
            begin += _SIZE_BYTES + size
        yield from rest

    def __len__(self) -> int:
        return self._length


class Mapped(Generic[T, R]):
    """The values of a function of each of some values, computed whenever they are read."""

    def __init__(self, function: Callable[[T], R], values: Iterable[T]) -> None:
        self._function, self._values = function, values

    def __iter__(self) -> Iterator[R]:
        return map(self._function, self._values)


def in_order(values: Iterable[S]) -> Iterator[S]:
    """Yields values sorted, in memory that does not grow with their number."""
    remaining, runs = iter(values), list[LongList[S]]()
    while some := sorted(itertools.islice(remaining, _RUN)):
        runs.append(LongList(some))
        if len(runs) == _MOST_RUNS:
            runs = [LongList(heapq.merge(*runs))]
    return heapq.merge(*runs)


def json_parts(value: object, sort_keys: bool = False) -> Iterator[bytes]:
    """Yields the JSON of a value that holds long lists, as `json.dumps` would write it with lists
    in their place.
    """
    lists: list[Iterable[object]] = []

    def placed(value_of_lists: object) -> str:
        if not isinstance(value_of_lists, LongList | Mapped):
            raise TypeError(f"{type(value_of_lists).__name__} has no JSON")
        lists.append(value_of_lists)
        return _MARK

    texts = json.dumps(value, sort_keys=sort_keys, default=placed).split(json.dumps(_MARK))
    for text, values in itertools.zip_longest(texts, lists):
        yield text.encode()
        if values is not None:
            yield b"["
            for number, item in enumerate(values):
                yield (", " * (number > 0) + json.dumps(item, sort_keys=sort_keys)).encode()
            yield b"]"


def read_json_list(parts: Iterable[str], head: str) -> tuple[LongList[object], str]:
    """Reads a list in a JSON text that `json_parts` made; returns its values, and the text after
    it.

    Args:
      parts: of the text.
      head: the text up to the list's opening bracket, which is included.

    Raises:
      ValueError: the text is another.
    """
    remaining, text, place = iter(parts), "", 0
    values, decode = LongList[object](), json.JSONDecoder().raw_decode
    while len(text) < len(head):
        text += _next_part(remaining)
    if not text.startswith(head):
        raise ValueError(f"the text does not begin with {head}")
    place = len(head)
    while not text.startswith("]", place):
        try:
            value, end = decode(text, place)
        except ValueError:  # the rest of the value is in the next part
            end = len(text)
        if text.startswith((", ", "]"), end):
            values.append(value)
            place = end + 2 * text.startswith(",", end)
        else:
            text, place = text[place:] + _next_part(remaining), 0
    return values, text[place + 1 :] + "".join(remaining)


def _next_part(parts: Iterator[str]) -> str:
    part = next(parts, "")
    if not part:
        raise ValueError("the text ends within a list")
    return part
