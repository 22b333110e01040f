"""Records that training leaves out, cuts or splits, found by reading and tokenising the dataset again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from maxbatch.config.combined import StreamConfig
from maxbatch.config.sections import STORES
from maxbatch.data.store.chat_rendering import ConversationError
from maxbatch.data.store.conversations import Encoded
from maxbatch.data.store.documents import Document, DocumentSource
from maxbatch.data.store.formats import TokenIds, grouped
from maxbatch.data.store.tokenizer import Tokenizer
from maxbatch.data.store.tokenizers import tokenizer_of
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.recipe import StreamRecipe
from maxbatch.system.errors import ConfigError

_BATCH_BYTES, _BATCH_RECORDS = 1 << 18, 256


class BadRecord(NamedTuple):
    """A record that is not trained on as it is."""

    file: str
    record: int  # as numbered in the file, from 1: the line, the row
    effect: str  # left out, cut, split or refused
    reason: str


def bad_records(config: StreamConfig) -> Iterator[BadRecord]:
    """Yields the bad records of every source of a dataset, then those of its held-out data, in order.

    Raises:
      ConfigError: data that cannot be read, or whose records are not here (prepared and computed data).
    """
    tokenizer = tokenizer_of(config)
    mixture = read_mixture(config)
    for source in [part.config for part in mixture] if mixture else [config]:
        yield from _bad_records(source, "dataset_path", tokenizer)
    if config.eval_dataset_path:
        yield from _bad_records(config, "eval_dataset_path", tokenizer)


def place_of_kept(config: StreamConfig, key: str, tokenizer: Tokenizer, number: int) -> str | None:
    """Returns the file and record of the kept record `number`, from 0; None if the records are not here.

    Reads and tokenises the records before it again.
    """
    if config.dataset_type in ("synthetic", *STORES):
        return None
    source = replace(DocumentSource.from_config(config, key), skip_bad_records=True)
    kept = 0
    for batch in _batches(source):
        documents = [document for document in batch if document.utf8]
        lengths = _lengths(config, tokenizer, [document.utf8 for document in documents])
        for document, length in zip(documents, lengths, strict=True):
            if not isinstance(length, ConversationError):
                if kept == number:
                    return source.where(document)
                kept += 1
    return None


def _batches(source: DocumentSource) -> Iterator[list[Document]]:
    return grouped(source.documents(), lambda document: len(document.utf8), _BATCH_BYTES, _BATCH_RECORDS)


def _bad_records(config: StreamConfig, key: str, tokenizer: Tokenizer) -> Iterator[BadRecord]:
    if config.dataset_type in ("synthetic", *STORES):
        raise ConfigError(
            f"dataset_type={config.dataset_type}: --bad reads records, and there are none; works: the dataset_type and "
            "dataset_path that `maxbatch prepare` was given"
        )
    source = replace(DocumentSource.from_config(config, key), skip_bad_records=True)
    effect = "left out" if config.skip_bad_records else "refused"

    def found(document: Document, effect: str, reason: str) -> BadRecord:
        return BadRecord(document.piece.file.path, source.record_number(document), effect, reason)

    for batch in _batches(source):
        lengths = iter(_lengths(config, tokenizer, [document.utf8 for document in batch if document.utf8]))
        for document in batch:
            if not document.utf8:
                yield found(document, effect if document.problem else "left out", document.reason)
                continue
            length = next(lengths)
            if isinstance(length, ConversationError):
                yield found(document, effect, str(length))
            elif length > config.max_target_length and (cut := _cut(config)):
                reason = f"has {length} tokens, and a row has max_target_length={config.max_target_length}"
                yield found(document, cut, reason)


def _cut(config: StreamConfig) -> str:
    """Returns what becomes of a document that is longer than a row; "" where documents are joined and cut anyway."""
    if config.recipe.has_answers:
        return {"truncate": "cut", "drop": "left out", "error": "refused"}[config.overlong]
    return "" if config.packing else "split"


def _lengths(config: StreamConfig, tokenizer: Tokenizer, records: Sequence[bytes]) -> list[int | ConversationError]:
    """Returns the tokens of each record, of its longest document, or why the record is bad."""
    encoder = StreamRecipe.of(config.recipe).encoder(config, tokenizer)
    if encoder is None:
        added = config.add_bos + config.add_eos
        return [_num_ids(tokenizer, record) + added for record in records]
    return [
        encoded if isinstance(encoded, ConversationError) else _longest(encoded)
        for encoded in encoder.encode_batch(records)
    ]


def _longest(documents: Sequence[Encoded]) -> int:
    return max(len(document.ids) for document in documents)


def _num_ids(tokenizer: Tokenizer, document: bytes) -> int:
    if isinstance(document, TokenIds):
        return len(document) // 8
    return len(tokenizer.encode_utf8_batch([document])[0])
