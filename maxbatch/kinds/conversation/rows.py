"""Rows of conversations: each is in one row. `overlong` truncates, drops or refuses a longer one."""

from __future__ import annotations

import numpy as np

from maxbatch.data.store.store import Store
from maxbatch.data.stream.overlong import refuse_overlong
from maxbatch.data.stream.rows import Extents
from maxbatch.data.stream.split import Fitted


def fit_rows(store: Store, documents_S: np.ndarray, length: int, overlong: str) -> Fitted:
    """Returns the conversations with numbers `documents_S`, each at most `length` long, a row.

    Raises:
      ConfigError: a conversation is longer and `overlong` is `error`, or none is left.
    """
    start_S, end_S = Extents.of(store.offsets, documents_S)
    lengths_S = end_S - start_S
    is_long_S = lengths_S > length
    if refuse_overlong("conversation", documents_S, lengths_S, length, overlong):
        start_S, end_S = start_S[~is_long_S], end_S[~is_long_S]
    return Fitted(Extents(start_S, np.minimum(end_S, start_S + length)), int(is_long_S.sum()))
