"""The interface of a kind of sample to the stream: its cut of documents into rows. Imports no NumPy
by itself.
"""

from __future__ import annotations

from abc import abstractmethod

from maxbatch.config.combined import StreamConfig
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.data.stream.split import Split, SplitRows

Identity = dict[str, str | int | bool]


class StreamRecipe(StoreRecipe):
    """A kind of sample as the stream knows it."""

    @abstractmethod
    def row_identity(self, config: StreamConfig) -> Identity:
        """Returns the values that determine the rows of given documents."""

    @abstractmethod
    def rows(self, config: StreamConfig, split: Split) -> SplitRows:
        """Returns the rows of a split.

        Raises:
          ConfigError: a document is too long for a row, or none is left.
        """

    @abstractmethod
    def num_rows_if_cached(self, config: StreamConfig, split: Split) -> int | None:
        """Returns the number of a split's rows if known without packing."""
