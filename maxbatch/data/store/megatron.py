"""`megatron`: a token store of Megatron-LM, PREFIX.bin and PREFIX.idx, read in place.

The index is a header (`MMIDIDX`, version 1, the type of tokens, the numbers of sequences and of
document marks), then int32 lengths of sequences in tokens, int64 places of sequences in PREFIX.bin
in bytes, int64 marks (document d is sequences marks[d] to marks[d + 1] - 1), and for a multimodal
store int8 modes of sequences. PREFIX.bin is the tokens, sequence after sequence; bytes after the
last one are not read. Reference: `megatron/core/datasets/indexed_dataset.py`.

Of a store in a bucket the index, 20 bytes a document, is copied into the cache once; tokens are
read by range. The index is checked as a whole when a store is first opened. The format has no
checksums, so damage to a token goes unnoticed before that, unless it makes an id that the
vocabulary lacks.

The content of a store is identified by the lengths of its sequences, its documents, and the MD5 of
PREFIX.bin, which an object store states itself, or else by the version of the object. The hash that
names rows (it keys the shuffle) is older: of the tokens it covers all up to 64 MiB, else 256 parts
of 256 KiB from all over the file.

Legend: D documents, S sequences, n values asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeGuard, overload

import numpy as np

from maxbatch.config.sections import DataConfig
from maxbatch.config.values import shown
from maxbatch.data.store.blocks import MappedFile
from maxbatch.data.store.cache_folder import cache_file, keep, recall, writing_cache
from maxbatch.data.store.document_table import LocalTable
from maxbatch.data.store.ranged_tokens import CheckedIds, RangedTokens, readers
from maxbatch.data.store.store import IDS, StoreFacts
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.system.storage.atomic_files import writing_atomically
from maxbatch.system.storage.contents import content_stamp, md5_of, stored_sum
from maxbatch.system.storage.locks import exclusive
from maxbatch.system.storage.source_files import SourceFile, place_of, source_file, typed_reason
from maxbatch.system.storage.storage import AnyPath, as_path, is_remote, read_range
from maxbatch.system.storage.watched_files import watch
from maxbatch.system.terminal.warning import warn_once

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, marks
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_MOST_SEQUENCES = 1 << 48
_CHUNK = 1 << 20  # sequences that are checked at once
# of the tokens that identify the content
_WHOLE_BYTES, _PARTS, _PART_BYTES = 64 << 20, 256, 256 << 10
_VERSION = 2  # of what the cache holds of a store
_SHOWN_BYTES = 1 << 30  # whose hashing is shown


@dataclass(frozen=True)
class _ArraySizes:
    """The sizes of a store's arrays."""

    dtype: str
    num_sequences: int
    num_documents: int

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of an index without modes."""
        return _HEADER.size + 12 * self.num_sequences + 8 * (self.num_documents + 1)


class IndexTable(LocalTable):
    """The starts of documents, in a mapped index."""

    def __init__(self, path: Path, layout: _ArraySizes) -> None:
        super().__init__(layout.num_documents)
        self._path, self._layout = path, layout

    def __getstate__(self) -> dict[str, object]:
        # Another process maps the file itself; a pickled map would contain all of it.
        return {name: self.__dict__[name] for name in ("_path", "_layout", "_num_documents")}

    @cached_property
    def lengths_S(self) -> np.ndarray:
        """int32, tokens of each sequence."""
        return self._mapped("<i4", _HEADER.size, self._layout.num_sequences)

    @cached_property
    def places_S(self) -> np.ndarray:
        """int64, the first byte of each sequence."""
        return self._mapped(
            "<i8", _HEADER.size + 4 * self._layout.num_sequences, self._layout.num_sequences
        )

    @cached_property
    def marks_D(self) -> np.ndarray:
        """int64[D + 1], the first sequence of each document; at last the number of sequences."""
        begin = _HEADER.size + 12 * self._layout.num_sequences
        return self._mapped("<i8", begin, self._layout.num_documents + 1)

    @cached_property
    def modes_S(self) -> np.ndarray:
        """int8, the mode of each sequence; none in a store of text."""
        has_modes = self._path.stat().st_size > self._layout.size
        return self._mapped("i1", self._layout.size, self._layout.num_sequences if has_modes else 0)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.places_S[-1]) // self._layout.itemsize + int(self.lengths_S[-1])

    def _mapped(self, dtype: str, begin: int, count: int) -> np.ndarray:
        if not count:  # an empty part of a file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(self._path, dtype, "r", begin, (count,))

    def starts(self, documents_n: np.ndarray) -> np.ndarray:
        sequence_n = self.marks_D[documents_n]
        last = self._layout.num_sequences - 1
        place_n = self.places_S[np.minimum(sequence_n, last)] // self._layout.itemsize
        array: np.ndarray = np.where(sequence_n > last, self.num_tokens, place_n)
        return array

    def check(self, token_bytes: int) -> str:
        """Returns the hash of sequences and documents.

        Args:
          token_bytes: of the file of tokens.

        Raises:
          ValueError: sequences overlap, leave gaps or end after the file; marks that are out of
            order; modes of sequences that are not text.
        """
        content, end = hashlib.blake2b(digest_size=16), 0
        for first in range(0, self._layout.num_sequences, _CHUNK):
            length_n = (
                self.lengths_S[first : first + _CHUNK].astype(np.int64) * self._layout.itemsize
            )
            ends_n = end + np.cumsum(length_n)
            if (
                is_wrong_n := (length_n < 0)
                | (self.places_S[first : first + _CHUNK] != ends_n - length_n)
            ).any():
                raise ValueError(
                    f"sequence {first + int(np.argmax(is_wrong_n))} does not follow the one "
                    "before it"
                )
            if (modes_n := self.modes_S[first : first + _CHUNK]).any():
                number = first + int(np.argmax(modes_n != 0))
                raise ValueError(
                    f"sequence {number} has mode {modes_n[number - first]}: only text (mode 0) is "
                    "read"
                )
            content.update(self.lengths_S[first : first + _CHUNK].tobytes())
            end = int(ends_n[-1])
        if end > token_bytes:
            raise ValueError(f"its sequences have {end} bytes, and the .bin file has {token_bytes}")

        if first_mark := int(self.marks_D[0]):
            raise ValueError(
                f"its first document begins at sequence {first_mark}, and must begin at 0"
            )
        last = 0
        for first in range(0, self._layout.num_documents + 1, _CHUNK):
            marks_n = self.marks_D[first : first + _CHUNK]
            if (np.diff(marks_n, prepend=last) < 0).any():
                raise ValueError(
                    f"documents {first} to {first + len(marks_n) - 1} are not in order"
                )
            content.update(marks_n.tobytes())
            last = int(marks_n[-1])
        if last != self._layout.num_sequences:
            raise ValueError(
                f"its documents end at sequence {last} of {self._layout.num_sequences}"
            )
        return content.hexdigest()


@dataclass(frozen=True)
class MegatronStore:
    """An open store; a `Store` whose documents hold their own special tokens, if they have any."""

    folder: AnyPath  # the file of tokens
    manifest: StoreFacts
    table: IndexTable
    dtype: str
    vocab_size: int | None = None  # None: ids are not checked

    trained_bit = None

    def of_vocabulary(self, vocab_size: int) -> MegatronStore:
        """Returns the store with ids that are compared with a vocabulary where they are read."""
        return replace(self, vocab_size=vocab_size)

    @cached_property
    def tokens(self) -> CheckedIds:
        """The ids, mapped or read by range."""
        path, count, dtype = self.folder, self.manifest["tokens"], np.dtype(self.dtype)
        ids: MappedFile | RangedTokens
        if is_remote(path):
            ids = RangedTokens([path], self.dtype, [count])
        else:
            ids = MappedFile(path, dtype, count * dtype.itemsize, None)
        return CheckedIds(ids, 1 << 31 if self.vocab_size is None else self.vocab_size, path)

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[documents + 1], the first token of each document; at last the number of tokens."""
        return self.table.starts(np.arange(self.manifest["documents"] + 1))

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("tokens", "offsets")
        }


@overload
def open_megatron(config: DataConfig, key: str) -> MegatronStore: ...


@overload
def open_megatron(config: DataConfig, key: str, reads: bool) -> MegatronStore | None: ...


def open_megatron(config: DataConfig, key: str, reads: bool = True) -> MegatronStore | None:
    """Returns the store that config[key] names: its prefix, or one of its files.

    Args:
      key: `dataset_path` or `eval_dataset_path`.
      reads: whether to read a store that was not opened before; without, None for such a store.

    Raises:
      ConfigError: a file is missing, damaged, or of another format.
    """
    value = config[key]
    where = f"{key}={shown(repr(value))}"
    if not value or ";" in value:
        raise ConfigError(
            f"{where}: dataset_type=megatron needs the prefix of a .bin and an .idx file; "
            "several are a mixture, such as 'web,0.7;code,0.3'"
        )
    prefix = value.removesuffix(".bin").removesuffix(".idx")
    files = [_listed(where, as_path(f"{prefix}{suffix}")) for suffix in (".bin", ".idx")]
    cached = cache_file(config.data_cache_dir, "megatron", [_VERSION, *files])
    known = recall(cached)
    if known is None and not reads:
        return None
    bin_file, index_file = (as_path(file.path) for file in files)

    def damaged(problem: str) -> ConfigError:
        return ConfigError(f"{where}: {index_file} cannot be used: {problem}")

    # Small facts of the index first; the whole of both files only if the cache has no hashes.
    layout = _layout(read_range(index_file, 0, _HEADER.size), files[1].size, damaged)
    path = index_file if isinstance(index_file, Path) else _copied(config, files[1])
    table = IndexTable(path, layout)
    num_bytes = table.num_tokens * layout.itemsize
    stamps = [content_stamp(file) for file in (bin_file, index_file)]
    if not _is_hashes(known):
        with _alone(cached):  # hosts and commands that share the cache hash a store once
            known = recall(cached)
            if not _is_hashes(known):
                try:
                    sums = [table.check(files[0].size), *_digests(bin_file, num_bytes)]
                except ValueError as error:
                    raise damaged(str(error)) from None
                content = hashlib.blake2b(" ".join(sums).encode(), digest_size=16).hexdigest()
                known = [content, _whole(bin_file, num_bytes), _whole(index_file, files[1].size)]
                if stamps != [content_stamp(file) for file in (bin_file, index_file)]:
                    raise ConfigError(
                        f"{where}: {bin_file} or {index_file.name} changed while it was hashed"
                    )
                with contextlib.suppress(OSError):  # the cache may only be read
                    keep(cached, known)

    content, whole, _ = known
    sizes = (num_bytes, files[1].size)
    for file, size, stamp, hashed in zip(
        (bin_file, index_file), sizes, stamps, known[1:], strict=True
    ):
        watch(file, stamp, partial(_is_same, file, size, hashed))
    if files[0].size > num_bytes:
        warn_once(
            f"{where}: {bin_file} has {files[0].size} bytes, and the sequences of "
            f"{index_file.name} end after {num_bytes}; the rest is not read"
        )

    facts: StoreFacts = {
        "content": content,
        "whole_content": whole,
        "documents": layout.num_documents,
        "tokens": table.num_tokens,
        "held_out": [],
        "skipped_records": 0,
        "tokenizer": IDS,
    }
    return MegatronStore(bin_file, facts, table, layout.dtype)


def _is_hashes(known: object) -> TypeGuard[list[str]]:
    return (
        isinstance(known, list) and len(known) == 3 and all(isinstance(text, str) for text in known)
    )


def _alone(cached: Path) -> contextlib.AbstractContextManager[None]:
    """Returns a lock that only one process with this cache holds; none where the cache cannot be
    written.
    """
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return contextlib.nullcontext()
    return exclusive(cached.with_suffix(".lock"))


def _whole(file: AnyPath, size: int) -> str:
    """Returns a store's MD5 or version of an object, or the MD5 of a file's first bytes; shows the
    reading of many.
    """
    if stored := stored_sum(file):
        return stored
    if size < _SHOWN_BYTES:
        return md5_of(file, size)
    from maxbatch.system.terminal.bars import bytes_bar  # slow to import

    with bytes_bar(size, f"hashing {file.name}") as progress:
        return md5_of(file, size, progress)


def _is_same(file: AnyPath, size: int, hashed: str) -> bool:
    return _whole(file, size) == hashed


def _listed(where: str, path: AnyPath) -> SourceFile:
    try:
        file = source_file(place_of(str(path), where), path.name)
    except (ConfigError, TrainingError):  # an object store that refuses, or does not answer
        raise
    except OSError as error:
        raise ConfigError(
            f"{where}: dataset_type=megatron needs {path}: {typed_reason(error)}"
        ) from error
    if file is None:
        raise ConfigError(f"{where}: dataset_type=megatron needs {path}, which is not a file")
    return file


def _layout(header: bytes, size: int, damaged: Callable[[str], ConfigError]) -> _ArraySizes:
    """Returns the layout that the header of an index of `size` bytes states."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise damaged("it is not an index of Megatron-LM's (MMIDIDX)")
    _, version, code, num_sequences, num_marks = _HEADER.unpack(header)
    if version != 1:
        raise damaged(f"it has version {version}, and 1 is read")
    if code not in _DTYPES:
        problem = (
            f"{_FLOATS[code]} numbers, not token ids"
            if code in _FLOATS
            else f"values of an unknown type ({code})"
        )
        raise damaged(f"it states {problem}")
    layout = _ArraySizes(_DTYPES[code], num_sequences, num_marks - 1)
    if not num_marks or max(num_sequences, num_marks) > _MOST_SEQUENCES:
        raise damaged(f"it states {num_sequences} sequences and {num_marks} marks of documents")
    if size not in (layout.size, layout.size + num_sequences):
        raise damaged(
            f"it has {size} bytes, and {num_sequences} sequences of {num_marks - 1} documents "
            f"{layout.size}"
        )
    if not num_sequences or not layout.num_documents:
        raise damaged("it holds no document")
    return layout


def _copied(config: DataConfig, file: SourceFile) -> Path:
    """Returns the copy of an index in an object store, made at the first use."""
    copy = cache_file(config.data_cache_dir, "megatron", [_VERSION, "index", file])
    if not copy.is_file() or copy.stat().st_size != file.size:
        with writing_cache(config.data_cache_dir, copy.parent):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with place_of(file.path).open("rb") as source, writing_atomically(copy) as target:
                shutil.copyfileobj(source, target, 1 << 22)
    return copy


def _digests(path: AnyPath, size: int) -> Iterator[str]:
    """Yields the hashes of the parts of a file that identify it."""
    spans = [(begin, min(begin + _PART_BYTES, size)) for begin in range(0, size, _PART_BYTES)]
    if size > _WHOLE_BYTES:
        begins = [number * (size - _PART_BYTES) // (_PARTS - 1) for number in range(_PARTS)]
        spans = [(begin, begin + _PART_BYTES) for begin in begins]

    def digest(span: tuple[int, int]) -> str:
        data = read_range(path, *span)
        if len(data) != span[1] - span[0]:
            raise ValueError(
                f"the .bin file changed while it was read: it has no bytes {span[0]} to {span[1]}"
            )
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    yield from readers().map(digest, spans)
