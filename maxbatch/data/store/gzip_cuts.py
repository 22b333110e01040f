"""Places where a gzip file of several members can be cut into pieces of whole lines.

A gzip file is one or more members, each compressed by itself, one after the other (RFC 1952,
section 2.2), possibly with zeros in between. `bgzip` writes such files, and so does `cat a.gz
b.gz`. The bytes that begin a member also occur inside of compressed data, and a member may hold a
whole gzip file, so only decompressing the members before it shows where one begins. That reads the
file once more, up to the last bytes that could begin a member, so a file of one member has no cuts
and is hardly decompressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

MAGIC = b"\x1f\x8b"
_DEFLATED = MAGIC + b"\x08"  # every member begins so
# a decompressor that reads a member's header and checks its checksum and size
_WITH_HEADER = zlib.MAX_WBITS | 16
_BLOCK_BYTES = 1 << 20


class Cut(NamedTuple):
    """The beginning of a line, and the member that decompressing begins at to reach it."""

    line: int  # bytes of the content before the line
    member: int  # bytes of the file before the member
    member_content: int  # bytes of the content before the member


class _Part(NamedTuple):
    """A part of the content."""

    place: int  # bytes of the file before the part
    begins_member: bool
    content: bytes


def line_cuts(stream: BinaryIO, step: int) -> Iterator[Cut]:
    """Yields a cut for the first line that begins at or after a member, at least `step` bytes of
    the file apart.

    Ends at damage: what is behind it belongs to the last piece.
    """
    if not (last := _last_candidate(stream)):
        return
    cut_at, content, ends_line = 0, 0, True
    pending: tuple[int, int] | None = None  # a member that no line begins in so far, as in Cut
    try:
        for place, begins_member, data in _parts(stream):
            if place > last and not pending:
                return
            if begins_member and place - cut_at >= step:
                pending = place, content
            if pending and (ends_line or b"\n" in data):
                yield Cut(content if ends_line else content + data.index(b"\n") + 1, *pending)
                cut_at, pending = pending[0], None
            content += len(data)
            ends_line = data.endswith(b"\n") if data else ends_line
    except zlib.error:
        return


def _last_candidate(stream: BinaryIO) -> int:
    """Returns the last place of a file where a member could begin; 0 if there is one at most."""
    stream.seek(0)
    last, begin, kept = 0, 0, b""
    while block := stream.read(_BLOCK_BYTES):
        data = kept + block
        if (place := data.rfind(_DEFLATED)) >= 0:
            last = begin + place
        kept = data[1 - len(_DEFLATED) :]
        begin += len(data) - len(kept)
    return last


def _parts(stream: BinaryIO) -> Iterator[_Part]:
    """Yields the content of a file, and for each member at least one part, up to its end or the
    point where it is cut.

    Raises:
      zlib.error: the file is damaged.
    """
    stream.seek(0)
    place, data = 0, stream.read(_BLOCK_BYTES)
    while data:
        decompressor = zlib.decompressobj(_WITH_HEADER)
        begins_member = True
        while data and not decompressor.eof:
            content = decompressor.decompress(data, _BLOCK_BYTES)
            yield _Part(place, begins_member, content)
            begins_member = False
            rest = decompressor.unused_data or decompressor.unconsumed_tail
            place += len(data) - len(rest)
            data = rest or stream.read(_BLOCK_BYTES)
        while data and not (rest := data.lstrip(b"\0")):
            place += len(data)
            data = stream.read(_BLOCK_BYTES)
        if data:
            place += len(data) - len(rest)
            data = rest
