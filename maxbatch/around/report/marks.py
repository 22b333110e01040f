"""The marked updates of a run: the skipped ones, and those behind holes of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric, SkipReason
from maxbatch.system.terminal.folding import counted


class Mark(NamedTuple):
    """An update that is marked."""

    place: int  # index of its record
    step: int
    reason: SkipReason | None  # None: it was not skipped
    left_out: int  # samples in holes before or within the update
    first: int  # own number of the first sample behind the update before
    end: int  # one more than the own number of the update's last sample

    @property
    def words(self) -> str:
        """The mark in words."""
        words = [] if self.reason is None else [_WORDS[self.reason]]
        if self.left_out:
            samples = counted(self.left_out, "sample")
            words.append(f"hole: {samples} left out of {self.first:,} to {self.end - 1:,}")
        return "; ".join(words)

    @property
    def columns(self) -> list[str]:
        """The columns of `COLUMNS` that it is drawn in."""
        reason = [] if self.reason is None else [_WORDS[self.reason]]
        return [*reason, *([HOLE] if self.left_out else [])]


_WORDS = {SkipReason.SPIKE: "spike", SkipReason.NON_FINITE: "not finite"}
HOLE = "hole"
# Columns of the marks, with the style in which they are drawn and a sentence about it.
COLUMNS = {
    _WORDS[SkipReason.SPIKE]: ("stars", "Stars: skipped spikes, at their loss."),
    _WORDS[SkipReason.NON_FINITE]: (
        "squares",
        "Squares: skipped updates that are not finite, at the mean where they have no loss.",
    ),
    HOLE: ("triangles", "Triangles: updates behind holes of skip_samples, at the mean."),
}


def find_marks(records: Sequence[Record]) -> list[Mark]:
    """Returns the marked updates, oldest first.

    A line of an older version has no `skip_reason`, where only updates that are not finite were
    skipped, and no `stream_position`, where a stream had no holes.
    """
    marks: list[Mark] = []
    if not records:
        return marks
    seen_before = position_before = 0
    if records[0][Metric.STEP] > 1:  # of a run that took another's place: no line of that one
        seen_before, position_before = _positions(records[0])
    for index, record in enumerate(records):
        reason = None
        if record.get(Metric.SKIPPED):
            is_spike = record.get(Metric.SKIP_REASON) == SkipReason.SPIKE
            reason = SkipReason.SPIKE if is_spike else SkipReason.NON_FINITE
        seen, position = _positions(record)
        left_out = max(0, (position - position_before) - (seen - seen_before))
        if reason is not None or left_out:
            marks.append(
                Mark(index, record[Metric.STEP], reason, left_out, position_before, position)
            )
        seen_before, position_before = seen, position
    return marks


def _positions(record: Record) -> tuple[int, int]:
    """Returns the samples trained on, and the position in the stream with all samples."""
    seen: int = record[Metric.SAMPLES_SEEN]
    return seen, record.get(Metric.STREAM_POSITION, seen)


def counts_of(marks: Sequence[Mark]) -> str:
    """Returns the numbers of marks in words."""
    reasons = [mark.reason for mark in marks if mark.reason is not None]
    counts = []
    if reasons:
        kinds = (
            f"{count:,} {_WORDS[reason]}{'s' if reason == SkipReason.SPIKE and count > 1 else ''}"
            for reason in _WORDS
            if (count := reasons.count(reason))
        )
        counts.append(f"{counted(len(reasons), 'skipped update')} ({', '.join(kinds)})")
    left_out = [mark.left_out for mark in marks if mark.left_out]
    if left_out:
        samples = counted(sum(left_out), "sample")
        counts.append(f"{counted(len(left_out), 'update')} behind holes ({samples} left out)")
    return ", ".join(counts)


def newest(marks: Sequence[Mark], most: int) -> list[Mark]:
    """Returns the newest marks, skipped updates before those that only have a hole."""
    return sorted(marks, key=lambda mark: (mark.reason is None, -mark.step))[:most]
