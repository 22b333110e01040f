"""Updates of a run, taken again: their figures, their samples, and where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxbatch.around.replay.comparison import Compared, computes_exactly
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.sample_gradients import Sample, samples
from maxbatch.around.replay.stream_task import Documents
from maxbatch.around.replay.task import Content
from maxbatch.around.replay.token_losses import token_losses
from maxbatch.around.replay.updates import Before, updates
from maxbatch.plan.holes import Holes
from maxbatch.plan.skip_samples import holes_of, names_file
from maxbatch.run.folder.hashes_file import differing_arrays, in_words
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.system.terminal.warning import note


class Wanted(NamedTuple):
    """What a replay shows.

    Attributes:
      step: the update.
      around: the number of updates before it that are shown too.
      top: the number of samples of an update, those that pull the most; None: all.
      has_losses: whether every token has its loss.
    """

    step: int
    around: int = 0
    top: int | None = None
    has_losses: bool = False


class ShownSample(NamedTuple):
    """A sample of an update, or a response, and its content."""

    sample: Sample
    content: Content

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        return {**dataclasses.asdict(self.sample), **self.content.to_json()}


class ShownUpdate(NamedTuple):
    """An update that was taken again."""

    figures: Compared
    samples: list[ShownSample]  # in the order of the stream, or the largest pull first

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        shown = [sample.to_json() for sample in self.samples]
        return {**self.figures._asdict(), "samples": shown}


class Replayed(NamedTuple):
    """A replay."""

    before: list[ShownUpdate]  # the updates before it that are shown
    update: ShownUpdate
    # what the run leaves out, the own numbers of these samples, and of those ahead with their rows
    skip_samples: str
    differences: list[str]  # from the recorded updates up to this one, in words
    start: str  # what it was taken again from

    @property
    def shown(self) -> list[ShownUpdate]:
        """The updates that are shown, in order."""
        return [*self.before, self.update]

    @property
    def stores(self) -> list[str]:
        """The stores that do not state the files of their documents."""
        contents = (sample.content for update in self.shown for sample in update.samples)
        stores = {
            document.store
            for content in contents
            if isinstance(content, Documents)
            for document in content.documents
        }
        return sorted(store for store in stores if store is not None)

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        before = {"before": [update.to_json() for update in self.before]} if self.before else {}
        return {**self.update.to_json(), "skip_samples": self.skip_samples, **before}


def replay(
    run: RecordedRun,
    checkpoint: int | None,
    wanted: Wanted,
    devices: Sequence[jax.Device] | None = None,
) -> Replayed:
    """Takes the updates of a run from a checkpoint to the wanted one again.

    Args:
      checkpoint: its step; None: the first parameters.
      devices: those to compute on; None: all at hand.

    Raises:
      ConfigError: the run, its data or the checkpoint cannot be used.
    """
    differences, shown_updates, begin = list[str](), list[ShownUpdate](), None
    own_numbers, skip_samples, is_exact = list[int](), "", True
    for update in updates(run, checkpoint, wanted.step, devices or jax.devices()):
        if isinstance(update, Before):
            begin = update.samples_seen if begin is None else begin
            shown_samples = list[ShownSample]()
            if update.planned.step >= wanted.step - wanted.around:
                shown_samples = _shown_samples(update, wanted)
                own_numbers += [shown.sample.index for shown in shown_samples]
            if update.planned.step == wanted.step:
                skip_samples = _again(run, update, own_numbers, begin)
            continue
        is_exact = is_exact and computes_exactly(update.config)
        step = update.line[Metric.STEP]
        if step not in run.lines:  # a hole in metrics.jsonl
            note(f"update {step} has no line in {run.named}, and is not compared")
            continue
        compared = Compared.of(update.line, run.line(step))
        recorded = run.hashes.get(step, {})
        arrays = differing_arrays(update.hashes, recorded) if update.hashes and recorded else []
        if difference := compared.difference(is_exact) or _of_arrays(arrays):
            differences.append(f"update {compared.step} differs: {difference}")
        if compared.step >= wanted.step - wanted.around:
            shown_updates.append(ShownUpdate(compared, shown_samples))
    start = "the first parameters" if checkpoint is None else f"checkpoint {checkpoint}"
    *before, last = shown_updates
    return Replayed(before, last, skip_samples, differences, start)


def _of_arrays(names: list[str]) -> str | None:
    return f"{in_words(names)}, to the last bit" if names else None


def _shown_samples(update: Before, wanted: Wanted) -> list[ShownSample]:
    rows = update.rows
    measured = list(enumerate(samples(rows, update.state)))
    if wanted.top is not None:
        measured = sorted(measured, key=lambda placed: -placed[1].pull)[: wanted.top]
    places, losses = [place for place, _ in measured], None
    if wanted.has_losses and places:
        arrays = {name: array[places] for name, array in rows.arrays.items()}
        losses = token_losses(rows.measuring, update.state, arrays)
    contents = rows.contents(places, losses)
    return [
        ShownSample(sample, content)
        for (_, sample), content in zip(measured, contents, strict=True)
    ]


def _again(run: RecordedRun, update: Before, numbers: list[int], begin: int) -> str:
    """Returns `skip_samples` of the run's last session with the own numbers from sample `begin` to
    the end of the run that have the rows of some samples; without the former if a file states it.
    """
    skipped = holes_of(run.config.stream, is_kept=False)
    total = update.task.total_samples(run)
    again, begin = list(numbers), update.task.holes.own_number(begin)
    left_out = 0  # in a row, of those that were looked at last
    # A run of so many samples ends later in the stream when more of them are left out; if all rows
    # of the data are, it never ends.
    while left_out <= total and begin < (
        end := skipped.merged_with(_holes(again)).position_after(total)
    ):
        returning = update.task.again(numbers, begin, end)
        left_out = left_out + end - begin if len(returning) == end - begin else 0
        again += returning
        begin = end
    new = _holes(again)
    return (new if names_file(run.config.skip_samples) else skipped.merged_with(new)).text


def _holes(own_numbers: list[int]) -> Holes:
    return Holes((number, number + 1) for number in own_numbers)
