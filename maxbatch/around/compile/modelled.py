"""The modelled time of a compiled program on its devices, by the compiler's own clock."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from maxbatch.around.compile.clock import Operation, schedule_of
from maxbatch.around.compile.hlo import read_hlo
from maxbatch.config.combined import DecoderConfig
from maxbatch.data.feed.placement import BatchShape
from maxbatch.model.flops import model_flops_per_token
from maxbatch.run.compile.target import Target
from maxbatch.system.hardware.chips import mfu_peak

_DEAREST = 5


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Modelled, not measured, figures of one run of a program, per device.

    None without a compiler clock (CPUs and GPUs); rates are also None for programs other than
    updates.
    """

    compute_cycles: int | None = None  # with loops multiplied out, without custom kernels
    kernel_cycles: int | None = None  # of custom kernels, by their cost
    hidden_collective_bytes: int | None = None
    exposed_collective_bytes: int | None = None
    modelled_step_s: float | None = None
    modelled_tokens_per_second_per_device: float | None = None
    modelled_mfu: float | None = None
    operations: Sequence[Operation] = ()  # those with the most cycles, in order

    def of_samples(self, share: float) -> Modelled:
        """Scales the rates to real samples, a share of all slots (`batch_padding`)."""
        rate, mfu = (
            figure and figure * share
            for figure in (self.modelled_tokens_per_second_per_device, self.modelled_mfu)
        )
        return dataclasses.replace(
            self, modelled_tokens_per_second_per_device=rate, modelled_mfu=mfu
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the figures as `--json` prints them."""
        return dataclasses.asdict(self) | {
            "operations": [dataclasses.asdict(operation) for operation in self.operations]
        }


def model_time(
    text: str,
    target: Target,
    config: DecoderConfig,
    slots: int,
    peak_tflops: float | None,
    shape: BatchShape | None,
) -> Modelled:
    """Returns the modelled figures of a program.

    Args:
      slots: token slots of a row.
      peak_tflops: per device, `peak_tflops_per_device`; None: the chip's, of the type of the
        layers' products.
      shape: the batch of an update; None for another program.
    """
    chip = target.chip
    if not has_clock(target) or chip is None:
        return Modelled()
    schedule = schedule_of(read_hlo(text), chip, shape.max_micro_batches if shape else 1)
    seconds = schedule.seconds(chip)
    rate, mfu = _rates(seconds, target, config, slots, peak_tflops, shape)
    return Modelled(
        compute_cycles=round(schedule.compute_cycles),
        kernel_cycles=round(schedule.kernel_cycles),
        hidden_collective_bytes=round(schedule.hidden_collective_bytes),
        exposed_collective_bytes=round(schedule.exposed_collective_bytes),
        modelled_step_s=seconds,
        modelled_tokens_per_second_per_device=rate,
        modelled_mfu=mfu,
        operations=schedule.dearest(_DEAREST),
    )


def sum_of_times(
    programs: Sequence[tuple[Modelled, int]],
    target: Target,
    config: DecoderConfig,
    slots: int,
    peak_tflops: float | None,
    shape: BatchShape,
) -> Modelled:
    """Returns the figures of an update of several programs that run one after another.

    Args:
      programs: the figures of each, and its runs in the update.
      slots, peak_tflops: as in `model_time`.
      shape: the batch.
    """
    if not has_clock(target):
        return Modelled()

    def total(name: str) -> float:
        return sum((getattr(program, name) or 0) * runs for program, runs in programs)

    cycles: Counter[tuple[str, str]] = Counter()
    for program, runs in programs:
        for operation in program.operations:
            cycles[operation.name, operation.source] += operation.cycles * runs
    seconds = total("modelled_step_s")
    rate, mfu = _rates(seconds, target, config, slots, peak_tflops, shape)
    return Modelled(
        compute_cycles=round(total("compute_cycles")),
        kernel_cycles=round(total("kernel_cycles")),
        hidden_collective_bytes=round(total("hidden_collective_bytes")),
        exposed_collective_bytes=round(total("exposed_collective_bytes")),
        modelled_step_s=seconds,
        modelled_tokens_per_second_per_device=rate,
        modelled_mfu=mfu,
        operations=[Operation(*key, cycles=n) for key, n in cycles.most_common(_DEAREST)],
    )


def _rates(
    seconds: float | None,
    target: Target,
    config: DecoderConfig,
    slots: int,
    peak_tflops: float | None,
    shape: BatchShape | None,
) -> tuple[float | None, float | None]:
    """Returns tokens per second of a device, and MFU, of an update that takes so long; None for
    another program.
    """
    peak = mfu_peak(target.chip, config.quantization, peak_tflops)
    if not (shape and seconds and peak):
        return None, None
    tokens = shape.micro_batch * shape.max_micro_batches * slots
    rate = tokens / len(target.devices) / seconds
    return rate, rate * model_flops_per_token(config) / (peak.tflops * 1e12)


def has_clock(target: Target) -> bool:
    """Returns whether the target's compiler estimates cycles."""
    return (
        target.devices[0].platform == "tpu"
        and target.chip is not None
        and target.chip.clock_ghz is not None
    )
