"""One stream of samples: `stream[0], stream[1], ...`, fixed by dataset, seed and packing settings
alone.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from maxbatch.config.combined import StreamConfig
from maxbatch.config.config import Config, as_config
from maxbatch.config.values import shown
from maxbatch.data.stream.epochs import (
    EpochOrder,
    SampleOrigin,
    check_indices,
    order_identity,
)
from maxbatch.data.stream.mixture import MixtureSource, read_mixture, stages_of
from maxbatch.data.stream.mixture_order import StagedOrder
from maxbatch.data.stream.reader import Order, ReadAhead, Reader
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.rows import RowArrays, RowDocument
from maxbatch.data.stream.samples import (
    Epochs,
    Indices,
    InTurn,
    KeptCounts,
    Mixed,
    SampleRows,
)
from maxbatch.data.stream.sources import SourceRows, open_rows, refuse_num_epochs
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.plan.skip_samples import holes_of
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import is_remote

if TYPE_CHECKING:
    from ml_collections import ConfigDict

# Part of every identity. Increment it when the same settings give other samples.
_STREAM_VERSION = 1
_FAR_AHEAD_S = 10.0  # seconds of training to read ahead from an object store


@dataclass(frozen=True, eq=False)
class Stream:
    """Samples by index; any index costs the same.

    With holes, `stream[i]` is the kept sample i. Below, samples are numbered by their own numbers:
    those of the stream without holes.

    A training stream is endless. With one source, epoch e is samples e n to (e + 1) n - 1, n =
    `samples_per_epoch`, and each epoch permutes the same rows. In a mixture, the count of each
    source in any 1000 consecutive samples is within one of its share. Each source has its own
    epochs: after m samples of a source with n rows, its next sample is sample m mod n of its epoch
    m // n. So a small source repeats more often than a large one of the same weight.

    A held-out stream is its n rows once, in order; a mixture's sources follow each other.

    A sample is a dict of arrays [L]: `tokens` int32, `segments` int32 (1, 2, ... per document of
    the row, 0 at padding), `weights` float32 (loss weight of token t as a target, predicted from
    the tokens before it in its segment: 0 at the first token of each segment and at padding, else
    1). A sample of several rows, such as a pair of answers, has L slots for each.
    """

    samples: SampleRows
    tokenizer: Tokenizer
    identity: Identity  # the settings that define the stream; equal identities mean equal samples
    samples_per_epoch: int | None  # n, rows of the split; None for the training stream of a mixture
    is_endless: bool
    read_ahead: ReadAhead
    notes: tuple[str, ...] = ()  # records left out, cut or split, and why
    holes: Holes = NO_HOLES  # own numbers that are left out

    def __len__(self) -> int:
        """Returns the samples of an epoch, n, or of a held-out stream.

        Raises:
          TypeError: a mixture's sources have no common epoch.
        """
        if self.samples_per_epoch is None:
            raise TypeError("the stream of a mixture has no epoch, and so no length")
        return self.samples_per_epoch

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> RowArrays:
        """Returns sample `index`, arrays [L].

        Raises:
          IndexError: an index below 0, or past the end of a held-out stream.
        """
        return {name: array[0] for name, array in self.batch([operator.index(index)]).items()}

    def batch(self, indices: Indices) -> RowArrays:
        """Returns the samples with these indices, in their order, as arrays [n, L]; cheaper than
        one at a time.
        """
        if len(indices):
            self._check(min(indices))
            self._check(max(indices))
        return self.samples.batch(self.holes.own_numbers(indices) if self.holes else indices)

    def read(self, start: int, stop: int) -> RowArrays:
        """Returns samples start to stop - 1 as arrays [stop - start, L]."""
        return self.batch(range(start, stop))

    def lengths(self, indices: Indices) -> np.ndarray:
        """Returns the numbers of tokens of these samples without reading the tokens: int64[n], or
        [n, K] for samples of K rows.
        """
        return self.samples.lengths(self.holes.own_numbers(indices) if self.holes else indices)

    def row(self, index: int) -> SampleOrigin:
        """Returns the origin of sample `index`."""
        self._check(index)
        return self.samples.place(self.own_number(index))

    def own_number(self, index: int) -> int:
        """Returns the own number of sample `index`: its index in the stream without holes."""
        return self.holes.own_number(index)

    def documents(self, index: int) -> list[RowDocument]:
        """Returns the documents of sample `index`, one for each of its segments; none if samples
        are computed.
        """
        self._check(index)
        return self.samples.documents(self.own_number(index))

    def again(self, own_numbers: Sequence[int], first: int, end: int) -> list[int]:
        """Returns the own numbers among `first` to `end` - 1 at which the rows of some samples
        return, holes included.
        """
        return self.samples.again(own_numbers, first, end)

    def samples_by_source(self, position: int) -> dict[str, int] | None:
        """Returns the counts per source of a mixture in samples 0 to position - 1, or None."""
        if not isinstance(self.samples, Mixed):
            return None
        if position < 0:
            raise IndexError(f"position {position}: must be at least 0")
        if not self.holes:
            return self.samples.counts(position)
        return self._kept_counts.at(self.holes.position_after(position))

    @functools.cached_property
    def _kept_counts(self) -> KeptCounts:
        assert isinstance(self.samples, Mixed), "the others have no sources"
        return KeptCounts(self.samples, self.holes)

    def reader_of(self, order: Order) -> Reader:
        """Returns a reader of the samples of `order`, such as one host's rows; the caller must
        close it.
        """
        return Reader(self.batch, self.samples.row_length, order, self.read_ahead)

    def stats(self) -> dict[str, Any]:
        """Returns the figures of an epoch.

        Returns:
          `samples`, `slots`, `tokens` (with special tokens, without padding), `packing_efficiency`
          (tokens per slot), `documents`, `skipped_records` (of the whole dataset); of conversations
          also `overlong_records`, `trained_tokens` and `trained_tokens_per_sample` (`mean` and
          `std`). Of a mixture, the sums over all sources, each once, and `sources`: the same
          figures of each source by name, and its `weight` in a training stream.
        """
        return self.samples.stats()

    def _check(self, index: int) -> None:
        end = None if self.is_endless else self.samples_per_epoch
        check_indices(f"sample {index}: the stream has samples", index, index + 1, end)


class ReadPart(NamedTuple):
    """The part of a stream that a run reads."""

    stream: Stream | None  # None on a host that reads no rows
    num_samples: int  # from its start


@overload
def open_stream(
    config: Config | ConfigDict | StreamConfig, split: Literal["train"] = "train"
) -> Stream: ...


@overload
def open_stream(
    config: Config | ConfigDict | StreamConfig, split: Literal["eval"]
) -> Stream | None: ...


def open_stream(
    config: Config | ConfigDict | StreamConfig, split: Literal["train", "eval"] = "train"
) -> Stream | None:
    """Opens the training or the held-out stream (None without held-out data); tokenises new data.

    Raises:
      ConfigError: unusable settings or data, with key, value and file.
    """
    config = config if isinstance(config, StreamConfig) else as_config(config).stream
    held_out = {"train": False, "eval": True}[split]
    holes = NO_HOLES if held_out else holes_of(config)
    mixture = read_mixture(config)
    if held_out and config.eval_dataset_path:
        mixture = None  # the held-out files of every source
    elif mixture is not None and not held_out:
        refuse_num_epochs(config, mixture)
    sources = _open_sources(config, mixture, held_out)
    if not sources:
        return None
    first = next(iter(sources.values()))
    identity: Identity = {"stream_version": _STREAM_VERSION, "split": split}
    samples: SampleRows
    if mixture is None:
        samples = _epochs(config, first, None if held_out else first.shuffle_name)
        identity |= first.identity
    else:
        samples = _mixed(config, mixture, sources, held_out)
        identity |= _mixture_identity(config, sources)
    if not held_out:
        identity |= {
            f"source {i}: weight": source.weights_text for i, source in enumerate(mixture or ())
        }
        identity |= order_identity(config) | holes.identity
    has_epochs = mixture is None or held_out
    samples_per_epoch = (
        sum(source.rows.num_rows for source in sources.values()) if has_epochs else None
    )
    is_far = any(
        source.store_folder and is_remote(source.store_folder) for source in sources.values()
    )
    seconds = _FAR_AHEAD_S if is_far else 0.0
    read_ahead = ReadAhead(config.grain_worker_count, config.grain_prefetch_buffer_size, seconds)
    notes = tuple(
        f"{name}: {text}" if name else text
        for name, source in sources.items()
        for text in source.notes
    )
    return Stream(
        samples,
        first.tokenizer,
        identity,
        samples_per_epoch,
        not held_out,
        read_ahead,
        notes,
        holes,
    )


def _open_sources(
    config: StreamConfig, mixture: tuple[MixtureSource, ...] | None, held_out: bool
) -> dict[str, SourceRows]:
    """Opens a split of the dataset, or of every source of a mixture that has it."""
    if mixture is None:
        rows = open_rows(config, held_out=held_out)
        return {} if rows is None else {"": rows}
    opened = {}
    for source in mixture:
        try:
            rows = open_rows(source.config, held_out=held_out, whole=config)
        except ConfigError as error:
            raise ConfigError(f"source {shown(source.name)} of the mixture: {error}") from error
        if rows is not None:
            opened[source.name] = rows
    return opened


def _mixed(
    config: StreamConfig,
    mixture: tuple[MixtureSource, ...],
    sources: dict[str, SourceRows],
    held_out: bool,
) -> Mixed:
    seen: Counter[str] = Counter()
    epochs = {}
    for name, source in sources.items():
        # The number gives sources of equal content different permutations.
        key = f"{source.shuffle_name} {seen[source.shuffle_name]}"
        seen[source.shuffle_name] += 1
        epochs[name] = _epochs(config, source, None if held_out else key)
    if held_out:
        return Mixed(epochs, InTurn([source.rows.num_rows for source in sources.values()]))
    return Mixed(epochs, StagedOrder(stages_of(mixture)))


def _mixture_identity(config: StreamConfig, sources: dict[str, SourceRows]) -> Identity:
    """Returns the identities of all sources, numbered, with common settings once.

    Names are left out: moved or renamed data are the same stream.
    """
    shared = dict(config.items())
    identity: Identity = {"sources": len(sources)}
    for number, source in enumerate(sources.values()):
        for key, value in source.identity.items():
            identity[key if key in shared else f"source {number}: {key}"] = value
    return identity


def _epochs(config: StreamConfig, source: SourceRows, name: str | None) -> Epochs:
    """Returns the epochs of a source, shuffled by `name` if the config shuffles; in order if `name`
    is None.
    """
    num_rows = source.rows.num_rows
    order = EpochOrder(num_rows) if name is None else EpochOrder.of(config, num_rows, name)
    return Epochs(source.rows, order)
