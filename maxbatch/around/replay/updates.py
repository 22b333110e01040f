"""The updates of a recorded run, taken again on the devices at hand by the trainer's own step, feed
and states.

The batches are planned for the devices of the recorded run, and cut for those at hand: the update
does not depend on the cut.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.around.replay.recorded_run import RecordedRun, Segment
from maxbatch.config.config import Config
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value
from maxbatch.data.feed.feed import StagedBatch
from maxbatch.plan.batch import BatchPlan, ResumePoint
from maxbatch.plan.mesh_shape import AXES, axis_key
from maxbatch.plan.place import Place
from maxbatch.plan.rampup import PlannedStep
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.run.compile.cache import CompileCounter
from maxbatch.run.context import RunContext
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import CheckpointRecord, Position, newest_record
from maxbatch.run.folder.run_folder import REFERENCE_FILE
from maxbatch.run.pretraining import (
    OpenedPretraining,
    PlannedPretraining,
    open_pretraining,
)
from maxbatch.run.record.recorder import Output, Recorder, ThroughputMeter
from maxbatch.run.taking_over import position_taken_over
from maxbatch.run.task import Start
from maxbatch.run.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.run.weights.parameters import FirstParameters, open_source, open_state
from maxbatch.system.storage.storage import AnyPath
from maxbatch.update.state import TrainState

# How the run was laid out, which an update does not depend on.
_LAYOUT = (
    *(axis_key(net, axis) for net in ("ici", "dcn") for axis in AXES),
    "num_pipeline_microbatches",
    "num_pipeline_repeats",
    "expansion_factor_real_data",
    "attention",
    "compiled_dir",
)
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
    """An update that is about to be taken: its batch, and the state before it."""

    planned: PlannedStep
    batch: StagedBatch
    state: TrainState
    task: PlannedPretraining


class Taken(NamedTuple):
    """An update that was taken."""

    line: Record  # as a run would record it


class _Kept(Output):
    """The line of the update that was recorded last."""

    def __init__(self) -> None:
        self.line: Record = {}

    def append(self, record: Record) -> None:
        self.line = record


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
    record, stored = _start(run, checkpoint)
    position, state = record.position if record and stored else Position(), None
    segments = run.segments(position.step + 1, step)
    for segment in segments:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxbatch-")))
            _copy_reference(run.path, folder)
            context = RunContext(_config_here(segment.config, folder), devices, stack)
            opened = open_pretraining(context, concludes=False)
            key, path = opened.source
            open_at = open_state if key == "load_full_state_path" else open_source
            origin = RunOrigin(open_at, key, path, run.path, record)
            if stored is None and state is None:
                position = _first_position(segment.config, opened, origin)
            hosts = record.hosts if record and stored else (None, None)
            planned = opened.planned_as(_plan(segment, opened, position, hosts, devices))
            if stored is not None and state is None:
                state = stored.full_state(planned.abstract)
            start = Start(
                position, None, state is None, FirstParameters(origin, context.config.model)
            )
            running, state = planned.build(start).run(state, lambda *_: None, stack)
            settings = UpdatePlan.from_config(segment.config.plan, planned.plan.manager)
            kept = _Kept()
            recorder = _recorder(context, opened, planned, position, kept, stack)
            for batch in running.feed:
                yield Before(batch.planned, batch, state, planned)
                state, taken = running.step(state, batch, settings)
                recorder.add(taken)
                recorder.catch_up()
                yield Taken(kept.line)
                position = recorder.position
                if position.step == segment.last_step:
                    break


def _recorder(
    context: RunContext,
    opened: OpenedPretraining,
    planned: PlannedPretraining,
    position: Position,
    kept: _Kept,
    stack: ExitStack,
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
    return Recorder(
        config.record, planned.plan.manager, position, compiles, meter, [kept], opened.data.holes
    )


def _start(
    run: RecordedRun, checkpoint: int | None
) -> tuple[CheckpointRecord | None, StoredCheckpoint | None]:
    """Returns the record that pins the first parameters, and the checkpoint to start from."""
    if checkpoint is None:
        return newest_record(run.path), None
    stored = StoredCheckpoint(run.path / "checkpoints" / str(checkpoint))  # type: ignore[arg-type]
    return stored.record, stored


def _config_here(config: Config, folder: Path) -> Config:
    """Returns a run's config for the devices at hand: all of them share the rows and the
    parameters.
    """
    layout = {name: KEYS[name].default_value for name in _LAYOUT}
    if (budget := config.max_tokens_per_pass) is not None:  # a row a sample is the same update
        rows = budget // config.max_target_length
        layout |= {"max_tokens_per_pass": None, "per_device_batch_size": rows}
    return config.replaced({**layout, **_UPDATES_ALONE, "run_dir": str(folder)})


def _copy_reference(run_dir: AnyPath, folder: Path) -> None:
    """Copies the reference of pairs, so that it is not computed again."""
    file = run_dir / REFERENCE_FILE
    if file.is_file():
        with file.open("rb") as there, open(folder / REFERENCE_FILE, "wb") as here:
            shutil.copyfileobj(there, here)


def _first_position(config: Config, opened: OpenedPretraining, origin: RunOrigin) -> Position:
    """Returns the position that the run began at: 0, or where the MaxText run stood that it took
    over.
    """
    source = origin.source() if config.load_full_state_path else None
    if not isinstance(source, ForeignState):
        return Position()
    start = config.start_samples
    return position_taken_over(
        config.plan,
        None if start is None else int(start),
        source,
        lambda: opened.plan(ResumePoint()).plan,
    )


def _plan(
    segment: Segment,
    opened: OpenedPretraining,
    position: Position,
    hosts: tuple[int | None, int | None],
    devices: Sequence[jax.Device],
) -> BatchPlan:
    """Returns the plan of the recorded run's batches, cut for the devices at hand."""
    point = ResumePoint(position.step, position.place, *hosts)
    plan = _recorded_plan(segment, opened.data.samples_per_epoch, point)
    manager = plan.manager
    # as many rows per device as the run had in one pass
    rows = max(1, math.floor(plan.micro_batch_size_to_train_on / plan.num_devices))
    passes = rows * len(devices)
    cut = tuple(
        stage._replace(micro_batch=passes, accumulation_steps=-(-stage.batch // passes))
        for stage in manager.split_stages
    )
    return dataclasses.replace(plan, manager=dataclasses.replace(manager, split_stages=cut))


def _recorded_plan(
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


def end_of(run: RecordedRun, samples_per_epoch: int | None) -> int:
    """Returns the samples of a whole run, as its last session states its length."""
    last = max(run.lines)
    (segment,) = run.segments(last, last)
    place = Place(run.lines[last][Metric.SAMPLES_SEEN])
    total = _recorded_plan(segment, samples_per_epoch, ResumePoint(last, place)).total_samples
    assert total is not None, "data that are here have known epochs"
    return total


def rows_of(batch: StagedBatch) -> dict[str, np.ndarray]:
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
