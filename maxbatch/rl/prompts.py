"""Prompts: one stream of them, fixed by the dataset, the template and the seed, with the fields of their records.

Limits: the records are held in memory, as JSON; a dataset of prompts is one source, no mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.formats import record_as_json
from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.data.store.tokenizers import Tokenizer, check_special_tokens, check_vocab_size, make_tokenizer
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.samples import place_in_epochs
from maxbatch.data.stream.sources import Identity, check_paths, order_identity
from maxbatch.rl import arithmetic
from maxbatch.rl.templates import Template
from maxbatch.system.errors import ConfigError

# Part of every identity: raised when the same settings come to mean other prompts.
_PROMPTS_VERSION = 1
# Types of datasets that have no records, and what stands nearest to them.
_NEAREST_TYPE = {"arrayrecord": "parquet", "text": "jsonl", "tokens": "jsonl"}
_TEXTS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
      index: in the stream, of which epochs follow one another; or in the held-out part.
      text: what the template makes of the record.
      tokens: int32[n], 1 <= n <= `max_prefill_predict_length`; the beginning-of-text token first where `add_bos`.
      record: all fields, for the rewards; a copy of its own.
    """

    index: int
    text: str
    tokens: np.ndarray
    record: dict[str, Any]


class Prompts:
    """One split of the prompts. The training stream has no end: epoch e is prompts e n to (e + 1) n - 1, each a
    permutation of the same records. A held-out part is its n prompts once, in order.

    Attributes:
      num_prompts: n, prompts of an epoch.
      identity: what defines the prompts; equal identities mean equal prompts.
      tokenizer: what makes their tokens.
      skipped_records: records of the whole dataset that were left out (`skip_bad_records`).
    """

    def __init__(
        self,
        records: Sequence[bytes],
        text: _PromptText,
        *,
        shuffle: tuple[int, str] | None,
        endless: bool,
        identity: Identity,
        skipped_records: int,
    ):
        """Makes a split; `PromptSource` is the usual way.

        Args:
          records: JSON objects.
          text: makes a record's text and its tokens.
          shuffle: seed and name that key the permutations; None: in order.
          endless: the stream goes on after its first epoch.
          identity, skipped_records: see the class.
        """
        self.num_prompts = len(records)
        self.identity = identity
        self.tokenizer = text.tokenizer
        self.skipped_records = skipped_records
        self._records = records
        self._text = text
        self._shuffle = shuffle
        self._endless = endless

    def read(self, first: int, count: int) -> list[Prompt]:
        """Returns prompts first to first + count - 1. O(count), whatever `first`.

        Raises:
          IndexError: below 0, or past the end of a held-out part.
        """
        if first < 0 or count < 0 or not (self._endless or first + count <= self.num_prompts):
            end = "" if self._endless else f" to {self.num_prompts - 1}"
            raise IndexError(f"{count} prompts from {first}: there are prompts from 0{end}")
        numbers = [place_in_epochs(first + i, self.num_prompts, self._shuffle).row for i in range(count)]
        records = [json.loads(self._records[number]) for number in numbers]
        texts = [self._text.template.fill(record, "the record") for record in records]
        tokens = self._text.tokens(texts)
        return [Prompt(first + i, texts[i], tokens[i], records[i]) for i in range(count)]


class PromptSource:
    """The prompts of a config: those to train on, and the held-out ones. All of them are read, filled in and measured
    when it is made.

    Raises:
      ConfigError: settings or data that cannot be used, by key, value and record; a prompt of no token, or of more
        than `max_prefill_predict_length`.
    """

    def __init__(self, config: ConfigDict):
        _check_dataset(config)
        self._config = config
        self._fraction = HeldOutFraction.from_config(config)
        self._text = _PromptText(config)
        self._dataset = _Dataset(config, "dataset_path", self._text)
        self._fraction.refuse_empty(len(self._dataset.records), "prompts")

    def train(self) -> Prompts:
        """Returns the prompts to train on."""
        return self._split("train", self._dataset, self._part(held_out=False))

    def held_out(self) -> Prompts | None:
        """Returns the held-out prompts; None where nothing is held out. Reads `eval_dataset_path` where one is given.

        Raises:
          ConfigError: as for the prompts to train on.
        """
        if self._config.eval_dataset_path:
            dataset = _Dataset(self._config, "eval_dataset_path", self._text)
            return self._split("eval", dataset, dataset.records)
        if not self._fraction.fraction:
            return None
        return self._split("eval", self._dataset, self._part(held_out=True))

    def _part(self, *, held_out: bool) -> list[bytes]:
        records, fraction = self._dataset.records, self._fraction
        if not fraction.fraction:
            return records
        chosen = fraction.records(fraction.count(len(records), held_out), held_out)
        return [records[number] for number in chosen.tolist()]

    def _split(self, split: Literal["train", "eval"], dataset: _Dataset, records: Sequence[bytes]) -> Prompts:
        config, trains = self._config, split == "train"
        identity: Identity = {
            "prompts_version": _PROMPTS_VERSION,
            "split": split,
            "content": dataset.content,
            "tokenizer": self._text.tokenizer.identity,
            **{key: config[key] for key in names_fixing(Fixes.PROMPTS)},
            "held_out": self._fraction.rule,
        }
        shuffle = None
        if trains:
            identity |= order_identity(config)
        if trains and config.enable_data_shuffling:
            shuffle = (config.data_shuffle_seed, dataset.content)
        return Prompts(
            records,
            self._text,
            shuffle=shuffle,
            endless=trains,
            identity=identity,
            skipped_records=dataset.skipped,
        )


class _PromptText:
    """From records to texts, and from texts to tokens."""

    def __init__(self, config: ConfigDict):
        self.template = Template(config.prompt_template)
        self.tokenizer: Tokenizer = make_tokenizer(config)
        check_vocab_size(config, self.tokenizer)
        check_special_tokens(config, self.tokenizer)
        self._bos = np.array([self.tokenizer.bos_id] if config.add_bos else [], np.int32)

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each prompt, int32[n]."""
        encoded = self.tokenizer.encode_utf8_batch([text.encode("utf-8") for text in texts])
        return [np.concatenate([self._bos, tokens.astype(np.int32)]) for tokens in encoded]


class _Dataset:
    """All records of one path, before they are split.

    Attributes:
      records: JSON objects, in order.
      content: a hash of the records and of the prompts they make.
      skipped: records that were left out.
    """

    def __init__(self, config: ConfigDict, key: str, text: _PromptText):
        self.records: list[bytes] = []
        self.skipped = 0
        self._config = config
        self._where = "dataset_type=arithmetic"
        hashed = hashlib.blake2b(digest_size=16)
        numbers: list[int] = []
        texts: list[str] = []
        for number, record, prompt in self._filled(key, text.template):
            self.records.append(record)
            numbers.append(number)
            texts.append(prompt)
            for part in (record, prompt.encode("utf-8")):
                hashed.update(len(part).to_bytes(8, "little"))
                hashed.update(part)
        if not texts:
            raise ConfigError(f"{self._where}: has no record that makes a prompt")
        self.content = hashed.hexdigest()
        self._check_lengths(numbers, texts, text)

    def _filled(self, key: str, template: Template) -> Iterator[tuple[int, bytes, str]]:
        """Yields the number, counted from 1, the JSON and the prompt of each record that is not left out."""
        problem = None
        for number, record in enumerate(self._read(key), 1):
            if not record:
                self.skipped += 1
                continue
            try:
                prompt = template.fill(json.loads(record), f"record {number}")
            except ConfigError as error:
                if not self._config.skip_bad_records:
                    raise
                problem = problem or error
                self.skipped += 1
                continue
            yield number, record, prompt
        if problem is not None and not self.records:
            raise problem

    def _read(self, key: str) -> Iterator[bytes]:
        if self._config.dataset_type == "arithmetic":
            yield from map(record_as_json, arithmetic.records())
            return
        source = DocumentSource.from_config(self._config, key, whole_records=True)
        self._where = f"{key}={source.value!r}"
        for document in source.documents():
            yield document.utf8
        source.refuse_changed()

    def _check_lengths(self, numbers: Sequence[int], texts: Sequence[str], text: _PromptText) -> None:
        lengths: list[int] = []
        for begin in range(0, len(texts), _TEXTS_AT_ONCE):
            lengths += map(len, text.tokens(texts[begin : begin + _TEXTS_AT_ONCE]))
        longest, shortest = int(np.argmax(lengths)), int(np.argmin(lengths))
        most = self._config.max_prefill_predict_length
        if lengths[longest] > most:
            others = sum(length > most for length in lengths) - 1
            more = f", and {others} more are too long" if others else ""
            works = f"max_prefill_predict_length={lengths[longest]}"
            if lengths[longest] >= self._config.max_target_length:
                room = self._config.max_target_length - most
                works += f" max_target_length={lengths[longest] + room}"
            raise ConfigError(
                f"max_prefill_predict_length={most}: the prompt of record {numbers[longest]} of {self._where} has "
                f"{lengths[longest]} tokens{more}; works: {works}"
            )
        if not lengths[shortest]:
            raise ConfigError(
                f"add_bos=false: the prompt of record {numbers[shortest]} of {self._where} has no token to respond "
                "to; works: add_bos=true"
            )


def _check_dataset(config: ConfigDict) -> None:
    if config.dataset_type not in ("arithmetic", "jsonl", "parquet"):
        nearest = _NEAREST_TYPE.get(config.dataset_type, "arithmetic")
        raise ConfigError(
            f"dataset_type={config.dataset_type}: prompts come from records with fields: one of arithmetic, jsonl, "
            f"parquet; works: dataset_type={nearest}"
        )
    check_paths(config)
    if config.dataset_type != "arithmetic" and read_mixture(config) is not None:
        raise ConfigError(
            f"dataset_path={config.dataset_path!r}: prompts are no mixture with weights; files joined by ';' follow "
            f"one another"
        )
