"""Conversations as prompts: tokens of the messages up to the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from maxbatch.data.tokenizers.chat_rendering import Conversation, Message, Rendered
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError

_ASKED, _ANSWERED = "question", "answer"


class ChatPrompts:
    """A tokenizer's chat template for generation.

    Raises:
      ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template()

    def ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Returns the ids (int32[n]) of a conversation for the assistant to answer.

        Raises:
          ConfigError: the template refuses the conversation.
        """
        return self._tokenizer.encode_markup_batch([self.text(messages)])[0]

    def text(self, messages: Sequence[Message]) -> str:
        """Returns the text of such a conversation; raises as `ids` does."""
        return self._rendered(Conversation(messages, {}, prompts=True)).text

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The id of the special token at the end of the assistant's turn, if the template writes
        one.
        """
        messages = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": _ANSWERED},
        ]
        try:
            text, spans = self._rendered(Conversation(messages, {}))
        # the template refuses the two messages; only the tokenizer's end of text remains
        except ConfigError:
            return ()
        turn = text[slice(*spans[-1])].rstrip() if spans else ""
        end = next((end for end in self._template.ends if turn.endswith(end)), None)
        ids = self._tokenizer.encode_markup_batch([end])[0] if end else np.zeros(0, np.int32)
        return (int(ids[0]),) if len(ids) == 1 else ()

    def is_prompt(self, ids: Sequence[int]) -> bool:
        """Returns whether tokens end with the template's beginning of an assistant's turn."""
        try:
            text = self._rendered(
                Conversation([{"role": "user", "content": _ASKED}], {}, prompts=True)
            ).text
        except ConfigError:
            return False
        begin = self._tokenizer.encode_markup_batch([text.rpartition(_ASKED)[2]])[0].tolist()
        return bool(begin) and list(ids[-len(begin) :]) == begin

    def _rendered(self, question: Conversation) -> Rendered:
        try:
            self._template.refuse_unknown_roles(question.messages)
            [rendered] = self._template.render([question])
            if isinstance(rendered, RecordError):
                raise rendered
        except RecordError as error:
            raise ConfigError(f"the conversation cannot be written: {error}") from None
        return rendered


def chat_prompts(tokenizer: Tokenizer) -> ChatPrompts | None:
    """Returns the prompts of a tokenizer; None without a usable chat template."""
    try:
        return ChatPrompts(tokenizer)
    except ConfigError:
        return None
