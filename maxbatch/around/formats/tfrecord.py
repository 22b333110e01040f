"""`tfrecord`: every record is a tf.train.Example, and one of its features is the document; plain or
gzip.

A record is its length (uint64), the masked CRC-32C of the length (uint32), its bytes, and their
masked CRC-32C (uint32), little-endian. Reference: TensorFlow, `core/lib/io/record_writer.h`.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

from maxbatch.around.formats.example import example_field
from maxbatch.config.file_formats import SHARD, FileFormat
from maxbatch.data.store.files import open_file
from maxbatch.data.store.formats import PIECE_BYTES, Piece, Record, TokenIds, checked_utf8
from maxbatch.data.store.gzip_cuts import MAGIC
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.source_files import SourceFile
from maxbatch.system.storage.storage import is_remote

# length and its checksum; the checksum of the bytes
_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")
_MOST_RECORD_BYTES = 1 << 30
_MASK_DELTA = 0xA282EAD8


class TFRecords:
    """Records of TFRecord files. Pieces are ranges of bytes that begin and end with a record."""

    unit: ClassVar[str] = "record"

    def __init__(self, text_field: str | None):
        assert text_field is not None, "only records with fields are whole"
        try:
            import google_crc32c
        except ImportError as error:
            raise ConfigError(
                "dataset_type=tfrecord: needs google-crc32c, which is not installed; pip install "
                "'maxbatch[tfrecord]'"
            ) from error
        self._crc32c = google_crc32c.value
        self._feature = text_field

    def pieces(self, file: SourceFile) -> Iterator[Piece]:
        """Yields ranges of records; a file of an object store, and one that is packed or damaged,
        has no cuts.
        """
        begin = 0
        if not is_remote(file.path):
            with open_file(file) as stream:
                for position in self._positions(stream, file.size):
                    if position - begin >= PIECE_BYTES:
                        yield Piece(file, begin, position, position - begin)
                        begin = position
        if begin < file.size or not file.size:
            yield Piece(file, begin, file.size, file.size - begin)

    def records_before(self, piece: Piece) -> int:
        if not piece.begin:
            return 0
        with open_file(piece.file) as stream:
            return 1 + sum(
                1 for end in self._positions(stream, piece.file.size) if end < piece.begin
            )

    def documents(self, piece: Piece) -> Iterator[Record]:
        """Yields the feature of each record; records whose checksums differ are left out one by
        one.
        """
        position, number = piece.begin, 0
        with open_file(piece.file) as stream:
            is_packed = self._is_packed(stream)
            stream.seek(piece.begin)
            source = gzip.GzipFile(fileobj=stream) if is_packed else stream
            end = None if is_packed else piece.end
            while end is None or position < end:
                number += 1
                place = f"at byte {position}{' of its content' if is_packed else ''}"
                try:
                    head = source.read(_HEAD.size)
                    if not head and is_packed:
                        return
                    length = self._length(head)
                    if length > _MOST_RECORD_BYTES:
                        raise EOFError(
                            f"longer than {_MOST_RECORD_BYTES:,} bytes, the most that is read"
                        )
                    record, tail = source.read(length), source.read(_TAIL.size)
                    if len(tail) < _TAIL.size:
                        raise EOFError("cut short")
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    # The number of lost records is unknown: the rest of the file counts as one.
                    yield Record(number, b"", f"damaged or not a TFRecord file ({error}, {place})")
                    return
                position += _HEAD.size + length + _TAIL.size
                if _TAIL.unpack(tail)[0] != self._masked(record):
                    yield Record(number, b"", f"differs from its checksum ({place})")
                else:
                    yield self._document(number, record)

    def _document(self, number: int, record: bytes) -> Record:
        try:
            value = example_field(record, self._feature)
        except ValueError as error:
            return Record(number, b"", str(error))
        return Record(number, value) if isinstance(value, TokenIds) else checked_utf8(number, value)

    def _positions(self, stream: BinaryIO, size: int) -> Iterator[int]:
        """Yields the end of every record, up to the first whose length is damaged."""
        position = 0
        while position < size:
            stream.seek(position)
            try:
                position += _HEAD.size + self._length(stream.read(_HEAD.size)) + _TAIL.size
            except EOFError:
                return
            if position <= size:
                yield position

    def _is_packed(self, stream: BinaryIO) -> bool:
        head = stream.read(_HEAD.size)
        try:
            self._length(head)
        except EOFError:
            return head.startswith(MAGIC)
        return False

    def _length(self, head: bytes) -> int:
        """Returns the bytes of a record; raises EOFError unless its head is whole and agrees with
        its checksum.
        """
        if len(head) < _HEAD.size:
            raise EOFError("cut short")
        length, checksum = _HEAD.unpack(head)
        if checksum != self._masked(head[:8]):
            raise EOFError("the length of the record differs from its checksum")
        return int(length)

    def _masked(self, data: bytes) -> int:
        """Returns the masked CRC-32C: rotated right by 15 bits, plus a constant."""
        checksum: int = self._crc32c(data)
        return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


FORMAT = FileFormat(
    lambda record_format, text_field: TFRecords(text_field),
    re.compile(rf"\.(tfrecords?|tfrec){SHARD}(\.gz)?$"),
    ".tfrecord, .tfrecords or .tfrec",
    has_text_field=True,
)
