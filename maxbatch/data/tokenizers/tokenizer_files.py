"""Tokenizers that are files: Hugging Face's `tokenizer.json` and SentencePiece models (extra
`text`).
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from maxbatch.config.hub import folder_of, hub_problem
from maxbatch.config.values import shown, shown_path, utf8_of
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.bounded import read_bytes
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.storage.watched_files import CHANGED

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as Library

    from maxbatch.data.tokenizers.chat_template import ChatTemplate

# The usual names of special tokens; the first that a tokenizer has is used. GPT-2's single token is
# bos and eos.
_NAMES = {
    "bos": ("<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "<bos>", "<s>", "<|endoftext|>"),
    "eos": ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>"),
    "pad": ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>"),
}
_MOST_BYTES = 256 << 20  # of a tokenizer; those of 256,000 tokens have 35 MB


class _Library(Protocol):
    """The interface that both libraries share."""

    def decode(self, ids: list[int], /) -> str: ...


L = TypeVar("L", bound=_Library)


class _FileTokenizer(Tokenizer, Generic[L]):
    """A tokenizer whose file is found, read and hashed at once, and loaded at the first use in each
    process.

    Other processes read the file themselves, and refuse one that has changed since it was hashed.
    """

    _KEPT: tuple[str, ...] = ("file", "identity", "_template_hash")  # in other processes

    kind: str
    file_name: str  # in a folder, as a glob
    package: str
    content: str  # of the file, for messages

    def __init__(self, path: str):
        self.file = self._find(path)
        self.identity = ""
        with reading(self.file, blame=self.error):
            self.identity = self._identity_of(self._content)

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"tokenizer_path={shown(repr(str(self.file)))}: {problem}")

    @cached_property
    def _content(self) -> bytes:
        content = read_bytes(self.file, shown_path(self.file), _MOST_BYTES)
        if self.identity and self._identity_of(content) != self.identity:
            raise self.error(CHANGED)
        return content

    def _identity_of(self, content: bytes) -> str:
        return (
            f"{self.kind}:{hashlib.blake2b(content + self._settings(), digest_size=16).hexdigest()}"
        )

    @cached_property
    def bos_id(self) -> int | None:
        return self._special("bos")

    @cached_property
    def eos_id(self) -> int | None:
        return self._special("eos")

    @cached_property
    def pad_id(self) -> int:
        """The padding token, else eos, bos, or 0: the model never trains on the tokens of empty
        slots.
        """
        candidates = (self._special("pad"), self.eos_id, self.bos_id, 0)
        return next(token for token in candidates if token is not None)

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; no special tokens."""
        return [
            np.array(ids, np.int32)
            for ids in self._encode([utf8.decode("utf-8") for utf8 in documents])
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, without special tokens and ids beyond the vocabulary."""
        return self._library.decode([int(token) for token in ids if 0 <= token < self.vocab_size])

    @cached_property
    def _library(self) -> L:
        with reading(self.file, blame=self.error):
            content = self._content
        try:
            return self._load(content)
        except ImportError as error:
            raise ConfigError(
                f"tokenizer_type={self.kind}: needs {self.package}, which is not installed; "
                "pip install 'maxbatch[text]'"
            ) from error
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise self.error(f"not a {self.content} ({' '.join(str(error).split())})") from error

    @abstractmethod
    def _load(self, content: bytes) -> L: ...

    @abstractmethod
    def _special(self, name: str) -> int | None: ...

    @abstractmethod
    def _encode(self, texts: list[str]) -> Iterable[list[int]]: ...

    def _settings(self) -> bytes:
        """Returns the settings that shape the tokens, besides the file."""
        return b""

    def _find(self, path: str) -> AnyPath:
        if not path:
            raise ConfigError(
                f"tokenizer_path='': tokenizer_type={self.kind} needs a file {self.file_name}, or "
                "a folder with one"
            )
        where = f"tokenizer_path={shown(repr(path))}"
        if problem := hub_problem(path):
            raise ConfigError(f"{where}: {problem}")
        file = folder_of(path)
        if file.is_dir():
            files = sorted(entry for entry in file.glob(self.file_name) if entry.is_file())
            if len(files) != 1:
                names = shown(", ".join(entry.name for entry in files))
                problem = f"holds several ({names}); name one" if files else "holds none"
                raise ConfigError(
                    f"{where}: must be a folder with a file {self.file_name}; it {problem}"
                )
            return files[0]
        if not file.is_file():
            raise ConfigError(f"{where}: no such file or folder (seen from {os.getcwd()})")
        return file

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in self._KEPT if name in self.__dict__}


class HuggingFaceTokenizer(_FileTokenizer["Library"]):
    """A `tokenizer.json`. Its post-processor, truncation and padding are not used; special tokens
    that are spelled out in a text are text.

    bos, eos and pad are those of the `tokenizer_config.json` beside it, else tokens with the usual
    names.
    """

    kind = "huggingface"
    file_name = "tokenizer.json"
    package = "tokenizers"
    content = "tokenizer.json that `tokenizers` reads"

    def _load(self, content: bytes) -> Library:
        from tokenizers import Tokenizer as Library

        library = Library.from_buffer(content)
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        return library

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: ids may have gaps."""
        return max(
            self._library.get_vocab_size(), 1 + max(self._library.get_vocab().values(), default=-1)
        )

    def _encode(self, texts: list[str]) -> Iterable[list[int]]:
        library = self._library
        try:
            encodings = library.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            raise self.error(
                f"cannot encode every text: {error}; its unk_token must be in its vocabulary"
            ) from error
        return (encoding.ids for encoding in encodings)

    def encode_markup_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._markup_library.encode_batch_fast(
            [utf8_of(text).decode("utf-8") for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode_markup(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        return self._library.decode(known, skip_special_tokens=False)

    def chat_template(self) -> ChatTemplate:
        return self._template

    def begins_with_bos(self) -> bool:
        """Returns whether the tokenizer's post-processor puts its beginning-of-text token before a
        text.
        """
        return self._library.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    @cached_property
    def _template(self) -> ChatTemplate:
        from maxbatch.data.tokenizers.chat_template import read_template

        special = [token.content for token in self._library.get_added_tokens_decoder().values()]
        template = read_template(self.file.parent, special, self.error)
        hashed = hashlib.blake2b(template.identity.encode(), digest_size=16).hexdigest()
        # of the process that sent it here
        if self.__dict__.setdefault("_template_hash", hashed) != hashed:
            raise self.error(f"its chat template {CHANGED}")
        return template

    @cached_property
    def _markup_library(self) -> Library:
        library = self._load(self._content)
        library.encode_special_tokens = False
        return library

    def _special(self, name: str) -> int | None:
        tokens = self._stated_tokens
        if f"{name}_token" not in tokens:
            ids = map(self._library.token_to_id, _NAMES[name])
            return next((token for token in ids if token is not None), None)
        token = tokens[f"{name}_token"]
        return None if token is None else self._library.token_to_id(token)

    def _settings(self) -> bytes:
        return json.dumps(sorted(self._stated_tokens.items())).encode()

    @cached_property
    def _stated_tokens(self) -> dict[str, str | None]:
        """Returns the special tokens that the `tokenizer_config.json` beside the file states."""
        from maxbatch.data.tokenizers.chat_template import read_settings

        settings = read_settings(self.file.with_name("tokenizer_config.json"), self.error)
        tokens: dict[str, str | None] = {}
        for name in (f"{name}_token" for name in _NAMES):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if name in settings and (token is None or isinstance(token, str)):
                tokens[name] = token
        return tokens


class SentencePieceTokenizer(_FileTokenizer["SentencePieceProcessor"]):
    """A SentencePiece model, with its own special tokens and its own normalisation of text."""

    kind = "sentencepiece"
    file_name = "*.model"
    package = "sentencepiece"
    content = "SentencePiece model"

    def _load(self, content: bytes) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        library = SentencePieceProcessor()
        library.LoadFromSerializedProto(content)
        return library

    @cached_property
    def vocab_size(self) -> int:
        return self._library.get_piece_size()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._library.encode(
            texts, out_type=int, add_bos=False, add_eos=False, num_threads=1
        )
        return ids

    def _special(self, name: str) -> int | None:
        token = getattr(self._library, f"{name}_id")()
        return token if token >= 0 else None

    def chat_template(self) -> ChatTemplate:
        """Raises ConfigError: SentencePiece has none."""
        raise self.error(
            "a SentencePiece model has no chat template; works: tokenizer_type=huggingface"
        )
