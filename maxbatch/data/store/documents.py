"""The documents of a dataset, in a fixed order, and the jobs that share the reading of them.

A document is UTF-8 text or token ids, held as bytes. A record without text, or a bad one while
`skip_bad_records` is set, is yielded as an empty document with its problem, so that the reader can
count it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from maxbatch.config.combined import StoreConfig
from maxbatch.config.file_formats import file_format, file_formats
from maxbatch.config.values import field_names, shown, shown_fields
from maxbatch.data.store.files import Listing, changed, list_files
from maxbatch.data.store.formats import (
    BLANK,
    PIECE_BYTES,
    Format,
    Piece,
    grouped,
    make_format,
    record_as_json,
)
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.long_lists import LongList
from maxbatch.system.storage.source_files import SourceFile, files_below
from maxbatch.system.storage.storage import scheme_of

# Present in every Python from 3.11 on, self-contained, together some 120 kB.
STDLIB_HELD_OUT = frozenset(
    {
        "bisect.py",
        "cmd.py",
        "colorsys.py",
        "csv.py",
        "fnmatch.py",
        "getopt.py",
        "json/decoder.py",
        "netrc.py",
        "queue.py",
        "sched.py",
        "shlex.py",
        "textwrap.py",
    }
)
# Tests are full of odd bytes and generated tables; the other folders are applications and bundles,
# not the library.
_STDLIB_LEFT_OUT = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "idlelib",
        "turtledemo",
        "ensurepip",
    }
)
_JOB_PIECES = 1024  # at most: empty files add nothing to the bytes of a job

Files = LongList[SourceFile] | tuple[SourceFile, ...]


class Document(NamedTuple):
    """UTF-8 text or `TokenIds` (empty: a record left out), and whether the dataset itself holds it
    out.
    """

    utf8: bytes
    held_out: bool
    piece: Piece  # the part of a file that has its record
    number: int  # of its record in the piece, from 1
    problem: str = ""  # why the record is left out

    @property
    def reason(self) -> str:
        """The reason why an empty document is left out."""
        return self.problem or "an empty text"


@dataclass(frozen=True)
class DocumentSource:
    """The documents of one dataset, in order."""

    dataset_type: str
    key: str  # the config key and value that name the dataset, for messages
    value: str
    files: Files
    missing_shards: tuple[str, ...]  # their names; each counts as one record left out
    # "" if records have no fields; None if a document is a whole record, as JSON
    text_field: str | None
    record_format: str  # "": of no effect
    skip_bad_records: bool  # leave out records that cannot be read
    record_fields: str = ""  # names of fields by ours; "": none have other names

    @classmethod
    def from_config(
        cls, config: StoreConfig, key: str = "dataset_path", whole_records: bool = False
    ) -> DocumentSource:
        """Lists the files of `dataset_path` (or `eval_dataset_path`); reads none of them.

        A file below both paths is held out: it is not part of `dataset_path`. If `whole_records`,
        or if records are questions with answers, documents are records as JSON instead of their
        text.

        Raises:
          ConfigError: nothing is there, nothing is of the right kind, or shards are missing.
        """
        dataset_type = config.dataset_type
        if dataset_type == "python_stdlib":
            key, value = "dataset_type", "python_stdlib"
            files, missing = Listing(_stdlib_files(Path(sysconfig.get_paths()["stdlib"])), ())
        else:
            value = config[key]
            files, missing = _path_files(dataset_type, key, value)
            if key == "dataset_path" and config.eval_dataset_path:
                files = _without_held_out(config, files)

        form = file_format(dataset_type)
        names = field_names(config.record_fields) or {}
        named = names.get("text", config.text_field)
        text_field = named if form.names_text(config.record_format) else ""
        is_whole = whole_records or config.recipe.has_answers
        source = cls(
            dataset_type,
            key,
            value,
            files,
            missing,
            text_field=None if is_whole else text_field,
            record_format=form.record_format(config.record_format),
            skip_bad_records=config.skip_bad_records,
            record_fields=config.record_fields if is_whole else "",
        )
        if missing and not config.skip_bad_records:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise source.error(
                f"shard {missing[0]} is missing{others}; skip_bad_records=true continues without "
                "it, and a list of the shards (joined by ';') asks for no others"
            )
        return source

    @cached_property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def place(self) -> str:
        """A hash of where the dataset is, which tells another dataset's store from an older one of
        this dataset.
        """
        is_named = self.dataset_type == "python_stdlib"
        paths = [path.strip() for path in self.value.split(";")]
        places = [
            path if is_named or scheme_of(path) else os.path.abspath(os.path.expanduser(path))
            for path in paths
        ]
        return hashlib.blake2b(
            ";".join(places).encode(errors="surrogateescape"), digest_size=8
        ).hexdigest()

    def error(self, problem: str) -> ConfigError:
        """Returns the error that blames this dataset's key and value for `problem`."""
        return ConfigError(f"{self.key}={shown(repr(self.value))}: {problem}")

    def jobs(self) -> Iterator[list[Piece]]:
        """Returns all pieces in order, small ones together; the grouping depends on the files
        alone.
        """
        return grouped(self._pieces(), lambda piece: piece.size, PIECE_BYTES, _JOB_PIECES)

    def documents(
        self,
        pieces: Iterable[Piece] | None = None,
        ended: Callable[[Piece, int], None] = lambda piece, num_records: None,
    ) -> Iterator[Document]:
        """Yields the documents of some pieces (default: of all), in order; a record left out is
        yielded empty.

        Args:
          ended: called with each piece, once it is read, and the number of its records.

        Raises:
          ConfigError: a file or record that cannot be read, named by file and line, row or record.
        """
        for piece in self._pieces() if pieces is None else pieces:
            held_out = self.dataset_type == "python_stdlib" and piece.file.name in STDLIB_HELD_OUT
            number = 0
            with reading(piece.file.path, blame=self.error):
                for number, content, problem in self._format.documents(piece):
                    if problem == BLANK:
                        continue
                    if content and self._names:
                        content, problem = self._renamed(content)
                    document = Document(content, held_out, piece, number, problem)
                    if problem and not self.skip_bad_records:
                        raise self.bad_record(document, problem)
                    yield document
            ended(piece, number)

    def bad_record(self, document: Document, problem: str) -> ConfigError:
        """Returns the error for a record, which names the record and the key that leaves out such
        records.
        """
        return self.error(
            f"{self.where(document)}: {problem}; skip_bad_records=true leaves such records out"
        )

    def where(self, document: Document) -> str:
        """Returns the file of a document, and its record as numbered there; may read the file
        again.
        """
        unit = self._format.unit
        return (
            f"{document.piece.file.path} {unit} {self.record_number(document)}"
            if unit
            else document.piece.file.path
        )

    def record_number(self, document: Document) -> int:
        """Returns the number, from 1, of a document's record in its file; may read the file
        again.
        """
        return self.records_before(document.piece) + document.number

    def records_before(self, piece: Piece) -> int:
        """Counts the records of a file before a piece; may read the file again."""
        return self._format.records_before(piece)

    @cached_property
    def _names(self) -> dict[str, str]:
        return field_names(self.record_fields) or {}

    def _renamed(self, content: bytes) -> tuple[bytes, str]:
        """Returns a record, as JSON, with the names that it should have and "", or b"" and the
        problem.
        """
        record = json.loads(content)
        missing = next((field for field in self._names.values() if field not in record), None)
        if missing is not None:
            named = f"record_fields={shown(self.record_fields)}"
            return (
                b"",
                f"{named}: no field {shown(repr(missing))}; its fields: {shown_fields(record)}",
            )
        kept = {name: value for name, value in record.items() if name not in self._names.values()}
        return record_as_json(
            kept | {wanted_name: record[field] for wanted_name, field in self._names.items()}
        ), ""

    def _pieces(self) -> Iterator[Piece]:
        for file in self.files:
            with reading(file.path, blame=self.error):
                yield from self._format.pieces(file)

    def refuse_changed(self) -> None:
        """Raises ConfigError if a file has changed since it was listed."""
        for file in self.files:
            if change := changed(file):
                again = "; start again once it is complete" if change == "changed" else ""
                raise self.error(f"{file.path} {change} while it was read{again}")

    @cached_property
    def _format(self) -> Format:
        return make_format(self.dataset_type, self.record_format, self.text_field)

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_format", "_names")
        }


def _path_files(dataset_type: str, key: str, value: str) -> Listing:
    if dataset_type not in file_formats():
        raise ConfigError(
            f"dataset_type={dataset_type}: is not a file format for documents; works: "
            "dataset_type=jsonl"
        )
    form = file_format(dataset_type)
    return list_files(key, value, form.names, form.suffixes)


def _stdlib_files(root: Path) -> LongList[SourceFile]:
    """Returns the standard library's modules, without empty files and files that are made on each
    machine.
    """

    generated = ("_sysconfigdata", "sitecustomize", "usercustomize")
    modules = files_below(
        root,
        wanted=lambda name: name.endswith(".py") and not name.startswith(generated),
        enter=lambda name: name not in _STDLIB_LEFT_OUT and not name.startswith("config-"),
    )
    files = LongList(file for file in modules if file.size)
    if not files:
        raise ConfigError(
            f"dataset_type='python_stdlib': this Python has no source files in {root}; use "
            "another type"
        )
    return files


def _without_held_out(config: StoreConfig, files: LongList[SourceFile]) -> LongList[SourceFile]:
    """Returns the files that `eval_dataset_path` does not name."""
    eval_files = _path_files(
        config.dataset_type, "eval_dataset_path", config.eval_dataset_path
    ).files
    held_out = {os.path.realpath(file.path) for file in eval_files}
    rest = LongList(file for file in files if os.path.realpath(file.path) not in held_out)
    if not rest:
        raise ConfigError(
            f"eval_dataset_path={shown(repr(config.eval_dataset_path))}: holds out every file of "
            f"dataset_path={shown(repr(config.dataset_path))}, so that none is left to train on; "
            "eval_fraction=0.1 holds out a tenth of the documents instead"
        )
    return rest
