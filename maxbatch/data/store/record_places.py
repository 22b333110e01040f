"""The file and the record that each document of a store came from, in a file of their own.

The file is in no identity, and training does not read it: a store without it trains the same.

Each line of `records.jsonl` begins a run of records of the store that were neighbours in one file:

    {"first": 0, "file": "web/00000.jsonl", "record": 1}

`first` is the number of the run's first record in the store, from 0 (of pairs of answers, which are
two documents each, of the pair), and `record` its number in the file, from 1, as `maxbatch data
--bad` counts. So a dataset that leaves out nothing has one line per file.

Legend: R records of a job that are kept, P pieces of it.
"""

from __future__ import annotations

import array
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from maxbatch.data.store.formats import Piece
from maxbatch.system.storage.storage import AnyPath

RECORDS = "records.jsonl"


class RecordPlace(NamedTuple):
    """The place of a record."""

    file: str  # its path, as the dataset was listed
    record: int  # its number in the file, from 1


class PieceRecords(NamedTuple):
    """A piece of a file that was read."""

    file: str
    is_first: bool  # of its file
    num_records: int  # those that are left out included


@dataclass
class RecordNumbers:
    """The records of a job that are kept, by their pieces."""

    pieces: list[PieceRecords] = field(default_factory=list)
    # the number of each record's piece in `pieces`
    piece_R: array.array[int] = field(default_factory=lambda: array.array("q"))
    # the number of each record in its piece, from 1
    number_R: array.array[int] = field(default_factory=lambda: array.array("q"))

    def keep(self, piece: int, number: int) -> None:
        """Adds a record; its piece may be added later."""
        self.piece_R.append(piece)
        self.number_R.append(number)

    def end_piece(self, piece: Piece, num_records: int) -> None:
        """Adds a piece, in the order of the job."""
        self.pieces.append(PieceRecords(piece.file.path, piece.begin == 0, num_records))

    def without(self, duplicates_R: np.ndarray) -> RecordNumbers:
        """Returns them without some records, bool[R]."""

        def kept(numbers: array.array[int]) -> array.array[int]:
            return array.array("q", np.frombuffer(numbers, np.int64)[~duplicates_R].tobytes())

        return RecordNumbers(self.pieces, kept(self.piece_R), kept(self.number_R))

    def append(self, job: RecordNumbers) -> None:
        """Adds the records of the next job."""
        shift = len(self.pieces)
        self.pieces += job.pieces
        self.piece_R.extend(piece + shift for piece in job.piece_R)
        self.number_R.extend(job.number_R)


class GrowingPlaces:
    """The file of records' places, written job by job."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by close
        self._records = 0  # of the store so far
        self._before = 0  # records of the file that is being read before the present piece
        self._next: RecordPlace | None = None  # the place at which the last run would go on

    def append(self, job: RecordNumbers) -> None:
        """Adds the records of the next job."""
        piece_R = np.frombuffer(job.piece_R, np.int64)
        number_R = np.frombuffer(job.number_R, np.int64)
        ends_P = np.searchsorted(piece_R, np.arange(len(job.pieces)), side="right")
        begin = 0
        for piece, end in zip(job.pieces, ends_P.tolist(), strict=True):
            self._before = 0 if piece.is_first else self._before
            numbers = number_R[begin:end]
            cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
            for run in filter(len, np.split(numbers, cuts)):
                self._add(piece.file, self._before + int(run[0]), len(run))
            self._before += piece.num_records
            begin = end

    def _add(self, file: str, record: int, count: int) -> None:
        if self._next != (file, record):
            line = {"first": self._records, "file": file, "record": record}
            self._file.write(json.dumps(line).encode() + b"\n")
        self._records += count
        self._next = RecordPlace(file, record + count)

    def close(self) -> None:
        self._file.close()


def places_of(folder: AnyPath, records: Iterable[int]) -> Mapping[int, RecordPlace]:
    """Returns the places of some records of a store, by their numbers in it; none if the store
    states none.
    """
    file = folder / RECORDS
    if not file.is_file():
        return {}
    places = dict[int, RecordPlace]()
    with file.open("rb") as lines:
        runs = _runs(lines)
        run, following = next(runs, None), next(runs, None)
        for record in sorted(set(records)):
            while following is not None and following[0] <= record:
                run, following = following, next(runs, None)
            if run is not None and run[0] <= record:
                first, place = run
                places[record] = place._replace(record=place.record + record - first)
    return places


def _runs(lines: Iterable[bytes]) -> Iterator[tuple[int, RecordPlace]]:
    for line in lines:
        run = json.loads(line)
        yield int(run["first"]), RecordPlace(str(run["file"]), int(run["record"]))
