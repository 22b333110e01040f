"""A dataset tokenised once: a memory-mapped array of tokens, cut into documents.

A store is a folder of five files: `tokens.bin` (uint16 or uint32), `offsets.npy` (int64[documents +
1], document d is tokens[offsets[d] : offsets[d + 1]], its bos and eos included), `blocks.bin`
(`maxbatch.data.store.blocks`), `manifest.json`, and `records.jsonl`, which training does not read
(`maxbatch.data.store.record_places`). It appears whole, by one rename. The tokens of a
large store are cut between documents into several files (`maxbatch.data.store.shards`).

In a store of records with answers (a pair of answers is two documents), the highest bit of each
token says whether it is trained on.

The manifest with its checksum, the sizes of the files and the offsets are checked whenever a store
is opened or mapped; of the offsets of a large store the parts that are read
(`maxbatch.data.store.document_table`). Tokens are compared with the hashes of their blocks where
they are read: of a local store each block once per process, in a bucket every time. `maxbatch
prepare --verify` reads all of them, and recomputes the hash of the content, which is in the
identity of the stream. A store that was made without hashes is read with a warning.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np

from maxbatch.config.combined import StoreConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import names_fixing
from maxbatch.data.store import document_table
from maxbatch.data.store.blocks import BLOCK_BYTES, BLOCKS, Blocks, MappedFile, damaged_file
from maxbatch.data.store.cache_folder import json_hash
from maxbatch.data.store.document_table import BlockTable, MappedTable, RangedTable, WholeTable
from maxbatch.data.store.file_contents import contents_of, known_contents
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.data.store.store import Manifest
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import check_special_tokens
from maxbatch.system.errors import ConfigError, StoreRefused, TrainingError, reading
from maxbatch.system.storage.bounded import RefusedContent, read_json
from maxbatch.system.storage.leases import LEASE_FILE
from maxbatch.system.storage.long_lists import Mapped
from maxbatch.system.storage.npy import read_npy
from maxbatch.system.storage.storage import AnyPath, file_sizes, is_remote

if TYPE_CHECKING:
    from maxbatch.data.store.documents import DocumentSource
    from maxbatch.data.store.ranged_tokens import RangedTokens

VERSION = 2
_MOST_MANIFEST_BYTES = 64 << 20  # it lists held-out documents, which may be millions
_MAPPED_BYTES = 1 << 20  # a table on a disk up to this size is read
_DIGEST_BYTES = 16
_WINDOW_TOKENS = 4 << 20  # of a verification
MANIFEST, OFFSETS, ONE_SHARD, FIRST_SHARD = (
    "manifest.json",
    "offsets.npy",
    "tokens.bin",
    "tokens-00000.bin",
)
_SHARD = re.compile(r"tokens(-\d{5,})?\.bin")
_BESIDE = (OFFSETS, BLOCKS)  # the files beside those of tokens
BUILDING_FOLDER = ".building"  # in an object store while a store is built there
# The settings that shape the documents of given files.
_SOURCE_SETTINGS = ("dataset_type", "text_field", "record_format", "skip_bad_records")


@dataclass(frozen=True)
class TokenLayout:
    """The layout of token ids in a store."""

    dtype: str  # of tokens.bin
    bos: tuple[int, ...]  # the id before each document, if any
    eos: tuple[int, ...]  # the id after each document, if any
    # the type in which ids are hashed; uint8 for bytes, which hashes the text itself
    hashed_as: str
    trained_bit: int | None = None  # the number of the bit that marks a trained token, if any does

    @classmethod
    def from_config(cls, config: StoreConfig, tokenizer: Tokenizer) -> TokenLayout:
        """Returns the layout for a tokenizer's ids; raises ConfigError if it lacks a special token
        that is set.
        """
        if config.recipe.has_answers:
            bit = 15 if tokenizer.vocab_size <= 1 << 15 else 31
            dtype = "uint16" if bit == 15 else "uint32"
            return cls(dtype=dtype, bos=(), eos=(), hashed_as=dtype, trained_bit=bit)
        check_special_tokens(config, tokenizer)
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        return cls(
            dtype=dtype,
            bos=(tokenizer.bos_id,) if config.add_bos and tokenizer.bos_id is not None else (),
            eos=(tokenizer.eos_id,) if config.add_eos and tokenizer.eos_id is not None else (),
            hashed_as="uint8" if tokenizer.identity == "byte" else dtype,
        )

    def digest(self, ids: np.ndarray) -> bytes:
        """Returns a document's part of the content hash: 16 bytes, of its ids without bos and
        eos.
        """
        return hashlib.sha256(ids.astype(self.hashed_as, copy=False).data).digest()[:_DIGEST_BYTES]


def new_content_hash() -> hashlib.blake2b:
    """Returns a hash to update with the digests of documents; it does not depend on their files and
    jobs.
    """
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


@dataclass(frozen=True)
class TokenStore:
    """An open store.

    Its manifest holds `content` (hash of the documents in order), `documents`, `tokens`,
    `text_bytes`, `skipped_records`, `held_out` (numbers of the documents that the dataset itself
    holds out), `tokenizer` (its identity), `vocab_size` (new stores only), the fields of
    TokenLayout, `signature` (hash of content and settings), `sizes` (bytes per file, those of
    tokens in order), `offsets_crc32`, `place` (hash of the dataset's path; new stores only) and
    `checksum` (hash of the manifest without it; new stores only). A store of conversations also has
    `conversations`, the settings that made them; one without duplicates has `deduplicated`, and
    `apart_from`, the content of the held-out data that it has no record of, or "".
    """

    folder: AnyPath
    manifest: Manifest

    @cached_property
    def tokens(self) -> np.ndarray | MappedFile | RangedTokens:
        """uint16 or uint32 [tokens]: memory-mapped, or read by range if they lie in an object store
        or in shards.

        Raises ConfigError if the store was replaced since it was opened; reading them does if they
        are damaged.
        """
        self._refuse_replaced()
        dtype = np.dtype(self.manifest["dtype"])
        if not self.manifest["tokens"]:  # An empty file cannot be mapped.
            return np.zeros(0, dtype)
        from maxbatch.data.store.ranged_tokens import RangedTokens

        files = {
            self.folder / name: size
            for name, size in self.manifest["sizes"].items()
            if name not in _BESIDE
        }
        (path, size), *others = files.items()
        if others or is_remote(path):
            sizes = [size // dtype.itemsize for size in files.values()]
            return RangedTokens(list(files), dtype.name, sizes, self.blocks)
        return MappedFile(path, dtype, size, self.blocks)

    @cached_property
    def blocks(self) -> Blocks | None:
        """The hashes of the blocks of tokens and offsets; None if the store has none."""
        sizes: dict[str, int] = self.manifest["sizes"]
        if BLOCKS not in sizes:
            return None
        return Blocks(self.folder, self.manifest["content"], _hashed(sizes))

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64[documents + 1], a large one mapped from a disk; ConfigError if it was damaged or
        replaced since.
        """
        self._refuse_replaced()
        path = self.folder / OFFSETS
        try:
            return read_npy(self._checked_offsets(), str(path))
        except RefusedContent as error:
            raise damaged_file(path, str(error)) from None

    def _checked_offsets(self) -> np.ndarray:
        """Returns the bytes of the file of offsets; raises ConfigError if they differ from their
        checksum.
        """
        data = self._offsets_file[:]
        if zlib.crc32(data.data) != self.manifest["offsets_crc32"]:
            if self.blocks:
                self.blocks.check(OFFSETS, 0, data.data)  # names the block
            raise damaged_file(self.folder / OFFSETS, "it differs from its checksum")
        return data

    @cached_property
    def _offsets_file(self) -> MappedFile | np.ndarray:
        """uint8, the file of offsets, a large one mapped from a disk."""
        path, size = self.folder / OFFSETS, self.manifest["sizes"][OFFSETS]
        if is_remote(path) or size <= _MAPPED_BYTES:
            return np.frombuffer(path.read_bytes(), np.uint8)
        return MappedFile(Path(str(path)), np.dtype(np.uint8), size, None)

    @cached_property
    def table(self) -> BlockTable:
        """The starts of documents: of a large store searched in its file, else `offsets`."""
        manifest, path = self.manifest, self.folder / OFFSETS
        documents, tokens, size = (
            manifest["documents"],
            manifest["tokens"],
            manifest["sizes"][OFFSETS],
        )
        if size <= document_table.WHOLE_BYTES:
            return WholeTable(self.offsets)
        self._refuse_replaced()
        if is_remote(path):
            return RangedTable(path, documents, tokens, self.blocks, manifest["offsets_crc32"])
        return MappedTable(path, size, documents, tokens, self.blocks)

    @property
    def trained_bit(self) -> int | None:
        """The number of the bit that marks a trained token; None if tokens have no such mark."""
        return self.manifest.get("trained_bit")

    def is_unchanged(self, name: str) -> bool:
        """Returns whether a file of this machine that the store reads is still as the manifest
        states; reads all of it.

        A file that was mapped is read through its map, as training does, also if its name has gone.
        """
        try:
            self._check(name)
        except ConfigError:
            return False
        return True

    def _check(self, name: str) -> None:
        if name == BLOCKS or not self.blocks:
            for other in _hashed(self.manifest["sizes"]) if self.blocks else ():
                self._check(other)
            self.verify()  # tokens and hashes may both have changed
        elif name != OFFSETS:
            if isinstance(self.tokens, MappedFile):
                self.tokens.check()
            elif not isinstance(self.tokens, np.ndarray):
                self.tokens.check(name)
        elif isinstance(self.table, MappedTable):
            self.table.check()
        else:
            self._checked_offsets()

    def verify(self) -> None:
        """Raises ConfigError if the tokens differ from the hash of their content, or leave the
        vocabulary.
        """
        manifest = self.manifest
        bos, eos = tuple(manifest["bos"]), tuple(manifest["eos"])
        layout = TokenLayout(manifest["dtype"], bos, eos, manifest["hashed_as"])
        all_bits = (1 << (self.trained_bit or 32)) - 1
        # The hash covers all bits of an id only if the id fits into the type that is hashed.
        end_of_ids = min(np.iinfo(layout.hashed_as).max + 1, manifest.get("vocab_size", 1 << 32))
        content, number, is_whole = new_content_hash(), 0, True
        # The content hash leaves bos and eos out, so they are compared one by one.
        for starts in self.table.runs():
            begins, ends = starts[:-1] + len(bos), starts[1:] - len(eos)
            is_whole = (
                is_whole
                and bool((begins <= ends).all())
                and all((self.tokens[begins - 1] == token).all() for token in bos)
                and all((self.tokens[ends] == token).all() for token in eos)
            )
            for ids in self._documents(begins, ends):
                content.update(layout.digest(ids))
                ids = ids & all_bits if self.trained_bit else ids
                if ids.max(initial=0) >= end_of_ids:
                    problem = (
                        f"document {number} has the id {ids.max()}, and its ids end at "
                        f"{end_of_ids - 1}"
                    )
                    raise damaged_file(self.folder / ONE_SHARD, problem)
                number += 1
        if not is_whole or content.hexdigest() != manifest["content"]:
            raise damaged_file(self.folder / ONE_SHARD, "it differs from the hash of its content")

    def digests(self) -> Iterator[bytes]:
        """Yields the digests of all documents, in order, in batches."""
        manifest = self.manifest
        bos, eos = tuple(manifest["bos"]), tuple(manifest["eos"])
        layout = TokenLayout(manifest["dtype"], bos, eos, manifest["hashed_as"])
        for starts in self.table.runs():
            documents = self._documents(starts[:-1] + len(bos), starts[1:] - len(eos))
            yield b"".join(map(layout.digest, documents))

    def _documents(self, begins: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the tokens of documents in order, read in batches, because requests are slow."""
        first, window = 0, self.tokens[0:0]
        for begin, end in zip(map(int, begins), map(int, ends), strict=True):
            if end > first + len(window):
                first, window = begin, self.tokens[begin : max(end, begin + _WINDOW_TOKENS)]
            yield window[begin - first : end - first]

    def __getstate__(self) -> dict[str, object]:
        # A worker process maps the file itself; a pickled memmap would contain all tokens.
        return {"folder": self.folder, "manifest": self.manifest}

    def _refuse_replaced(self) -> None:
        if _read_manifest(self.folder) != self.manifest:
            raise damaged_file(self.folder, "it was replaced since it was opened")


def signature(
    source: DocumentSource, tokenizer: Tokenizer, config: StoreConfig, held_out: str = ""
) -> str:
    """Returns a hash of the files' content and of all settings that shape a store; reads files not
    hashed so far.

    `held_out` is the content of the data whose records are left out, or "".
    """
    try:
        contents = contents_of(source.files, config.data_cache_dir)
    except OSError as error:
        with reading(error.filename or source.value, blame=source.error):
            raise
    return _signature(source, tokenizer, config, held_out, contents)


def known_signature(
    source: DocumentSource, tokenizer: Tokenizer, config: StoreConfig, held_out: str = ""
) -> str | None:
    """Returns the signature, or None if a file must be read first."""
    contents = known_contents(source.files, config.data_cache_dir)
    return None if contents is None else _signature(source, tokenizer, config, held_out, contents)


def _facts(source: DocumentSource, contents: Iterable[str]) -> Iterable[list[str]]:
    """Returns the identity of each file; that of the standard library has names, which decide what
    is held out.
    """
    named = source.dataset_type == "python_stdlib"
    pairs = zip(source.files, contents, strict=True)
    return Mapped(lambda pair: [pair[1], pair[0].name] if named else [pair[1]], pairs)


def _signature(
    source: DocumentSource,
    tokenizer: Tokenizer,
    config: StoreConfig,
    held_out: str,
    contents: Iterable[str],
) -> str:
    settings = {
        "version": VERSION,
        "files": _facts(source, contents),
        "missing_shards": source.missing_shards,
        **{name: getattr(source, name) for name in _SOURCE_SETTINGS},
        **({"record_fields": source.record_fields} if source.record_fields else {}),
        **({"deduplicated": held_out} if config.deduplicate else {}),
        "tokenizer": tokenizer.identity,
    }
    if encoder := StoreRecipe.of(config.recipe).encoder(config, tokenizer):
        settings["conversations"] = encoder.identity
    else:
        settings |= {key: config[key] for key in names_fixing(Fixes.TOKENS)}
    return json_hash(settings)


def manifest_checksum(manifest: Manifest) -> str:
    """Returns the checksum of a manifest, which the manifest itself contains."""
    others = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.blake2b(
        json.dumps(others, sort_keys=True).encode(), digest_size=_DIGEST_BYTES
    ).hexdigest()


def _read_manifest(folder: AnyPath) -> Manifest:
    """Returns the manifest of a store.

    Raises:
      ConfigError: it is missing, damaged or of another version, or a file has another size than it
        states.
    """
    path, sizes = folder / MANIFEST, dict[str, int]()
    try:
        manifest = read_json(path, str(path), most_bytes=_MOST_MANIFEST_BYTES)
        sizes = file_sizes(folder)
    except RefusedContent:
        manifest = None
    except (ConfigError, TrainingError):  # an object store that refuses, or does not answer
        raise
    except OSError:
        manifest = None
    if manifest is None or not _is_manifest(manifest):
        raise damaged_file(folder / MANIFEST, "it is missing, damaged or of another version")
    for name, size in manifest["sizes"].items():
        actual = sizes.get(name)
        if actual is None:
            raise damaged_file(folder / name, "it is missing")
        if actual != size:
            block = min(size, actual) // BLOCK_BYTES
            raise damaged_file(
                folder / name, f"it has {actual} bytes, not {size}; damaged from block {block} on"
            )
    return manifest


def _is_manifest(value: object) -> TypeGuard[Manifest]:
    if not isinstance(value, dict) or value.get("version") != VERSION:
        return False
    counts = ("documents", "tokens", "text_bytes", "skipped_records", "offsets_crc32")
    dtype = value.get("dtype")
    return (
        all(_is_count(value.get(name), 1 << 62) for name in counts)
        and all(isinstance(value.get(name), str) for name in ("content", "tokenizer", "signature"))
        and dtype in ("uint16", "uint32")
        and value.get("hashed_as") in ("uint8", dtype)
        and value.get("trained_bit") in (None, 8 * np.dtype(dtype).itemsize - 1)
        and _is_count(value.get("vocab_size", 0), (1 << 32) + 1)
        and all(
            _are_counts(value.get(name), np.iinfo(dtype).max + 1, most=1) for name in ("bos", "eos")
        )
        and _are_counts(value.get("held_out"), value["documents"], most=value["documents"])
        and _are_reasons(value.get("skipped_reasons", {}))
        and _are_sizes(value.get("sizes"), value["tokens"] * np.dtype(dtype).itemsize)
        and value.get("checksum")
        == (manifest_checksum(cast(Manifest, value)) if BLOCKS in value["sizes"] else None)
    )


def _are_sizes(sizes: object, token_bytes: int) -> bool:
    """Returns whether the files in a manifest are those of a store."""
    if not isinstance(sizes, dict) or OFFSETS not in sizes:
        return False
    shards = [name for name in sizes if name not in _BESIDE]
    return (
        all(_is_count(size, 1 << 62) for size in sizes.values())
        and shards == shard_names(len(shards))
        and sum(sizes[name] for name in shards) == token_bytes
        and sizes.get(BLOCKS) in (None, Blocks(Path(), "", _hashed(sizes)).num_bytes)
    )


def _hashed(sizes: dict[str, int]) -> dict[str, int]:
    """Returns the sizes of the files whose blocks have hashes, in the order of the hashes."""
    return {name: size for name, size in sizes.items() if name != BLOCKS}


def _is_count(value: object, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def _are_counts(value: object, end: int, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(_is_count(item, end) for item in value)
    )


def _are_reasons(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(kind, str) and _is_count(n, 1 << 62) for kind, n in value.items()
    )


def shard_names(num_shards: int) -> list[str]:
    """Returns the names of a store's files of tokens."""
    return (
        [ONE_SHARD]
        if num_shards == 1
        else [f"tokens-{number:05d}.bin" for number in range(num_shards)]
    )


def store_files(folder: AnyPath) -> list[str]:
    """Returns the names of a store's files in a folder: those that its manifest lists, else those
    named like them.
    """
    store = open_folder(folder)
    if store is not None:
        return [MANIFEST, *store.manifest["sizes"]]
    return [
        name
        for name in file_sizes(folder)
        if name in (MANIFEST, *_BESIDE) or _SHARD.fullmatch(name)
    ]


def was_prepared(folder: AnyPath) -> bool:
    """Returns whether a folder has a store's files, perhaps damaged, of another version or not all
    built yet.
    """
    names = {path.name for path in folder.iterdir()}
    is_store = MANIFEST in names and bool(names & {ONE_SHARD, FIRST_SHARD})
    return is_store or BUILDING_FOLDER in names or names == {LEASE_FILE}


def open_folder(folder: AnyPath) -> TokenStore | None:
    """Returns the store in a folder, or None if it is missing, damaged or of another version."""
    try:
        return load_folder(folder)
    except StoreRefused:  # an object store that refuses, or does not answer
        raise
    except ConfigError:
        return None


def load_folder(folder: AnyPath) -> TokenStore:
    """Returns the store in a folder.

    Raises:
      ConfigError: it is missing, damaged or of another version; names the file.
    """
    manifest = _read_manifest(folder)
    store = TokenStore(folder, manifest)
    try:
        if not isinstance(store.table, WholeTable):
            return store
        offsets = store.offsets
    except (ConfigError, TrainingError):  # an object store that refuses, or does not answer
        raise
    except (OSError, ValueError, EOFError):
        offsets = np.zeros(0)
    has_type = offsets.dtype == np.int64 and offsets.shape == (manifest["documents"] + 1,)
    if not has_type or offsets[-1] != manifest["tokens"]:
        raise damaged_file(folder / OFFSETS, "it is not a table of the store's documents")
    return store
