"""Shards of a token store: files of tokens that are cut between the jobs of a build.

While a store is built into an object store, the facts about the documents of each finished shard
are beside it, in `.building/`, so that a killed build continues with the next shard.
"""

from __future__ import annotations

import array
import contextlib
import io
import itertools
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxbatch.data.store.blocks import BlockHasher
from maxbatch.data.store.growing import GrowingHashes
from maxbatch.data.store.record_places import PieceRecords, RecordNumbers
from maxbatch.data.store.token_store import BUILDING_FOLDER, MANIFEST, shard_names
from maxbatch.data.store.tokenise import Tokenised
from maxbatch.system.storage.bounded import read_bytes, read_json
from maxbatch.system.storage.npy import read_npy
from maxbatch.system.storage.storage import AnyPath, file_sizes, remove_tree, upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ARRAYS = {
    "counts": "uint8",
    "lengths": "int64",
    "digests": "uint8",
    "held_out": "int64",
    "hashes": "uint32",
    "pieces_of_records": "int64",
    "numbers_of_records": "int64",
}
_COUNTS = ("jobs", "tokens", "source_bytes", "text_bytes")
_MOST_BYTES = 4 << 30  # of the facts about a shard: 150 million documents


def _name(number: int) -> str:
    return shard_names(number + 2)[number]  # of a store of several shards


@dataclass
class Shard:
    """The facts about the documents of a shard, and the number of its jobs."""

    jobs: int = 0
    facts: Tokenised = field(default_factory=lambda: Tokenised(0))
    hashes: list[np.ndarray] = field(default_factory=list)  # uint32, of its blocks

    def add(self, job: Tokenised) -> None:
        self.jobs += 1
        self.facts.append(job)

    def to_bytes(self, signature: str) -> bytes:
        """Returns the shard as the content of a file, for a build of this signature."""
        facts = self.facts
        counts = {
            "signature": signature,
            "jobs": self.jobs,
            "tokens": facts.tokens,
            "source_bytes": facts.source_bytes,
            "reasons": facts.reasons,
            "text_bytes": facts.text_bytes,
            "pieces": facts.records.pieces,
        }
        file = io.BytesIO()
        np.savez(
            file,
            counts=np.frombuffer(json.dumps(counts).encode(), np.uint8),
            lengths=np.frombuffer(facts.lengths, np.int64),
            digests=np.frombuffer(facts.digests, np.uint8),
            held_out=np.array(facts.held_out, np.int64),
            hashes=np.concatenate([np.zeros(0, np.uint32), *self.hashes]),
            pieces_of_records=np.frombuffer(facts.records.piece_R, np.int64),
            numbers_of_records=np.frombuffer(facts.records.number_R, np.int64),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, signature: str) -> Shard | None:
        """Returns the shard that a file holds; None if the file is damaged or of a build of another
        signature.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as saved:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in saved.infolist()):
                    return None  # ours are not packed, and packed ones could have any size
                arrays = [read_npy(saved.read(f"{name}.npy"), name) for name in _ARRAYS]
            read, lengths, digests, held_out, hashes, piece_R, number_R = arrays
            counts: dict[str, Any] = read_json(read.tobytes(), "counts")
            is_ours = counts["signature"] == signature and all(
                _is_count(counts[name]) for name in _COUNTS
            )
            is_ours = is_ours and all(map(_is_count, counts["reasons"].values()))
            pieces = [PieceRecords(*piece) for piece in counts["pieces"]]
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OSError,
            EOFError,
            RuntimeError,
            struct.error,
            zipfile.BadZipFile,
        ):
            return None
        is_typed = [array.dtype for array in arrays] == list(_ARRAYS.values())
        if not is_ours or not is_typed or lengths.min(initial=0) < 0 or held_out.min(initial=0) < 0:
            return None
        facts = Tokenised(
            counts["source_bytes"],
            array.array("q", lengths.tobytes()),
            bytearray(digests),
            held_out.tolist(),
            counts["reasons"],
            counts["text_bytes"],
            RecordNumbers(
                pieces,
                array.array("q", piece_R.tobytes()),
                array.array("q", number_R.tobytes()),
            ),
        )
        return cls(counts["jobs"], facts, [hashes])


KeepShard = Callable[[int, Path, Shard], None]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


class ShardWriter:
    """Writes tokens into files of about `shard_tokens` tokens each; jobs write to it as to one
    file.

    Args:
      shard_tokens: a shard that has as many ends with its job; None for one shard.
      keep: called with the number, the file and the facts of each shard but the last, which are
        collected for it; None on a disk, where a build that was killed starts again.
    """

    def __init__(
        self,
        folder: Path,
        shard_tokens: int | None,
        first: int,
        hashes: GrowingHashes,
        keep: KeepShard | None,
    ) -> None:
        self.sizes: list[int] = []  # tokens of the shards that are finished
        self._folder, self._shard_tokens, self._number, self._keep = (
            folder,
            shard_tokens,
            first,
            keep,
        )
        self._hashes = hashes
        self._open()

    def _open(self) -> None:
        self._shard, self._tokens, self._is_full = Shard(), 0, False
        self._hasher = BlockHasher(self._take_hashes)
        self._file = open(self._path, "wb")  # noqa: SIM115  closed by __exit__

    @property
    def _path(self) -> Path:
        return self._folder / _name(self._number)

    def _take_hashes(self, hashes: np.ndarray) -> None:
        self._hashes.append(hashes)
        if self._keep:
            self._shard.hashes.append(hashes)

    def write(self, data: Buffer) -> int:
        """Writes tokens of the job that is at work."""
        if self._is_full:
            self._close()
            if self._keep:
                self._keep(self._number, self._path, self._shard)
            self._number += 1
            self._open()
        self._hasher.update(data)
        return self._file.write(data)

    def end_job(self, done: Tokenised) -> None:
        """Adds the facts about the job whose tokens were written last."""
        self._tokens += done.tokens
        if self._keep:
            self._shard.add(done)
        self._is_full = self._shard_tokens is not None and self._tokens >= self._shard_tokens

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Closes the last file; the only one of a store gets its own name."""
        if kind:
            with contextlib.suppress(OSError):  # an earlier failure takes precedence
                self._file.close()
            return
        self._close()
        self._path.replace(self._folder / shard_names(self._number + 1)[-1])

    def _close(self) -> None:
        self._hasher.finish()
        self.sizes.append(self._tokens)
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class RemoteShards:
    """The finished shards of a build into an object store."""

    def __init__(self, folder: AnyPath, signature: str) -> None:
        self._folder, self._signature = folder, signature

    def begin(self) -> None:
        """Marks the folder as one in which a store is built, so that a build that was killed can be
        started again.
        """
        (self._folder / BUILDING_FOLDER / "signature").write_text(self._signature)

    def found(self, itemsize: int) -> Iterator[Shard]:
        """Yields the shards that an earlier build of the same signature finished, from the first
        on.
        """
        sizes = file_sizes(self._folder)
        for number in itertools.count():
            size = sizes.get(_name(number))
            shard = None if size is None else self._read(number)
            if shard is None or shard.facts.tokens * itemsize != size:
                return
            yield shard

    def _read(self, number: int) -> Shard | None:
        try:
            content = read_bytes(self._facts(number), str(self._facts(number)), _MOST_BYTES)
        except FileNotFoundError:
            return None
        return Shard.from_bytes(content, self._signature)

    def keep(self, number: int, file: Path, shard: Shard) -> None:
        """Copies a finished shard to the store, then its facts, which mark it as finished; removes
        the local file.
        """
        (self._folder / MANIFEST).unlink(missing_ok=True)  # of the store that this one replaces
        upload(file, self._folder / file.name)
        self._facts(number).write_bytes(shard.to_bytes(self._signature))
        file.unlink()

    def _facts(self, number: int) -> AnyPath:
        return self._folder / BUILDING_FOLDER / f"{number:05d}.npz"

    def tidy(self, replaced: Iterable[str]) -> None:
        """Removes the files that only a build needs, and those of the store that this one
        replaces.
        """
        remove_tree(self._folder / BUILDING_FOLDER)
        for name in replaced:
            (self._folder / name).unlink(missing_ok=True)
