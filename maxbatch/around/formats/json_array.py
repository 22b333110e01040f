"""`json`: an array of objects, or an object with one; each object of the array is a record; plain
or gzip.

A file is one piece, read by one process, object by object: memory does not grow with their number.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TextIO

from maxbatch.around.formats.packed import opened_text
from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.data.store.formats import LONGEST_RECORD, Piece, Record, WholeFiles, content_of

_BLOCK_CHARACTERS = 1 << 16
_SPACE = " \t\r\n"
_LONGEST_NUMBER = 64  # digits that may follow a part of a number
_BEHIND_NUMBERS = f",]}}{_SPACE}"
_NO_ARRAY = "has no array of objects; lines of one object each are read by dataset_type=jsonl"


class _Fault(ValueError):
    """Text that cannot be read on; the message is the reason."""


@dataclass(frozen=True)
class JsonArray(WholeFiles):
    """Objects of an array of JSON."""

    unit: ClassVar[str] = "record"

    text_field: str | None  # None: the whole record, as JSON

    def documents(self, piece: Piece) -> Iterator[Record]:
        number = 0
        with opened_text(piece.file) as text:
            try:
                for number, value in enumerate(_records(_Reader(text)), 1):
                    yield Record(number, *content_of(value, self.text_field))
            except _Fault as fault:
                # The number of lost records is unknown: the rest of the file counts as one.
                yield Record(number + 1, b"", str(fault))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                yield Record(number + 1, b"", f"cut short or damaged ({error})")


def _records(reader: _Reader) -> Iterator[object]:
    """Yields the values of the array; raises _Fault for text that is not JSON, or without one array
    of objects.
    """
    opening = reader.next_character()
    if opening == "[":
        yield from reader.values()
    elif opening == "{":
        yield from _records_of_object(reader)
    else:
        raise _Fault(_NO_ARRAY)
    if reader.next_character():
        raise _Fault(
            "goes on after its first value; lines of one object each are read by dataset_type=jsonl"
        )


def _records_of_object(reader: _Reader) -> Iterator[object]:
    """Yields the values of the only array of objects among the values of an object."""
    name_of_array = None
    reader.expect("{")
    while reader.next_character() != "}":
        name = reader.value()
        reader.expect(":")
        if reader.next_character() == "[" and reader.after("[") == "{":
            if name_of_array is not None:
                raise _Fault(
                    f"has two arrays of objects, {name_of_array!r} and {name!r}, and must have one"
                )
            name_of_array = name
            yield from reader.values()
        else:
            reader.value()
        if reader.next_character() == ",":
            reader.expect(",")
    reader.expect("}")
    if name_of_array is None:
        raise _Fault(_NO_ARRAY)


class _Reader:
    """The values of a text of JSON, read in blocks."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._buffer, self._position = text, "", 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Returns the next character that is no white space, without reading over it; "" at the
        end.
        """
        while True:
            while self._position < len(self._buffer):
                if (character := self._buffer[self._position]) not in _SPACE:
                    return character
                self._position += 1
            if not self._read_more(_BLOCK_CHARACTERS):
                return ""

    def after(self, character: str) -> str:
        """Returns the next character behind one that is next, and stays before both."""
        self.expect(character)
        following = self.next_character()  # which may read a block, and drop what is before it
        self._buffer, self._position = character + self._buffer[self._position :], 0
        return following

    def expect(self, character: str) -> None:
        if (there := self.next_character()) != character:
            raise _Fault(
                f"not JSON ({there!r} where {character!r} must be)"
                if there
                else "not JSON (it is cut short)"
            )
        self._position += 1

    def values(self) -> Iterator[object]:
        """Yields the values of an array."""
        self.expect("[")
        if self.next_character() != "]":
            yield self.value()
            while self.next_character() == ",":
                self.expect(",")
                yield self.value()
        self.expect("]")

    def value(self) -> object:
        """Reads a value; a longer one is tried again with twice as much text."""
        if not self.next_character():
            raise _Fault("not JSON (it is cut short)")
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                behind = self._buffer[end : end + _LONGEST_NUMBER]
                may_go_on = (
                    is_number
                    and behind[:1] not in _BEHIND_NUMBERS
                    and len(behind) < _LONGEST_NUMBER
                )
                if behind and not may_go_on:
                    self._position = end
                    return value
                # with more text a number may have more digits
                if not self._read_more(_BLOCK_CHARACTERS):
                    self._position = len(self._buffer) - len(behind)
                    return value
            except (ValueError, RecursionError) as error:
                size = len(self._buffer) - self._position
                if size > LONGEST_RECORD:
                    raise _Fault(
                        f"longer than {LONGEST_RECORD:,} characters, the most that is read"
                    ) from error
                if not self._read_more(max(size, _BLOCK_CHARACTERS)):
                    raise _Fault(f"not JSON ({error})") from error

    def _read_more(self, characters: int) -> bool:
        """Appends text to the buffer, and drops what was read; returns whether there was any."""
        more = self._text.read(characters)
        self._buffer = self._buffer[self._position :] + more
        self._position = 0
        return bool(more)


FORMAT = FileFormat(
    lambda record_format, text_field: JsonArray(text_field),
    re.compile(rf"\.json{SHARD}(\.gz)?$"),
    ".json or .json.gz",
    has_records=True,
)
