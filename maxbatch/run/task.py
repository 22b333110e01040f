"""The phases of a task, which a session (`maxbatch.run.session`) leads from one to the next.

Each phase is a frozen value, made by a method of the one before it:

    opened.plan(resume) -> planned      the data are open; what follows from config, devices and
    position is planned planned.build(start) -> built       whatever the updates read is open, and
    whatever can be refused has been built.run(restored, stack) -> running, state      the first
    update is compiled, and the batches are on their way
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from maxbatch.config.combined import UpdateConfig
from maxbatch.model.flops import model_flops_per_token
from maxbatch.parallel.agreement import check_agreed
from maxbatch.plan.batch import BatchPlan, ResumePoint
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.plan.place import Place
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.skip_samples import names_file
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.run.folder.position import Position
from maxbatch.run.weights.checkpoints import model_identity
from maxbatch.run.weights.parameters import FirstParameters
from maxbatch.update.state import TrainState
from maxbatch.update.step import StepMetrics


class TaskData(NamedTuple):
    """The facts of the data that a task trains on."""

    identity: Mapping[str, object]  # the keys and facts that a resume must agree with
    samples_per_epoch: int | None  # None for a mixture, which has no epoch of its own
    num_loading_hosts: int = 1  # hosts that read them
    unit: str = "samples"  # what `samples_seen` counts
    notes: tuple[str, ...] = ()  # records left out, cut or split, and why
    holes: Holes = NO_HOLES  # no part of the identity: those ahead of a position may change

    def holes_read(self, skip_samples: str) -> dict[str, str]:
        """Returns the content of the file that the config names for the holes; empty without."""
        return {"content of skip_samples": self.holes.digest} if names_file(skip_samples) else {}


def check_same_data(key_text: str, identity: Mapping[str, object]) -> None:
    """Checks that all hosts read the same data; all of them call it.

    Args:
      key_text: the key of the data and its value, as a message repeats them.
      identity: the identity of this host's data; of the first host's if another one reads them.

    Raises:
      ConfigError: the data of some hosts differ.
    """
    check_agreed(
        {key: str(value) for key, value in identity.items()},
        "give every host the same files",
        f"{key_text}: ",
    )


class TaskModel(NamedTuple):
    """The facts of the model that a task trains."""

    identity: Mapping[str, object]  # identity that a resume must match
    flops_per_token: int  # of training, forward and backward


def model_of(config: UpdateConfig) -> TaskModel:
    """Returns the model that the config describes."""
    return TaskModel(model_identity(config), model_flops_per_token(config))


class Dispatched(NamedTuple):
    """An update under way: its plan, and metrics that may not be computed yet."""

    planned: PlannedStep
    place: Place  # after it
    micro_batch_size: int
    num_micro_batches: int
    learning_rate: float
    data_wait_s: float  # time that the update waited for its batch
    metrics: StepMetrics
    figures: Mapping[str, object] = {}  # further fields of its record, by name


class Start(NamedTuple):
    """The position from which a run continues, and what it starts from."""

    position: Position
    ahead: bytes | None  # what a checkpoint holds for the batches ahead
    is_new: bool  # whether no state was restored
    parameters: FirstParameters


# takes a step, a name and a text, which is shown beside the metrics
ShowText = Callable[[int, str, str], None]


class TaskBatch(Protocol):
    """The input of one update."""

    @property
    def planned(self) -> PlannedStep:
        """The update that it is for."""


B = TypeVar("B", bound=TaskBatch)


class Opened(Protocol[B]):
    """A task whose data are open."""

    @property
    def data(self) -> TaskData:
        """The data of the run."""

    @property
    def model(self) -> TaskModel:
        """The model of the run."""

    @property
    def source(self) -> tuple[str, str]:
        """The config key and the path of the source of the first parameters; an empty path if they
        are made.
        """

    @property
    def why_untrained(self) -> str:
        """The reason why no update of a run that has ended had anything to train on, and a
        remedy.
        """

    def plan(self, resume: ResumePoint) -> Planned[B]:
        """Plans the run from a position on."""


class Planned(Protocol[B]):
    """A task with its plan from a position on: nothing is compiled."""

    @property
    def plan(self) -> BatchPlan:
        """The plan of its batches."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that train."""

    @property
    def abstract(self) -> TrainState:
        """Shapes and shardings of the state."""

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Returns a compiled program."""

    def build(self, start: Start) -> Built[B]:
        """Opens whatever the updates ahead read besides the training data; all hosts must read the
        same.

        The source of the first parameters is opened if this start reads it, before the warm start
        of a new run not.
        """


class Built(Protocol[B]):
    """A task that has everything that its updates need but a state."""

    @property
    def reads(self) -> Mapping[str, str]:
        """The content of what it reads besides its training data, by name."""

    @property
    def has_eval_loss(self) -> bool:
        """Whether an eval has a loss on held-out data."""

    @property
    def introduction(self) -> Sequence[str]:
        """Lines to print before the run starts."""

    def run(
        self, restored: TrainState | None, show: ShowText, stack: ExitStack
    ) -> tuple[Running[B], TrainState]:
        """Compiles the first update and returns the state to start from: the restored one or a
        first one.

        `show` takes the texts of evals; `stack` ends the feed and closes the files.
        """


class Running(Protocol[B]):
    """A task whose updates are taken."""

    @property
    def feed(self) -> Iterable[B]:
        """The batches of the updates ahead."""

    @property
    def takes_turns(self) -> bool:
        """Whether an update must end before the next one is dispatched."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate."""

    def step(
        self, state: TrainState, batch: B, settings: UpdatePlan
    ) -> tuple[TrainState, Dispatched]:
        """Dispatches one update."""

    def compile_rest(self) -> None:
        """Starts compiling in the background the programs that training needs after its first
        update.
        """

    def evaluate(self, state: TrainState, step: int) -> Mapping[str, object]:
        """Returns figures of the state after `step` updates, by the names of the metrics."""

    def ahead(self) -> bytes | None:
        """Returns the data of unfinished batches for the checkpoint; None if there are none."""

    @property
    def why_untrained(self) -> str:
        """The reason why no update of the run had anything to train on, and a remedy."""

    def conclusion(self, state: TrainState) -> Iterable[str]:
        """Returns lines to print once the run is complete."""
