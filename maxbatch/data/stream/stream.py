"""One stream of samples: `stream[0], stream[1], ...`, fixed by the dataset, the seed and the packing settings alone."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, overload

import grain
from ml_collections import ConfigDict

from maxbatch.config.values import shown
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.data.stream.epoch_length import refuse_num_epochs
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.mixture_order import WeightedOrder
from maxbatch.data.stream.reader import Contiguous, Order, ReadAhead, Reader, RowBlocks
from maxbatch.data.stream.rows import Rows, RowSource
from maxbatch.data.stream.samples import MAX_SHUFFLED_ROWS, Epochs, Indices, InTurn, Mixed, Place
from maxbatch.data.stream.sources import Identity, SourceRows, open_rows, order_identity
from maxbatch.system.errors import ConfigError

# Part of every identity. Raise it if the same settings come to mean other samples.
_STREAM_VERSION = 1


class Stream:
    """Samples by index; any index costs the same.

    A training stream has no end. With one source, epoch e is samples e n to (e + 1) n - 1, n = `samples_per_epoch`, and
    each epoch permutes the same rows. In a mixture, the count of each source in any 1000 consecutive samples is within
    one of its share. Each source has its own epochs: after m samples of a source with n rows, its next sample is sample
    m mod n of its epoch m // n. So a small source repeats more often than a large one of the same weight.

    A held-out stream is its n rows once, in order; those of a mixture one source after the other.

    A sample is a dict of arrays [L]: `tokens` int32, `segments` int32 (1, 2, ... per document of the row, 0 at
    padding), `weights` float32 (loss weight of token t as a target, predicted from the tokens before it in its segment:
    0 at the first token of each segment and at padding, else 1).

    Attributes:
      samples_per_epoch: n, rows of the split; None for the training stream of a mixture, which has no epochs.
      max_target_length: L, tokens of a row.
      identity: the settings that define the stream, by config key if there is one; equal identities mean equal samples.
      tokenizer: turned text into tokens.
    """

    def __init__(
        self,
        samples: Epochs | Mixed,
        *,
        tokenizer: Tokenizer,
        identity: Identity,
        samples_per_epoch: int | None,
        endless: bool,
        ahead: ReadAhead,
    ):
        """Makes a stream; `open_stream` is the usual way.

        Args:
          samples: by index.
          tokenizer, identity, samples_per_epoch: see the class.
          endless: the stream goes on after `samples_per_epoch`.
          ahead: how `rows` and `reader` read ahead.
        """
        self.samples_per_epoch = samples_per_epoch
        self.max_target_length = samples.row_length
        self.identity = identity
        self.tokenizer = tokenizer
        self._samples = samples
        self._end = None if endless else samples_per_epoch
        self._ahead = ahead

    def __getitem__(self, index: int) -> Rows:
        """Returns sample `index`, arrays [L].

        Raises:
          IndexError: the index is below 0, or past the end of a held-out stream.
        """
        return _only_row(self.batch([operator.index(index)]))

    def batch(self, indices: Indices) -> Rows:
        """Returns the samples with these indices, in their order, as arrays [n, L]; cheaper than one at a time."""
        if len(indices):
            self._check(min(indices))
            self._check(max(indices))
        return self._samples.batch(indices)

    def read(self, start: int, stop: int) -> Rows:
        """Returns samples start to stop - 1 as arrays [stop - start, L]."""
        return self.batch(range(start, stop))

    def row(self, index: int) -> Place:
        """Returns the origin of sample `index`."""
        self._check(index)
        return self._samples.place(index)

    def samples_by_source(self, position: int) -> dict[str, int] | None:
        """Returns the number of samples of each source of a mixture among samples 0 to position - 1, else None. O(1) in
        `position`.
        """
        if not isinstance(self._samples, Mixed):
            return None
        if position < 0:
            raise IndexError(f"position {position}: must be at least 0")
        return dict(zip(self._samples.sources, self._samples.order.counts(position), strict=True))

    def dataset(self, start: int = 0, stop: int | None = None) -> grain.MapDataset:
        """Returns a `grain.MapDataset` whose element i is sample start + i, arrays [L], to transform further."""
        return grain.MapDataset.source(RowBlocks(self, Contiguous(start, self._stop(stop)), 1)).map(_only_row)

    def reader(self, start: int = 0, stop: int | None = None) -> Reader:
        """Returns a reader of samples start to stop - 1 (by default all that follow), which has to be closed.

        It reads ahead with threads or processes, as the config says.
        """
        return self.reader_of(Contiguous(start, self._stop(stop)))

    def reader_of(self, order: Order) -> Reader:
        """Returns a reader of the samples of `order`, such as one host's rows; otherwise like `reader`."""
        return Reader(self, order, self._ahead)

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """Yields samples start to stop - 1, arrays [L], read ahead like `reader` until the generator is closed."""
        with self.reader(start, stop) as reader:
            for block in reader.blocks():
                for place in range(len(block["tokens"])):
                    yield {name: array[place] for name, array in block.items()}

    def stats(self) -> dict[str, Any]:
        """Returns the figures of an epoch.

        Returns:
          `samples`, `slots`, `tokens` (with special tokens, without padding), `packing_efficiency` (tokens per slot),
          `documents`, `skipped_records` (of the whole dataset). Of a mixture, the sums over all sources, each once, and
          `sources`: the same figures of each source by name, and its `weight` in a training stream.
        """
        stats = self._samples.stats()
        if isinstance(self._samples, Mixed) and isinstance(self._samples.order, WeightedOrder):
            weights = self._samples.order.weights
            for figures, weight in zip(stats["sources"].values(), weights, strict=True):
                figures["weight"] = float(weight)
        return stats

    def _check(self, index: int) -> None:
        if index < 0 or (self._end is not None and index >= self._end):
            end = "" if self._end is None else f" to {self._end - 1}"
            raise IndexError(f"sample {index}: the stream has samples from 0{end}")

    def _stop(self, stop: int | None) -> int | None:
        return self._end if stop is None else stop


@overload
def open_stream(config: ConfigDict, split: Literal["train"] = "train") -> Stream: ...


@overload
def open_stream(config: ConfigDict, split: Literal["eval"]) -> Stream | None: ...


def open_stream(config: ConfigDict, split: Literal["train", "eval"] = "train") -> Stream | None:
    """Opens the training stream or the held-out one; new data are tokenised now.

    Args:
      config: as `load_config` gives it.
      split: "train" or "eval".

    Returns:
      The stream; None for "eval" if nothing is held out.

    Raises:
      ConfigError: settings or data that cannot be used, by key, value, and file.
    """
    held_out = {"train": False, "eval": True}[split]
    mixture = read_mixture(config)
    if mixture is not None and not held_out:
        refuse_num_epochs(config, mixture)
    identity: Identity = {"stream_version": _STREAM_VERSION, "split": split}
    samples: Epochs | Mixed
    if mixture is None or (held_out and config.eval_dataset_path):
        source = open_rows(config, held_out=held_out)
        if source is None:
            return None
        tokenizer = source.tokenizer
        samples = _epochs(config, source.rows, None if held_out else source.shuffle_name)
        samples_per_epoch: int | None = source.rows.num_rows
        identity |= source.identity
    else:
        opened = _open_sources(mixture, held_out)
        if not opened:
            return None
        tokenizer = next(iter(opened.values())).tokenizer
        seen: Counter[str] = Counter()
        sources = {}
        for name, source in opened.items():
            # The number gives two sources of equal content different permutations.
            key = f"{source.shuffle_name} {seen[source.shuffle_name]}"
            seen[source.shuffle_name] += 1
            sources[name] = _epochs(config, source.rows, None if held_out else key)
        num_rows = [source.rows.num_rows for source in opened.values()]
        order = InTurn(num_rows) if held_out else WeightedOrder([source.weight for source in mixture])
        samples = Mixed(sources, order)
        samples_per_epoch = sum(num_rows) if held_out else None
        identity |= _mixture_identity(config, opened)
        if not held_out:
            identity |= {f"source {i}: weight": str(source.weight) for i, source in enumerate(mixture)}
    if not held_out:
        identity |= order_identity(config)
    return Stream(
        samples,
        tokenizer=tokenizer,
        identity=identity,
        samples_per_epoch=samples_per_epoch,
        endless=not held_out,
        ahead=ReadAhead(config.grain_worker_count, config.grain_prefetch_buffer_size),
    )


def _open_sources(mixture: tuple[MixtureSource, ...], held_out: bool) -> dict[str, SourceRows]:
    """Opens one split of every source that has it."""
    opened = {}
    for source in mixture:
        try:
            rows = open_rows(source.config, held_out=held_out)
        except ConfigError as error:
            raise ConfigError(f"source {shown(source.name)} of the mixture: {error}") from error
        if rows is not None:
            opened[source.name] = rows
    return opened


def _mixture_identity(config: ConfigDict, sources: dict[str, SourceRows]) -> Identity:
    """Returns the identities of all sources, numbered; settings that they share stand once.

    Names do not count: data that are moved or renamed are still the same stream.
    """
    identity: Identity = {"sources": len(sources)}
    for number, source in enumerate(sources.values()):
        for key, value in source.identity.items():
            identity[key if key in config else f"source {number}: {key}"] = value
    return identity


def _epochs(config: ConfigDict, rows: RowSource, name: str | None) -> Epochs:
    """Returns the epochs of a source, shuffled by `name` if the config says so; in order if `name` is None."""
    if name is None or not config.enable_data_shuffling:
        return Epochs(rows, shuffle=None)
    if rows.num_rows > MAX_SHUFFLED_ROWS:
        raise ConfigError(
            f"enable_data_shuffling=true: an epoch has {rows.num_rows} rows, and at most "
            f"{MAX_SHUFFLED_ROWS} (2^32) can be permuted; works: enable_data_shuffling=false"
        )
    return Epochs(rows, shuffle=(config.data_shuffle_seed, name))


def _only_row(block: Rows) -> Rows:
    return {name: array[0] for name, array in block.items()}
