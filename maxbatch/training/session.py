"""One run, from its config to its last checkpoint: feed, step, record, save.

Pre-training and reinforcement learning are tasks of the same session. A task says what a step feeds on and what it
optimises; the session restores, plans, records, evaluates, saves and stops.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.config.loading import dump_config
from maxbatch.parallel.hosts import is_first
from maxbatch.parallel.mesh import num_slices
from maxbatch.plan.batch import BatchPlan, Resume
from maxbatch.plan.learning_rate import LearningRate
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.view import WIDTH, equation, ramp_table
from maxbatch.runs.devices import DevicesUsed, record_devices
from maxbatch.runs.metrics import MetricsLog
from maxbatch.runs.position import Position
from maxbatch.runs.run_folder import RunFolder
from maxbatch.system.terminal import TrainingConsole
from maxbatch.training.board import Board
from maxbatch.training.checkpoints import Checkpoints, Newest, model_identity
from maxbatch.training.compile.cache import CompileCounter, use_persistent_cache
from maxbatch.training.compile.ladder import Background
from maxbatch.training.profiling import Profiler
from maxbatch.training.progress import RunProgress, end_of_run, nothing_left
from maxbatch.training.recorder import Dispatched, Output, Recorder
from maxbatch.training.signals import StopRequest
from maxbatch.training.state import TrainState, num_parameters


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

    def introduction(self) -> Iterable[str]:
        """Returns lines to print before the run starts."""

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


class Outcome(NamedTuple):
    """How a run ended."""

    position: Position
    stopped_by: str | None  # the signal that stopped it early; None if it ran to its end


class Session(Generic[B]):
    """A run that is ready to take its next step. What can be refused is refused before anything is written.

    Args:
      config: a resolved config.
      devices: what the run may use.
      open_task: makes the task of this session, and opens its data.
      stack: closes what the session and its task open.
      outputs: further places that the records go to.

    Attributes:
      folder: the run's folder.
      stop: whether somebody asked the run to stop.
      background: compiles what training will want later.
      position: where training stands.
      plan: the batch plan, from `position` on.
      checkpoints: None if `enable_checkpointing` is false.
      board: TensorBoard, while the run trains; None on a host that writes nothing.

    Raises:
      ConfigError: something in the config, the data or the checkpoint cannot be used.
    """

    state: TrainState
    position: Position
    plan: BatchPlan

    def __init__(
        self,
        config: ConfigDict,
        devices: Sequence[jax.Device],
        open_task: Callable[[Session[B]], Task[B]],
        stack: ExitStack,
        outputs: Sequence[Output] = (),
    ) -> None:
        self.config, self.devices, self.stack, self._more_outputs = config, devices, stack, outputs
        use_persistent_cache(config)
        self.console = TrainingConsole(width=WIDTH, highlight=False, markup=False, quiet=not is_first())
        self.folder = stack.enter_context(RunFolder(config.run_dir, writes=is_first()))
        self.stop = stack.enter_context(StopRequest())
        self.background = stack.enter_context(Background())
        self.board: Board | None = None
        self.task = open_task(self)
        self.checkpoints = self._open_checkpoints()
        newest = self.checkpoints.newest() if self.checkpoints else None
        self._stand_at(newest.position if newest else Position(), newest)
        for message in self.plan.warnings:
            warn(message)
        self.task.build()
        restored = (
            self.checkpoints.restore(self.task.abstract, self.task.executable) if self.checkpoints else None
        )
        position = restored.position if restored else Position()
        if position != self.position:  # the newest checkpoint was damaged
            self._stand_at(position, newest)
        self._restored = restored.state if restored else None
        if is_first() and not self.is_complete:
            self.folder.write("config.yml", dump_config(config))
            record_devices(self.folder.path, self._devices_used())

    def _open_checkpoints(self) -> Checkpoints | None:
        if not self.config.enable_checkpointing:
            return None
        checkpoints = Checkpoints(
            self.folder.path,
            self.config.max_num_checkpoints_to_keep,
            {"data": self.task.data.identity, "model": model_identity(self.config)},
            warn,
            self.task.data.num_loading_hosts,
        )
        return self.stack.enter_context(closing(checkpoints))

    def _stand_at(self, position: Position, newest: Newest | None) -> None:
        self.position = position
        hosts = newest.hosts if newest else ()
        self.plan = self.task.plan(Resume(position.step, position.samples_seen, *hosts))

    def _devices_used(self) -> DevicesUsed:
        return DevicesUsed(
            first_step=self.position.step + 1,
            device_kind=self.devices[0].device_kind,
            num_devices=len(self.devices),
            num_hosts=jax.process_count(),
            num_slices=num_slices(self.devices),
            mesh=dict(self.task.mesh.shape),
        )

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, those before a resume included."""
        total = self.plan.total_steps
        assert total is not None, "data that are here have known epochs"
        return total

    @property
    def is_complete(self) -> bool:
        """Whether no update is left."""
        return self.position.step >= self.total_steps

    def run(self) -> Outcome:
        """Takes every update that is left, or those until somebody asks to stop.

        Raises:
          DivergedError: `max_consecutive_skips` updates in a row were not finite.
          TrainingError: the disk is full.
        """
        if self.is_complete:
            self.console.print(nothing_left(self.config.run_dir, self.position, self.task.data.unit))
            return Outcome(self.position, None)
        with (
            CompileCounter() as compiles,
            Profiler(self.config.profile_steps, self.folder.path / "profile") as profiler,
            ExitStack() as outputs,
            self.task.feed() as feed,
        ):
            self._introduce()
            recorder = self.open_recorder(compiles, outputs)
            started = time.perf_counter()
            restored, self._restored = self._restored, None
            self.state = self.task.prepare(restored)
            self.console.print(f"ready in {time.perf_counter() - started:.1f} s")
            self.train(feed, recorder, profiler)
        if self.checkpoints:
            self.checkpoints.close()  # what is said to be done or saved is on disk
        return self._conclude()

    def open_recorder(self, compiles: CompileCounter, stack: ExitStack) -> Recorder:
        """Returns the recorder of the updates ahead; `stack` closes the places that its records go to."""
        outputs: list[Output] = []
        if is_first():
            step, num_stages = self.position.step, len(self.plan.manager.stages)
            self.board = Board(self.folder.path, step)
            progress = RunProgress(self.console, self.total_steps, step, num_stages, self.config.log_period)
            metrics = MetricsLog(self.folder, step, self.position.samples_seen, warn)
            outputs += [metrics, self.board, *self._more_outputs, progress]
        opened = [stack.enter_context(closing(output)) for output in outputs]
        return Recorder(self.config, self.plan.manager, self.position, compiles, self.devices, opened)

    def train(self, feed: Iterable[B], recorder: Recorder, profiler: Profiler) -> None:
        """Trains on what is fed. A run stops and is saved between batches, of which one may serve several updates."""
        config, task = self.config, self.task
        rate = LearningRate.from_config(config, self.plan.manager)
        first_step, last_end = self.position.step + 1, self.position.step  # last update that ended its batch
        recorder.restart_clock()
        for batch in feed:
            step, first_sample = batch.planned.step, batch.planned.first_sample
            if last_end == step - 1 and self.stop.before(step):
                break
            profiler.before(step)
            rates = rate.at(first_sample), rate.batch_ratio_at(first_sample)
            with np.errstate(over="ignore"):  # the update of a rate that float32 cannot hold is skipped
                self.state, update = task.step(self.state, batch, *rates)
            recorder.add(update)
            self.background.check()
            if step == first_step:
                jax.block_until_ready(update.metrics)
                self._compile_rest()
            ends_batch = batch.planned.end_sample > first_sample
            saves = ends_batch and self._is_due(config.checkpoint_period, last_end, step)
            evaluates = ends_batch and task.evaluates and self._is_due(config.eval_interval, last_end, step)
            pauses = saves or evaluates or step == first_step or profiler.ends_after(step)
            if pauses or task.takes_turns:
                recorder.catch_up(partial(task.evaluate, self.state, step) if evaluates else None)
            if pauses:
                profiler.after(step)
                if saves:
                    self._save(recorder)
                recorder.restart_clock()
            last_end = step if ends_batch else last_end
        recorder.catch_up()
        self._save(recorder)
        recorder.sync()
        self.position = recorder.position

    def _is_due(self, period: int, last_end: int, step: int) -> bool:
        """Returns whether the run ends, or a multiple of the period was passed since the last end of a batch."""
        return step == self.total_steps or step // period > last_end // period

    def _save(self, recorder: Recorder) -> None:
        if self.checkpoints and not self.checkpoints.has(recorder.position.step):
            recorder.sync()
            self.checkpoints.save(self.state, recorder.position)

    def _compile_rest(self) -> None:
        self.task.compile_rest()
        if self.checkpoints:
            self.checkpoints.compile(self.task.abstract, self.background, self.task.executable)

    def _introduce(self) -> None:
        """Prints what is about to happen: the batch as an equation, the ramp, the model and where it trains."""
        self.console.print(equation(self.plan))
        if len(self.plan.manager.stages) > 1:
            self.console.print(ramp_table(self.plan))
        for line in self.task.introduction():
            self.console.print(line)
        data, position = self.task.data, self.position
        epoch = "" if data.samples_per_epoch is None else f", {data.samples_per_epoch:,} {data.unit} an epoch"
        resumed = (
            f", resumed at step {position.step}, sample {position.samples_seen:,}" if position.step else ""
        )
        self.console.print(
            f"{num_parameters(self.task.abstract.params):,} parameters | {self.config.dataset_type}{epoch} | "
            f"{self.config.run_dir}{resumed}"
        )

    def _conclude(self) -> Outcome:
        """Prints where the run lies and what to type next."""
        stopped_by = None if self.is_complete else self.stop.signal_name
        self.console.print(
            end_of_run(
                self.config.run_dir, self.position, self.task.data.unit,
                stopped_by=stopped_by, saved=self.checkpoints is not None,
            )
        )  # fmt: skip
        for line in () if stopped_by else self.task.conclusion(self.state):
            self.console.print(line)
        return Outcome(self.position, stopped_by)


def warn(message: str) -> None:
    """Prints one line on standard error; the run goes on."""
    if is_first():
        print(f"maxbatch: warning: {message}", file=sys.stderr, flush=True)
