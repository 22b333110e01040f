"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxbatch.config.combined import StreamConfig
from maxbatch.config.rules import BYTE_VOCABULARY, check_tokenizer
from maxbatch.config.sections import DataConfig
from maxbatch.config.values import shown
from maxbatch.data.store.store import IDS
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from maxbatch.data.tokenizers.chat_template import ChatTemplate


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; bos 256, eos 257, pad 258. Needs no file and loses nothing."""

    vocab_size = BYTE_VOCABULARY
    bos_id = 256
    eos_id = 257
    pad_id = 258
    identity = "byte"

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (uint8[n], n = number of bytes) of each text; no special tokens."""
        return [np.frombuffer(utf8, np.uint8) for utf8 in documents]

    def chat_template(self) -> ChatTemplate:
        """Raises ConfigError: bytes have no chat template."""
        raise ConfigError(
            "tokenizer_type=byte: has no chat template, which messages need; plain prompts, and "
            "records with prompt and completion, need none; works: tokenizer_type=huggingface "
            "with tokenizer_path, the model's folder"
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, without special tokens and unknown ids; torn characters become
        U+FFFD.
        """
        ids = np.asarray(ids)
        return (
            ids[(ids >= 0) & (ids < 256)]
            .astype(np.uint8)
            .tobytes()
            .decode("utf-8", errors="replace")
        )


class NoTokenizer(Tokenizer):
    """Token ids without their tokenizer: ids are shown as numbers, and no text becomes ids."""

    bos_id = None
    eos_id = None
    pad_id = 0
    vocab_size = 0  # until it is stated
    identity = IDS

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Raises ConfigError: there is no tokenizer."""
        raise self._error("text")

    def chat_template(self) -> ChatTemplate:
        """Raises ConfigError: there is no tokenizer."""
        raise self._error("a chat template")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the ids as numbers."""
        return " ".join(str(int(token)) for token in ids)

    def _error(self, use: str) -> ConfigError:
        return ConfigError(
            f"tokenizer_type=byte: the data hold token ids of another tokenizer, which {use} "
            "needs; works: tokenizer_type=huggingface with tokenizer_path, the model's folder"
        )


def tokenizer_of(config: StreamConfig) -> Tokenizer:
    """Returns the tokenizer of a config's data; data of token ids have the stated one, or none."""
    if config.dataset_type == "megatron" and config.tokenizer_type == "byte":
        check_tokenizer(config.tokenizer_type, config.tokenizer_path)
        return NoTokenizer(config.vocab_size)
    return make_tokenizer(config.tokenizer_type, config.tokenizer_path)


def make_tokenizer(tokenizer_type: str, tokenizer_path: str) -> Tokenizer:
    """Returns the tokenizer that `tokenizer_type` and `tokenizer_path` name.

    Its file is hashed now; its library (extra `text`) loads it at the first use.

    Raises:
      ConfigError: a `tokenizer_path` that the tokenizer does not read, or one without a tokenizer
        file.
    """
    check_tokenizer(tokenizer_type, tokenizer_path)
    if tokenizer_type == "byte":
        return ByteTokenizer()
    from maxbatch.data.tokenizers.tokenizer_files import (
        HuggingFaceTokenizer,
        SentencePieceTokenizer,
    )

    if tokenizer_type == "huggingface":
        return HuggingFaceTokenizer(tokenizer_path)
    return SentencePieceTokenizer(tokenizer_path)


def check_special_tokens(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if `add_bos` or `add_eos` is set and the tokenizer lacks the token."""
    tokens = (("add_bos", tokenizer.bos_id, "beginning"), ("add_eos", tokenizer.eos_id, "end"))
    for key, token, role in tokens:
        if config[key] and token is None:
            raise ConfigError(
                f"{key}=true: the {config.tokenizer_type} tokenizer "
                f"{shown(repr(config.tokenizer_path))} has no {role}-of-text token; works: "
                f"{key}=false"
            )
