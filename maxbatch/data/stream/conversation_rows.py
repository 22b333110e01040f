"""The rows of conversations (`use_sft`): which of them fit, and how many of their tokens are trained on.

A conversation stays in one row. One that is longer than a row goes by `overlong`: it loses its end, is left out, or is
refused. The figures of the trained tokens need all rows to be read once; they are kept beside the packing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.data.store.token_store import TokenStore
from maxbatch.data.stream.rows import Extents, RowSource
from maxbatch.system.atomic_files import writing_atomically
from maxbatch.system.errors import ConfigError

_VERSION = 1
_ROWS_AT_ONCE = 1024


class Fitted(NamedTuple):
    """The conversations of a split that make rows."""

    extents: Extents
    num_overlong: int  # that were longer than a row


def fit_rows(config: ConfigDict, store: TokenStore, documents_S: np.ndarray) -> Fitted:
    """Returns the conversations with numbers `documents_S`, each at most a row long.

    Raises:
      ConfigError: one is longer, and `overlong` is `error`; or none is left.
    """
    length = config.max_target_length
    start_S, end_S = Extents.of(store.offsets, documents_S)
    lengths_S = end_S - start_S
    is_long_S = lengths_S > length
    count = int(is_long_S.sum())
    if count and config.overlong == "error":
        first = int(np.argmax(is_long_S))
        longest = int(lengths_S.max())
        more = f", and {count - 1} more are too long" if count > 1 else ""
        raise ConfigError(
            f"max_target_length={length}: conversation {int(documents_S[first]) + 1} has {int(lengths_S[first])} "
            f"tokens{more}, and overlong=error; works: max_target_length={longest}, or overlong=truncate"
        )
    if config.overlong == "drop":
        start_S, end_S = start_S[~is_long_S], end_S[~is_long_S]
        if not len(start_S):
            raise ConfigError(
                f"overlong=drop: all {count} conversations are longer than max_target_length={length}; "
                f"works: max_target_length={int(lengths_S.max())}, or overlong=truncate"
            )
    return Fitted(Extents(start_S, np.minimum(end_S, start_S + length)), count)


class TrainedTokens(NamedTuple):
    """The trained tokens of a split's rows, each row once."""

    num_rows: int
    total: int
    square_sum: int  # of each row's number

    @property
    def mean(self) -> float:
        """The mean of a row."""
        return self.total / self.num_rows

    @property
    def std(self) -> float:
        """The standard deviation of a row."""
        return math.sqrt(max(0.0, self.square_sum / self.num_rows - self.mean**2))


class TrainedShare(NamedTuple):
    """One source's share of a stream of conversations."""

    weight: float  # of the samples; 1 if it is the only source
    tokens: TrainedTokens


def trained_tokens_of_update(shares: Sequence[TrainedShare], batch_size: int) -> dict[str, float]:
    """Returns the `mean` and the standard deviation (`std`) of the trained tokens in an update of B shuffled rows.

    The rows of a source are drawn from its epoch without replacement (Cochran 1977, Sampling Techniques, theorem 2.2);
    an update that is longer than an epoch holds all of its rows.
    """
    mean = variance = 0.0
    for weight, tokens in shares:
        rows, drawn = tokens.num_rows, batch_size * weight
        mean += drawn * tokens.mean
        drawn %= rows
        variance += tokens.std**2 * drawn * (rows - drawn) / max(rows - 1, 1)
    return {"mean": mean, "std": math.sqrt(variance)}


class ConversationFigures(NamedTuple):
    """Figures of the conversations of a split."""

    num_overlong: int  # longer than a row
    tokens: TrainedTokens


def find_trained_tokens(config: ConfigDict, key: Mapping[str, Any]) -> TrainedTokens | None:
    """Returns the cached figures of rows that `key` fixes, or None."""
    try:
        found = json.loads(_path(config, key).read_bytes())
        return TrainedTokens(*(int(found[name]) for name in TrainedTokens._fields))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def count_trained_tokens(config: ConfigDict, key: Mapping[str, Any], rows: RowSource) -> TrainedTokens:
    """Returns the figures of rows that `key` fixes, from the cache or by reading them all."""
    found = find_trained_tokens(config, key)
    if found is not None:
        return found
    total = square_sum = 0
    for begin in range(0, rows.num_rows, _ROWS_AT_ONCE):
        block = rows.batch(range(begin, min(begin + _ROWS_AT_ONCE, rows.num_rows)))
        trained_n = block["weights"].sum(axis=1, dtype=np.float64).astype(np.int64)
        total += int(trained_n.sum())
        square_sum += int((trained_n**2).sum())
    counted = TrainedTokens(rows.num_rows, total, square_sum)
    path = _path(config, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_atomically(path) as file:
            file.write(json.dumps(counted._asdict()).encode())
    except OSError as error:
        raise ConfigError(
            f"data_cache_dir: cannot write {path}: {error.strerror or error}; data_cache_dir=/a/writable/folder puts "
            "it elsewhere"
        ) from error
    return counted


def _path(config: ConfigDict, key: Mapping[str, Any]) -> Path:
    whole_key = json.dumps([_VERSION, config.max_target_length, config.packing, key], sort_keys=True)
    name = hashlib.blake2b(whole_key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return cache_folder(config).parent / "trained-tokens" / name
