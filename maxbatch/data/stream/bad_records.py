"""Records that training leaves out, cuts or splits, found by reading and tokenising the dataset
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxbatch.config.combined import StreamConfig
from maxbatch.config.sections import STORES
from maxbatch.data.store.documents import Document, DocumentSource
from maxbatch.data.store.duplicates import HashTable, record_hashes
from maxbatch.data.store.formats import Piece, grouped
from maxbatch.data.store.lookup import leaves_out_held_out
from maxbatch.data.store.token_store import TokenLayout
from maxbatch.data.store.tokenise import Tokeniser
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.recipe import StreamRecipe
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.system.errors import ConfigError

_BATCH_BYTES, _BATCH_RECORDS = 1 << 18, 256
_PIECE_RECORDS = np.uint64(1 << 40)  # more records than a piece has


class BadRecord(NamedTuple):
    """A record that is not trained on as it is."""

    file: str
    record: int  # as numbered in the file, from 1: the line, the row
    effect: str  # left out, cut, split or refused
    reason: str


def bad_records(config: StreamConfig) -> Iterator[BadRecord]:
    """Yields the bad records of every source of a dataset, then those of its held-out data, in
    order.

    With `deduplicate` the records that are equal to another one are among them.

    Raises:
      ConfigError: data that cannot be read, or whose records are not here (prepared and computed
        data).
    """
    tokenizer = tokenizer_of(config)
    mixture = read_mixture(config)
    for source in [part.config for part in mixture] if mixture else [config]:
        yield from _bad_records(source, "dataset_path", tokenizer, config)
    if config.eval_dataset_path:
        yield from _bad_records(config, "eval_dataset_path", tokenizer, config)


def place_of_kept(
    config: StreamConfig,
    key: str,
    tokenizer: Tokenizer,
    number: int,
    whole: StreamConfig | None = None,
) -> str | None:
    """Returns the file and record of the kept record `number`, from 0; None if the records are not
    here.

    Reads and tokenises the records before it again. `whole` is the config of the mixture of which
    this is a source.
    """
    if config.dataset_type in ("synthetic", *STORES):
        return None
    source, records = _records(config, key, tokenizer, whole or config)
    kept = 0
    for document, record in records:
        if not isinstance(record, str):
            if kept == number:
                return source.where(document)
            kept += 1
    return None


def _bad_records(
    config: StreamConfig, key: str, tokenizer: Tokenizer, whole: StreamConfig
) -> Iterator[BadRecord]:
    if config.dataset_type in ("synthetic", *STORES):
        raise ConfigError(
            f"dataset_type={config.dataset_type}: --bad reads records, and there are none; works: "
            "the dataset_type and dataset_path that `maxbatch prepare` was given"
        )
    source, records = _records(config, key, tokenizer, whole)
    bad = "left out" if config.skip_bad_records else "refused"
    for document, record in records:
        if isinstance(record, _Duplicate):
            effect, reason = "left out", str(record)
        elif isinstance(record, str):
            effect, reason = bad if document.utf8 or document.problem else "left out", record
        elif record > config.max_target_length and (effect := _cut(config)):
            reason = (
                f"has {record} tokens, and a row has max_target_length={config.max_target_length}"
            )
        else:
            continue
        yield BadRecord(document.piece.file.path, source.record_number(document), effect, reason)


def _cut(config: StreamConfig) -> str:
    """Returns the fate of a document that is longer than a row; "" where documents are joined and
    cut anyway.
    """
    if config.recipe.has_answers:
        return {"truncate": "cut", "drop": "left out", "error": "refused"}[config.overlong]
    return "" if config.packing else "split"


class _Duplicate(str):
    """The reason why a record is left out that is equal to another one."""


def _records(
    config: StreamConfig, key: str, tokenizer: Tokenizer, whole: StreamConfig
) -> tuple[DocumentSource, Iterator[tuple[Document, int | str]]]:
    """Returns a dataset, and its records with their tokens (of the longest document), or why they
    are left out.
    """
    reading = _Reading(config, key, tokenizer)
    if not config.deduplicate:
        return reading.source, (
            (document, record if isinstance(record, str) else _longest(record, reading.layout))
            for document, record in reading.records()
        )
    held_out = (
        _Reading(whole, "eval_dataset_path", tokenizer)
        if leaves_out_held_out(config, key, whole)
        else None
    )
    return reading.source, _without_duplicates(reading, held_out)


def _longest(documents: Sequence[np.ndarray], layout: TokenLayout) -> int:
    return max(map(len, documents)) + len(layout.bos) + len(layout.eos)


class _Reading:
    """A dataset whose records are read and tokenised as for its store."""

    def __init__(self, config: StreamConfig, key: str, tokenizer: Tokenizer) -> None:
        recipe = StreamRecipe.of(config.recipe)
        self.source = replace(DocumentSource.from_config(config, key), skip_bad_records=True)
        self.layout = TokenLayout.from_config(config, tokenizer)
        self.documents_per_record = recipe.documents_per_record
        self._tokeniser = Tokeniser(
            self.source, tokenizer, self.layout, recipe.encoder(config, tokenizer)
        )

    def records(self) -> Iterator[tuple[Document, Sequence[np.ndarray] | str]]:
        """Yields the records, in order, with the tokens of each, or why it is left out."""
        for batch in grouped(
            self.source.documents(),
            lambda document: len(document.utf8),
            _BATCH_BYTES,
            _BATCH_RECORDS,
        ):
            encoded = self._tokeniser.encoded([document for document in batch if document.utf8])
            yield from (
                (document, next(encoded) if document.utf8 else document.reason)
                for document in batch
            )


def _without_duplicates(
    reading: _Reading, held_out: _Reading | None
) -> Iterator[tuple[Document, int | str]]:
    """Yields the records of a dataset, with the place of the record that a duplicate is equal
    to.
    """
    pieces = list[tuple[DocumentSource, Piece]]()

    @cache
    def records_before(number: int) -> int:
        source, piece = pieces[number]
        return source.records_before(piece)

    with tempfile.TemporaryDirectory() as folder:
        table = HashTable(Path(folder))
        for dataset in filter(None, (held_out, reading)):
            for document, record in dataset.records():
                if isinstance(record, str):
                    if dataset is reading:
                        yield document, record
                    continue
                if not pieces or pieces[-1][1] is not document.piece:
                    pieces.append((dataset.source, document.piece))
                number = np.uint64(len(pieces) - 1) * _PIECE_RECORDS + np.uint64(document.number)
                digests = b"".join(map(dataset.layout.digest, record))
                first = table.first(
                    record_hashes(digests, dataset.documents_per_record), np.array([number])
                )[0]
                if dataset is not reading:
                    continue
                if first == number:
                    yield document, _longest(record, dataset.layout)
                else:
                    piece, place = int(first // _PIECE_RECORDS), int(first % _PIECE_RECORDS)
                    file = pieces[piece][1].file.path
                    yield (
                        document,
                        _Duplicate(f"equal to record {records_before(piece) + place} of {file}"),
                    )
