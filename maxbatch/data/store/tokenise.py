"""Documents to tokens, job by job, in this process or in several workers: the result is the
same.
"""

from __future__ import annotations

import array
import functools
import io
import itertools
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from maxbatch.data.store.documents import Document, DocumentSource
from maxbatch.data.store.duplicates import SeenRecords
from maxbatch.data.store.formats import Piece, TokenIds, grouped
from maxbatch.data.store.record_places import RecordNumbers
from maxbatch.data.store.skipped import kind_of
from maxbatch.data.store.token_store import TokenLayout
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import TrainingError
from maxbatch.system.processes.worker_pool import WorkerEnded, WorkerPool

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from maxbatch.data.store.encoder import Encoder
    from maxbatch.system.processes.ray_cluster import RayCluster, RayPool

# Batches large enough to be worth a call of the library, and small enough for the processor's
# cache.
_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 1024
# Few calls per token, and memory that does not grow with the length of a document.
_WRITE_TOKENS = 1 << 18
_WRITE_PARTS = 4096
_COPY_BYTES = 1 << 18


class Writable(Protocol):
    """The file that tokens are written to."""

    def write(self, data: Buffer, /) -> object: ...


@dataclass(frozen=True)
class Tokeniser:
    """The settings that turn documents into tokens."""

    source: DocumentSource
    tokenizer: Tokenizer
    layout: TokenLayout
    encoder: Encoder | None = None  # makes documents of records, if they are not texts

    def tokenise(self, job: Sequence[Piece], file: Writable) -> Tokenised:
        """Writes the tokens of a job's documents to a file; raises ConfigError if one cannot be
        read.
        """
        done = Tokenised(sum(piece.size for piece in job))
        dtype = np.dtype(self.layout.dtype)
        for arrays in grouped(self._tokens(job, done), len, _WRITE_TOKENS, _WRITE_PARTS):
            file.write(np.concatenate(arrays, dtype=dtype, casting="unsafe").data)
        return done

    def _tokens(self, job: Sequence[Piece], done: Tokenised) -> Iterator[np.ndarray]:
        """Yields the tokens of a job's documents, a long document in parts."""
        bos, eos = np.array(self.layout.bos, np.int64), np.array(self.layout.eos, np.int64)
        pieces = {id(piece): number for number, piece in enumerate(job)}
        for batch in grouped(
            self._kept(job, done),
            lambda document: len(document.utf8),
            _BATCH_BYTES,
            _BATCH_DOCUMENTS,
        ):
            for document, documents in zip(batch, self.encoded(batch), strict=True):
                if isinstance(documents, str):
                    self._leave_out(document, documents, done)
                    continue
                done.records.keep(pieces[id(document.piece)], document.number)
                for ids in documents:
                    yield bos
                    for begin in range(0, len(ids), _WRITE_TOKENS):
                        yield ids[begin : begin + _WRITE_TOKENS]
                    yield eos
                    done.lengths.append(len(bos) + len(ids) + len(eos))
                    done.digests += self.layout.digest(ids)

    def encoded(self, batch: Sequence[Document]) -> Iterator[Sequence[np.ndarray] | str]:
        """Yields the tokens of each record's documents, as the store has them, or why the record is
        bad.
        """
        texts = [document.utf8 for document in batch]
        if self.encoder is None:
            encoded_texts = iter(
                self.tokenizer.encode_utf8_batch(
                    [text for text in texts if not isinstance(text, TokenIds)]
                )
            )
            for document in batch:
                if not isinstance(document.utf8, TokenIds):
                    yield [next(encoded_texts)]
                else:
                    yield self._fault(document.utf8) or [np.frombuffer(document.utf8, "<i8")]
            return
        bit, dtype = self.layout.trained_bit, np.dtype(self.layout.dtype)
        assert bit is not None, "the layout of records with answers marks trained tokens"
        for encoded in self.encoder.encode_batch(texts):
            if isinstance(encoded, RecordError):
                yield str(encoded)
            else:
                yield [
                    ids.astype(dtype) | trained.astype(dtype) << dtype.type(bit)
                    for ids, trained in encoded
                ]

    def _leave_out(self, document: Document, problem: str, done: Tokenised) -> None:
        """Counts a bad record; raises ConfigError unless such records are left out."""
        if not self.source.skip_bad_records:
            raise self.source.bad_record(document, problem)
        done.leave_out(problem)

    def _fault(self, document: TokenIds) -> str:
        """Returns why the ids of a document cannot be used, or ""."""
        ids = np.frombuffer(document, "<i8")
        most = min(self.tokenizer.vocab_size, np.iinfo(self.layout.hashed_as).max + 1) - 1
        if ids.min() >= 0 and ids.max() <= most:
            return ""
        wrong = int(ids[(ids < 0) | (ids > most)][0])
        return f"the token id {wrong} is not one of the tokenizer's, 0 to {most}"

    def _kept(self, job: Sequence[Piece], done: Tokenised) -> Iterator[Document]:
        kept = 0
        for document in self.source.documents(job, done.records.end_piece):
            if not document.utf8:
                done.leave_out(document.reason)
                continue
            if document.held_out:
                done.held_out.append(kept)
            kept += 1
            done.text_bytes += len(document.utf8)
            yield document


@dataclass
class Tokenised:
    """Facts about the documents of a job, besides their tokens."""

    source_bytes: int  # bytes of the files that were read, about
    # in tokens, with bos and eos
    lengths: array.array[int] = field(default_factory=lambda: array.array("q"))
    # hashes of the documents, one after the other
    digests: bytearray = field(default_factory=bytearray)
    # numbers, in the job, of documents that the dataset holds out
    held_out: list[int] = field(default_factory=list)
    # records left out, by the kind of their problem
    reasons: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0  # of all documents
    records: RecordNumbers = field(default_factory=RecordNumbers)  # those that are kept

    @property
    def skipped(self) -> int:
        """Records left out."""
        return sum(self.reasons.values())

    def leave_out(self, problem: str, count: int = 1) -> None:
        """Counts records that are left out for one reason."""
        kind = kind_of(problem)
        self.reasons[kind] = self.reasons.get(kind, 0) + count

    @property
    def tokens(self) -> int:
        """Tokens of all documents, those that begin and end them included."""
        return int(np.frombuffer(self.lengths, np.int64).sum())

    def without(self, duplicates: np.ndarray, kinds: Mapping[str, int]) -> Tokenised:
        """Returns the facts without the documents of duplicates, bool[documents], which are counted
        by their kind.
        """
        kept = ~duplicates
        lengths = np.frombuffer(self.lengths, np.int64)[kept]
        digests = np.frombuffer(self.digests, np.uint8).reshape(len(kept), -1)[kept]
        places = np.cumsum(kept) - 1
        held_out = [int(places[number]) for number in self.held_out if kept[number]]
        done = Tokenised(
            self.source_bytes,
            array.array("q", lengths.tobytes()),
            bytearray(digests.tobytes()),
            held_out,
            dict(self.reasons),
            self.text_bytes,
            # the documents of a record are all kept or all duplicates
            self.records.without(duplicates[:: len(kept) // max(1, len(self.records.number_R))]),
        )
        for kind, count in kinds.items():
            done.leave_out(kind, count)
        return done

    def append(self, job: Tokenised) -> None:
        self.source_bytes += job.source_bytes
        self.held_out += [len(self.lengths) + number for number in job.held_out]
        self.lengths.extend(job.lengths)
        self.digests += job.digests
        for kind, count in job.reasons.items():
            self.reasons[kind] = self.reasons.get(kind, 0) + count
        self.text_bytes += job.text_bytes
        self.records.append(job.records)


class _Part(NamedTuple):
    """A job, and the file of this machine for its tokens; None: they are returned."""

    job: Sequence[Piece]
    file: Path | None


def tokenise_all(
    tokeniser: Tokeniser,
    jobs: Iterable[Sequence[Piece]],
    file: Writable,
    folder: Path,
    workers: int,
    cluster: RayCluster | None,
    seen: SeenRecords | None = None,
) -> Iterator[Tokenised]:
    """Appends the tokens of all jobs to a file, in order, and yields the facts about each.

    Args:
      folder: where workers of this machine leave their tokens until they are appended.
      workers: processes; 1 means this one, without a cluster.
      cluster: where tasks tokenise, in place of processes of this machine.
      seen: the records before these; records equal to one of them are left out. None: no record is.

    Raises:
      ConfigError: a file or record that cannot be read; the first of several.
      TrainingError: a worker crashed or was killed.
    """
    itemsize = np.dtype(tokeniser.layout.dtype).itemsize
    if workers == 1 and cluster is None:
        for job in jobs:
            if seen is None:
                yield tokeniser.tokenise(job, file)
                continue
            # which documents are duplicates is known when the whole job has been read
            with tempfile.TemporaryFile(dir=folder) as whole_job:
                done = tokeniser.tokenise(job, whole_job)
                whole_job.seek(0)
                yield _append(done, whole_job, file, seen, itemsize)
        return

    # The pieces of a job bring their files; a list of all files may be long.
    setup = functools.partial(
        _part_writer, replace(tokeniser, source=replace(tokeniser.source, files=()))
    )
    # Each worker has one core, so that threads of the tokenizer library would only slow one another
    # down.
    variables = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # With this many jobs ahead no worker waits for an earlier one. The files are reused: new ones
    # would cost as much as the tokens themselves.
    most_waiting = 4 * workers
    files = [None] if cluster else [folder / f"part-{number}" for number in range(most_waiting)]
    parts = map(_Part, jobs, itertools.cycle(files))

    pool: RayPool[_Part, _Answer] | WorkerPool[_Part, _Answer]
    if cluster:
        from maxbatch.system.processes.ray_cluster import RayPool

        pool = RayPool(cluster, setup, variables)
    else:
        pool = WorkerPool(setup, workers, variables=variables)
    with pool:
        for part, (done, tokens) in _in_order(pool, parts, most_waiting):
            with (
                io.BytesIO(tokens)
                if part.file is None
                else open(part.file, "rb", buffering=0) as written
            ):
                yield _append(done, written, file, seen, itemsize)
    for path in folder.glob("part-*"):
        path.unlink()


def _append(
    done: Tokenised, tokens: IO[bytes], file: Writable, seen: SeenRecords | None, itemsize: int
) -> Tokenised:
    """Appends the tokens of a job to a file, without those of duplicates; returns the facts about
    what is kept.
    """
    duplicates, kinds = (np.zeros(0, bool), {}) if seen is None else seen.duplicates(done.digests)
    if not kinds:
        shutil.copyfileobj(tokens, file, _COPY_BYTES)
        return done
    offsets = np.concatenate([[0], np.cumsum(np.frombuffer(done.lengths, np.int64))]) * itemsize
    # Runs of documents that are all kept or all duplicates.
    borders = [0, *(np.flatnonzero(np.diff(duplicates)) + 1).tolist(), len(duplicates)]
    for first, end in itertools.pairwise(borders):
        if duplicates[first]:
            continue
        position = tokens.seek(int(offsets[first]))
        while block := tokens.read(min(_COPY_BYTES, int(offsets[end]) - position)):
            file.write(block)
            position += len(block)
    return done.without(duplicates, kinds)


_Answer = tuple[Tokenised, bytes]


def _part_writer(tokeniser: Tokeniser) -> Callable[[_Part], _Answer]:
    def write_part(part: _Part) -> _Answer:
        if part.file is None:
            tokens = io.BytesIO()
            return tokeniser.tokenise(part.job, tokens), tokens.getvalue()
        with open(part.file, "r+b") as file:
            done = tokeniser.tokenise(part.job, file)
            file.truncate()  # A file is reused, and its last job may have been longer.
        return done, b""

    return write_part


def _in_order(
    pool: RayPool[_Part, _Answer] | WorkerPool[_Part, _Answer],
    parts: Iterable[_Part],
    most_waiting: int,
) -> Iterator[tuple[_Part, _Answer]]:
    """Yields the parts with their answers, in order; at most `most_waiting` are under way."""
    waiting: deque[tuple[_Part, Future[_Answer]]] = deque()

    def first() -> tuple[_Part, _Answer]:
        part, future = waiting.popleft()
        try:
            return part, future.result()
        except WorkerEnded as end:
            raise TrainingError(
                f"{part.job[0].file.path}: cannot be tokenised: {end}; if memory ran out, "
                "--workers 1 of `maxbatch prepare` needs the least"
            ) from end

    for part in parts:
        if len(waiting) == most_waiting:
            yield first()
        if part.file is not None:
            part.file.touch()  # a worker opens it without truncating it
        [future] = pool.submit([part])
        waiting.append((part, future))
    while waiting:
        yield first()
