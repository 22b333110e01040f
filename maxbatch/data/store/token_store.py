"""A dataset tokenised once: a memory-mapped array of tokens, cut into documents.

A store is a folder of three files: `tokens.bin` (uint16 or uint32), `offsets.npy` (int64[documents + 1], document d is
tokens[offsets[d] : offsets[d + 1]], its bos and eos included) and `manifest.json`. It appears whole, by one rename.

Sizes and offsets are checked whenever a store is opened or mapped; the tokens themselves, which nobody wants to
read in full before a run, by `maxbatch prepare --verify`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.data.store.tokenizers import Tokenizer, check_special_tokens
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from maxbatch.data.store.documents import DocumentSource

VERSION = 2
_DIGEST_BYTES = 16
FILES = ("tokens.bin", "offsets.npy")


@dataclass(frozen=True)
class Stored:
    """How the ids of documents are stored.

    Attributes:
      dtype: of tokens.bin.
      bos, eos: ids before and after each document; none, or one.
      hashed_as: type that ids of documents are hashed as: of bytes it is the text that is hashed, as fast as can be.
    """

    dtype: str
    bos: tuple[int, ...]
    eos: tuple[int, ...]
    hashed_as: str

    @classmethod
    def by(cls, tokenizer: Tokenizer, config: ConfigDict) -> Stored:
        """Returns how a tokenizer's ids are stored.

        Raises:
          ConfigError: a special token is asked for that the tokenizer does not have.
        """
        check_special_tokens(config, tokenizer)
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        return cls(
            dtype=dtype,
            bos=(tokenizer.bos_id,) if config.add_bos and tokenizer.bos_id is not None else (),
            eos=(tokenizer.eos_id,) if config.add_eos and tokenizer.eos_id is not None else (),
            hashed_as="uint8" if tokenizer.identity == "byte" else dtype,
        )

    def digest(self, ids: np.ndarray) -> bytes:
        """Returns a document's part of the content hash: 16 bytes, of its ids without bos and eos."""
        return hashlib.sha256(ids.astype(self.hashed_as, copy=False).data).digest()[:_DIGEST_BYTES]


def new_content_hash() -> hashlib.blake2b:
    """Returns the hash over the digests of documents: how they are cut into files and jobs leaves no trace."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


@dataclass(frozen=True)
class TokenStore:
    """A store, opened.

    Attributes:
      folder: where it lies.
      manifest: `content` (hash of the documents in order), `documents`, `tokens`, `text_bytes`,
        `skipped_records`, `held_out` (document numbers that the source itself keeps for evaluation),
        `tokenizer` (its identity), `dtype`, `bos`, `eos` and `hashed_as` (see Stored), `signature` (hash of files
        and settings), `sizes` (bytes per file), `offsets_crc32`.
    """

    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def tokens(self) -> np.ndarray:
        """uint16 or uint32 [tokens], mapped, not read.

        Raises:
          ConfigError: the store was damaged or replaced since it was opened.
        """
        self._refuse_replaced()
        return np.memmap(self.folder / "tokens.bin", dtype=self.manifest["dtype"], mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[documents + 1].

        Raises:
          ConfigError: the store was damaged or replaced since it was opened.
        """
        self._refuse_replaced()
        data = (self.folder / "offsets.npy").read_bytes()
        if zlib.crc32(data) != self.manifest["offsets_crc32"]:
            raise self._damaged("offsets.npy differs from its checksum")
        return np.load(io.BytesIO(data))

    def verify(self) -> None:
        """Reads all tokens and compares them with the hash of their content.

        Raises:
          ConfigError: something differs.
        """
        bos, eos = tuple(self.manifest["bos"]), tuple(self.manifest["eos"])
        stored = Stored(self.manifest["dtype"], bos, eos, self.manifest["hashed_as"])
        content = new_content_hash()
        begins, ends = self.offsets[:-1] + len(bos), self.offsets[1:] - len(eos)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            content.update(stored.digest(self.tokens[begin:end]))
        whole = (
            content.hexdigest() == self.manifest["content"]
            and all((self.tokens[begins - 1] == token).all() for token in bos)
            and all((self.tokens[ends] == token).all() for token in eos)
        )
        if not whole:
            raise self._damaged("tokens.bin differs from the hash of its content")

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file itself; a pickled memmap would carry all tokens.
        return {"folder": self.folder, "manifest": self.manifest}

    def _refuse_replaced(self) -> None:
        if read_manifest(self.folder) != self.manifest:
            raise self._damaged("it was damaged or replaced since it was opened")

    def _damaged(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.folder}: the tokenised data cannot be used: {problem}; make them again")


def cache_folder(config: ConfigDict) -> Path:
    """Returns the folder of all entries: below `data_cache_dir`, else XDG_CACHE_HOME/maxbatch, else
    ~/.cache/maxbatch."""
    if config.data_cache_dir:
        return Path(os.path.expanduser(config.data_cache_dir)) / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "maxbatch" / "tokens"


def signature(source: DocumentSource, tokenizer: Tokenizer, config: ConfigDict) -> str:
    """Returns a hash of the files (path, size, time of change) and of all settings that shape a store."""
    settings = {
        "version": VERSION,
        "files": source.files,
        "missing_shards": source.missing_shards,
        **source.settings,
        "tokenizer": tokenizer.identity,
        **{key: config[key] for key in names_fixing(Fixes.TOKENS)},
    }
    return hashlib.blake2b(
        json.dumps(settings).encode("utf-8", "surrogateescape"), digest_size=16
    ).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a store whose files have the sizes that it says; else None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["version"] != VERSION or set(manifest["sizes"]) != set(FILES):
            return None
        whole = all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def open_folder(folder: Path) -> TokenStore | None:
    """Returns the store in a folder, or None where it is missing, cut short or not of this version."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    store = TokenStore(folder, manifest)
    try:
        offsets = store.offsets
        consistent = len(offsets) == manifest["documents"] + 1 and offsets[-1] == manifest["tokens"]
    except (ConfigError, OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return store if consistent else None
