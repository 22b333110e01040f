"""What a kind of sample knows of the stream: the rows that documents become. Imports no NumPy by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from maxbatch.config.keys import Fixes
from maxbatch.config.sections import names_fixing
from maxbatch.data.store.recipe import StoreRecipe

if TYPE_CHECKING:
    import numpy as np

    from maxbatch.data.store.heldout import Records
    from maxbatch.data.store.store import Store
    from maxbatch.data.store.tokenizers import Tokenizer
    from maxbatch.data.stream.rows import Extents, RowSource
    from maxbatch.data.stream.stream_config import StreamConfig

Identity = dict[str, str | int | bool]


@dataclass(frozen=True)
class Split:
    """The records of one split of a store.

    Attributes:
      store: the store.
      records: their numbers.
      key: the values that fix the lengths of their documents, and so the cut into rows.
      tokenizer: that of the store.
    """

    store: Store
    records: np.ndarray | Records
    key: Mapping[str, object]
    tokenizer: Tokenizer

    @property
    def pad_id(self) -> int:
        """The token of empty slots; the library of the tokenizer is loaded for it."""
        return self.tokenizer.pad_id

    @property
    def numbers_S(self) -> np.ndarray:
        """int64, the numbers of all records."""
        from maxbatch.data.store.heldout import Records

        records = self.records
        return records.between(0, records.total) if isinstance(records, Records) else records


class Fitted(NamedTuple):
    """The documents of a split that go into rows."""

    extents: Extents
    num_overlong: int  # those that were longer than a row


class Opened(NamedTuple):
    """The rows of a split."""

    rows: RowSource
    num_overlong: int  # records that were longer than a row


class StreamRecipe(StoreRecipe):
    """A kind of sample as the stream knows it; by default a row is cut from documents, joined or each by itself.

    Attributes:
      store_records: the records of a store, for messages.
      reads_blocks: whether rows may be looked up in blocks of a large table of documents.
    """

    store_records: ClassVar[str] = "documents"
    reads_blocks: ClassVar[bool] = True

    def row_identity(self, config: StreamConfig) -> Identity:
        """Returns the values that fix the rows of given documents."""
        return {key: config[key] for key in names_fixing(Fixes.TOKENS | Fixes.ROWS)}

    def strategy(self, config: StreamConfig) -> str:
        """Returns how documents are packed: a value of `packing_strategy`."""
        return str(config.packing_strategy)

    def fitted(self, config: StreamConfig, split: Split) -> Fitted:
        """Returns the documents of a split as they go into rows.

        Raises:
          ConfigError: one is too long for a row, or none is left.
        """
        from maxbatch.data.stream.rows import Extents

        return Fitted(Extents.of(split.store.offsets, split.numbers_S), 0)

    def rows(self, config: StreamConfig, split: Split) -> Opened:
        """Returns the rows of a split."""
        from maxbatch.data.stream.document_rows import open_documents

        return open_documents(config, split, self)

    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int | None:
        """Returns the rows of a split if they are known without packing it."""
        from maxbatch.data.stream.document_rows import num_rows_if_cached

        return num_rows_if_cached(config, split, self)
