"""Records of prompts that training leaves out or refuses, found by reading the dataset again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from maxbatch.config.combined import PromptConfig
from maxbatch.data.store.documents import Document, DocumentSource
from maxbatch.data.store.duplicates import record_digest
from maxbatch.data.stream.bad_records import BadRecord
from maxbatch.kinds.prompt.prompts import RECORD, PromptText, Written, refuse_mixture
from maxbatch.kinds.prompt.ready_tasks import TASKS
from maxbatch.kinds.prompt.refusals import check_type
from maxbatch.system.errors import ConfigError

_RECORDS_AT_ONCE = 1024


def bad_prompts(config: PromptConfig) -> Iterator[BadRecord]:
    """Yields the bad records of a dataset of prompts, then those of its held-out data, in order.

    With `deduplicate` the records whose prompt has the text of another one are among them.

    Raises:
      ConfigError: data that cannot be read, a mixture, or computed prompts, which have no records.
    """
    check_type(config.dataset_type)
    if config.dataset_type in TASKS:
        raise ConfigError(
            f"dataset_type={config.dataset_type}: --bad reads records, and these prompts are "
            "computed; works: a dataset_type with files, such as jsonl"
        )
    refuse_mixture(config)
    text, places = PromptText(config), dict[bytes, _Place]()
    if config.eval_dataset_path:
        held_out = list(_bad(config, "eval_dataset_path", text, places))
    yield from _bad(config, "dataset_path", text, places)
    if config.eval_dataset_path:
        yield from held_out


class _Place(NamedTuple):
    """A record's place, whose number in its file may take another reading."""

    source: DocumentSource
    document: Document

    def __str__(self) -> str:
        number = self.source.record_number(self.document)
        return f"record {number} of {self.document.piece.file.path}"


_Places = dict[bytes, _Place]  # of the first record of each prompt, by the hash of its text


def _bad(config: PromptConfig, key: str, text: PromptText, places: _Places) -> Iterator[BadRecord]:
    """Yields the bad records of one path, and adds its prompts to `places`."""
    source = replace(
        DocumentSource.from_config(config, key, whole_records=True), skip_bad_records=True
    )
    bad = "left out" if config.skip_bad_records else "refused"
    for batch in _batches(source):
        read = [_read(document, text) for document in batch]
        prompts = [prompt for prompt in read if isinstance(prompt, Written)]
        lengths = iter(map(len, text.tokens(prompts)))
        for document, prompt in zip(batch, read, strict=True):
            if isinstance(prompt, str):
                effect = bad if document.utf8 or document.problem else "left out"
                reason = prompt
            elif first := _first(config, places, prompt, _Place(source, document)):
                next(lengths)
                effect, reason = "left out", f"equal to {first}"
            else:
                effect, reason = "refused", _unfit(config, next(lengths))
            if reason:
                number = source.record_number(document)
                yield BadRecord(document.piece.file.path, number, effect, reason)


def _batches(source: DocumentSource) -> Iterator[Sequence[Document]]:
    documents = source.documents()
    while batch := list(itertools.islice(documents, _RECORDS_AT_ONCE)):
        yield batch


def _read(document: Document, text: PromptText) -> Written | str:
    """Returns a record's prompt, or the reason why it has none."""
    if not document.utf8:
        return document.reason
    try:
        return text.of(json.loads(document.utf8), RECORD)
    except ConfigError as error:
        return text.problem(error)


def _first(config: PromptConfig, places: _Places, prompt: Written, here: _Place) -> _Place | None:
    """Returns the first record of a prompt's text; None if this is it, or without
    `deduplicate`.
    """
    if not config.deduplicate:
        return None
    here = here._replace(document=here.document._replace(utf8=b""))
    first = places.setdefault(record_digest(prompt.text.encode("utf-8")), here)
    return None if first is here else first


def _unfit(config: PromptConfig, length: int) -> str:
    """Returns why a prompt of `length` tokens is refused, or ""."""
    most = config.max_prefill_predict_length
    if length > most:
        return f"has {length} tokens, and a prompt at most max_prefill_predict_length={most}"
    return "" if length else "has no token to respond to; add_bos=true gives it one"
