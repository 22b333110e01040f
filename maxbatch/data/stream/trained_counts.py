"""The trained tokens of a split's rows: counted in one pass over all rows, and cached beside the
packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxbatch.config.combined import StreamConfig
from maxbatch.data.store.cache_folder import cache_file, keep, recall, writing_cache
from maxbatch.data.stream.rows import RowSource
from maxbatch.data.stream.trained_tokens import TrainedTokens

_VERSION = 3
_ROWS_AT_ONCE = 1024


def find_trained_tokens(config: StreamConfig, key: Mapping[str, object]) -> TrainedTokens | None:
    """Returns the cached figures of the rows of `key`, or None."""
    figures = recall(_path(config, key))
    return TrainedTokens(*figures) if isinstance(figures, list) else None


def count_trained_tokens(
    config: StreamConfig, key: Mapping[str, object], rows: RowSource
) -> TrainedTokens:
    """Returns the figures of the rows of `key`, from the cache or by reading all rows."""
    figures = find_trained_tokens(config, key)
    if figures is not None:
        return figures
    total = square_sum = 0
    for begin in range(0, rows.num_rows, _ROWS_AT_ONCE):
        block = rows.batch(range(begin, min(begin + _ROWS_AT_ONCE, rows.num_rows)))
        trained_n = block["weights"].sum(axis=1, dtype=np.float64).astype(np.int64)
        total += int(trained_n.sum())
        square_sum += int((trained_n**2).sum())
    counted = TrainedTokens(rows.num_rows, total, square_sum)
    path = _path(config, key)
    with writing_cache(config.data_cache_dir, path):
        keep(path, counted)
    return counted


def _path(config: StreamConfig, key: Mapping[str, object]) -> Path:
    facts = [_VERSION, config.max_target_length, config.packing, key]
    return cache_file(config.data_cache_dir, "trained-tokens", facts)
