"""A split of a store, and its rows. Imports no NumPy by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from maxbatch.data.store.heldout import Records
    from maxbatch.data.store.store import Store
    from maxbatch.data.stream.rows import Extents, RowSource
    from maxbatch.data.tokenizers.tokenizer import Tokenizer


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
        return records.numbers_S if isinstance(records, Records) else records


class Fitted(NamedTuple):
    """The documents of a split for its rows."""

    extents: Extents
    num_overlong: int  # documents longer than a row


class SplitRows(NamedTuple):
    """The rows of a split."""

    rows: RowSource
    num_overlong: int  # records longer than a row
