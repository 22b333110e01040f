"""The speed of an update: tokens, model FLOPs, and their share of the chip's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxbatch.system.chips import chip_of


class Throughput(NamedTuple):
    """The speed of one update; its fields are those of the record."""

    step_time_s: float
    tokens_per_second: float  # tokens of real rows, over all devices
    tflops_per_device: float  # model FLOPs, recomputation not counted
    mfu: float | None  # share of the device's bf16 peak; None if that is unknown


class ThroughputMeter:
    """Turns a step's rows and seconds into rates.

    Args:
      length: L, tokens of a row.
      flops_per_token: of training, forward and backward.
      devices: the devices that train.
      peak_tflops: of a device; None: that of a known chip.
    """

    def __init__(
        self, length: int, flops_per_token: int, devices: Sequence[jax.Device], peak_tflops: float | None
    ) -> None:
        self._length, self._flops_per_token = length, flops_per_token
        self._num_devices = len(devices)
        chip = chip_of(devices[0].device_kind)
        self._peak = peak_tflops or (chip.tflops if chip else None)

    def __call__(self, num_rows: int, seconds: float) -> Throughput:
        """Returns the speed of an update on `num_rows` real rows."""
        tokens_per_second = num_rows * self._length / seconds
        tflops = tokens_per_second * self._flops_per_token / self._num_devices / 1e12
        return Throughput(seconds, tokens_per_second, tflops, tflops / self._peak if self._peak else None)
