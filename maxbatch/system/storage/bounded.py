"""Bounds for foreign files: size, depth, expansion and range of numbers, each with its own message.

Every reader of JSON or text from outside uses these functions, and readers of YAML those of
`bounded_yaml`. A file beyond a bound is refused before it costs more memory or time than the bound
allows.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath

MOST_BYTES = 16 << 20  # default bound of a JSON file
MOST_DEPTH = 100  # nesting of lists and mappings
# An empty list takes three bytes of JSON and some seventy of memory.
_MOST_JSON_VALUES = 5_000_000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_MOST_DIGITS = 300  # more overflow a float


class RefusedContent(ConfigError, ValueError):
    """Content beyond a bound or in a wrong format; the message names the file and the bound."""


def read_bytes(path: AnyPath, label: str, most: int) -> bytes:
    """Returns the content of a regular file of at most `most` bytes.

    Args:
      label: its name in messages.

    Raises:
      RefusedContent: the file is larger, or is a pipe or a device, which may never end.
      OSError: the system does not read it.
    """
    if isinstance(path, RemotePath):
        check_size(path.stat().st_size, label, most)
        content = path.read_bytes()
    else:
        status = path.stat()
        mode, size = status.st_mode, min(status.st_size, most)
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise RefusedContent(f"{label}: must be a regular file")
        with path.open("rb") as file:
            content = file.read(size + 1)  # memory is taken for as much as is asked for
            if len(content) > size:  # it grew, or is one of the system's, which state no size
                content += file.read(most + 1 - len(content))
    check_size(len(content), label, most)
    return content


def read_text(path: AnyPath, label: str, most: int) -> str:
    """Returns the text of a UTF-8 file of at most `most` bytes; raises as `read_bytes` does."""
    try:
        return read_bytes(path, label, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedContent(f"{label}: is not UTF-8 text (byte {error.start})") from None


def check_size(size: int, label: str, most: int) -> None:
    if size > most:
        raise RefusedContent(f"{label}: is larger than {_size(most)}, the most that is read")


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >> 20 else f"{size} bytes"


def read_json(
    source: AnyPath | bytes | str,
    label: str,
    *,
    most_bytes: int = MOST_BYTES,
    most_values: int = _MOST_JSON_VALUES,
    most_depth: int = MOST_DEPTH,
    unique: bool = False,
    finite: bool = True,
) -> Any:
    """Returns the value of a JSON file or text.

    Args:
      source: a path, or the content itself.
      label: its name in messages.
      most_depth: bound on lists and objects in one another; 1 allows a flat object.
      unique: refuses an object that states a key twice; else the last one holds.
      finite: refuses NaN, Infinity and numbers that overflow to it.

    Raises:
      RefusedContent: it is beyond a bound, is not JSON, holds half of a surrogate pair, or a value
        that `unique` or `finite` refuses.
      OSError: the system does not read the file.
    """
    content = source if isinstance(source, bytes | str) else read_bytes(source, label, most_bytes)
    check_size(len(content), label, most_bytes)
    if _values(content) > most_values:
        raise RefusedContent(f"{label}: {_too_many(most_values)}")
    try:
        value = json.loads(
            content,
            parse_constant=_refuse_constant if finite else None,
            parse_float=_finite if finite else None,
            parse_int=_whole,
            object_pairs_hook=_unique if unique else None,
        )
    except RecursionError:
        raise RefusedContent(too_deep(label, most_depth)) from None
    except ValueError as error:
        raise RefusedContent(f"{label}: is not JSON ({error})") from None
    if not _is_within(value, most_depth):
        raise RefusedContent(too_deep(label, most_depth))
    if _counter(content)("\\u") and not _is_text(value):
        raise RefusedContent(
            f"{label}: a text in it has half of a surrogate pair, which is not a character"
        )
    return value


def _too_many(most: int) -> str:
    return f"holds more than {most:,} values, the most that are read"


TOO_MANY_VALUES = _too_many(_MOST_JSON_VALUES)


def has_too_many_values(line: bytes) -> bool:
    """Returns whether a line of JSON holds more values than `read_json` reads; commas in its texts
    are no values.
    """
    if len(line) <= MOST_BYTES or _values(line) <= _MOST_JSON_VALUES:
        return False
    return _values(_STRING.sub(b"", line)) > _MOST_JSON_VALUES


def _values(content: bytes | str) -> int:
    """Returns the values of JSON, or more: what looks like the beginning of one within a text
    counts too.
    """
    return sum(map(_counter(content), "[{,"))


def _counter(content: bytes | str) -> Callable[[str], int]:
    return (
        content.count
        if isinstance(content, str)
        else lambda character: content.count(character.encode())
    )


def too_deep(label: str, most_depth: int) -> str:
    return f"{label}: is nested more than {most_depth} deep, the most that is read"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} overflows")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"the number {text[:20]}... has {len(text)} digits")
    return int(text)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is stated twice")
    return mapping


def _is_text(value: object) -> bool:
    """Returns whether every text in a value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_within(value: object, most_depth: int) -> bool:
    """Returns whether lists and objects are at most so deep in one another, level by level."""
    level = [value]
    for _ in range(most_depth):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return True
    return not any(isinstance(value, dict | list) for value in level)


def _inner(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
