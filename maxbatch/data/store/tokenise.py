"""Documents to tokens, job by job: in this process, or in worker processes that share the jobs.

What comes out depends on the jobs and their order alone, never on who did them. A worker is
`python -m maxbatch.data.store.tokenise`: it reads requests from its standard input, writes tokens to a file and the
rest of its answer to its standard output, and ends with its parent, also when that is killed.
"""

from __future__ import annotations

import array
import contextlib
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.formats import Piece
from maxbatch.data.store.token_store import Stored
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.system.errors import ConfigError, TrainingError

# Enough for a call of the library to be worth it; few enough to stay in the processor's cache.
_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 1024
_BUFFER_TOKENS = 1 << 18
_COPY_BYTES = 1 << 20
_PARENT_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class Tokeniser:
    """How documents become tokens.

    Attributes:
      source: whose jobs they are.
      tokenizer: makes ids of text.
      stored: how they are stored.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    stored: Stored

    def tokenise(self, job: Sequence[Piece], file: BinaryIO) -> Tokenised:
        """Writes the tokens of a job's documents to a file.

        Raises:
          ConfigError: a file or record that cannot be read.
        """
        done = Tokenised(sum(piece.size for piece in job))
        bos, eos = self.stored.bos, self.stored.eos
        writer = _Writer(file, np.dtype(self.stored.dtype))
        digests = []
        for batch in _batches(self._kept(job, done)):
            for ids in self.tokenizer.encode_utf8_batch(batch):
                writer.write(bos)
                writer.write(ids)
                writer.write(eos)
                done.lengths.append(len(bos) + len(ids) + len(eos))
                digests.append(self.stored.digest(ids))
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
    """What is known of a job's documents beside their tokens.

    Attributes:
      source_bytes: about how much of the files was read.
      lengths: int64, tokens of each document with its bos and eos.
      digests: of the documents, one after the other.
      held_out: numbers, within the job, of documents that the source keeps for evaluation.
      skipped: records left out.
      text_bytes: of all documents.
    """

    source_bytes: int
    lengths: array.array[int] = field(default_factory=lambda: array.array("q"))
    digests: bytes = b""
    held_out: list[int] = field(default_factory=list)
    skipped: int = 0
    text_bytes: int = 0


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
    """Appends the tokens of all jobs to a file, in order, and yields the rest of what is known of each.

    Args:
      folder: where workers leave their tokens until they are appended.
      workers: processes; 1 means this one.

    Raises:
      ConfigError: a file or record that cannot be read; of several the first.
      TrainingError: a worker was killed.
    """
    if workers == 1:
        for job in jobs:
            yield tokeniser.tokenise(job, file)
        return
    with _Workers(tokeniser, workers) as pool:
        for done, part in pool.tokenise(jobs, folder):
            with open(part, "rb", buffering=0) as tokens:
                _copy(tokens, file, sum(done.lengths) * np.dtype(tokeniser.stored.dtype).itemsize)
            yield done
    for part in folder.glob("part-*"):
        part.unlink()


def _copy(source: io.FileIO, target: BinaryIO, size: int) -> None:
    block = memoryview(bytearray(min(_COPY_BYTES, size)))
    while size:
        filled = source.readinto(block[:size])
        if not filled:
            raise OSError(f"tokens of a worker are cut short: {size} bytes are missing")
        target.write(block[:filled])
        size -= filled


class _Workers:
    """Processes that tokenise, each served by a thread of this one."""

    def __init__(self, tokeniser: Tokeniser, number: int):
        # Each worker has one core: threads of the tokenizer library's own would only be in each other's way.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for _ in range(number)
        ]
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # The files of a job come with it; a list of all of them may be long.
        self._hello = pickle.dumps(replace(tokeniser, source=replace(tokeniser.source, files=())))
        self._greeted: set[int] = set()
        self._threads = ThreadPoolExecutor(number)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed first: threads that wait for an answer then get none and end.
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def tokenise(self, jobs: Iterable[Sequence[Piece]], folder: Path) -> Iterator[tuple[Tokenised, Path]]:
        """Yields, in the order of the jobs, what is known of each and the file that holds its tokens."""
        waiting: deque[tuple[Future[Tokenised], Path]] = deque()
        # So many jobs ahead that no worker waits for the order. Their files are written over and over: new ones
        # would cost as much as the tokens themselves.
        parts = deque(folder / f"part-{number}" for number in range(4 * len(self._processes)))
        for job in jobs:
            if not parts:
                future, part = waiting.popleft()
                yield future.result(), part
                parts.append(part)
            part = parts.popleft()
            part.touch()
            waiting.append((self._threads.submit(self._ask, tuple(job), part), part))
        for future, part in waiting:
            yield future.result(), part

    def _ask(self, job: tuple[Piece, ...], part: Path) -> Tokenised:
        process = self._free.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.pid not in self._greeted:
                self._greeted.add(process.pid)
                process.stdin.write(self._hello)
            pickle.dump((job, str(part)), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = process.wait()
            raise TrainingError(
                f"a worker that tokenised {job[0].file.path} ended with exit code {code}; where memory ran out, "
                "--workers 1 of `maxbatch prepare` needs the least"
            ) from error
        finally:
            self._free.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer


def work(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests: a Tokeniser first, then jobs and the files for their tokens.

    Raises:
      EOFError, BrokenPipeError: nobody asks any more.
    """
    tokeniser: Tokeniser = pickle.load(requests)
    while True:
        job, part = pickle.load(requests)
        answer: Any
        try:
            with open(part, "r+b") as file:
                answer = tokeniser.tokenise(job, file)
        except (ConfigError, OSError) as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has gone, also in the midst of a job."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def main() -> None:
    """Runs a worker on standard input and output; the argument is the parent's process id, since a parent that was
    killed at once could not be asked for any more."""
    # Ctrl-C is the parent's to answer; what libraries print must not end up among the answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
