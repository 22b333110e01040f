"""Prompts: a stream determined by dataset, template and seed, with the fields of the prompts'
records.

With `deduplicate` the first of the records whose prompts have the same text is kept, and no
held-out prompt is trained on.

Limits: records are in memory, as JSON; a dataset of prompts is one source, not a mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from maxbatch.config.combined import PromptConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.model_forms import END_TOKENS, end_tokens
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.sections import names_fixing
from maxbatch.config.values import shown
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.duplicates import EQUAL, EQUAL_HELD_OUT, record_digest
from maxbatch.data.store.formats import record_as_json
from maxbatch.data.store.heldout import HeldOutFraction, Records
from maxbatch.data.store.skipped import kind_of, skipped_text
from maxbatch.data.stream.epochs import EpochOrder, check_indices, order_identity
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import check_special_tokens, make_tokenizer
from maxbatch.kinds.conversation.messages import messages_of
from maxbatch.kinds.prompt.ready_tasks import TASKS
from maxbatch.kinds.prompt.refusals import check_lengths, check_type
from maxbatch.kinds.prompt.templates import Template
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.plan.skip_samples import holes_of
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.warning import note

# Part of every identity; raise it when the same settings give other prompts.
_PROMPTS_VERSION = 1
_TEXTS_AT_ONCE = 1024
RECORD = "the record"  # of a message, where its place is not known yet


@dataclass(frozen=True, eq=False)
class Prompt:
    index: int  # its own number in the stream of epochs, or its index in the held-out split
    text: str  # the prompt from template and record
    # int32[n], 1 <= n <= `max_prefill_predict_length`; with `add_bos`, that token first
    tokens: np.ndarray
    record: dict[str, object]  # all fields, for the rewards; its own copy


@dataclass(frozen=True, eq=False)
class Prompts:
    """One split of the prompts.

    The training stream is endless: epoch e is prompts e n to (e + 1) n - 1, each epoch another
    permutation of the records. A held-out split is n prompts once, in order.
    """

    records: Sequence[bytes]  # JSON objects, n of them
    text: PromptText
    identity: Identity  # equal identities mean equal prompts
    skipped_records: int  # skipped records of the whole dataset (`skip_bad_records`)
    order: EpochOrder  # of the records
    is_endless: bool  # whether the stream continues after its first epoch
    has_chats: bool  # whether any record of the whole dataset is a conversation
    holes: Holes = NO_HOLES  # own numbers that are left out

    @property
    def num_prompts(self) -> int:
        """Prompts of an epoch, n."""
        return len(self.records)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end the assistant's turn, if any prompt is a conversation."""
        return self.text.chat.end_ids if self.has_chats else ()

    def read(self, first: int, count: int) -> list[Prompt]:
        """Returns the kept prompts first to first + count - 1, in O(count) for any `first`.

        Raises:
          IndexError: an index below 0, or past the end of a held-out split.
        """
        what, end = f"{count} prompts from {first}: there are prompts", first + count
        check_indices(what, first, end, None if self.is_endless else self.num_prompts)
        own_numbers = self.own_numbers(first, end)
        records = [json.loads(self.records[self.order.place(number).row]) for number in own_numbers]
        texts = [self.text.of(record, "the record") for record in records]
        tokens = self.text.tokens(texts)
        return [Prompt(own_numbers[i], texts[i].text, tokens[i], records[i]) for i in range(count)]

    def own_numbers(self, first: int, end: int) -> Sequence[int]:
        """Returns the own numbers of the kept prompts first to end - 1."""
        return self.holes.own_numbers(range(first, end)) if self.holes else range(first, end)


def refuse_mixture(config: PromptConfig) -> None:
    """Raises ConfigError for a dataset with weights."""
    if read_mixture(config) is not None:
        raise ConfigError(
            f"dataset_path={shown(repr(config.dataset_path))}: prompts are no mixture with "
            "weights; files joined by ';' follow one another"
        )


class PromptSource:
    """The prompts of a config, for training and held out.

    All are read, filled in and measured on construction.

    Raises:
      ConfigError: unusable settings or data, with key, value and record; a prompt without tokens,
        or with more than `max_prefill_predict_length`.
    """

    def __init__(self, config: PromptConfig):
        self._config = config
        check_type(config.dataset_type)
        refuse_mixture(config)
        self._fraction = HeldOutFraction.of(config.eval_fraction)
        self._text = PromptText(self._config)
        self._held_out = None
        if config.deduplicate and config.eval_dataset_path:
            self._held_out = _read_dataset(config, "eval_dataset_path", self._text)
        self._dataset = _read_dataset(config, "dataset_path", self._text, self._held_out)
        self._fraction.refuse_empty(len(self._dataset.records), "prompts")

    def train(self) -> Prompts:
        return self._split(self._dataset, self._part(held_out=False), trains=True)

    @cached_property
    def held_out(self) -> Prompts | None:
        """The held-out prompts, from `eval_dataset_path` if stated; None if nothing is held out."""
        if self._config.eval_dataset_path:
            dataset = self._held_out or _read_dataset(self._config, "eval_dataset_path", self._text)
            return self._split(dataset, dataset.records, trains=False)
        if not self._fraction.fraction:
            return None
        return self._split(self._dataset, self._part(held_out=True), trains=False)

    def _part(self, held_out: bool) -> list[bytes]:
        records = self._dataset.records
        chosen = Records(self._fraction, len(records), held_out)
        return [records[number] for number in chosen.numbers_S.tolist()]

    def _split(self, dataset: _Dataset, records: Sequence[bytes], trains: bool) -> Prompts:
        config = self._config
        identity: Identity = {
            "prompts_version": _PROMPTS_VERSION,
            "split": "train" if trains else "eval",
            "content": dataset.content,
            "tokenizer": self._text.tokenizer.identity,
            **{key: config[key] for key in names_fixing(Fixes.PROMPTS)},
            "held_out": self._fraction.rule,
        }
        holes = holes_of(config) if trains else NO_HOLES
        if trains:
            identity |= order_identity(config) | holes.identity
        if ends := end_tokens(config.load_parameters_path):
            identity[END_TOKENS] = str(ends)
        order = EpochOrder(len(records))
        if trains:
            order = EpochOrder.of(config, len(records), dataset.content)
        return Prompts(
            records,
            self._text,
            identity,
            dataset.skipped,
            order,
            is_endless=trains,
            has_chats=dataset.has_chats,
            holes=holes,
        )


class Written(NamedTuple):
    """The text of a prompt."""

    text: str
    is_chat: bool  # written by the chat template, with all special tokens


class PromptText:
    """Conversion of records to texts, and of texts to tokens.

    With a template of a single field, such as "{messages}", a list of messages is a conversation:
    the tokenizer's chat template writes it, up to the beginning of the assistant's answer.
    """

    def __init__(self, config: PromptConfig):
        self.template = Template(config.prompt_template)
        self.tokenizer: Tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
        check_vocabulary(config, self.tokenizer.vocab_size)
        check_special_tokens(config, self.tokenizer)
        self._bos = np.array([self.tokenizer.bos_id] if config.add_bos else [], np.int32)

    @cached_property
    def chat(self) -> ChatPrompts:
        """The chat template of the tokenizer; raises ConfigError if it has none."""
        return ChatPrompts(self.tokenizer)

    def of(self, record: Mapping[str, object], place: str) -> Written:
        """Returns the prompt of a record; `place` names it in messages.

        Raises:
          ConfigError: the template or the chat template does not fit the record.
        """
        where = f"prompt_template={shown(repr(self.template.text))}: {place}"
        try:
            messages = self._messages(record)
        except RecordError as error:
            raise ConfigError(f"{where}: {error}") from None
        if messages is None:
            return Written(self.template.fill(record, place), is_chat=False)
        if messages[-1]["role"] == "assistant":
            raise ConfigError(
                f"{where}: the last message is the assistant's, but a prompt ends before it; "
                "works: the messages before it"
            )
        chat = self.chat
        try:
            return Written(chat.text(messages), is_chat=True)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def problem(self, error: ConfigError) -> str:
        """Returns the fault of a record that was named `RECORD`, without the template."""
        problem = str(error).removeprefix(f"prompt_template={shown(repr(self.template.text))}: ")
        return problem.removeprefix(RECORD).lstrip(": ")

    def _messages(self, record: Mapping[str, object]) -> list[dict[str, object]] | None:
        """Returns a record's messages if its prompt is a conversation; raises RecordError for
        broken ones.
        """
        field = self.template.only_field
        value = record.get(field) if field else None
        if isinstance(value, list) and any(
            isinstance(item, dict) and item.keys() & {"role", "from"} for item in value
        ):
            return messages_of(value, field)
        return None

    def tokens(self, prompts: Sequence[Written]) -> list[np.ndarray]:
        """Returns the tokens of each prompt, int32[n]."""
        plain = iter(
            self.tokenizer.encode_utf8_batch(
                [prompt.text.encode("utf-8") for prompt in prompts if not prompt.is_chat]
            )
        )
        chats = iter(
            self.tokenizer.encode_markup_batch(
                [prompt.text for prompt in prompts if prompt.is_chat]
            )
        )
        return [
            next(chats).astype(np.int32)
            if prompt.is_chat
            else np.concatenate([self._bos, next(plain).astype(np.int32)])
            for prompt in prompts
        ]


class _Dataset(NamedTuple):
    """All records of one path, before splitting."""

    records: list[bytes]  # JSON objects, in order
    content: str  # a hash of the records and their prompts
    skipped: int  # skipped records
    texts: set[bytes]  # hashes of the prompts' texts; empty without `deduplicate`
    has_chats: bool  # whether any is a conversation


class _PromptRecord(NamedTuple):
    """A record of a dataset of prompts."""

    json: bytes  # an object; b"" for a record that is left out
    where: Callable[[], str]  # its place, for messages; may read its file again
    reason: str = ""  # why it is left out


def _read_dataset(
    config: PromptConfig, key: str, text: PromptText, held_out: _Dataset | None = None
) -> _Dataset:
    """Reads all records of a dataset, but for those of prompts that are held out."""
    where, records = _open(config, key)
    content = hashlib.blake2b(digest_size=16)
    kept: list[tuple[_PromptRecord, Written]] = []
    reasons, first_problem, texts = Counter[str](), None, set[bytes]()
    for record in records:
        if not record.json:
            reasons[kind_of(record.reason)] += 1
            continue
        try:
            prompt = text.of(json.loads(record.json), RECORD)
        except ConfigError as error:
            first_problem = first_problem or _fault(text, record)
            if not config.skip_bad_records:
                raise first_problem from None
            reasons[kind_of(text.problem(error))] += 1
            continue
        if config.deduplicate:
            digest = record_digest(prompt.text.encode("utf-8"))
            if held_out is not None and digest in held_out.texts:
                reasons[EQUAL_HELD_OUT] += 1
                continue
            if digest in texts:
                reasons[EQUAL] += 1
                continue
            texts.add(digest)
        kept.append((record, prompt))
        for part in (record.json, prompt.text.encode("utf-8")):
            content.update(len(part).to_bytes(8, "little"))
            content.update(part)
    if not kept:
        left_out = f" ({skipped_text(reasons.total(), reasons)})" if reasons else ""
        raise first_problem or ConfigError(f"{where}: has no record that makes a prompt{left_out}")
    if skipped := reasons.total():
        note(f"{where}: {skipped_text(skipped, reasons)}")
    lengths: list[int] = []
    for begin in range(0, len(kept), _TEXTS_AT_ONCE):
        lengths += map(
            len, text.tokens([prompt for _, prompt in kept[begin : begin + _TEXTS_AT_ONCE]])
        )
    check_lengths(config, lengths, lambda number: kept[number][0].where())
    has_chats = any(prompt.is_chat for _, prompt in kept)
    return _Dataset(
        [record.json for record, _ in kept], content.hexdigest(), skipped, texts, has_chats
    )


def _fault(text: PromptText, record: _PromptRecord) -> ConfigError:
    """Returns the error for a record that makes no prompt, with its place."""
    try:
        text.of(json.loads(record.json), record.where())
    except ConfigError as error:
        return error
    raise AssertionError("a record that made no prompt makes none again")


def _open(config: PromptConfig, key: str) -> tuple[str, Iterator[_PromptRecord]]:
    """Returns a dataset's name for messages, and its records."""
    if task := TASKS.get(config.dataset_type):
        where = f"dataset_type={config.dataset_type}"
        numbered = enumerate(map(record_as_json, task.records()), 1)
        return where, (
            _PromptRecord(record, partial("{} record {}".format, where, number))
            for number, record in numbered
        )
    source = DocumentSource.from_config(config, key, whole_records=True)

    def records() -> Iterator[_PromptRecord]:
        for document in source.documents():
            where = partial(source.where, document._replace(utf8=b""))
            yield _PromptRecord(document.utf8, where, document.reason)
        source.refuse_changed()

    return f"{key}={source.value!r}", records()
