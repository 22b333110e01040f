"""Updates of a run, taken again: their figures, their samples, and where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.around.replay.comparison import Compared, computes_exactly
from maxbatch.around.replay.documents import SampleDocument, documents_of
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.sample_gradients import Sample, samples
from maxbatch.around.replay.token_losses import pieces_of_text, token_losses
from maxbatch.around.replay.updates import Before, end_of, rows_of, updates
from maxbatch.data.stream.stream import Stream
from maxbatch.plan.holes import Holes
from maxbatch.plan.skip_samples import holes_of, names_file
from maxbatch.run.folder.metrics_schema import Metric


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
    """A sample of an update, and the documents that it holds."""

    sample: Sample
    documents: list[SampleDocument]
    # of each document, its text token by token, each with its loss; empty if not asked for
    losses: list[list[tuple[str, float | None]]]

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        return {
            **dataclasses.asdict(self.sample),
            "documents": [document.to_json() for document in self.documents],
        }


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
        stores = {
            document.store
            for update in self.shown
            for sample in update.samples
            for document in sample.documents
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
    own_numbers, skip_samples = list[int](), ""
    is_exact = computes_exactly(run.config)
    for update in updates(run, checkpoint, wanted.step, devices or jax.devices()):
        if isinstance(update, Before):
            begin = update.planned.first_sample if begin is None else begin
            shown_samples = list[ShownSample]()
            if update.planned.step >= wanted.step - wanted.around:
                shown_samples = _shown_samples(update, wanted)
                own_numbers += [shown.sample.index for shown in shown_samples]
            if update.planned.step == wanted.step:
                skip_samples = _again(run, update, own_numbers, begin)
            continue
        compared = Compared.of(update.line, run.line(update.line[Metric.STEP]))
        if difference := compared.difference(is_exact):
            differences.append(f"update {compared.step} differs: {difference}")
        if compared.step >= wanted.step - wanted.around:
            shown_updates.append(ShownUpdate(compared, shown_samples))
    start = "the first parameters" if checkpoint is None else f"checkpoint {checkpoint}"
    *before, last = shown_updates
    return Replayed(before, last, skip_samples, differences, start)


def _shown_samples(update: Before, wanted: Wanted) -> list[ShownSample]:
    stream = update.task.opened.stream
    assert stream is not None, "this process loads data"
    measured = list(samples(update))
    if wanted.top is not None:
        measured = sorted(measured, key=lambda sample: -sample.pull)[: wanted.top]
    indices = [stream.holes.kept_before(sample.index) for sample in measured]
    places = [index - update.planned.first_sample for index in indices]
    rows = {name: array[places] for name, array in rows_of(update.batch).items()}
    documents = documents_of(stream, indices, rows)
    losses: list[list[list[tuple[str, float | None]]]] = [[] for _ in measured]
    if wanted.has_losses:
        losses = _losses_of(stream, rows, token_losses(update, rows))
    return [ShownSample(*fields) for fields in zip(measured, documents, losses, strict=True)]


def _losses_of(
    stream: Stream, rows: dict[str, np.ndarray], losses: np.ndarray
) -> list[list[list[tuple[str, float | None]]]]:
    """Returns the pieces of text of each document of each sample."""
    pieces_by_sample = []
    for tokens, segments, of_sample in zip(rows["tokens"], rows["segments"], losses, strict=True):
        masks = (segments == number for number in range(1, int(segments.max(initial=0)) + 1))
        pieces_by_sample.append(
            [pieces_of_text(stream.tokenizer, tokens[mask], of_sample[mask]) for mask in masks]
        )
    return pieces_by_sample


def _again(run: RecordedRun, update: Before, numbers: list[int], begin: int) -> str:
    """Returns `skip_samples` of the run's last session with the own numbers from sample `begin` to
    the end of the run that have the rows of some samples; without the former if a file states it.
    """
    opened = update.task.opened
    assert opened.stream is not None, "this process loads data"
    skipped = holes_of(run.config.stream, is_kept=False)
    total = end_of(run, opened.data.samples_per_epoch)
    again, begin = list(numbers), opened.data.holes.own_number(begin)
    # A run of so many samples ends later in the stream when more of them are left out.
    while begin < (end := skipped.merged_with(_holes(again)).position_after(total)):
        again += opened.stream.again(numbers, begin, end)
        begin = end
    new = _holes(again)
    return (new if names_file(run.config.skip_samples) else skipped.merged_with(new)).text


def _holes(own_numbers: list[int]) -> Holes:
    return Holes((number, number + 1) for number in own_numbers)
