"""The task of a session: the data that its steps feed on, and the update that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from maxbatch.plan.batch import BatchPlan, Resume
from maxbatch.plan.rampup import PlannedStep
from maxbatch.training.recorder import Dispatched
from maxbatch.training.state import TrainState


class TaskData(NamedTuple):
    """The data of a task.

    Attributes:
      identity: the keys and facts that a resume must agree with.
      samples_per_epoch: None for a mixture, which has no epoch of its own.
      num_loading_hosts: hosts that read them.
      unit: what `samples_seen` counts.
    """

    identity: dict[str, Any]
    samples_per_epoch: int | None
    num_loading_hosts: int = 1
    unit: str = "samples"


class TaskBatch(Protocol):
    """What one update feeds on."""

    @property
    def planned(self) -> PlannedStep:
        """The update that it is for."""


B = TypeVar("B", bound=TaskBatch)


class Task(Protocol[B]):
    """What a session trains: the batches that its steps feed on, and the update that they take.

    The methods are called in this order, all but `step`, `evaluate` and `executable` once.

    Attributes:
      data: what it trains on.
      mesh: the mesh of the devices that train, from `build` on.
      abstract: shapes and shardings of the state, from `build` on.
      takes_turns: whether an update must end before the next one is dispatched.
    """

    data: TaskData
    mesh: Mesh
    abstract: TrainState
    takes_turns: bool

    @property
    def evaluates(self) -> bool:
        """Whether there is held-out data to evaluate, from `prepare` on."""

    def plan(self, resume: Resume) -> BatchPlan:
        """Plans the batch from a position on; also called a second time, for the position of an older checkpoint."""

    def build(self) -> None:
        """Makes what the plan of the session calls for; nothing is compiled yet."""

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """Returns a compiled program."""

    def feed(self) -> AbstractContextManager[Iterable[B]]:
        """Opens the batches of the updates ahead."""

    def prepare(self, restored: TrainState | None) -> TrainState:
        """Returns the state to start from, a restored or a first one, once the first update is compiled."""

    def step(
        self, state: TrainState, batch: B, learning_rate: float, batch_ratio: float
    ) -> tuple[TrainState, Dispatched]:
        """Dispatches one update; `batch_ratio` is its batch over the reference batch."""

    def compile_rest(self) -> None:
        """Starts compiling in the background what training wants after its first update."""

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, Any]:
        """Returns figures of the state after `step` updates, by the names of the metrics."""

    def conclusion(self, state: TrainState) -> Iterable[str]:
        """Returns lines to print once the run is complete."""
