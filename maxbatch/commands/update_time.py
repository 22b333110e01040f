"""The seconds of an update that `plan` counts with: stated, assumed, modelled by the compiler, or
measured by a run.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from maxbatch.plan.run_time import UpdateTime, seconds_for_share
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.config.config import Config
    from maxbatch.plan.batch import BatchPlan
    from maxbatch.system.hardware.chips import Peak
    from maxbatch.system.storage.storage import AnyPath

_MOST_BYTES = 1 << 24  # of a manifest
_FIRST_UPDATES = 2  # of a run of more updates: caches and clocks are still cold


class TimedDevices(NamedTuple):
    """The time of an update, and the devices that take it."""

    update: UpdateTime
    num_devices: int


def update_time(
    config: Config,
    plan: BatchPlan,
    *,
    step_seconds: float | None,
    mfu: float | None,
    peak: Peak | None,
    flops_per_token: int | None,
    has_devices: bool,
) -> TimedDevices | None:
    """Returns the time of an update from the first source that knows it; None if none does.

    Args:
      config: of the run.
      plan: of the devices at hand.
      step_seconds: of an update, as stated; None: not stated.
      mfu: the share of the peak to assume; None: not stated.
      peak: that the share refers to; None: unknown.
      flops_per_token: of training; None: of an own model, which nobody knows.
      has_devices: whether the command line states the devices; else those that a run was measured
        on count.

    Raises:
      ConfigError: a share of a peak that nobody knows, or of reinforcement learning.
    """
    if step_seconds is not None:
        return TimedDevices(UpdateTime(step_seconds, "stated"), plan.num_devices)
    if mfu is not None:
        if plan.rl:
            raise ConfigError(
                f"--mfu {mfu:g}: counts the FLOPs of training, and an update of reinforcement "
                "learning also samples; works: --step-seconds 12"
            )
        if flops_per_token is None:
            raise ConfigError(
                f"--mfu {mfu:g}: the FLOPs of an own model are unknown; works: --step-seconds 12"
            )
        if peak is None:
            raise ConfigError(
                f"--mfu {mfu:g}: needs the peak of a device; works: --mfu {mfu:g} --topology "
                f"v5p-128, or --mfu {mfu:g} peak_tflops_per_device=989"
            )
        seconds = seconds_for_share(plan, flops_per_token, peak.tflops, mfu)
        source = f"assumed: MFU {mfu:g} of {peak.in_words()}"
        return TimedDevices(UpdateTime(seconds, source), plan.num_devices)
    return _modelled(config, plan) or _measured(config, plan, has_devices)


def _modelled(config: Config, plan: BatchPlan) -> TimedDevices | None:
    """Returns the compiler's time of the last stage's update in `compiled_dir`, if it was compiled
    for the devices.
    """
    if not config.compiled_dir:
        return None
    from maxbatch.system.storage.storage import as_path

    try:
        with (as_path(config.compiled_dir) / "manifest.json").open("rb") as file:
            manifest = json.loads(file.read(_MOST_BYTES))
        num_devices = manifest["devices"]["devices"]
        steps = list(zip(manifest["shapes"], manifest["modelled_step_s"], strict=True))
    except (OSError, ValueError, TypeError, KeyError):
        return None  # training refuses such a folder by name
    if num_devices != plan.num_devices:
        return None
    for (micro_batch, most_passes), seconds in steps:
        if micro_batch == plan.micro_batch_size_to_train_on and isinstance(seconds, float):
            of_update = seconds * plan.gradient_accumulation_steps / most_passes
            return TimedDevices(
                UpdateTime(of_update, "modelled by the compiler in compiled_dir"), num_devices
            )
    return None


def _measured(config: Config, plan: BatchPlan, has_devices: bool) -> TimedDevices | None:
    """Returns the median times of the updates in `run_dir`, if the run has the model and the
    devices of the plan.
    """
    if not os.path.isfile(os.path.join(config.run_dir, "metrics.jsonl")):
        return None  # also of a run in a bucket, which a plan does not ask
    from maxbatch.run.folder.devices import read_devices
    from maxbatch.system.storage.storage import as_path

    run_dir = as_path(config.run_dir)
    if not _is_same_program(config, run_dir):
        return None
    used = read_devices(run_dir)
    if not used or (has_devices and used[-1].num_devices != plan.num_devices):
        return None
    by_batch = _median_seconds(run_dir, used[-1].first_step)
    if not by_batch:
        return None
    last = plan.global_batch_size_to_train_on
    measured = last if last in by_batch else max(by_batch)
    source = f"measured in {config.run_dir} on {used[-1].num_devices} devices"
    if measured != last:
        source += f" at a batch of {measured}"
    if not has_devices and used[-1].num_devices != plan.num_devices:
        note(
            f"the time is of the {used[-1].num_devices} devices that {config.run_dir} was "
            "measured on"
        )
    return TimedDevices(
        UpdateTime(by_batch[measured] * last / measured, source, by_batch), used[-1].num_devices
    )


def _median_seconds(run_dir: AnyPath, first_step: int) -> dict[int, float]:
    """Returns the median seconds of the updates from `first_step` on, by global batch."""
    from maxbatch.run.folder.metrics import scan_metrics
    from maxbatch.run.folder.metrics_schema import Metric

    records = [
        record for record in scan_metrics(run_dir).records if record[Metric.STEP] >= first_step
    ]
    warm = records[_FIRST_UPDATES:] or records
    seconds: dict[int, list[float]] = defaultdict(list)
    for record in warm:
        time = record.get(Metric.STEP_TIME_S)
        if isinstance(time, int | float) and time > 0:
            seconds[record[Metric.GLOBAL_BATCH_SIZE]].append(time)
    return {batch: statistics.median(times) for batch, times in seconds.items()}


def _is_same_program(config: Config, run_dir: AnyPath) -> bool:
    """Returns whether a run has the keys that fix the work per sample: the keys of its programs, but
    for the batch.
    """
    from maxbatch.config.keys import Fixes, Part
    from maxbatch.config.loading import load_config
    from maxbatch.config.sections import names_fixing, names_of

    try:
        recorded = load_config(str(run_dir / "config.yml"))
    except ConfigError:
        return False
    batch = {*names_of(Part.BATCH), *names_of(Part.RAMP)}
    names = [name for name in names_fixing(Fixes.MODEL | Fixes.PROGRAM) if name not in batch]
    return all(config[name] == recorded[name] for name in names)
