"""The interface of a tokenizer to the store, the stream and generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxbatch.config.values import utf8_of

if TYPE_CHECKING:
    from maxbatch.data.tokenizers.chat_template import ChatTemplate


class Tokenizer(ABC):
    """A tokenizer as the store, the stream and generation use it.

    Text never becomes a special token, but in markup, which chat templates write, special tokens
    are spelled out. By default no special token has a text, and no rule of the tokenizer's own adds
    one.
    """

    identity: str  # differs between tokenizers that encode differently

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1, special ones included."""

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """The beginning of a text; None if the tokenizer lacks it."""

    @property
    @abstractmethod
    def eos_id(self) -> int | None:
        """The end of a text; None if the tokenizer lacks it."""

    @property
    @abstractmethod
    def pad_id(self) -> int:
        """The token of empty slots."""

    @abstractmethod
    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int [n]) of each text; no special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, without special tokens and unknown ids."""

    @abstractmethod
    def chat_template(self) -> ChatTemplate:
        """Returns the chat template beside the tokenizer; raises ConfigError if there is none."""

    @property
    def start_id(self) -> int:
        """The id before a text whose first token is to be predicted."""
        return next(token for token in (self.bos_id, self.eos_id, self.pad_id) if token is not None)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (int32[n]) of a text; no special tokens."""
        return self.encode_utf8_batch([utf8_of(text)])[0].astype(np.int32, copy=False)

    def encode_markup_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; special tokens that are spelled out in it become
        those tokens.
        """
        return [self.encode(text) for text in texts]

    def decode_markup(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, special tokens spelled out."""
        return self.decode(ids)

    def begins_with_bos(self) -> bool:
        """Returns whether the tokenizer's own rules put its beginning-of-text token before a
        text.
        """
        return False
