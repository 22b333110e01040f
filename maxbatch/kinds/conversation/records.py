"""Records with answers to train on: conversations as tokens, each of them trained on or not.

A record has one of the forms of `sft_format`; `auto` takes the first of them whose fields it has:

- `messages`: each has `role` and `content`; the tokenizer's chat template writes them.
- `sharegpt`: the same in `conversations`, as `from` and `value`, with an optional `system`.
- `completion`: `prompt` and `completion`, two texts, after which the end-of-text token follows, or two lists of
  messages.
- `alpaca`: `instruction`, an optional `input`, and `output`: a message of the user and one of the assistant.
- `text`: a text in `text_field`, all of which is trained on, and the end-of-text token.

The special tokens that such a text spells out become those tokens, as in transformers; nothing else
is added. Of the fields of the record besides, the template sees `tools` (a list, or JSON of one)
and those of `chat_template_kwargs`.

With `sft_train_on_completion_only` the assistant's tokens are trained on, the end of its turn
included: those of every assistant message (but not of one with `weight` 0 or `train` false), or of
the completion. Without, all tokens are.

Another kind of record is a subclass, which says what documents a record holds.

A text is tokenised as a whole. Where a trained part begins or ends, so must a token: a prompt's
tokens must be those that the prompt has by itself, or else generation would begin differently from
training.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from maxbatch.config.values import shown, shown_fields
from maxbatch.data.store.encoder import Encoded
from maxbatch.data.tokenizers.chat_rendering import Conversation, Rendered
from maxbatch.data.tokenizers.chat_template import ChatTemplate
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.kinds.conversation.messages import extras_of, kind_of_value, messages_of
from maxbatch.system.errors import ConfigError

_VERSION = 3  # increment it when the same records give other tokens
# The forms of a record and the fields that they need, in the order in which `auto` tries them.
_FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("",),  # text_field
}
_WEIGHTS = ("weight", "train")  # fields of a message


@dataclass(frozen=True)
class Conversations:
    """An encoder of records as tokens, each of which is trained on or not."""

    tokenizer: Tokenizer
    completion_only: bool
    form: str = "auto"  # a key of _FIELDS, or auto
    text_field: str = "text"
    named_fields: Collection[str] = ()  # fields that `record_fields` names

    # whether a document without a token to train on is an error
    needs_trained: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, object]:
        """The values that fix the tokens of records, besides the tokenizer."""
        try:
            template = self.tokenizer.chat_template().identity
        except ConfigError:  # raised once a record needs the template
            template = None
        fields = {
            "completion_only": self.completion_only,
            "format": self.form,
            "text_field": self.text_field,
        }
        return {"version": _VERSION, **fields, **self.kind, "template": template}

    @property
    def kind(self) -> dict[str, object]:
        """The part of `identity` that tells this kind of record from others."""
        return {}

    def documents(self, record: Mapping[str, object]) -> Sequence[Conversation | Texts]:
        """Returns the documents of a record; raises RecordError if it has none."""
        return [self._conversation(record)]

    def encode_batch(self, records: Sequence[bytes]) -> list[tuple[Encoded, ...] | RecordError]:
        """Returns the documents of records, which are JSON objects, or why a record is bad.

        A bad record has no conversation, or one in which trained tokens cannot be told from others.

        Raises:
          ConfigError: the tokenizer has no chat template, and a record needs it.
        """
        read = [self._read(record) for record in records]
        conversations = [
            document
            for documents in read
            for document in documents
            if isinstance(document, Conversation)
        ]
        rendered = iter(self.template.render(conversations) if conversations else [])
        encoded: list[tuple[Encoded, ...] | RecordError] = []
        for documents in read:
            texts = [
                next(rendered) if isinstance(document, Conversation) else document
                for document in documents
            ]
            try:
                encoded.append(tuple(map(self._encoded, texts)))
            except RecordError as error:
                encoded.append(error)
        return encoded

    def _read(self, utf8: bytes) -> Sequence[Conversation | Texts | RecordError]:
        """Returns the conversations of a record, or the reason why it has none."""
        try:
            documents = self.documents(json.loads(utf8))
            return [
                document if isinstance(document, Texts) else self._checked(document)
                for document in documents
            ]
        except RecordError as error:
            return [error]

    def _checked(self, conversation: Conversation) -> Conversation:
        self.template.refuse_unknown_roles(conversation.messages)
        return _checked(conversation, self.completion_only)

    def _encoded(self, document: Rendered | Texts | RecordError) -> Encoded:
        if isinstance(document, RecordError):
            raise document
        if isinstance(document, Texts):
            return self._trains_any(self._texts(*document))
        if not self.completion_only:
            document = Rendered(document.text, [(0, len(document.text))])
        if not any(begin < end for begin, end in document.spans):
            raise RecordError("has no message of the assistant to train on")
        return self._trains_any(self._split(document))

    def _trains_any(self, encoded: Encoded) -> Encoded:
        """Returns a document; raises RecordError if it needs a token to predict, and has
        none.
        """
        if self.needs_trained and not encoded.trained[1:].any():
            raise RecordError("has an answer without a token to train on")
        return encoded

    @property
    def template(self) -> ChatTemplate:
        """The chat template; ConfigError if there is none."""
        return self.tokenizer.chat_template()

    def _split(self, rendered: Rendered) -> Encoded:
        """Returns the ids of a text, and which of them lie in its spans."""
        text, spans = rendered
        borders = sorted({border for span in spans for border in span} - {0, len(text)})
        ids, *prefixes = self.tokenizer.encode_markup_batch(
            [text, *(text[:border] for border in borders)]
        )
        for part, border in zip(prefixes, borders, strict=True):
            if not np.array_equal(ids[: len(part)], part):
                around = shown(
                    repr(text[max(0, border - 10) : border] + "|" + text[border : border + 10])
                )
                raise RecordError(
                    f"a token crosses the border between trained and untrained text, at {around}; "
                    "a special token or white space in the chat template, on the other side of "
                    "the border, keeps them apart"
                )
        place = {0: 0, len(text): len(ids)} | dict(zip(borders, map(len, prefixes), strict=True))
        trained = np.zeros(len(ids), bool)
        for begin, end in spans:
            trained[place[begin] : place[end]] = True
        return Encoded(ids, trained)

    def _texts(self, prompt: str, completion: str) -> Encoded:
        """Returns the ids of a prompt and its completion, and which are trained on.

        Some tokenizers would join the end of one text and the beginning of the other; they are then
        tokenised apart.
        """
        whole, before, after = self.tokenizer.encode_markup_batch(
            [prompt + completion, prompt, completion]
        )
        begin = len(before)
        if not np.array_equal(whole[:begin], before):
            whole = np.concatenate([before, after])
        end = self.tokenizer.eos_id
        if end is not None and (not len(whole) or whole[-1] != end):
            whole = np.append(whole, np.int32(end))
        return Encoded(whole, np.arange(len(whole)) >= (begin if self.completion_only else 0))

    def _conversation(self, record: Mapping[str, object]) -> Conversation | Texts:
        """Returns the conversation of a record in the form that is stated, or found."""
        fields = {
            form: tuple(name or self.text_field for name in names)
            for form, names in _FIELDS.items()
        }

        def has(form: str) -> bool:
            return all(record.get(name) is not None for name in fields[form])

        wanted = _form_of(self.form, self.named_fields)
        form = next(filter(has, fields), None) if wanted == "auto" else wanted
        if form is None or not has(form):
            ways = (
                [" and ".join(names) for names in fields.values()]
                if form is None
                else [" and ".join(fields[form])]
            )
            key = "use_sft=true" if form is None or self.form == "auto" else f"sft_format={form}"
            raise RecordError(
                f"{key} needs {', or '.join(ways)}; its fields: {shown_fields(record)}"
            )
        if form == "text":
            return Texts("", answer_of(_text(record, self.text_field), self.text_field))
        if form == "alpaca":
            asked = "\n\n".join(
                filter(None, (_text(record, "instruction"), _text(record, "input", "")))
            )
            if not asked:
                raise RecordError("field instruction is empty")
            answer = answer_of(_text(record, "output"), "output")
            turns = [
                ("system", _text(record, "system", "")),
                ("user", asked),
                ("assistant", answer),
            ]
            return Conversation(
                [
                    {"role": role, "content": text}
                    for role, text in turns
                    if text or role != "system"
                ],
                extras_of(record),
            )
        if form == "completion":
            return _prompted(record)
        messages = messages_of(record[fields[form][0]], fields[form][0])
        system = _text(record, "system", "") if form == "sharegpt" else ""
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(messages, extras_of(record))


def _form_of(wanted: str, names: Collection[str]) -> str:
    """Returns the form of records: the stated one, or for `auto` one whose fields `record_fields`
    all names.
    """
    named = (
        form
        for form, fields in _FIELDS.items()
        if all(field and field in names for field in fields)
    )
    return next(named, wanted) if wanted == "auto" else wanted


class Texts(NamedTuple):
    """A document of two texts."""

    prompt: str
    completion: str


def _prompted(record: Mapping[str, object]) -> Conversation | Texts:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Texts(prompt, answer_of(completion, "completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = messages_of(prompt, "prompt"), messages_of(completion, "completion")
        return Conversation([*asked, *answered], extras_of(record), len(asked))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list):
            raise RecordError(
                f"field {name} is {kind_of_value(value)}, not a text or a list of messages"
            )
    raise RecordError("fields prompt and completion must be both texts, or both lists of messages")


def answer_of(text: str, field: str) -> str:
    """Returns the text of an answer; raises RecordError if it has nothing to train on."""
    if not text.strip():
        raise RecordError(f"field {field} is empty, so that there is no answer to train on")
    return text


def _text(record: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = record.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise RecordError(f"field {name} is {kind_of_value(value)}, not a text")
    return value


def _checked(conversation: Conversation, completion_only: bool) -> Conversation:
    """Returns a conversation with the messages to leave out of training; raises RecordError
    if it has no end.
    """
    messages = conversation.messages
    if messages[-1]["role"] == "user":
        raise RecordError(
            "ends with a message of the user, and no message of the assistant answers it"
        )
    choices = [_is_trained(message, number) for number, message in enumerate(messages, 1)]
    for number, (message, trained) in enumerate(zip(messages, choices, strict=True), 1):
        if trained and completion_only and message["role"] != "assistant":
            raise RecordError(
                f"message {number} states that it is trained on, and it is not the assistant's"
            )
        if trained is False and not completion_only:
            raise RecordError(
                f"message {number} states that it is not trained on, and "
                "sft_train_on_completion_only=false trains on all; works: "
                "sft_train_on_completion_only=true"
            )
    plain = [
        {key: value for key, value in message.items() if key not in _WEIGHTS}
        for message in messages
    ]
    return conversation._replace(
        messages=plain,
        untrained=frozenset(i for i, choice in enumerate(choices) if choice is False),
    )


def _is_trained(message: Mapping[str, object], number: int) -> bool | None:
    """Returns whether a message states that it is trained on (`weight`, `train`); None if it states
    nothing.
    """
    choices = {bool(message[name]) for name in _WEIGHTS if message.get(name) is not None}
    for name in _WEIGHTS:
        if message.get(name) not in (None, 0, 1):  # False and True too
            value = shown(repr(message[name]))
            raise RecordError(
                f"message {number}: {name} is {value}, and it must be 0 or 1, or false or true"
            )
    if len(choices) > 1:
        raise RecordError(f"message {number}: weight and train contradict each other")
    return next(iter(choices), None)
