"""The order in which the rows of a source are read, of tokens or of prompts: epoch after epoch, each
a permutation of the same rows.

Limits: a shuffled epoch has at most 2^32 rows (Grain's permutation is 32 bits wide).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from maxbatch.config.keys import Fixes
from maxbatch.config.sections import DataConfig, names_fixing
from maxbatch.data.stream.grain import index_shuffle
from maxbatch.data.stream.recipe import Identity
from maxbatch.system.errors import ConfigError

_MOST_SHUFFLED_ROWS = 1 << 32


class SampleOrigin(NamedTuple):
    epoch: int  # of its source
    row: int  # in the split of its source
    source: str | None = None  # name in a mixture


class EpochOrder(NamedTuple):
    """An order of n rows: index i is row i mod n of epoch i // n, permuted.

    Attributes:
      num_rows: n.
      shuffle: the seed and the name that key the permutations; None: rows are in order.
    """

    num_rows: int
    shuffle: tuple[int, str] | None = None

    @classmethod
    def of(cls, config: DataConfig, num_rows: int, name: str) -> EpochOrder:
        """Returns the order of training rows, shuffled by `name` if the config shuffles.

        Raises:
          ConfigError: there are more rows than can be permuted.
        """
        if not config.enable_data_shuffling:
            return cls(num_rows)
        if num_rows > _MOST_SHUFFLED_ROWS:
            raise ConfigError(
                f"enable_data_shuffling=true: an epoch has {num_rows} rows, and at most "
                f"{_MOST_SHUFFLED_ROWS} (2^32) can be permuted; works: enable_data_shuffling=false"
            )
        return cls(num_rows, (config.data_shuffle_seed, name))

    def place(self, index: int) -> SampleOrigin:
        """Returns the place of an index, in O(1)."""
        epoch, slot = divmod(operator.index(index), self.num_rows)
        if self.shuffle is None:
            return SampleOrigin(epoch, slot)
        key = epoch_key(*self.shuffle, epoch)
        row = index_shuffle(slot, max_index=self.num_rows - 1, seed=key, rounds=4)
        return SampleOrigin(epoch, row)

    def indices_of(self, rows: Collection[int], first: int, end: int) -> list[int]:
        """Returns the indices from `first` to `end` - 1 whose row is one of some rows, in order.

        A permutation is not inverted: of shuffled rows every index is looked at.
        """
        if self.shuffle is not None:
            return [index for index in range(first, end) if self.place(index).row in rows]
        epochs = range(first // self.num_rows, -(-end // self.num_rows))
        indices = (epoch * self.num_rows + row for epoch in epochs for row in sorted(rows))
        return [index for index in indices if first <= index < end]


@lru_cache(maxsize=64)
def epoch_key(seed: int, source: str, epoch: int) -> int:
    """Returns the 32-bit key of one epoch's permutation.

    The key is a hash: with seed + epoch, the second epoch of seed 0 would equal the first of seed
    1, and two sources of equal length would have equal permutations.
    """
    digest = hashlib.blake2b(f"{seed}\0{source}\0{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def order_identity(config: DataConfig) -> Identity:
    """Returns the values that fix the order of training rows: shuffling and its key."""
    fixing = (
        names_fixing(Fixes.ORDER) if config.enable_data_shuffling else ("enable_data_shuffling",)
    )
    return {key: config[key] for key in fixing}


def check_indices(what: str, first: int, end: int, length: int | None) -> None:
    """Raises IndexError unless there are indices `first` to `end` - 1; `what` begins its message.

    Args:
      length: number of indices; None: they are endless.
    """
    if not 0 <= first <= end or (length is not None and end > length):
        last = "" if length is None else f" to {length - 1}"
        raise IndexError(f"{what} from 0{last}")
