"""What an update left behind: one record, in `metrics.jsonl`, in TensorBoard and on the console."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter

from maxbatch.data.stream.fingerprint import to_hex
from maxbatch.data.stream.stream import Stream
from maxbatch.runs.run_folder import RunFolder
from maxbatch.system.errors import DivergedError
from maxbatch.training.checkpoints import Position
from maxbatch.training.compile.cache import CompileCounter
from maxbatch.training.step import StepMetrics
from maxbatch.training.throughput import ThroughputMeter


class Dispatched(NamedTuple):
    """An update on its way: what was asked for, and metrics that may not be there yet."""

    step: int
    samples_seen: int  # once it is done
    num_rows: int  # real rows, padding left out
    stage: int
    micro_batch_size: int
    num_micro_batches: int
    learning_rate: float
    data_wait_s: float
    metrics: StepMetrics


class Output(Protocol):
    """Where the records of a run go."""

    def append(self, record: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Waits for each update's metrics, one update behind the dispatch, and writes its record.

    Args:
      position: where the run starts; `position` follows the recorded updates.
      stream: the training stream, None on a host that does not load; a mixture's samples are counted by source.
      outputs: where records go, none on a host that writes nothing.
    """

    def __init__(
        self,
        config: ConfigDict,
        position: Position,
        compiles: CompileCounter,
        devices: Sequence[jax.Device],
        stream: Stream | None,
        outputs: Sequence[Output],
    ) -> None:
        self.position = position
        self._samples_by_source = stream.samples_by_source if stream else lambda position: None
        rows_per_sample = config.num_generations if config.batch_size else 1
        self._slots_per_sample = rows_per_sample * config.max_target_length
        self._measures_noise = config.gradient_noise_scale
        self._max_skips = config.max_consecutive_skips
        self._meter = ThroughputMeter(config, devices)
        self._compiles, self._outputs = compiles, outputs
        self._last_done = time.perf_counter()

    def restart_clock(self) -> None:
        """Leaves what was done since the last update (eval, a save) out of the next step's time."""
        self._last_done = time.perf_counter()

    def record(self, update: Dispatched, also: Callable[[], dict[str, Any]] | None = None) -> None:
        """Waits for an update and writes its record.

        Args:
          update: the update.
          also: called once the update is done and timed; what it returns joins the record.

        Raises:
          DivergedError: it was the last of `max_consecutive_skips` skipped ones.
        """
        metrics = jax.device_get(update.metrics)
        now = time.perf_counter()
        throughput = self._meter(update.num_rows, now - self._last_done)
        self._last_done = now
        self._advance(update, metrics)
        record = {
            "step": update.step,
            "samples_seen": self.position.samples_seen,
            "tokens_seen": self.position.samples_seen * self._slots_per_sample,
            "global_batch_size": update.num_rows,
            "stage": update.stage,
            "loss": float(metrics.loss),
            "learning_rate": update.learning_rate,
            "grad_norm": float(metrics.grad_norm),
            "data_fingerprint": to_hex(metrics.fingerprint),
            **throughput._asdict(),
            "data_wait_s": update.data_wait_s,
            "data_wait_fraction": update.data_wait_s / throughput.step_time_s,
            "loss_weight": float(metrics.weight),
            "micro_batch_size": update.micro_batch_size,
            "num_micro_batches": update.num_micro_batches,
            "skipped": bool(metrics.skipped),
            "skipped_updates": self.position.skipped_updates,
            "compiles": self._compiles.count,
            **self._noise(),
            **self._mixture(),
            **(also() if also else {}),
        }
        for output in self._outputs:
            output.append(record)
        if self.position.consecutive_skips >= self._max_skips:
            raise DivergedError(
                f"{self.position.consecutive_skips} updates in a row had a gradient that is not finite (the last: step "
                f"{update.step}, samples_seen {self.position.samples_seen}); the parameters are those before them. "
                "Lower learning_rate, or look at the data there with `maxbatch data`"
            )

    def _mixture(self) -> dict[str, Any]:
        counts = self._samples_by_source(self.position.samples_seen)
        return {} if counts is None else {"samples_by_source": counts}

    def _noise(self) -> dict[str, Any]:
        if not self._measures_noise:
            return {}
        samples = self.position.noise_scale.samples
        critical = None if samples is None else max(1, round(samples))
        return {"gradient_noise_scale": samples, "critical_batch_estimate": critical}

    def _advance(self, update: Dispatched, metrics: StepMetrics) -> None:
        skipped = bool(metrics.skipped)
        self.position = Position(
            step=update.step,
            samples_seen=update.samples_seen,
            skipped_updates=self.position.skipped_updates + skipped,
            consecutive_skips=self.position.consecutive_skips + 1 if skipped else 0,
            noise_scale=self.position.noise_scale.after(
                float(metrics.grad_norm),
                float(metrics.weight),
                update.num_rows,
                *(float(figure) for figure in metrics.parts),
            ),
        )

    def sync(self) -> None:
        """Returns once every record is on disk; a checkpoint may commit only then."""
        for output in self._outputs:
            output.sync()

    def close(self) -> None:
        for output in self._outputs:
            output.sync()
            output.close()


class Board:
    """TensorBoard events of a run; those of updates that will be redone are purged."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._writer = SummaryWriter(str(folder.path), purge_step=step + 1)

    def append(self, record: dict[str, Any]) -> None:
        counts = {f"samples_by_source/{k}": v for k, v in record.get("samples_by_source", {}).items()}
        for key, value in (record | counts).items():
            if isinstance(value, int | float) and math.isfinite(value) and key != "step":
                self._writer.add_scalar(key, value, record["step"])

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""
        self._writer.add_text(name, text, step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
