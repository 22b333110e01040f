"""Records for supervised fine-tuning (`use_sft`): conversations as tokens, each of them trained on or not.

A record has `messages` (each with `role` and `content`, written by the tokenizer's chat template) or `prompt` and
`completion`: two texts, after which the end-of-text token follows, or two lists of messages. The special tokens that
such a text spells out become those tokens, as in transformers; nothing else is added. Of the fields of the record
besides, the template sees `tools` (a list, or JSON of one) and those of `chat_template_kwargs`.

With `sft_train_on_completion_only` the assistant's tokens are trained on, the end of its turn included: those of every
assistant message, or of the completion. Without, all tokens are.

A text is tokenised as a whole. Where a trained part begins or ends, so must a token: a prompt's tokens must be those
that the prompt has by itself, or else generation would begin differently from training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxbatch.config.sections import DataConfig
from maxbatch.config.values import shown
from maxbatch.data.store.chat_rendering import ConversationError, Question, Rendered
from maxbatch.data.store.chat_template import ChatTemplate
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.system.bounded import RefusedContent, read_json
from maxbatch.system.errors import ConfigError

_NEEDED = "messages, or prompt and completion"


class RecordError(ConfigError):
    """A record that cannot be used, by its number from 0; the message is the reason."""

    def __init__(self, number: int, problem: str):
        super().__init__(number, problem)
        self.number, self.problem = number, problem


@dataclass(frozen=True)
class Conversations:
    """How records become tokens that are trained on and tokens that are not."""

    tokenizer: Tokenizer
    completion_only: bool
    skip_bad_records: bool

    @classmethod
    def from_config(cls, config: DataConfig, tokenizer: Tokenizer) -> Conversations | None:
        """Returns None unless `use_sft` is set."""
        if not config.use_sft:
            return None
        return cls(tokenizer, config.sft_train_on_completion_only, config.skip_bad_records)

    @property
    def identity(self) -> dict[str, object]:
        """The values that fix the tokens of records, besides the tokenizer."""
        try:
            template = self.tokenizer.chat_template().identity
        except ConfigError:  # raised once a record needs the template
            template = None
        return {"completion_only": self.completion_only, "template": template}

    def encode_batch(self, records: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Returns the ids (int32[n]) and whether they are trained on (bool[n]) of records, which are JSON objects.

        None stands for a record that `skip_bad_records` leaves out.

        Raises:
          RecordError: a record without a conversation, or one in which trained tokens cannot be told from others.
          ConfigError: the tokenizer has no chat template, and a record needs it.
        """
        read = [self._read(record) for record in records]
        questions = [one for one in read if isinstance(one, Question)]
        rendered = iter(self.template.render(questions) if questions else [])
        encoded: list[tuple[np.ndarray, np.ndarray] | None] = []
        for number, one in enumerate(read):
            try:
                encoded.append(self._encoded(next(rendered) if isinstance(one, Question) else one))
            except ConversationError as error:
                if not self.skip_bad_records:
                    raise RecordError(number, str(error)) from error
                encoded.append(None)
        return encoded

    def _read(self, utf8: bytes) -> Question | _Texts | ConversationError:
        """Returns the conversation of a record, or why it has none."""
        try:
            return _conversation(json.loads(utf8))
        except ConversationError as error:
            return error

    def _encoded(self, found: Rendered | _Texts | ConversationError) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(found, ConversationError):
            raise found
        if isinstance(found, _Texts):
            return self._texts(*found)
        if not self.completion_only:
            found = Rendered(found.text, [(0, len(found.text))])
        if not any(begin < end for begin, end in found.spans):
            raise ConversationError("has no message of the assistant, so that nothing would be trained on")
        return self._split(found)

    @property
    def template(self) -> ChatTemplate:
        """The chat template; ConfigError if there is none."""
        return self.tokenizer.chat_template()

    def _split(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, and which of them lie in its spans."""
        text, spans = rendered
        borders = sorted({border for span in spans for border in span} - {0, len(text)})
        ids, *parts = self.tokenizer.encode_markup_batch([text, *(text[:border] for border in borders)])
        for part, border in zip(parts, borders, strict=True):
            if not np.array_equal(ids[: len(part)], part):
                around = shown(repr(text[max(0, border - 10) : border] + "|" + text[border : border + 10]))
                raise ConversationError(
                    f"a token crosses the border between trained and untrained text, at {around}; a special token or "
                    "white space in the chat template, on the other side of the border, keeps them apart"
                )
        place = {0: 0, len(text): len(ids)} | dict(zip(borders, map(len, parts), strict=True))
        trained = np.zeros(len(ids), bool)
        for begin, end in spans:
            trained[place[begin] : place[end]] = True
        return ids, trained

    def _texts(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a prompt and its completion, and which are trained on.

        Some tokenizers would join the end of one text and the beginning of the other; they are then tokenised apart.
        """
        whole, before, after = self.tokenizer.encode_markup_batch([prompt + completion, prompt, completion])
        begin = len(before)
        if not np.array_equal(whole[:begin], before):
            whole = np.concatenate([before, after])
        end = self.tokenizer.eos_id
        if end is not None and (not len(whole) or whole[-1] != end):
            whole = np.append(whole, np.int32(end))
        return whole, np.arange(len(whole)) >= (begin if self.completion_only else 0)


class _Texts(NamedTuple):
    """A record of two texts."""

    prompt: str
    completion: str


def _conversation(record: Mapping[str, object]) -> Question | _Texts:
    prompt, completion = record.get("prompt"), record.get("completion")
    if record.get("messages") is not None:
        return Question(_messages(record["messages"], "messages"), _extras(record))
    if isinstance(prompt, str) and isinstance(completion, str):
        return _Texts(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = _messages(prompt, "prompt"), _messages(completion, "completion")
        return Question([*asked, *answered], _extras(record), len(asked))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if value is not None and not isinstance(value, str | list):
            raise ConversationError(f"field {name} is a {type(value).__name__}, not a text or a list of messages")
    fields = shown(", ".join(map(repr, list(record)[:8])) or "none")
    raise ConversationError(f"use_sft=true needs {_NEEDED} (both texts, or both lists); its fields: {fields}")


def _messages(value: object, field: str) -> list[dict[str, object]]:
    """Returns the messages of a field, without the empty fields that tables have; raises ConversationError."""
    if not isinstance(value, list) or not value:
        raise ConversationError(f"field {field} is {_kind(value)}, not a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConversationError(f"message {number} of field {field} is not an object with a role, which is a text")
    kept = ("role", "content")
    return [{k: v for k, v in message.items() if v is not None or k in kept} for message in value]


def _extras(record: Mapping[str, object]) -> dict[str, object]:
    tools, more = record.get("tools"), record.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = read_json(tools, "field tools, a text,")
        except RefusedContent as error:
            raise ConversationError(str(error)) from error
    if tools is not None and not isinstance(tools, list):
        raise ConversationError(f"field tools is {_kind(tools)}, not a list")
    if more is not None and not isinstance(more, dict):
        raise ConversationError(f"field chat_template_kwargs is {_kind(more)}, not an object")
    return {**(more or {}), "tools": tools or None}


def _kind(value: object) -> str:
    return "empty" if isinstance(value, list) else f"a {type(value).__name__}"
