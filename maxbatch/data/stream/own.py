"""A user's own data as a stream: any sequence of rows that an index alone decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from maxbatch.config.combined import StreamConfig
from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.data.stream.epochs import SampleOrigin
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.reader import ReadAhead
from maxbatch.data.stream.recipe import Identity
from maxbatch.data.stream.rows import RowArrays, RowDocument
from maxbatch.data.stream.samples import Indices
from maxbatch.data.stream.stream import Stream
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.plan.holes import SKIP_SAMPLES
from maxbatch.plan.refusal import MOST_TYPED, Refusal
from maxbatch.plan.skip_samples import holes_of
from maxbatch.system.code_names import code_name
from maxbatch.system.errors import ConfigError, one_line

_LAST_SEGMENT = 2**31 - 1
_NONE = HeldOutFraction.of(0)


class Samples(Protocol):
    """A user's samples: `samples[i]` is always the same row, in every process and in any order.

    One with a length has epochs: after its last sample comes the first. One without has no end. A
    mapping `identity`, where there is one, says what defines the samples: a checkpoint is resumed
    only with an equal one. Without it, the first sample does.
    """

    def __getitem__(self, index: int, /) -> Mapping[str, ArrayLike] | ArrayLike:
        """Returns a row: its tokens, int32[L], or a mapping of `tokens` and, where wanted,
        `segments` and `weights`.

        `segments` int32[L] counts the documents of the row from 1, 0 at padding (default: one
        document). `weights` float32[L] is the loss weight of each token as a target (default: 1,
        and 0 where a segment begins).
        """


def as_stream(samples: Samples | Stream, config: StreamConfig) -> Stream:
    """Returns a user's samples as the training stream of a run, without the rows that
    `eval_fraction` holds out.

    Raises:
      ConfigError: the first or the last sample is no row of `max_target_length` tokens below
        `vocab_size`, or `eval_fraction` is of samples without a length.
    """
    split = HeldOutFraction.of(config.eval_fraction)
    if isinstance(samples, Stream):
        _refuse_fraction(
            config.eval_fraction,
            "this one is of open_stream",
            "eval_stream=open_stream(config, 'eval')",
        )
        return _with_holes(samples, config)
    if not isinstance(samples, Sized):
        _refuse_fraction(config.eval_fraction, f"{code_name(samples)} has none", "eval_stream=rows")
    rows = OwnRows(samples, config, "stream", split)
    return _with_holes(_stream_of(rows, samples, config, is_endless=True), config)


def _with_holes(stream: Stream, config: StreamConfig) -> Stream:
    """Returns a stream with the config's holes; raises ConfigError if it has other ones."""
    holes = holes_of(config)
    if stream.holes == holes:
        return stream
    if stream.holes:
        rule = "must leave out what the stream that train() was given leaves out"
        text = stream.holes.text
        raise Refusal(
            config, SKIP_SAMPLES, rule, {SKIP_SAMPLES: text} if len(text) <= MOST_TYPED else {}
        )
    return dataclasses.replace(stream, holes=holes, identity=stream.identity | holes.identity)


def held_out_of(samples: Samples | Stream, config: StreamConfig) -> Stream | None:
    """Returns the rows that `eval_fraction` holds out of a user's training samples; None if it is
    0.
    """
    split = HeldOutFraction.of(config.eval_fraction)
    if isinstance(samples, Stream) or not split.fraction:
        return None
    return _stream_of(
        OwnRows(samples, config, "stream", split, held_out=True), samples, config, is_endless=False
    )


def as_held_out(samples: Samples | Stream, config: StreamConfig) -> Stream:
    """Returns a user's held-out samples, each once.

    Raises:
      ConfigError: they have no length, the first or the last one cannot be used, or the config
        holds out others.
    """
    for key in ("eval_dataset_path", "eval_fraction"):
        if config[key]:
            works = f"{key}=''" if key == "eval_dataset_path" else f"{key}=0"
            raise ConfigError(
                f"{key}={config[key]}: states held-out data beside eval_stream; works: {works}"
            )
    if not isinstance(samples, Sized) or (isinstance(samples, Stream) and samples.is_endless):
        name = (
            "a training stream, which has no end"
            if isinstance(samples, Stream)
            else code_name(samples)
        )
        raise ConfigError(
            f"eval_stream: must have a length (len), and this is {name}; works: a list of rows"
        )
    if isinstance(samples, Stream):
        return samples
    return _stream_of(OwnRows(samples, config, "eval_stream"), samples, config, is_endless=False)


def _refuse_fraction(eval_fraction: float, why: str, works: str) -> None:
    if eval_fraction:
        raise ConfigError(
            f"eval_fraction={eval_fraction}: holds out rows of a stream with a length, and {why}; "
            f"works: {works} in train() with eval_fraction=0"
        )


def _stream_of(rows: OwnRows, samples: Samples, config: StreamConfig, is_endless: bool) -> Stream:
    own_identity = getattr(samples, "identity", None)
    identity: Identity = {"stream": "own", "max_target_length": config.max_target_length}
    if rows.split.fraction:
        identity["held_out"] = rows.split.rule
    identity |= (
        {"first sample": fingerprint([rows.batch([0])])}
        if own_identity is None
        else dict(own_identity)
    )
    read_ahead = ReadAhead(config.grain_worker_count, config.grain_prefetch_buffer_size)
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    return Stream(
        rows, tokenizer, identity, rows.num_rows, is_endless=is_endless, read_ahead=read_ahead
    )


class OwnRows:
    """The rows of a user's samples, checked and completed one by one.

    Args:
      argument: the argument of `train` that gives them, for messages.
      split: the share of the samples that is held out.
      held_out: whether these are the held-out ones.

    Raises:
      ConfigError: there are none, the share holds out none, or the first or the last one cannot be
        used.
    """

    def __init__(
        self,
        samples: Samples,
        config: StreamConfig,
        argument: str,
        split: HeldOutFraction = _NONE,
        held_out: bool = False,
    ) -> None:
        self._samples, self.row_length, self._vocab_size = (
            samples,
            config.max_target_length,
            config.vocab_size,
        )
        self._argument, self.split, self._held_out = argument, split, held_out
        self.num_rows: int | None = None
        if isinstance(samples, Sized):
            total = len(samples)
            if not total:
                raise ConfigError(f"{argument}: holds no samples; works: at least one")
            split.refuse_empty(total, "samples")
            self.num_rows = split.count(total, held_out)
        self.batch([0] if self.num_rows is None else [0, self.num_rows - 1])

    def place(self, index: int) -> SampleOrigin:
        if self.num_rows is None:
            return SampleOrigin(0, index)
        epoch, number = divmod(index, self.num_rows)
        return SampleOrigin(
            epoch, self.split.record(number, self._held_out) if self.split.fraction else number
        )

    def documents(self, index: int) -> list[RowDocument]:
        return []

    def again(self, indices: Sequence[int], first: int, end: int) -> list[int]:
        """Returns none: what repeats in a user's samples is not known."""
        return []

    def batch(self, indices: Indices) -> RowArrays:
        """Returns samples by their indices, arrays [n, L]."""
        rows = [self._row(self.place(int(index)).row) for index in indices]
        empty = {"tokens": np.int32, "segments": np.int32, "weights": np.float32}
        if not rows:
            return {name: np.zeros((0, self.row_length), dtype) for name, dtype in empty.items()}
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def lengths(self, indices: Indices) -> np.ndarray:
        """Returns the tokens of samples by their indices: int64[n]."""
        counts: np.ndarray = np.count_nonzero(self.batch(indices)["segments"], axis=1)
        return counts

    def stats(self) -> dict[str, object]:
        """Returns the figures of an epoch that are known without reading it."""
        return {
            "samples": self.num_rows,
            "slots": self.num_rows and self.num_rows * self.row_length,
        }

    def _row(self, index: int) -> RowArrays:
        sample = self._read(index)
        row = sample if isinstance(sample, Mapping) else {"tokens": sample}
        if "tokens" not in row:
            raise ConfigError(
                f"{self._at(index)}: has no tokens; works: {{'tokens': int32[{self.row_length}]}}"
            )
        tokens = self._whole_numbers(index, "tokens", row["tokens"])
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ConfigError(
                f"{self._at(index)}: tokens from {tokens.min()} to {tokens.max()} must be at "
                f"least 0 and below vocab_size={self._vocab_size}; works: "
                f"vocab_size={max(2, int(tokens.max()) + 1)}"
            )
        segments = self._whole_numbers(index, "segments", row.get("segments", np.ones_like(tokens)))
        if segments.min() < 0 or segments.max() > _LAST_SEGMENT:
            raise ConfigError(
                f"{self._at(index)}: segments must be 1, 2, ... per document, and 0 at padding"
            )
        begins = np.diff(segments, prepend=-1) != 0
        weights = self._array(index, "weights", row.get("weights", ~begins & (segments > 0)))
        if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all():
            raise ConfigError(
                f"{self._at(index)}: weights must be finite numbers; works: "
                f"float32[{self.row_length}]"
            )
        return {
            "tokens": tokens.astype(np.int32),
            "segments": segments.astype(np.int32),
            "weights": weights.astype(np.float32),
        }

    def _at(self, index: int) -> str:
        return f"{self._argument}[{index}]"

    def _read(self, index: int) -> Mapping[str, ArrayLike] | ArrayLike:
        """Returns a sample; an error of the user's code gets a note that names the stream."""
        try:
            return self._samples[index]
        except StopIteration as error:  # would end the reading thread in silence
            raise RuntimeError(
                f"{self._at(index)}: {code_name(self._samples)} raised StopIteration"
            ) from error
        except Exception as error:
            error.add_note(
                f"maxbatch: raised by the {self._argument} {code_name(self._samples)}, as "
                f"{self._at(index)}"
            )
            raise

    def _whole_numbers(self, index: int, name: str, value: ArrayLike) -> np.ndarray:
        array = self._array(index, name, value)
        if array.dtype.kind not in "iu":
            raise ConfigError(
                f"{self._at(index)}: {name} of type {array.dtype} must be whole numbers; "
                f"works: int32[{self.row_length}]"
            )
        return array

    def _array(self, index: int, name: str, value: ArrayLike) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError as error:  # a list of lists of several lengths
            raise ConfigError(
                f"{self._at(index)}: {name} is no array ({one_line(error)})"
            ) from error
        if array.shape != (self.row_length,):
            raise ConfigError(
                f"{self._at(index)}: {name} of shape {array.shape} must be ({self.row_length},), "
                f"a row of max_target_length={self.row_length} tokens"
                + (
                    f"; works: max_target_length={array.size}"
                    if array.ndim == 1 and array.size > 1
                    else ""
                )
            )
        return array
