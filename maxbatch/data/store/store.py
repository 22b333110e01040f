"""The interface of a token store to the stream, whichever program wrote the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Required, TypedDict

if TYPE_CHECKING:
    import numpy as np

    from maxbatch.data.store.blocks import MappedFile
    from maxbatch.data.store.document_table import BlockTable
    from maxbatch.data.store.ranged_tokens import CheckedIds, RangedTokens
    from maxbatch.system.storage.storage import AnyPath

IDS = "ids"  # the identity of the tokenizer of data that hold token ids
# in the identity of a stream: the hash of a store of another program as a whole
WHOLE_CONTENT = "all tokens"


class Manifest(TypedDict, total=False):
    """The JSON of a token store; `TokenStore` describes its fields."""

    version: Required[int]
    content: Required[str]
    whole_content: str  # never here: `content` covers all tokens
    documents: Required[int]
    tokens: Required[int]
    text_bytes: Required[int]
    skipped_records: Required[int]
    # by the kind of the records' problems; absent without, and of older stores
    skipped_reasons: dict[str, int]
    held_out: Required[list[int]]
    tokenizer: Required[str]
    vocab_size: int
    dtype: Required[str]
    bos: Required[list[int]]
    eos: Required[list[int]]
    hashed_as: Required[str]
    trained_bit: int | None
    conversations: dict[str, object]
    sizes: Required[dict[str, int]]
    offsets_crc32: Required[int]
    signature: Required[str]
    place: str  # the hash of the dataset's path
    deduplicated: bool  # true where duplicates were left out
    # beside it: the content of the held-out data whose records were left out, or ""
    apart_from: str
    checksum: str


class StoreFacts(TypedDict, total=False):
    """The facts about a store that fix its streams."""

    # hash of the tokens of the documents in order; of another program's store, of a sample
    content: Required[str]
    # where `content` is of a sample: a hash of all tokens, or a bucket's version of them
    whole_content: str
    documents: Required[int]
    tokens: Required[int]
    held_out: Required[list[int]]  # numbers of the documents that the dataset itself holds out
    skipped_records: Required[int]
    skipped_reasons: dict[str, int]  # by the kind of the records' problems
    tokenizer: Required[str]  # its identity
    deduplicated: bool  # true where duplicates were left out


class Store(Protocol):
    """Documents of tokens, one after the other."""

    @property
    def folder(self) -> AnyPath: ...  # where it is, for messages

    @property
    def manifest(self) -> StoreFacts: ...

    @property
    # all of them, in order
    def tokens(self) -> np.ndarray | MappedFile | RangedTokens | CheckedIds: ...

    @property
    def table(self) -> BlockTable: ...

    @property
    # int64[documents + 1], the starts of documents; at last the tokens
    def offsets(self) -> np.ndarray: ...

    @property
    # the bit that marks a trained token; None: no token has a mark
    def trained_bit(self) -> int | None: ...
