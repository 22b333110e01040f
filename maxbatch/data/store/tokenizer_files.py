"""Tokenizers that are files: Hugging Face's `tokenizer.json` and SentencePiece models (extra `text`)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch.system.errors import ConfigError

# As models of the field write them; the first that a tokenizer has is taken. GPT-2's one token is both.
_BOS_TOKENS = ("<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "<bos>", "<s>", "<|endoftext|>")
_EOS_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>")
_PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
_NAMES = {"bos_token": _BOS_TOKENS, "eos_token": _EOS_TOKENS, "pad_token": _PAD_TOKENS}


class _FileTokenizer:
    """A tokenizer whose file is found and hashed at once, and loaded when it is first used.

    A copy in another process loads its own.
    """

    kind: str
    file_name: str  # in a folder, as a glob
    package: str

    def __init__(self, path: str):
        """Finds the file.

        Raises:
          ConfigError: `tokenizer_path` names no file of this kind that can be read.
        """
        self.file = self._find(path)
        try:
            self.identity = f"{self.kind}:{self._hash()}"
        except OSError as error:
            raise self.error(f"cannot read {self.file}: {error.strerror or error}") from error

    def error(self, problem: str) -> ConfigError:
        """Returns the error that blames the file for `problem`."""
        return ConfigError(f"tokenizer_path={str(self.file)!r}: {problem}")

    def encode_utf8(self, utf8: bytes) -> np.ndarray:
        """Returns the ids (int32[n]) of UTF-8 text; no special tokens."""
        return self.encode_utf8_batch([utf8])[0]

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; no special tokens."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (int32[n]) of a text; no special tokens."""
        return self.encode_utf8(text.encode("utf-8"))

    def _find(self, path: str) -> Path:
        if not path:
            raise ConfigError(
                f"tokenizer_path='': tokenizer_type={self.kind} needs a file {self.file_name}, or a folder with one"
            )
        file = Path(os.path.expanduser(path)).absolute()
        if file.is_dir():
            found = sorted(file.glob(self.file_name))
            if len(found) != 1:
                names = ", ".join(entry.name for entry in found)
                problem = f"holds several ({names}); name one" if found else "holds none"
                raise ConfigError(
                    f"tokenizer_path={path!r}: a folder with a file {self.file_name}; it {problem}"
                )
            return found[0]
        if not file.is_file():
            raise ConfigError(f"tokenizer_path={path!r}: no such file or folder (seen from {os.getcwd()})")
        return file

    def _hash(self) -> str:
        return hashlib.blake2b(self.file.read_bytes(), digest_size=16).hexdigest()

    def _missing(self, error: ImportError) -> ConfigError:
        return ConfigError(
            f"tokenizer_type={self.kind}: needs {self.package}, which is not installed; pip install 'maxbatch[text]'"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "identity": self.identity}


class HuggingFaceTokenizer(_FileTokenizer):
    """A `tokenizer.json`. Its post-processor, truncation and padding are not used; special tokens that are spelled out
    in a text are text.

    bos, eos and pad are what `tokenizer_config.json` beside it says, else tokens of the usual names.
    """

    kind = "huggingface"
    file_name = "tokenizer.json"
    package = "tokenizers"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: ids may have gaps."""
        return max(self._library.get_vocab_size(), 1 + max(self._library.get_vocab().values(), default=-1))

    @cached_property
    def bos_id(self) -> int | None:
        """The beginning-of-text token, or None."""
        return self._special("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        """The end-of-text token, or None."""
        return self._special("eos_token")

    @cached_property
    def pad_id(self) -> int:
        """The padding token; without one eos, bos, or 0: what lies in empty slots is never trained on."""
        found = (self._special("pad_token"), self.eos_id, self.bos_id, 0)
        return next(token for token in found if token is not None)

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; no special tokens."""
        texts = [utf8.decode("utf-8") for utf8 in documents]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids; special tokens and ids beyond the vocabulary vanish."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        return self._library.decode(known, skip_special_tokens=True)

    @cached_property
    def _library(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise self._missing(error) from error
        try:
            library = Tokenizer.from_file(str(self.file))
        except Exception as error:  # the library raises bare Exceptions
            raise self.error(f"not a tokenizer.json that `tokenizers` reads ({error})") from error
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        return library

    def _special(self, name: str) -> int | None:
        settings = _special_tokens_beside(self.file)
        if name not in settings:
            ids = map(self._library.token_to_id, _NAMES[name])
            return next((token for token in ids if token is not None), None)
        return None if settings[name] is None else self._library.token_to_id(settings[name])

    def _hash(self) -> str:
        settings = json.dumps(sorted(_special_tokens_beside(self.file).items()))
        return hashlib.blake2b(self.file.read_bytes() + settings.encode(), digest_size=16).hexdigest()


def _special_tokens_beside(file: Path) -> dict[str, str | None]:
    """Returns what `tokenizer_config.json` beside a tokenizer says of its special tokens, as far as it does."""
    path = file.with_name("tokenizer_config.json")
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"tokenizer_path={str(file)!r}: {path} is not JSON ({error})") from error
    found: dict[str, str | None] = {}
    for name in _NAMES:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if name in settings and (token is None or isinstance(token, str)):
            found[name] = token
    return found


class SentencePieceTokenizer(_FileTokenizer):
    """A SentencePiece model, with the special tokens that it was trained with. It normalises text as it was told to."""

    kind = "sentencepiece"
    file_name = "*.model"
    package = "sentencepiece"

    @cached_property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self._library.get_piece_size()

    @cached_property
    def bos_id(self) -> int | None:
        """The beginning-of-text token, or None."""
        return _or_none(self._library.bos_id())

    @cached_property
    def eos_id(self) -> int | None:
        """The end-of-text token, or None."""
        return _or_none(self._library.eos_id())

    @cached_property
    def pad_id(self) -> int:
        """The padding token; without one eos, bos, or 0: what lies in empty slots is never trained on."""
        found = (_or_none(self._library.pad_id()), self.eos_id, self.bos_id, 0)
        return next(token for token in found if token is not None)

    def encode_utf8_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids (int32[n]) of each text; no special tokens."""
        texts = [utf8.decode("utf-8") for utf8 in documents]
        ids = self._library.encode(texts, out_type=int, add_bos=False, add_eos=False, num_threads=1)
        return [np.array(tokens, np.int32) for tokens in ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids; special tokens and ids beyond the vocabulary vanish."""
        return self._library.decode([int(token) for token in ids if 0 <= token < self.vocab_size])

    @cached_property
    def _library(self) -> Any:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise self._missing(error) from error
        library = SentencePieceProcessor()
        try:
            library.LoadFromSerializedProto(self.file.read_bytes())
        except RuntimeError as error:
            raise self.error(f"not a SentencePiece model ({' '.join(str(error).split())})") from error
        return library


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None
