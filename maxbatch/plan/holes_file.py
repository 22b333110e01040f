"""A file of holes, with one range a line; a million plain ranges take less than a second."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from maxbatch.config.values import shown, shown_path
from maxbatch.plan.hole_ranges import RULE, read_ranges
from maxbatch.plan.holes import SKIP_SAMPLES, Holes
from maxbatch.plan.refusal import Refusal
from maxbatch.system.errors import reading
from maxbatch.system.storage.contents import content_stamp
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.system.storage.watched_files import Stamp, changed, watch

_MOST_DIGITS = 18  # of a number that surely fits 64 bits


def holes_in_file(path: str, slots: int | None, is_kept: bool) -> Holes:
    """Returns the holes of the file that `skip_samples` names; a file with the same stamp is read
    once.

    Args:
      slots: tokens of a sample; None: it has no fixed number.
      is_kept: whether the run under way watches the file.
    """
    file = as_path(path)
    with reading(file, blame=lambda why: _fault(path, f"{RULE}; {why}")):
        stamp = content_stamp(file)
        holes = _holes_in(file, str(stamp), path, slots)
    if is_kept:
        watch(file, stamp, lambda: _read(file, path, slots)[0] == holes)
    return holes


@functools.lru_cache(maxsize=2)
def _holes_in(file: AnyPath, stamp: str, path: str, slots: int | None) -> Holes:
    holes, read_at = _read(file, path, slots)
    if str(read_at) != stamp:
        raise changed(file)
    return holes


def _read(file: AnyPath, path: str, slots: int | None) -> tuple[Holes, Stamp]:
    """Reads a file; returns its holes, and its stamp afterwards."""
    content = file.read_bytes()
    stamp = content_stamp(file)
    plain = _plain_ranges(content)
    if plain is not None:
        return Holes.of_arrays(*plain), stamp
    return Holes(_ranges(content, path, slots)), stamp


def _ranges(content: bytes, path: str, slots: int | None) -> Iterator[tuple[int, int]]:
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise _fault(path, f"{RULE}; this one is no text") from None
    for number, line in enumerate(lines, 1):
        for stated_range in read_ranges(line, slots):
            if stated_range.rule:
                place = f"{shown_path(path)} line {number}: {shown(stated_range.word)}"
                such_as = stated_range.nearest or "1200:1300"
                rule = f"{place} {stated_range.rule}, such as {such_as}"
                raise Refusal({SKIP_SAMPLES: path}, SKIP_SAMPLES, rule, {})
            yield stated_range.first, stated_range.end


def _plain_ranges(content: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the ranges of a file of lines such as `1200:1300`; None for any other, or a range
    that is not one.
    """
    if not content:
        return None
    content = content if content.endswith(b"\n") else content + b"\n"
    byte_n = np.frombuffer(content, np.uint8)
    (mark_M,) = np.nonzero((byte_n < ord("0")) | (byte_n > ord("9")))
    digits_M = np.diff(mark_M, prepend=-1) - 1
    is_plain = (
        len(mark_M) % 2 == 0
        and (byte_n[mark_M[::2]] == ord(":")).all()
        and (byte_n[mark_M[1::2]] == ord("\n")).all()
        and digits_M.min() >= 1
        and digits_M.max() <= _MOST_DIGITS
    )
    if not is_plain:
        return None
    numbers = np.fromstring(content.replace(b":", b" ").decode("ascii"), np.int64, sep=" ")
    first_n, end_n = numbers[::2], numbers[1::2]
    return (first_n, end_n) if (first_n < end_n).all() else None


def _fault(path: str, rule: str) -> Refusal:
    """Returns the error about a file that cannot be read."""
    return Refusal({SKIP_SAMPLES: path}, SKIP_SAMPLES, rule, {SKIP_SAMPLES: ""})
