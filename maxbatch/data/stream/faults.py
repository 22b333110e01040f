"""Faults of a run's data and tokenizer in the first records, for a trial before the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from maxbatch.config.combined import StreamConfig
from maxbatch.config.hub import folder_of
from maxbatch.config.rules import check_data_paths, check_vocabulary
from maxbatch.config.values import shown
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.formats import TokenIds
from maxbatch.data.store.lookup import open_store
from maxbatch.data.store.megatron import open_megatron
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.recipe import StreamRecipe
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import check_special_tokens, tokenizer_of
from maxbatch.system.errors import ConfigError

_FIRST_RECORDS = 64  # read per source

T = TypeVar("T")


def data_faults(config: StreamConfig) -> list[str]:
    """Returns the faults of a config's data and tokenizer, one message each.

    Lists files, and reads and tokenises the first records of each source, through the chat template
    for conversations.
    """
    faults: dict[str, None] = {}

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except ConfigError as error:
            faults[str(error)] = None
            return None

    tokenizer = attempt(lambda: tokenizer_of(config))
    if tokenizer is not None and config.dataset_type != "synthetic":
        attempt(lambda: check_vocabulary(config, tokenizer.vocab_size))
        if config.dataset_type != "megatron":
            attempt(lambda: check_special_tokens(config, tokenizer))
    attempt(lambda: check_data_paths(config))
    mixture = attempt(lambda: read_mixture(config))
    sources = [source.config for source in mixture] if mixture else [config]
    for source in sources:
        attempt(partial(_read_first, source, "dataset_path", tokenizer))
    if config.eval_dataset_path:
        attempt(partial(_read_first, config, "eval_dataset_path", tokenizer))
    return list(faults)


def _read_first(config: StreamConfig, key: str, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError if a dataset, or one of its first records, cannot be read."""
    if config.dataset_type == "synthetic":
        return
    if config.dataset_type == "megatron":
        open_megatron(config, key)
        return
    if config.dataset_type == "tokens":
        if tokenizer is not None:
            open_store(config, tokenizer, key)
        elif not folder_of(config[key]).exists():
            raise ConfigError(f"{key}={shown(repr(config[key]))}: no such folder")
        return
    source = DocumentSource.from_config(config, key)
    documents = list(itertools.islice(source.documents(), _FIRST_RECORDS))
    texts = [document.utf8 for document in documents]
    if not any(texts):
        raise source.error(
            f"the first {len(texts)} records have no text" if texts else "holds no document"
        )
    if tokenizer is None:
        return
    encoder = StreamRecipe.of(config.recipe).encoder(config, tokenizer)
    if encoder is None:
        tokenizer.encode_utf8_batch([text for text in texts if not isinstance(text, TokenIds)])
        return
    kept = [document for document in documents if document.utf8]
    for document, encoded in zip(
        kept, encoder.encode_batch([record.utf8 for record in kept]), strict=True
    ):
        if isinstance(encoded, RecordError) and not source.skip_bad_records:
            raise source.bad_record(document, str(encoded))
