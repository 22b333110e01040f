"""The time that a run takes: its updates, each by the samples that it trains on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from maxbatch.plan.batch import BatchPlan
from maxbatch.system.terminal.folding import counted

HOUR_S, DAY_S = 3600.0, 86400.0


class UpdateTime(NamedTuple):
    """The seconds of a full update of the last stage, and where they come from."""

    seconds: float
    # stated, assumed (a share of the peak), modelled (by the compiler) or measured (by a run)
    source: str
    # measured seconds of an update by its global batch, for earlier stages
    by_batch: Mapping[int, float] = {}


class RunTime(NamedTuple):
    """The time of a whole run without starts, evals and checkpoints; its fields are those of `plan
    --json`.
    """

    run_seconds: float | None  # None: the length of the run is unknown
    device_hours: float | None
    step_seconds: float
    step_seconds_source: str

    def in_words(self, num_devices: int) -> str:
        """Returns the days and the device-hours, for the plan's text."""
        where = f"{self.step_seconds:.6g} s per update, {self.step_seconds_source}"
        if self.run_seconds is None or self.device_hours is None:
            return f"time: {where}; the length of the run is unknown here"
        days = _short(self.run_seconds / DAY_S)
        hours, devices = _short(self.device_hours), counted(num_devices, "device")
        return f"time: {days} days, {hours} device-hours on {devices}; {where}"


def _short(number: float) -> str:
    """Returns a number with its whole digits, or with four significant ones."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def seconds_for_share(
    plan: BatchPlan, flops_per_token: int, peak_tflops: float, share: float
) -> float:
    """Returns the seconds of an update of the last stage on devices that reach a share of their
    peak.

    Args:
      flops_per_token: of training, of the model.
      peak_tflops: of a device, 10^12 per second.
      share: model FLOPs utilisation, above 0.
    """
    return plan.tokens_per_step * flops_per_token / (plan.num_devices * peak_tflops * 1e12 * share)


def run_time(plan: BatchPlan, update: UpdateTime, num_devices: int) -> RunTime:
    """Returns the time of a plan: an update of fewer samples takes less in proportion, or what was
    measured.

    Args:
      update: the time of a full update of the last stage.
      num_devices: devices of the run.
    """
    seconds = _run_seconds(plan, update)
    device_hours = None if seconds is None else seconds * num_devices / HOUR_S
    return RunTime(seconds, device_hours, update.seconds, update.source)


def _run_seconds(plan: BatchPlan, update: UpdateTime) -> float | None:
    if plan.rl:  # every batch is of one size, and a position counts prompts
        return None if plan.total_steps is None else plan.total_steps * update.seconds
    stages = [plan.stages[number] for number in plan.manager.listed]
    last = stages[-1].global_batch_size
    total = 0.0
    for stage in stages:
        if stage.num_samples is None:
            return None
        if stage.num_samples:
            batch = stage.global_batch_size
            seconds = update.by_batch.get(batch, update.seconds * batch / last)
            total += seconds * stage.num_samples / batch
    return total
