"""One update of a run, taken again: its figures, its samples, and where it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxbatch.around.replay.comparison import Compared, computes_exactly
from maxbatch.around.replay.documents import SampleDocument, documents_of
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.sample_gradients import Sample, samples
from maxbatch.around.replay.updates import Before, end_of, rows_of, updates
from maxbatch.plan.holes import Holes
from maxbatch.plan.skip_samples import holes_of, names_file
from maxbatch.run.folder.metrics_schema import Metric


class ShownSample(NamedTuple):
    """A sample of an update, and the documents that it holds."""

    sample: Sample
    documents: list[SampleDocument]

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        return {
            **dataclasses.asdict(self.sample),
            "documents": [document.to_json() for document in self.documents],
        }


class Replayed(NamedTuple):
    """An update that was taken again."""

    update: Compared
    samples: list[ShownSample]  # in the order of the stream, or the largest share first
    # what the run leaves out, the own numbers of these samples, and of those ahead with their rows
    skip_samples: str
    differences: list[str]  # from the recorded updates up to this one, in words
    start: str  # what it was taken again from

    @property
    def stores(self) -> list[str]:
        """The stores that do not state the files of their documents."""
        documents = [document for shown in self.samples for document in shown.documents]
        return sorted({document.store for document in documents if document.store is not None})

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        return {
            **self.update._asdict(),
            "samples": [sample.to_json() for sample in self.samples],
            "skip_samples": self.skip_samples,
        }


def replay(
    run: RecordedRun,
    checkpoint: int | None,
    step: int,
    top: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Replayed:
    """Takes the updates of a run from a checkpoint to `step` again.

    Args:
      checkpoint: its step; None: the first parameters.
      top: the number of samples to keep, those with the largest share; None: all.
      devices: those to compute on; None: all at hand.

    Raises:
      ConfigError: the run, its data or the checkpoint cannot be used.
    """
    differences, largest, begin = list[str](), list[Sample](), None
    shown, skip_samples = list[ShownSample](), ""
    is_exact = computes_exactly(run.config)
    for update in updates(run, checkpoint, step, devices or jax.devices()):
        if isinstance(update, Before):
            begin = update.planned.first_sample if begin is None else begin
            if update.planned.step == step:
                largest = _largest(list(samples(update)), top)
                shown = _with_documents(update, largest)
                skip_samples = _again(run, update, largest, begin)
            continue
        compared = Compared.of(update.line, run.line(update.line[Metric.STEP]))
        if difference := compared.difference(is_exact):
            differences.append(f"update {compared.step} differs: {difference}")
    start = "the first parameters" if checkpoint is None else f"checkpoint {checkpoint}"
    return Replayed(compared, shown, skip_samples, differences, start)


def _largest(measured: list[Sample], top: int | None) -> list[Sample]:
    return measured if top is None else sorted(measured, key=_share, reverse=True)[:top]


def _share(sample: Sample) -> float:
    return float("-inf") if sample.share is None else sample.share


def _with_documents(update: Before, measured: list[Sample]) -> list[ShownSample]:
    stream = update.task.opened.stream
    assert stream is not None, "this process loads data"
    indices = [stream.holes.kept_before(sample.index) for sample in measured]
    places = [index - update.planned.first_sample for index in indices]
    rows = {name: array[places] for name, array in rows_of(update.batch).items()}
    documents = documents_of(stream, indices, rows)
    return [ShownSample(*pair) for pair in zip(measured, documents, strict=True)]


def _again(run: RecordedRun, update: Before, measured: list[Sample], begin: int) -> str:
    """Returns `skip_samples` of the run's last session with the own numbers from sample `begin` to
    the end of the run that have the rows of some samples; without the former if a file states it.
    """
    opened = update.task.opened
    assert opened.stream is not None, "this process loads data"
    skipped = holes_of(run.config.stream, is_kept=False)
    total = end_of(run, opened.data.samples_per_epoch)
    numbers = [sample.index for sample in measured]
    again, begin = list(numbers), opened.data.holes.own_number(begin)
    # A run of so many samples ends later in the stream when more of them are left out.
    while begin < (end := skipped.merged_with(_holes(again)).position_after(total)):
        again += opened.stream.again(numbers, begin, end)
        begin = end
    new = _holes(again)
    return (new if names_file(run.config.skip_samples) else skipped.merged_with(new)).text


def _holes(own_numbers: list[int]) -> Holes:
    return Holes((number, number + 1) for number in own_numbers)
