"""A kind of sample in the stream: its cut of documents into rows. Imports no NumPy by itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.sections import names_fixing
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.data.stream.split import Fitted, Opened, Split

if TYPE_CHECKING:
    from maxbatch.data.stream.document_rows import Cut

Identity = dict[str, str | int | bool]


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

        return open_documents(config, split, self._cut(config, split))

    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int | None:
        """Returns the number of a split's rows if known without packing."""
        from maxbatch.data.stream.document_rows import num_rows_if_cached

        return num_rows_if_cached(config, split, self._cut(config, split))

    def _cut(self, config: StreamConfig, split: Split) -> Cut:
        from maxbatch.data.stream.document_rows import Cut

        return Cut(self.strategy(config), self.reads_blocks, partial(self.fitted, config, split))
