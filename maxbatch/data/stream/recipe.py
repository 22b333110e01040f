"""A kind of sample in the stream: its cut of documents into rows. Imports no NumPy by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from maxbatch.config.keys import Fixes
from maxbatch.config.sections import names_fixing
from maxbatch.data.store.recipe import StoreRecipe

if TYPE_CHECKING:
    import numpy as np

    from maxbatch.config.combined import StreamConfig
    from maxbatch.data.store.heldout import Records
    from maxbatch.data.store.store import Store
    from maxbatch.data.store.tokenizers import Tokenizer
    from maxbatch.data.stream.rows import Extents, RowSource

Identity = dict[str, str | int | bool]


@dataclass(frozen=True)
class Split:
    """The records of one split of a store.

    Attributes:
      store: the store.
      records: their numbers.
      key: the values that determine document lengths, and so the cut into rows.
      tokenizer: the store's tokenizer.
    """

    store: Store
    records: np.ndarray | Records
    key: Mapping[str, object]
    tokenizer: Tokenizer

    @property
    def pad_id(self) -> int:
        """The token of empty slots; loads the tokenizer's library."""
        return self.tokenizer.pad_id

    @property
    def numbers_S(self) -> np.ndarray:
        """int64, the numbers of all records."""
        from maxbatch.data.store.heldout import Records

        records = self.records
        return records.between(0, records.total) if isinstance(records, Records) else records


class Fitted(NamedTuple):
    """The documents of a split for its rows."""

    extents: Extents
    num_overlong: int  # documents longer than a row


class Opened(NamedTuple):
    """The rows of a split."""

    rows: RowSource
    num_overlong: int  # records longer than a row


class StreamRecipe(StoreRecipe):
    """A kind of sample in the stream; by default rows are cut from documents, joined or separate.

    Attributes:
      store_records: the records of a store, for messages.
      reads_blocks: whether rows can be found through blocks of a large document table.
    """

    store_records: ClassVar[str] = "documents"
    reads_blocks: ClassVar[bool] = True

    def row_identity(self, config: StreamConfig) -> Identity:
        """Returns the values that determine the rows of given documents."""
        return {key: config[key] for key in names_fixing(Fixes.TOKENS | Fixes.ROWS)}

    def strategy(self, config: StreamConfig) -> str:
        """Returns the `packing_strategy` of documents."""
        return str(config.packing_strategy)

    def fitted(self, config: StreamConfig, split: Split) -> Fitted:
        """Returns the documents of a split, cut to fit rows.

        Raises:
          ConfigError: a document is too long for a row, or none is left.
        """
        from maxbatch.data.stream.rows import Extents

        return Fitted(Extents.of(split.store.offsets, split.numbers_S), 0)

    def rows(self, config: StreamConfig, split: Split) -> Opened:
        """Returns the rows of a split."""
        from maxbatch.data.stream.document_rows import open_documents

        return open_documents(config, split, self)

    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int | None:
        """Returns the number of a split's rows if known without packing."""
        from maxbatch.data.stream.document_rows import num_rows_if_cached

        return num_rows_if_cached(config, split, self)
