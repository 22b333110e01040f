"""Updates of `maxbatch train`, taken again: their rows are samples of the stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from maxbatch.around.replay.documents import SampleDocument, documents_of
from maxbatch.around.replay.recorded_run import RecordedRun, Segment
from maxbatch.around.replay.task import (
    Measuring,
    OpenedTask,
    Pieces,
    ReplayedTask,
    TaskKind,
    UpdateRows,
    recorded_plan,
)
from maxbatch.around.replay.token_losses import pieces_of_text
from maxbatch.config.values import Value, first_of
from maxbatch.data.feed.feed import StagedBatch
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.rows import RowArrays
from maxbatch.data.stream.stream import Stream
from maxbatch.plan.batch import BatchPlan, ResumePoint
from maxbatch.plan.place import Place
from maxbatch.run.context import RunContext
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import Position
from maxbatch.run.pretraining import (
    OpenedPretraining,
    PlannedPretraining,
    RunningPretraining,
    open_pretraining,
)
from maxbatch.run.taking_over import position_taken_over
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.update.state import TrainState

_MOST_DOCUMENTS = 3  # named in a row of the table


class Documents(NamedTuple):
    """The documents that a sample holds (`maxbatch.around.replay.task.Content`)."""

    documents: list[SampleDocument]
    losses: list[Pieces]  # of each document; empty if they are not known

    def to_json(self) -> dict[str, object]:
        """Returns its fields of an object of `maxbatch replay --json`."""
        return {"documents": [document.to_json() for document in self.documents]}

    @property
    def cells(self) -> Mapping[str, str]:
        """Its cells of the table on the terminal, by column."""
        places = [str(document) for document in self.documents if str(document)]
        return {"documents": first_of(places, _MOST_DOCUMENTS)}

    @property
    def title(self) -> str:
        """What the page adds to the number of the sample: nothing."""
        return ""

    @property
    def texts(self) -> Iterator[tuple[str, Pieces]]:
        """Its texts on the page, each with the place that it came from."""
        for number, document in enumerate(self.documents):
            place = f"{document}, from token {document.offset}" if str(document) else ""
            yield place, self.losses[number] if self.losses else [(document.text, None)]


@dataclasses.dataclass(frozen=True, eq=False)
class StreamTask(ReplayedTask):
    """Pre-training, planned from a position on."""

    segment: Segment
    opened: OpenedPretraining
    planned: PlannedPretraining
    measuring: Measuring

    def before(
        self, running: RunningPretraining, state: TrainState, batch: StagedBatch
    ) -> tuple[StagedBatch, UpdateRows]:
        """Returns the batch and its rows."""
        planned, shape = batch.planned, batch.shape
        seen, count = planned.first_sample, planned.num_rows
        if packs := self.planned.programs.packs:  # samples that share rows have a row each here
            assert running.stream is not None, "this process loads data"
            arrays = running.stream.read(seen, seen + count)
            of_pass = shape.micro_batch // packs
            shape = BatchShape(of_pass, -(-count // of_pass))
            staged, num_passes = self.measuring.stage(arrays, shape), shape.max_micro_batches
        else:
            arrays = _rows_of(batch)
            staged, num_passes = batch.batch, batch.num_micro_batches
        rows = UpdateRows(
            self.measuring,
            staged,
            shape,
            num_passes,
            arrays,
            self.opened.data.holes.own_numbers(range(seen, seen + count)),
            partial(self._contents, arrays, seen),
        )
        return batch, rows

    def _contents(
        self, arrays: RowArrays, seen: int, places: Sequence[int], losses: np.ndarray | None
    ) -> list[Documents]:
        rows = {name: array[list(places)] for name, array in arrays.items()}
        documents = documents_of(self._stream, [seen + place for place in places], rows)
        pieces: list[list[Pieces]] = [[] for _ in places]
        if losses is not None:
            pieces = _pieces(self._stream, rows, losses)
        return [Documents(*fields) for fields in zip(documents, pieces, strict=True)]

    def again(self, own_numbers: Sequence[int], first: int, end: int) -> list[int]:
        """Returns the own numbers among `first` to `end` - 1 with the rows of some samples."""
        return self._stream.again(own_numbers, first, end)

    def total_samples(self, run: RecordedRun) -> int:
        """Returns the samples of a whole run, as its last session states its length."""
        last = max(run.lines)
        (segment,) = run.segments(last, last)
        point = ResumePoint(last, Place(run.lines[last][Metric.SAMPLES_SEEN]))
        total = recorded_plan(segment, self.opened.data.samples_per_epoch, point).total_samples
        assert total is not None, "data that are here have known epochs"
        return total

    @property
    def _stream(self) -> Stream:
        assert self.opened.stream is not None, "this process loads data"
        return self.opened.stream


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedStream(OpenedTask):
    """Pre-training whose data are open."""

    segment: Segment
    opened: OpenedPretraining

    @classmethod
    def of(cls, segment: Segment, context: RunContext) -> OpenedStream:
        """Opens the data of a segment."""
        return cls(segment, open_pretraining(context, concludes=False))

    def source(self, run: RecordedRun) -> tuple[str, str]:
        """Returns the config key and the path of the first parameters."""
        return self.opened.source

    def first_position(self, origin: RunOrigin) -> Position:
        """Returns the position that the run began at: 0, or where the MaxText run stood that it
        took over.
        """
        config = self.segment.config
        source = origin.source() if config.load_full_state_path else None
        if not isinstance(source, ForeignState):
            return Position()
        start = config.start_samples
        return position_taken_over(
            config.plan,
            None if start is None else int(start),
            source,
            lambda: self.opened.plan(ResumePoint()).plan,
        )

    def planned_from(
        self, run: RecordedRun, position: Position, hosts: tuple[int | None, int | None]
    ) -> StreamTask:
        """Plans the recorded run's batches from a position on, cut for the devices at hand."""
        opened = self.opened
        planned = opened.planned_as(self._plan(position, hosts))
        placement = planned.programs.placement
        measuring = Measuring(
            opened.keys,
            planned.programs.mesh,
            opened.objective,
            opened.context.config.max_target_length,
            placement.arrange,
            lambda rows, shape: placement.stage(rows, len(rows["tokens"]), shape),
        )
        return StreamTask(self.segment, opened, planned, measuring)

    def _plan(self, position: Position, hosts: tuple[int | None, int | None]) -> BatchPlan:
        point = ResumePoint(position.step, position.place, *hosts)
        plan = recorded_plan(self.segment, self.opened.data.samples_per_epoch, point)
        # as many rows per device as the run had in one pass
        num_devices = len(self.opened.context.devices)

        def here(rows: int) -> int:
            return max(1, rows // plan.num_devices) * num_devices

        passes, keys = here(plan.micro_batch_size_to_train_on), self.opened.keys
        per_sample = keys.recipe.rows_per_sample if keys.max_tokens_per_pass else 1
        cut = tuple(
            stage._replace(
                micro_batch=passes,
                accumulation_steps=-(-stage.batch * per_sample // passes),
            )
            for stage in plan.manager.split_stages
        )
        manager = dataclasses.replace(plan.manager, split_stages=cut)
        return dataclasses.replace(
            plan, manager=manager, eval_batch_size=here(plan.eval_batch_size)
        )


def _rows_of(batch: StagedBatch) -> RowArrays:
    """Returns the rows of a staged batch, in the order of the stream: arrays [B, L]."""
    arrays = {
        name: np.asarray(array)
        for name, array in batch.batch._asdict().items()
        if array is not None
    }
    return {
        name: array.reshape(-1, array.shape[-1])[: batch.planned.num_rows]
        for name, array in arrays.items()
    }


def _pieces(stream: Stream, rows: RowArrays, losses: np.ndarray) -> list[list[Pieces]]:
    """Returns the pieces of text of each document of each sample."""
    pieces_by_sample = list[list[Pieces]]()
    for tokens, segments, of_sample in zip(rows["tokens"], rows["segments"], losses, strict=True):
        masks = (segments == number for number in range(1, int(segments.max(initial=0)) + 1))
        pieces_by_sample.append(
            [
                pieces_of_text(stream.tokenizer.decode, tokens[mask], of_sample[mask])
                for mask in masks
            ]
        )
    return pieces_by_sample


def _keys_here(segment: Segment, num_devices: int) -> dict[str, Value]:
    """Returns the keys of a row a sample, which is the same update as samples that share rows, but
    not to the last bit.
    """
    budget = segment.config.max_tokens_per_pass
    if budget is None or segment.config.reproducible_sums:
        return {}
    rows = int(budget) // segment.config.max_target_length
    return {"max_tokens_per_pass": None, "per_device_batch_size": rows}


STREAM = TaskKind(_keys_here, OpenedStream.of)
