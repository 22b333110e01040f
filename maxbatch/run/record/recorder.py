"""The record of each update: a line of `metrics.jsonl`, points in TensorBoard, progress on the
console.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from maxbatch.config.combined import RecordConfig
from maxbatch.config.recipes import slots_per_sample
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.run.compile.cache import CompileCounter
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric, SkipReason
from maxbatch.run.folder.position import Position
from maxbatch.run.record.hashes_log import HashesLog
from maxbatch.run.task import Dispatched
from maxbatch.system.errors import DivergedError
from maxbatch.system.hardware.chips import chip_of, mfu_peak
from maxbatch.system.hashing import to_hex
from maxbatch.update.step import StepMetrics


class Throughput(NamedTuple):
    """The speed of one update, with the record's fields."""

    step_time_s: float
    tokens_per_second: float  # padding is no token; over all devices
    tflops_per_device: float  # model FLOPs, recomputation not counted
    mfu: float | None  # share of the device's peak; None if unknown


class ThroughputMeter:
    """Turns a step's tokens and seconds into rates.

    Args:
      flops_per_token: FLOPs of training per token, forward and backward.
      peak_tflops: peak per device; None: a known chip's, of the type of the layers' products.
      quantization: that type; "": none of 8 bits.
    """

    def __init__(
        self,
        flops_per_token: int,
        devices: Sequence[jax.Device],
        peak_tflops: float | None,
        quantization: str = "",
    ) -> None:
        self._flops_per_token = flops_per_token
        self._num_devices = len(devices)
        peak = mfu_peak(chip_of(devices[0].device_kind), quantization, peak_tflops)
        self._peak = peak.tflops if peak else None

    def __call__(self, num_tokens: int, seconds: float) -> Throughput:
        """Returns the speed of an update on `num_tokens` tokens, slots without one left out."""
        tokens_per_second = num_tokens / seconds
        tflops = tokens_per_second * self._flops_per_token / self._num_devices / 1e12
        return Throughput(
            seconds, tokens_per_second, tflops, tflops / self._peak if self._peak else None
        )


class Output(Protocol):
    """A destination of a run's records; subclasses override any of the three methods.

    Called on the first host, by the training thread.
    """

    def append(self, record: Record) -> None:
        """Adds the record of one update, the fields of its line in `metrics.jsonl`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes all records so far durable; called before a checkpoint commits."""
        return

    def close(self) -> None:
        """Releases resources; called once, when the run ends or fails."""
        return


class Recorder:
    """A writer of update records, one update behind; `position` follows the recorded updates."""

    def __init__(
        self,
        config: RecordConfig,
        manager: RampupBatchManager,
        position: Position,
        compiles: CompileCounter,
        meter: ThroughputMeter,
        outputs: Sequence[Output],
        holes: Holes = NO_HOLES,
        hashes: HashesLog | None = None,
    ) -> None:
        self.position, self._holes = position, holes
        self._slots_per_row = slots_per_sample(config)
        self._slots_per_sample = manager.rows_per_sample * self._slots_per_row
        self._measures_noise = config.optimizer.gradient_noise_scale
        self._log_period = config.log_period
        self._means = config.recipe.means
        self._max_skips = config.optimizer.max_consecutive_skips
        self._spike_interval = config.optimizer.skip_step_interval
        self._meter, self._compiles, self._outputs = meter, compiles, outputs
        self._hashes = hashes
        self._unrecorded: Dispatched | None = None
        self._last_done = time.perf_counter()

    def restart_clock(self) -> None:
        """Excludes the time since the last update (an eval, a save) from the next step's."""
        self._last_done = time.perf_counter()

    def add(self, update: Dispatched) -> None:
        """Adds a dispatched update, and records the previous one."""
        self.catch_up()
        self._unrecorded = update

    def catch_up(self, evaluate: Callable[[], Mapping[str, object]] | None = None) -> None:
        """Waits for the last added update and records it.

        Args:
          evaluate: called after the update is done and timed; its figures join the record.

        Raises:
          DivergedError: it was the last of `max_consecutive_skips` non-finite updates in a row.
          TrainingError: copies of the new state differ.
        """
        if self._unrecorded is None:
            return
        update, self._unrecorded = self._unrecorded, None
        metrics = jax.device_get(update.metrics)
        seconds, self._last_done = time.perf_counter() - self._last_done, time.perf_counter()
        state_hash = None
        if self._hashes is not None:
            state_hash = self._hashes.append(update.planned.step, metrics.hashes)
        self._advance(update, metrics)
        evaluated = dict(evaluate() if evaluate else {})
        if isinstance(eval_loss := evaluated.get(Metric.EVAL_LOSS), float):
            best = self.position.best_eval.after(eval_loss, self.position.step)
            self.position = self.position._replace(best_eval=best)
        record = self._record(update, metrics, seconds, state_hash) | evaluated
        for output in self._outputs:
            output.append(record)
        if self.position.consecutive_skips >= self._max_skips:
            seen = self.position.samples_seen
            position = self._holes.position_after(seen)  # as maxbatch data counts
            where = f"samples_seen {seen}" + (
                f", stream_position {position}" if position != seen else ""
            )
            raise DivergedError(
                f"{self.position.consecutive_skips} updates in a row had {not_finite(record)} "
                f"that is not finite (the last: step {self.position.step}, {where}); the "
                "parameters are those before them. Lower "
                "learning_rate, or look at the data there with `maxbatch data`"
            )

    def _record(
        self, update: Dispatched, metrics: StepMetrics, seconds: float, state_hash: str | None
    ) -> Record:
        planned, position, tokens = update.planned, self.position, int(metrics.tokens)
        reason = _skip_reason(metrics)
        slots = update.micro_batch_size * update.num_micro_batches * self._slots_per_row
        record = {
            Metric.STEP: position.step,
            Metric.SAMPLES_SEEN: position.samples_seen,
            Metric.STREAM_POSITION: self._holes.position_after(position.samples_seen),
            Metric.TOKENS_SEEN: position.samples_seen * self._slots_per_sample,
            Metric.GLOBAL_BATCH_SIZE: planned.num_rows,
            Metric.STAGE: planned.stage,
            Metric.LOSS: float(metrics.loss) if metrics.weight > 0 else None,
            Metric.LEARNING_RATE: update.learning_rate,
            Metric.GRAD_NORM: float(metrics.grad_norm),
            Metric.DATA_FINGERPRINT: to_hex(metrics.fingerprint),
            Metric.STATE_HASH: state_hash,
            Metric.TOKENS: tokens,
            Metric.SLOT_SHARE: tokens / slots if slots else None,
            **self._meter(tokens, seconds)._asdict(),
            Metric.DATA_WAIT_S: update.data_wait_s,
            Metric.DATA_WAIT_FRACTION: update.data_wait_s / seconds,
            Metric.LOSS_WEIGHT: float(metrics.weight),
            Metric.MICRO_BATCH_SIZE: update.micro_batch_size,
            Metric.NUM_MICRO_BATCHES: update.num_micro_batches,
            Metric.SKIPPED: reason is not None,
            Metric.SKIP_REASON: reason,
            Metric.SKIPPED_UPDATES: position.skipped_updates,
            Metric.COMPILES: self._compiles.count,
        }

        if self._measures_noise:
            samples = position.noise_scale.samples
            record[Metric.GRADIENT_NOISE_SCALE] = samples
            record[Metric.CRITICAL_BATCH_ESTIMATE] = (
                None if samples is None else max(1, round(samples))
            )

        for name, total in metrics.others.items():
            if name in self._means:
                record[name] = float(total / metrics.weight) if metrics.weight > 0 else None

        if (routing := metrics.routing) is not None:
            record |= {
                Metric.LOAD_BALANCE_LOSS: float(routing.load_balance_loss),
                Metric.ROUTER_Z_LOSS: float(routing.router_z_loss),
                Metric.EXPERT_LOAD_MAX: float(routing.load_max),
                Metric.DROPPED_TOKENS: int(routing.dropped),
                Metric.ROUTING_FINGERPRINT: to_hex(routing.fingerprint),
            }
            if position.step % self._log_period == 0:
                choices = map(int, routing.choices_E)
                record[Metric.EXPERT_CHOICES] = {
                    str(expert): count for expert, count in enumerate(choices)
                }

        return {str(name): value for name, value in (record | dict(update.figures)).items()}

    def _advance(self, update: Dispatched, metrics: StepMetrics) -> None:
        reason, before, step = _skip_reason(metrics), self.position, update.planned.step
        norm, weight, noise_parts = (
            float(metrics.grad_norm),
            float(metrics.weight),
            map(float, metrics.noise_parts),
        )
        is_non_finite, is_spike = reason == SkipReason.NON_FINITE, reason == SkipReason.SPIKE
        is_weightless = not is_non_finite and not weight > 0
        noise_scale, spikes = before.noise_scale, before.spikes
        if not is_spike:
            noise_scale = noise_scale.after(norm, weight, update.planned.num_rows, *noise_parts)
        if metrics.is_spike is None:
            spikes = spikes.without_window()
        elif not (is_non_finite or is_weightless):
            spikes = spikes.kept(float(metrics.loss), norm, self._spike_interval)
        self.position = before._replace(
            step=step,
            place=update.place,
            skipped_updates=before.skipped_updates + (reason is not None),
            consecutive_skips=before.consecutive_skips + 1 if is_non_finite else 0,
            noise_scale=noise_scale,
            weightless_updates=before.weightless_updates + is_weightless,
            spikes=spikes.skipped(step) if is_spike else spikes,
        )

    def sync(self) -> None:
        """Makes all records durable; a checkpoint may commit only afterwards."""
        for output in self._outputs:
            output.sync()
        if self._hashes is not None:
            self._hashes.sync()


def _skip_reason(metrics: StepMetrics) -> SkipReason | None:
    """Returns why an update was skipped; None if it was not, or had nothing to train on."""
    if metrics.is_spike:
        return SkipReason.SPIKE
    return SkipReason.NON_FINITE if metrics.skipped else None


def not_finite(record: Record) -> str:
    """Names the non-finite part of an update that was skipped as such."""
    loss = record[Metric.LOSS]  # None for a batch without loss weight
    is_before = (loss is None or math.isfinite(loss)) and math.isfinite(record[Metric.GRAD_NORM])
    return "a new state" if is_before else "a gradient"
