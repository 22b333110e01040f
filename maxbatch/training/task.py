"""The interface of a task: what a session (`maxbatch.training.session`) trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from maxbatch.model.flops import model_flops_per_token
from maxbatch.parallel.agreement import check_agreed
from maxbatch.plan.batch import BatchPlan, Resume
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.runs.position import Position
from maxbatch.training.update.state import TrainState
from maxbatch.training.update.step import StepMetrics
from maxbatch.training.update.update_config import UpdateConfig
from maxbatch.training.weights.checkpoints import model_identity


class TaskData(NamedTuple):
    """The data of a task."""

    identity: Mapping[str, object]  # the keys and facts that a resume must agree with
    samples_per_epoch: int | None  # None for a mixture, which has no epoch of its own
    num_loading_hosts: int = 1  # hosts that read them
    unit: str = "samples"  # what `samples_seen` counts


def check_same_data(stated: str, own: Mapping[str, object]) -> None:
    """Checks that all hosts read the same data; all of them call it.

    Args:
      stated: the key of the data and its value, as a message repeats them.
      own: the identity of the data of this host; of the first host's if another one reads them.

    Raises:
      ConfigError: the data of some hosts differ.
    """
    check_agreed({key: str(value) for key, value in own.items()}, "give every host the same files", f"{stated}: ")


class TaskModel(NamedTuple):
    """The model of a task."""

    identity: Mapping[str, object]  # identity that a resume must match
    flops_per_token: int  # of training, forward and backward


def model_of(config: UpdateConfig) -> TaskModel:
    """Returns the model that the config describes."""
    return TaskModel(model_identity(config), model_flops_per_token(config))


class Dispatched(NamedTuple):
    """An update under way: its plan, and metrics that may not be computed yet."""

    planned: PlannedStep
    micro_batch_size: int
    num_micro_batches: int
    learning_rate: float
    data_wait_s: float  # time that the update waited for its batch
    metrics: StepMetrics
    figures: Mapping[str, object] = {}  # further fields of its record, by name


class Start(NamedTuple):
    """The position from which a run continues, and its plan from there."""

    plan: BatchPlan
    position: Position
    ahead: str | None = None  # what the task saved there for the batches ahead


class TaskBatch(Protocol):
    """The input of one update."""

    @property
    def planned(self) -> PlannedStep:
        """The update that it is for."""


B = TypeVar("B", bound=TaskBatch)


class Task(Protocol[B]):
    """The batches of a run, and the update that each of them takes.

    The methods are called in this order, all but `step`, `evaluate` and `executable` at most once.

    Attributes:
      data: the data of the run.
      model: the model of the run.
      start: the config key and the path of the source of the first parameters; an empty path if they are made.
      mesh: the mesh of the devices that train, from `build` on.
      abstract: shapes and shardings of the state, from `build` on.
      takes_turns: whether an update must end before the next one is dispatched.
      evaluates: whether there is anything to evaluate, from `prepare` on.
      has_eval_loss: whether an eval has a loss on held-out data, from `open_held_out` on.
    """

    data: TaskData
    model: TaskModel
    mesh: Mesh
    abstract: TrainState
    takes_turns: bool
    evaluates: bool
    has_eval_loss: bool

    @property
    def start(self) -> tuple[str, str]: ...

    def plan(self, resume: Resume) -> BatchPlan:
        """Plans the batch from a position on; also called a second time, for the position of an older checkpoint."""

    def build(self, plan: BatchPlan) -> None:
        """Builds the mesh and abstract state from the plan; compiles nothing."""

    def open_held_out(self) -> None:
        """Opens the held-out data, unless the config has no eval; not called where no update is left."""

    def identities(self) -> dict[str, str]:
        """Returns the content of what this host reads besides its training data, by name, if an update is left.

        Where another host reads a part, it has the first host's.
        """

    def open_start(self, start: Start, is_new: bool) -> None:
        """Opens the source of the first parameters if this start reads it: not before the warm start of a new run."""

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Returns a compiled program."""

    def feed(self, start: Start) -> AbstractContextManager[Iterable[B]]:
        """Opens the batches of the updates ahead."""

    def introduction(self, plan: BatchPlan) -> Iterable[str]:
        """Returns lines to print before the run starts."""

    def prepare(self, restored: TrainState | None, start: Start) -> TrainState:
        """Returns the state to start from, a restored or a first one, once the first update is compiled."""

    def step(self, state: TrainState, batch: B, settings: UpdateSettings) -> tuple[TrainState, Dispatched]:
        """Dispatches one update."""

    def compile_rest(self) -> None:
        """Starts compiling in the background the programs that training needs after its first update."""

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, object]:
        """Returns figures of the state after `step` updates, by the names of the metrics."""

    def ahead(self) -> str | None:
        """Returns what a checkpoint must hold for the batches ahead besides state and position; None: nothing."""

    def conclusion(self, state: TrainState) -> Iterable[str]:
        """Returns lines to print once the run is complete."""

    def why_untrained(self) -> str:
        """Returns the reason why no update of the run had anything to train on, and a remedy."""
