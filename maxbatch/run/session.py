"""One run, from its config to its last checkpoint: feed, step, record, save.

A task (`maxbatch.run.task`) defines the data of a step and its objective; the session
restores, plans, records, evaluates, saves and stops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import numpy as np

from maxbatch.config.loading import dump_config
from maxbatch.config.own_parts import own_parts_of
from maxbatch.parallel.hosts import broadcast, is_first, warn
from maxbatch.parallel.mesh import num_slices
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.plan.view import equation, ramp_table
from maxbatch.run.agreement import software_of
from maxbatch.run.changes import (
    changed_reads,
    changed_software,
    changes_since,
    keys_changed,
)
from maxbatch.run.compile.cache import CompileCounter
from maxbatch.run.context import RunContext
from maxbatch.run.due import Due, Schedule, has_stalled
from maxbatch.run.folder.devices import DevicesUsed, record_devices
from maxbatch.run.folder.metrics import Record, read_metrics
from maxbatch.run.folder.metrics_log import MetricsLog
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import Position
from maxbatch.run.folder.sessions import SessionLog, TimePart
from maxbatch.run.record.board import Board
from maxbatch.run.record.hashes_log import HashesLog
from maxbatch.run.record.loggers import TrackedRun, open_loggers, settings_of
from maxbatch.run.record.own_end import OwnOutput
from maxbatch.run.record.profiling import Profiler
from maxbatch.run.record.progress import RunProgress
from maxbatch.run.record.recorder import Output, Recorder, ThroughputMeter
from maxbatch.run.resume import IN_RUN_DIR, Resume
from maxbatch.run.task import B, Built, Dispatched, Opened, Running, ShowText, Start
from maxbatch.run.weights.parameters import load_parameters
from maxbatch.system.errors import (
    ConfigError,
    DivergedError,
    LeaseLost,
    PassingFault,
    StoreFailed,
    StoreFull,
    StoreRefused,
    TrainingError,
)
from maxbatch.system.storage.watched_files import check_watched
from maxbatch.system.terminal.folding import counted, folded
from maxbatch.update.reproducible.hashes import StateHasher
from maxbatch.update.state import TrainState, num_parameters

# The activity of a run by the part that its time counts in, for a line about a wait.
_ACTIVITIES = {
    TimePart.RESTORING: "restoring",
    TimePart.COMPILING: "compiling",
    TimePart.UPDATES_LOST: "in an update",
    TimePart.CHECKPOINTS: "saving",
    TimePart.EVAL: "evaluating",
}


class Outcome(NamedTuple):
    """How a run ended, and where its records are."""

    position: Position
    stopped_by: str | None  # the signal that stopped it early; None if it ran to its end
    run_dir: str

    @property
    def history(self) -> list[Record]:
        """The records of all updates of the run, those before a resume included, read from its
        `metrics.jsonl`.
        """
        return read_metrics(self.run_dir)

    @property
    def last(self) -> Record | None:
        """The record of the last update, as in `outcome.last["loss"]`; None before the first."""
        history = self.history
        return history[-1] if history else None

    def parameters(self) -> dict[Any, Any]:
        """Returns the parameters after the last update, read from its checkpoint; see
        `maxbatch.load_parameters`.
        """
        return load_parameters(f"{self.run_dir.rstrip('/')}/checkpoints/{self.position.step}")


class _KeptUpdates(Output):
    """Tells the clock of the session which updates are recorded."""

    def __init__(self, clock: SessionLog) -> None:
        self._clock = clock

    def append(self, record: Record) -> None:
        self._clock.record(record[Metric.STEP])


class Session(Generic[B]):
    """A run that is ready to take its next step.

    Args:
      outputs: further places that the records of the run go to.

    Raises:
      ConfigError: the config, the data or the checkpoint cannot be used; nothing is written before.
    """

    def __init__(
        self, context: RunContext, opened: Opened[B], outputs: Sequence[Output] = ()
    ) -> None:
        self._context, self.opened, self._outputs = context, opened, outputs
        self._own_end = context.own_end
        self.config, self.console, self.folder = context.config, context.console, context.folder
        self._clock, self._recording = context.sessions, context.config.record

        resume = Resume.find(context, opened)
        self.checkpoints, self._local = resume.checkpoints, resume.local
        self.planned, self.position = resume.planned, resume.position
        self._restored_from = resume.source
        # `run` takes it, so that nothing else keeps these arrays while training replaces them
        self._restored = resume.restored.state if resume.restored else None
        self._lines: MetricsLog | None = None  # on the first host, once the recorder is open

        self.built = None if self.is_complete else self._build(resume.start)
        reads = self.built.reads if self.built else {}
        software = software_of(context.devices[0])
        self._changes: list[str] = []
        if self.position.step and is_first():
            self._changes = changes_since(
                self.folder.path, self.config, self.plan, self.position.samples_seen
            )
            self._changes += changed_reads(context.identity, reads)
            self._changes += changed_software(context.identity, software)

        if self.is_complete:
            self._clock.withdraw()
        elif is_first():
            step = self.position.step
            self._clock.note_changed(keys_changed(self.folder.path, self.config))
            self._clock.stand_at(step, step if self._restored_from == IN_RUN_DIR else None)
            self.folder.begin_again()
            # so that training from it overwrites nothing
            written = self.config.replaced({"overwrite_run": False})
            self.folder.write("config.yml", dump_config(written))
            self.folder.note_session(reads, software)
            self._record_devices()

    def _build(self, start: Start) -> Built[B]:
        built = self.planned.build(start)
        patience = self.config.early_stopping_patience
        if patience is not None and not built.has_eval_loss:
            has_own = "stream" in own_parts_of(self.config.own_parts)
            works = (
                "eval_stream=rows in train(), eval_fraction of a stream with a length,"
                if has_own
                else "eval_fraction=0.1,"
            )
            raise ConfigError(
                f"early_stopping_patience={patience}: counts evals, and nothing is held out; "
                f"works: {works} or eval_dataset_path"
            )
        return built

    def _record_devices(self) -> None:
        used = DevicesUsed(
            first_step=self.position.step + 1,
            device_kind=self._context.devices[0].device_kind,
            num_devices=len(self._context.devices),
            num_hosts=jax.process_count(),
            num_slices=num_slices(self._context.devices),
            mesh=dict(self.planned.mesh.shape),
        )
        record_devices(self.folder.path, used)

    @property
    def plan(self) -> BatchPlan:
        """The plan of the run, from the position at its start on."""
        return self.planned.plan

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, those before a resume included."""
        total = self.plan.total_steps
        assert total is not None, "data that are here have known epochs"
        return total

    @property
    def is_complete(self) -> bool:
        """Whether no update is left, or the run has ended early."""
        return self.position.step >= self.total_steps or self._has_stalled

    @property
    def _has_stalled(self) -> bool:
        return has_stalled(self.position.best_eval, self.config.early_stopping_patience)

    @property
    def _early_end(self) -> str:
        """The reason why a run ended before its length, as the end of a line; empty if it did
        not.
        """
        if not self._has_stalled:
            return ""
        best = self.position.best_eval
        lowest = (
            "no eval had a finite loss"
            if best.loss is None
            else f"the lowest is {best.loss:.4f}, of step {best.step}"
        )
        if self.checkpoints and self.checkpoints.has_best(best.step):
            lowest += ", in checkpoints/best"
        evals = "eval" if best.evals_since == 1 else f"{best.evals_since} evals in a row"
        return f"; ended early: the eval loss has not fallen for {evals} ({lowest})"

    def run(self) -> Outcome:
        """Takes all remaining updates, or those until a stop is requested.

        Raises:
          DivergedError: `max_consecutive_skips` updates in a row were not finite, or all updates of
            the run.
          TrainingError: the disk is full, or no update had a loss.
        """
        if self.built is None:
            return self._already_complete()
        with (
            self._naming_what_is_saved(),
            CompileCounter(partial(self._clock.move, TimePart.COMPILING)) as compiles,
            Profiler(self.config.profile_steps, self.folder.path / "profile") as profiler,
            ExitStack() as stack,
        ):
            self._introduce(self.built)
            recorder, show = self.open_recorder(compiles, stack)
            started = time.perf_counter()

            restored, self._restored = self._restored, None
            with self._clock.during(TimePart.COMPILING):
                running, state = self.built.run(restored, show, stack)

            if self.config.eval_interval > 0 and not running.evaluates:
                unit, held_out_by = self.opened.data.unit, "eval_fraction or eval_dataset_path"
                if "stream" in own_parts_of(self.config.own_parts):
                    held_out_by = "eval_stream=, or eval_fraction of a stream with a length,"
                self.console.print(
                    f"no evals: no {unit} are held out; {held_out_by} holds some out"
                )
            self.console.print(f"ready in {time.perf_counter() - started:.1f} s")

            with self._clock.during(TimePart.UPDATES_LOST):  # kept once they are recorded
                state = self.train(running, state, recorder, profiler)
            self._clock.record(self.position.step)

        if self.checkpoints:
            with self._naming_what_is_saved(), self._clock.during(TimePart.CHECKPOINTS):
                self.checkpoints.close()  # wait: what we report as saved must be on disk
        self._context.stop.signal_name = (
            self._own_end.settle(self._fate_of_own_end) or self._context.stop.signal_name
        )

        if self._local and self.is_complete:
            self._local.remove()
        with self._clock.during(TimePart.EVAL):
            return self._conclude(running, state)

    def _already_complete(self) -> Outcome:
        self._check_result(self.opened.why_untrained)
        if self._local:
            self._local.remove()
        longer = "early_stopping_patience" if self._early_end else "its length"
        self.console.print(
            f"{self.config.run_dir} is complete: {counted(self.position.step, 'update')}, "
            f"{self._samples_seen}{self._early_end}. To continue, raise {longer}; for a new run, "
            "give another run_dir."
        )
        return Outcome(self.position, None, self.config.run_dir)

    def open_recorder(
        self, compiles: CompileCounter, stack: ExitStack
    ) -> tuple[Recorder, ShowText]:
        """Returns the recorder of the updates ahead, and where texts go; `stack` closes the places
        of both.
        """
        show: ShowText = lambda step, name, text: None  # noqa: E731  this host writes no TensorBoard events
        opened: list[Output] = []
        for output in self._open_outputs() if is_first() else ():
            # one by one: a later one may fail to open
            opened.append(stack.enter_context(closing(output)))
            if isinstance(output, Board):
                show = output.text
                output.settings(settings_of(self.config))
        meter = ThroughputMeter(
            self.opened.model.flops_per_token,
            self._context.devices,
            self.config.peak_tflops_per_device,
            self.config.quantization,
        )
        hashes = None
        if self._recording.optimizer.reproducible_sums:
            hasher = StateHasher(self.planned.abstract, self.planned.mesh)
            hashes = stack.enter_context(
                closing(HashesLog(self.folder, hasher, self.position.step))
            )
        return Recorder(
            self._recording,
            self.plan.manager,
            self.position,
            compiles,
            meter,
            opened,
            self.opened.data.holes,
            hashes,
        ), show

    def _doing(self) -> str:
        """Returns the activity of the run, for a line about a wait."""
        return _ACTIVITIES.get(self._clock.part, "starting")

    def _open_outputs(self) -> Iterator[Output]:
        step, num_stages = self.position.step, len(self.plan.manager.stages)
        self._lines = MetricsLog(
            self.folder, step, self.position.samples_seen, warn, self.position.taken_over
        )
        yield self._lines
        yield _KeptUpdates(self._clock)

        if "tensorboard" in self.config.log_to.split(","):
            yield Board(self.folder.path, step, warn)
        tracked = TrackedRun(self.config.run_dir, settings_of(self.config))
        yield from open_loggers(self.config.log_to, tracked, self.folder, warn)

        log_period, unit = (
            self._recording.log_period,
            self.config.recipe.counted,
        )
        samples = self.plan.total_samples if self.plan.rl is None else None
        yield RunProgress(
            self.console,
            self.total_steps,
            step,
            num_stages,
            log_period,
            self._doing,
            unit,
            samples,
        )
        yield from (
            OwnOutput(output, place, self._own_end) for place, output in enumerate(self._outputs)
        )

    def train(
        self, running: Running[B], state: TrainState, recorder: Recorder, profiler: Profiler
    ) -> TrainState:
        """Trains on the fed batches. A run stops and is saved between batches; a batch may serve
        several updates.
        """
        settings = UpdatePlan.from_config(self.config.plan, self.plan.manager)
        schedule = self._schedule(running)
        last_end = self.position.step  # last update that ended its batch
        recorder.restart_clock()
        for batch in self._until_own_end(running.feed):
            step = batch.planned.step
            # Only between batches: a resume continues at a sample, not within its batch.
            if last_end == step - 1 and self._context.stop.before_update():
                break
            state, update = self._step(running, state, batch, settings, profiler)
            recorder.add(update)
            self._context.background.check()

            due = schedule.after(batch.planned, last_end)
            if due.compiles:
                jax.block_until_ready(update.metrics)
                self._compile_rest(running)
            pauses = due.pauses or profiler.ends_after(step)
            # An output that raises ends the run after the update that it was given, so the next one
            # waits for it.
            if pauses or running.takes_turns or self._outputs:
                recorder.catch_up(
                    partial(self._evaluate, running, state, step) if due.evaluates else None
                )
            if due.evaluates:
                due = schedule.after_eval(due, step, recorder.position.best_eval)
            if pauses:
                profiler.after(step)
                self._save_due(due, running, state, recorder)
                recorder.restart_clock()

            last_end = step if batch.planned.ends_batch else last_end
            if due.ends_early:
                break
        recorder.catch_up()
        self._save(running, state, recorder)
        recorder.sync()
        self.position = recorder.position
        return state

    def _schedule(self, running: Running[B]) -> Schedule:
        config = self.config
        return Schedule(
            first_step=self.position.step + 1,
            total_steps=self.total_steps,
            checkpoint_period=config.checkpoint_period,
            eval_interval=config.eval_interval if running.evaluates else None,
            local_checkpoint_period=config.local_checkpoint_period if self._local else None,
            patience=config.early_stopping_patience,
            keeps_best=config.keep_best_checkpoint,
        )

    def _step(
        self,
        running: Running[B],
        state: TrainState,
        batch: B,
        settings: UpdatePlan,
        profiler: Profiler,
    ) -> tuple[TrainState, Dispatched]:
        """Dispatches an update."""
        self.folder.check()
        profiler.before(batch.planned.step)
        # the update of a rate that float32 cannot hold is skipped
        with np.errstate(over="ignore"):
            state, update = running.step(state, batch, settings)
        self._context.stop.must_save()
        self._clock.move(TimePart.WAITING_FOR_DATA, update.data_wait_s)
        if self._local:
            # before a later update is recorded, so that a restart repeats one period at most
            self._local.settle()
        return state, update

    def _save_due(
        self, due: Due, running: Running[B], state: TrainState, recorder: Recorder
    ) -> None:
        if due.saves or due.saves_extra:
            self._save(running, state, recorder, is_extra=due.saves_extra)
        if due.saves_locally:
            self._save_locally(state, recorder)

    def _until_own_end(self, feed: Iterable[B]) -> Iterator[B]:
        """Yields the batches ahead until a part of the user's own raises on any host."""
        batches = iter(feed)
        while True:
            batch = next(batches, None)
            if self._own_end.is_reached() or batch is None:
                return
            yield batch

    def _evaluate(self, running: Running[B], state: TrainState, step: int) -> Mapping[str, object]:
        with self._clock.during(TimePart.EVAL):
            return running.evaluate(state, step)

    def _save(
        self, running: Running[B], state: TrainState, recorder: Recorder, is_extra: bool = False
    ) -> None:
        check_watched()
        if self.checkpoints and not self.checkpoints.has(recorder.position.step):
            with self._clock.during(TimePart.CHECKPOINTS):
                self.folder.check()
                recorder.sync()
                self.checkpoints.save(state, recorder.position, running.ahead(), is_extra)

    def _save_locally(self, state: TrainState, recorder: Recorder) -> None:
        assert self._local is not None
        check_watched()
        with self._clock.during(TimePart.CHECKPOINTS):
            self.folder.check()
            recorder.sync()
            line = broadcast(lambda: self._lines.last_digest if self._lines else None)
            self._local.save(state, recorder.position, line)

    @contextlib.contextmanager
    def _naming_what_is_saved(self) -> Iterator[None]:
        """Re-raises a failure of the store in mid-run as PassingFault, naming the last
        checkpoint.
        """
        try:
            yield
        except (StoreRefused, StoreFailed, StoreFull, LeaseLost) as error:
            raise PassingFault(f"{error}; {self._fate}") from error

    @property
    def _fate_of_own_end(self) -> str:
        return f"{self._fate}; the same call continues after it" if self.checkpoints else self._fate

    @property
    def _fate(self) -> str:
        return self.checkpoints.fate if self.checkpoints else "nothing is saved"

    def _compile_rest(self, running: Running[B]) -> None:
        running.compile_rest()
        if self.checkpoints:
            self.checkpoints.compile(
                self.planned.abstract, self._context.background, self.planned.executable
            )
        if self._local:
            self._local.compile(self.planned.abstract, self._context.background)

    def _introduce(self, built: Built[B]) -> None:
        """Prints the plan before training: the batch as an equation, the ramp, the model and its
        devices.
        """
        self.console.print(folded(equation(self.plan), 2, self.console.width))
        if len(self.plan.manager.stages) > 1:
            self.console.print(ramp_table(self.plan))
        for line in (*built.introduction, *self._changes):
            self.console.print(line)

        step, samples_seen = self.position.step, self.position.samples_seen
        data = self.opened.data
        epoch = (
            ""
            if data.samples_per_epoch is None
            else f", {data.samples_per_epoch:,} {data.unit} an epoch"
        )
        if self.plan.samples_left_out:
            epoch += f", {self.plan.samples_left_out:,} {data.unit} of the run left out"

        where = f"step {step}, after {samples_seen:,} {data.unit}"
        is_taken_over = step > 0 and step == self.position.taken_over
        resumed = f", resumed at {where}, from {self._restored_from}" if step else ""
        if is_taken_over:
            resumed = f", continues MaxText's run at {where}"

        own_parts = own_parts_of(self.config.own_parts)
        of_model = f" of {own_parts['model']}" if "model" in own_parts else ""
        stream = (
            f"stream {own_parts['stream']}" if "stream" in own_parts else self.config.dataset_type
        )
        if not step and self._context.lines_cut:
            cut = counted(self._context.lines_cut, "update")
            resumed = f", begun anew: {cut} of an earlier start are in no checkpoint"
        self.console.print(
            f"{parameters_in_words(self.planned.abstract)}{of_model} | {stream}{epoch} | "
            f"{self.config.run_dir}{resumed}"
        )
        if is_taken_over:
            known = (
                f"from here on the {data.unit} are those of this run's stream; which rows MaxText "
                "had read is not known"
            )
            self.console.print(folded(known, 2, self.console.width))

        for text in data.notes:
            self.console.print(folded(f"{self.config.dataset_path}: {text}", 2, self.console.width))
        if self.config.run_name or self.config.base_output_directory:
            where, name = self.config.base_output_directory, self.config.run_name
            self.console.print(
                f"base_output_directory {where or 'runs'} | run_name {name or '(none)'}"
            )

    def _check_result(self, why_untrained: str) -> None:
        """Raises TrainingError if no update of the run had a finite loss and gradient."""
        position = self.position
        own_updates = position.step - position.taken_over
        if not own_updates or position.trained_updates:
            return
        where = f"{self.config.run_dir}: none of its {own_updates} updates changed the parameters"
        if position.skipped_updates:
            raise DivergedError(
                f"{where}: {position.skipped_updates} had a gradient or a new state that is not "
                "finite; lower learning_rate, or look at the parameters that it started from"
            )
        raise TrainingError(f"{where}: {why_untrained}")

    def _conclude(self, running: Running[B], state: TrainState) -> Outcome:
        """Prints the run's folder and the next command to type."""
        stopped_by = None if self.is_complete else self._context.stop.signal_name
        if stopped_by is None:
            self._check_result(running.why_untrained)
        self._clock.end_by(stopped_by or ("early stopping" if self._early_end else "done"))
        where = f"step {self.position.step}, {self._samples_seen}, in {self.config.run_dir}"
        if stopped_by is None:
            self.console.print(f"done: {where}{self._early_end}")
            for line in running.conclusion(state):
                self.console.print(line)
        else:
            fate = "saved" if self.checkpoints else "not saved (enable_checkpointing is false)"
            self.console.print(
                f"stopped by {stopped_by} at {where}; {fate}. The same command continues."
            )
        return Outcome(self.position, stopped_by, self.config.run_dir)

    @property
    def _samples_seen(self) -> str:
        return f"{self.position.samples_seen:,} {self.opened.data.unit}"


def parameters_in_words(abstract: TrainState) -> str:
    """Returns the number of a model's parameters in words, and of adapters how many are trained."""
    model, trained = num_parameters(abstract.model), num_parameters(abstract.params)
    if abstract.frozen is None:
        return f"{model:,} parameters"
    return f"{_short(trained)} of {_short(model)} parameters trained"


def _short(number: int) -> str:
    """Returns a number of parameters with at most one decimal."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)
