"""What the store, the stream and generation ask of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from maxbatch.config.values import utf8_of

if TYPE_CHECKING:
    from maxbatch.data.store.chat_template import ChatTemplate


class Tokenizer(Protocol):
    """A tokenizer as the store, the stream and generation use it.

    Text never becomes a special token, but in markup, which chat templates write, special tokens are spelled out.
    """

    @property
    def vocab_size(self) -> int: ...  # ids are 0 .. vocab_size - 1, special ones included

    @property
    def bos_id(self) -> int | None: ...  # None if the tokenizer lacks it

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int: ...  # of empty slots

    @property
    def identity(self) -> str: ...  # differs between tokenizers that encode differently

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]: ...

    def encode(self, text: str) -> np.ndarray: ...

    # Special tokens that are spelled out in these texts become those tokens.
    def encode_markup_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode_markup(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def begins_with_bos(self) -> bool: ...  # whether its own rules add bos before a text

    def chat_template(self) -> ChatTemplate: ...  # raises ConfigError if there is none

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class PlainTokenizer(ABC):
    """A tokenizer without markup: no special token has a text, and no rule of its own adds one."""

    @abstractmethod
    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int [n]) of each text; no special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, without special tokens and unknown ids."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (int32[n]) of a text; no special tokens."""
        return self.encode_utf8_batch([utf8_of(text)])[0].astype(np.int32, copy=False)

    def encode_markup_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; special tokens that are spelled out in it become those tokens."""
        return [self.encode(text) for text in texts]

    def decode_markup(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, special tokens spelled out."""
        return self.decode(ids)

    def begins_with_bos(self) -> bool:
        """Returns whether the tokenizer's own rules put its beginning-of-text token before a text."""
        return False
