"""The speed of an update: tokens, model FLOPs, and their share of the chip's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.model.flops import model_flops_per_token
from maxbatch.system.chips import chip_of


class Throughput(NamedTuple):
    """The speed of one update; its fields are those of the record."""

    step_time_s: float
    tokens_per_second: float  # tokens of real rows, over all devices
    tflops_per_device: float  # model FLOPs, recomputation not counted
    mfu: float | None  # share of the device's bf16 peak; None if that is unknown


class ThroughputMeter:
    """Turns a step's rows and seconds into rates.

    `peak_tflops_per_device` overrides the table of known chips. `flops_per_token` is of a user's model; None: that of
    the config's.
    """

    def __init__(self, config: ConfigDict, devices: Sequence[jax.Device], flops_per_token: int | None = None) -> None:
        self._length = config.max_target_length
        self._flops_per_token = flops_per_token or model_flops_per_token(DecoderConfig.of(config))
        self._num_devices = len(devices)
        chip = chip_of(devices[0].device_kind)
        self._peak = config.peak_tflops_per_device or (chip.tflops if chip else None)

    def __call__(self, num_rows: int, seconds: float) -> Throughput:
        """Returns the speed of an update on `num_rows` real rows."""
        tokens_per_second = num_rows * self._length / seconds
        tflops = tokens_per_second * self._flops_per_token / self._num_devices / 1e12
        return Throughput(seconds, tokens_per_second, tflops, tflops / self._peak if self._peak else None)
