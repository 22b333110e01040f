"""The updates of a recorded run, taken again on the devices at hand by the trainer's own step, feed
and states.

The batches are planned for the devices of the recorded run, and cut for those at hand: the update
does not depend on the cut.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import jax

from maxbatch.around.replay.policy_task import POLICY
from maxbatch.around.replay.recorded_run import RecordedRun, Segment
from maxbatch.around.replay.stream_task import STREAM
from maxbatch.around.replay.task import LAYOUT, OpenedTask, ReplayedTask, TaskKind, UpdateRows
from maxbatch.config.config import Config
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.run.changes import changed_reads
from maxbatch.run.compile.cache import CompileCounter
from maxbatch.run.context import RunContext
from maxbatch.run.folder.ahead import read_ahead
from maxbatch.run.folder.hashes_file import ArrayHashes
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.position import CheckpointRecord, Position, newest_record
from maxbatch.run.folder.run_folder import REFERENCE_FILE
from maxbatch.run.folder.run_id import read_identity
from maxbatch.run.record.hashes_log import HashesLog
from maxbatch.run.record.recorder import Output, Recorder, ThroughputMeter
from maxbatch.run.task import Start
from maxbatch.run.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.run.weights.parameters import FirstParameters, open_source, open_state
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.warning import note
from maxbatch.update.reproducible.hashes import StateHasher
from maxbatch.update.state import TrainState

# What an update does not need: states, evals, samples of text, logs.
_UPDATES_ALONE: dict[str, Value] = {
    "libtpu_flags": "none",
    "enable_checkpointing": False,
    "local_checkpoint_directory": "",
    "overwrite_run": False,
    "eval_interval": -1,
    "eval_tasks": "",
    "early_stopping_patience": None,
    "generate_prompt": "",
    "gradient_noise_scale": False,
    "log_to": "",
    "profile_steps": "",
}


class Before(NamedTuple):
    """An update that is about to be taken: its rows, and the state before it."""

    planned: PlannedStep
    samples_seen: int  # samples of the stream that were read before it
    state: TrainState
    rows: UpdateRows
    task: ReplayedTask


class Taken(NamedTuple):
    """An update that was taken."""

    line: Record  # as a run would record it
    config: Config  # the run's
    hashes: ArrayHashes  # of the state after it; empty without `reproducible_sums`


class _Kept(Output):
    """The line of the update that was recorded last."""

    def __init__(self) -> None:
        self.line: Record = {}

    def append(self, record: Record) -> None:
        self.line = record


class _Stored(NamedTuple):
    """A checkpoint to start from."""

    checkpoint: StoredCheckpoint
    ahead: bytes | None  # what it holds for the batches ahead

    @classmethod
    def of(cls, run: RecordedRun, step: int) -> _Stored:
        """Opens a checkpoint of a run; raises ConfigError if it is damaged."""
        folder = run.path / "checkpoints" / str(step)
        checkpoint = StoredCheckpoint(folder)  # type: ignore[arg-type]
        ahead, damage = read_ahead(folder, checkpoint.record)
        if damage:
            raise ConfigError(f"{folder}: is damaged ({damage}); name another with --checkpoint")
        return cls(checkpoint, ahead)


def updates(
    run: RecordedRun, checkpoint: int | None, step: int, devices: Sequence[jax.Device]
) -> Iterator[Before | Taken]:
    """Yields every update from a checkpoint to `step`, before it is taken and after.

    The state of a `Before` is gone once the next item is asked for.

    Args:
      checkpoint: its step; None: the first parameters.

    Raises:
      ConfigError: the run's data or its checkpoint cannot be used.
    """
    stored = None if checkpoint is None else _Stored.of(run, checkpoint)
    # which pins the first parameters
    record = stored.checkpoint.record if stored else newest_record(run.path)
    position, state, ahead = Position(), None, None
    if stored:
        position, ahead = stored.checkpoint.record.position, stored.ahead
    segments = run.segments(position.step + 1, step)
    for segment in segments:
        kind = POLICY if segment.config.recipe.is_sampled else STREAM
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxbatch-")))
            _copy_reference(run.path, folder)
            context = RunContext(_config_here(kind, segment, len(devices), folder), devices, stack)
            opened = kind.open(segment, context)
            origin = _origin(run, opened, record)
            if stored is None and state is None:
                position = opened.first_position(origin)
            hosts = record.hosts if record and stored else (None, None)
            task = opened.planned_from(run, position, hosts)
            planned = task.planned
            if stored is not None and state is None:
                state = stored.checkpoint.full_state(planned.abstract)
            first = FirstParameters(origin, context.config.model)
            built = planned.build(Start(position, ahead, state is None, first))
            if segment is segments[-1]:
                _note_changes(run, built.reads)
            running, state = built.run(state, lambda *_: None, stack)
            settings = UpdatePlan.from_config(segment.config.plan, planned.plan.manager)
            kept = _Kept()
            hashes = _hashes_log(context, task, position, stack)
            recorder = _recorder(context, opened, task, position, kept, stack, hashes)
            for fed in running.feed:
                batch, rows = task.before(running, state, fed)
                yield Before(batch.planned, position.samples_seen, state, rows, task)
                state, taken = running.step(state, batch, settings)
                recorder.add(taken)
                recorder.catch_up()
                yield Taken(kept.line, segment.config, hashes.last if hashes else {})
                position = recorder.position
                if position.step == segment.last_step:
                    break
            if segment is not segments[-1]:
                ahead = running.ahead()


def _recorder(
    context: RunContext,
    opened: OpenedTask,
    task: ReplayedTask,
    position: Position,
    kept: _Kept,
    stack: ExitStack,
    hashes: HashesLog | None,
) -> Recorder:
    """Returns a recorder that keeps the position and the last line, and writes nothing."""
    config = context.config
    meter = ThroughputMeter(
        opened.model.flops_per_token,
        context.devices,
        config.peak_tflops_per_device,
        config.quantization,
    )
    compiles = stack.enter_context(CompileCounter())
    manager, holes = task.planned.plan.manager, opened.data.holes
    return Recorder(config.record, manager, position, compiles, meter, [kept], holes, hashes)


def _hashes_log(
    context: RunContext, task: ReplayedTask, position: Position, stack: ExitStack
) -> HashesLog | None:
    """Returns the log of the hashes in the folder of the replay; None if the run has none."""
    if not context.config.record.optimizer.reproducible_sums:
        return None
    hasher = StateHasher(task.planned.abstract, task.planned.mesh)
    return stack.enter_context(closing(HashesLog(context.folder, hasher, position.step)))


def _origin(run: RecordedRun, opened: OpenedTask, record: CheckpointRecord | None) -> RunOrigin:
    """Returns the source of the run's first parameters."""
    key, path = opened.source(run)
    open_at = open_state if key == "load_full_state_path" else open_source
    return RunOrigin(open_at, key, path, run.path, record)


def _note_changes(run: RecordedRun, reads: Mapping[str, str]) -> None:
    """Says which files other than the data have changed since the run's last session, such as those
    of rewards.
    """
    if identity := read_identity(run.path):
        for change in changed_reads(identity, reads):
            note(f"{run.named}: {change}")


def _config_here(kind: TaskKind, segment: Segment, num_devices: int, folder: Path) -> Config:
    """Returns a run's config for the devices at hand: all of them share the rows and the
    parameters.
    """
    layout = {name: KEYS[name].default_value for name in LAYOUT}
    layout |= kind.keys_here(segment, num_devices)
    return segment.config.replaced({**layout, **_UPDATES_ALONE, "run_dir": str(folder)})


def _copy_reference(run_dir: AnyPath, folder: Path) -> None:
    """Copies the reference of pairs, so that it is not computed again."""
    file = run_dir / REFERENCE_FILE
    if file.is_file():
        with file.open("rb") as there, open(folder / REFERENCE_FILE, "wb") as here:
            shutil.copyfileobj(there, here)
