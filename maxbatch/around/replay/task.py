"""A task whose updates are taken again, and the rows of an update.

Shapes: A passes of M rows, B rows of an update, L tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from maxbatch.around.replay.recorded_run import RecordedRun, Segment
from maxbatch.config.combined import UpdateConfig
from maxbatch.config.values import Value
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.rows import RowArrays
from maxbatch.plan.batch import BatchPlan, ResumePoint
from maxbatch.plan.holes import Holes
from maxbatch.plan.mesh_shape import AXES, axis_key
from maxbatch.run.context import RunContext
from maxbatch.run.folder.position import Position
from maxbatch.run.task import Opened, Planned, TaskData, TaskModel
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.update.gradients import Objective
from maxbatch.update.state import TrainState

Pieces = Sequence[tuple[str, float | None]]  # texts of tokens, each with its loss if it is known

# How every run was laid out, which an update does not depend on.
LAYOUT = (
    *(axis_key(net, axis) for net in ("ici", "dcn") for axis in AXES),
    "num_pipeline_microbatches",
    "num_pipeline_repeats",
    "expansion_factor_real_data",
    "attention",
    "context_parallel_strategy",
    "context_parallel_load_balance",
    "compiled_dir",
)


class Content(Protocol):
    """The content of a row of an update, in words."""

    def to_json(self) -> dict[str, object]:
        """Returns its fields of an object of `maxbatch replay --json`."""

    @property
    def cells(self) -> Mapping[str, str]:
        """Its cells of the table on the terminal, by column."""

    @property
    def title(self) -> str:
        """What the page adds to the number of the row's sample."""

    @property
    def texts(self) -> Iterator[tuple[str, Pieces]]:
        """Its texts on the page, each with a line above it; "": none."""


@dataclass(frozen=True, eq=False)
class Measuring:
    """How the gradients of a task's rows are measured on its devices."""

    keys: UpdateConfig
    mesh: Mesh
    objective: Objective
    length: int  # L
    # of the number of rows in a pass: what turns a staged pass into rows to train on
    arrange: Callable[[int], Callable[[Any], Any]]
    # puts rows [n, L] on the devices, as passes [A, M, L] of a shape
    stage: Callable[[RowArrays, BatchShape], Any]


class UpdateRows(NamedTuple):
    """The rows that an update trains on."""

    measuring: Measuring
    batch: Any  # on the devices, [A, M, L]
    shape: BatchShape
    num_passes: int  # A of them are trained on
    arrays: RowArrays  # the same rows on this host, in the order of the stream: [B, L]
    own_numbers: Sequence[int]  # of their samples in the stream
    # of some of the rows, with the losses of their tokens: float32, in the shape of these rows
    contents: Callable[[Sequence[int], np.ndarray | None], Sequence[Content]]


class ReplayedTask(ABC):
    """A task planned from a position on, whose updates are taken again."""

    opened: Opened[Any]
    planned: Planned[Any]

    @property
    def holes(self) -> Holes:
        """The holes of the stream."""
        return self.opened.data.holes

    @abstractmethod
    def before(self, running: Any, state: TrainState, batch: Any) -> tuple[Any, UpdateRows]:
        """Returns the batch of an update, as the running task takes it, and its rows."""

    @abstractmethod
    def again(self, own_numbers: Sequence[int], first: int, end: int) -> list[int]:
        """Returns the own numbers among `first` to `end` - 1 with the rows of some samples."""

    @abstractmethod
    def total_samples(self, run: RecordedRun) -> int:
        """Returns the samples of a whole run, as its last session states its length."""


class OpenedTask(ABC):
    """A task whose data are open, before it is planned."""

    opened: Opened[Any]

    @property
    def data(self) -> TaskData:
        """The data of the run."""
        return self.opened.data

    @property
    def model(self) -> TaskModel:
        """The model of the run."""
        return self.opened.model

    @abstractmethod
    def source(self, run: RecordedRun) -> tuple[str, str]:
        """Returns the config key and the path of the first parameters; an empty path if they are
        made.
        """

    @abstractmethod
    def first_position(self, origin: RunOrigin) -> Position:
        """Returns the position that the run began at."""

    @abstractmethod
    def planned_from(
        self, run: RecordedRun, position: Position, hosts: tuple[int | None, int | None]
    ) -> ReplayedTask:
        """Plans the updates of the segment from a position on."""


class TaskKind(NamedTuple):
    """How the updates of a kind of run are taken again."""

    # keys of a segment's config for a number of devices, besides those of every run (`LAYOUT`)
    keys_here: Callable[[Segment, int], Mapping[str, Value]]
    # opens the data of a segment; the context has its config for the devices at hand
    open: Callable[[Segment, RunContext], OpenedTask]


def recorded_plan(
    segment: Segment, samples_per_epoch: int | None, resume: ResumePoint
) -> BatchPlan:
    """Returns the plan of the recorded run, on its devices."""
    used = segment.devices
    return BatchPlan.from_config(
        segment.config.plan,
        used.num_devices,
        used.num_hosts,
        num_slices=used.num_slices,
        samples_per_epoch=samples_per_epoch,
        resume=resume,
    )
