"""Documents to tokens, job by job, in this process or in several workers: the result is the same."""

from __future__ import annotations

import array
import functools
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.formats import Piece
from maxbatch.data.store.token_store import TokenLayout
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.system.errors import TrainingError
from maxbatch.system.worker_pool import WorkerEnded, WorkerPool

# Batches large enough to be worth a call of the library, and small enough for the processor's cache.
_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 1024
_BUFFER_TOKENS = 1 << 18
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Tokeniser:
    """The settings that turn documents into tokens.

    Attributes:
      source: the dataset of the jobs.
      tokenizer: turns text into token ids.
      layout: of the token ids in the store.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    layout: TokenLayout

    def tokenise(self, job: Sequence[Piece], file: BinaryIO) -> Tokenised:
        """Writes the tokens of a job's documents to a file.

        Raises:
          ConfigError: a file or record that cannot be read.
        """
        done = Tokenised(sum(piece.size for piece in job))
        bos, eos = self.layout.bos, self.layout.eos
        writer = _Writer(file, np.dtype(self.layout.dtype))
        digests = []
        for batch in _batches(self._kept(job, done)):
            for ids in self.tokenizer.encode_utf8_batch(batch):
                writer.write(bos)
                writer.write(ids)
                writer.write(eos)
                done.lengths.append(len(bos) + len(ids) + len(eos))
                digests.append(self.layout.digest(ids))
        writer.flush()
        done.digests = b"".join(digests)
        return done

    def _kept(self, job: Sequence[Piece], done: Tokenised) -> Iterator[bytes]:
        kept = 0
        for document in self.source.documents(job):
            if not document.utf8:
                done.skipped += 1
                continue
            if document.held_out:
                done.held_out.append(kept)
            kept += 1
            done.text_bytes += len(document.utf8)
            yield document.utf8


@dataclass
class Tokenised:
    """Facts about the documents of a job, besides their tokens.

    Attributes:
      source_bytes: bytes of the files that were read, about.
      lengths: int64, tokens of each document with its bos and eos.
      digests: hashes of the documents, one after the other.
      held_out: numbers, within the job, of the documents that the dataset itself holds out.
      skipped: records left out.
      text_bytes: bytes of all documents.
    """

    source_bytes: int
    lengths: array.array[int] = field(default_factory=lambda: array.array("q"))
    digests: bytes = b""
    held_out: list[int] = field(default_factory=list)
    skipped: int = 0
    text_bytes: int = 0

    def append(self, job: Tokenised) -> None:
        """Appends the documents of the next job, without their digests."""
        self.source_bytes += job.source_bytes
        self.held_out += [len(self.lengths) + number for number in job.held_out]
        self.lengths.extend(job.lengths)
        self.skipped += job.skipped
        self.text_bytes += job.text_bytes


class _Writer:
    """Collects tokens in one buffer and writes it when it is full."""

    def __init__(self, file: BinaryIO, dtype: np.dtype):
        self._file = file
        self._buffer = np.empty(_BUFFER_TOKENS, dtype)
        self._filled = 0

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        begin = 0
        while begin < len(ids):
            part = ids[begin : begin + len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            begin += len(part)
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        self._file.write(self._buffer[: self._filled].data)
        self._filled = 0


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for utf8 in documents:
        batch.append(utf8)
        size += len(utf8)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise_all(
    tokeniser: Tokeniser, jobs: Iterable[Sequence[Piece]], file: BinaryIO, folder: Path, workers: int
) -> Iterator[Tokenised]:
    """Appends the tokens of all jobs to a file, in order, and yields the facts about each.

    Args:
      folder: where workers leave their tokens until they are appended.
      workers: processes; 1 means this one.

    Raises:
      ConfigError: a file or record that cannot be read; the first of several.
      TrainingError: a worker crashed or was killed.
    """
    if workers == 1:
        for job in jobs:
            yield tokeniser.tokenise(job, file)
        return
    # The pieces of a job bring their files; a list of all files may be long.
    setup = functools.partial(_part_writer, replace(tokeniser, source=replace(tokeniser.source, files=())))
    # Each worker has one core, so that threads of the tokenizer library would only slow one another down.
    variables = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with WorkerPool(setup, workers, variables=variables) as pool:
        for done, part in _in_order(pool, workers, jobs, folder):
            with open(part, "rb", buffering=0) as tokens:
                _copy(tokens, file, sum(done.lengths) * np.dtype(tokeniser.layout.dtype).itemsize)
            yield done
    for part in folder.glob("part-*"):
        part.unlink()


def _part_writer(tokeniser: Tokeniser) -> Callable[[tuple[Sequence[Piece], Path]], Tokenised]:
    def write_part(job_and_part: tuple[Sequence[Piece], Path]) -> Tokenised:
        job, part = job_and_part
        with open(part, "r+b") as file:
            return tokeniser.tokenise(job, file)

    return write_part


def _in_order(
    pool: WorkerPool, workers: int, jobs: Iterable[Sequence[Piece]], folder: Path
) -> Iterator[tuple[Tokenised, Path]]:
    """Yields, in the order of the jobs, the facts about each and the file with its tokens."""
    waiting: deque[tuple[Sequence[Piece], Path, Future[Tokenised]]] = deque()
    # With so many jobs ahead no worker waits for an earlier one. The files are reused: new ones would cost as much as
    # the tokens themselves.
    parts = deque(folder / f"part-{number}" for number in range(4 * workers))
    for job in jobs:
        if not parts:
            done, part = _next(waiting)
            yield done, part
            parts.append(part)
        part = parts.popleft()
        part.touch()
        [future] = pool.submit([(job, part)])
        waiting.append((job, part, future))
    while waiting:
        yield _next(waiting)


def _next(waiting: deque[tuple[Sequence[Piece], Path, Future[Tokenised]]]) -> tuple[Tokenised, Path]:
    job, part, future = waiting.popleft()
    try:
        return future.result(), part
    except WorkerEnded as end:
        raise TrainingError(
            f"{job[0].file.path}: cannot be tokenised: {end}; if memory ran out, --workers 1 of `maxbatch prepare` "
            "needs the least"
        ) from end


def _copy(source: io.FileIO, target: BinaryIO, size: int) -> None:
    block = memoryview(bytearray(min(_COPY_BYTES, size)))
    while size:
        filled = source.readinto(block[:size])
        if not filled:
            raise OSError(f"tokens of a worker are cut short: {size} bytes are missing")
        target.write(block[:filled])
        size -= filled
