"""Throughput counts tokens, not slots, and the FLOPs of the model, per device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maxbatch.run.record.recorder import ThroughputMeter

FLOPS_PER_TOKEN = 1000


def devices(kind: str, count: int = 4) -> Any:
    return [SimpleNamespace(device_kind=kind)] * count


def test_rates_follow_from_tokens_and_seconds() -> None:
    rates = ThroughputMeter(FLOPS_PER_TOKEN, devices("cpu"), None)(num_tokens=10, seconds=0.5)
    assert rates.tokens_per_second == 20
    assert rates.tflops_per_device == pytest.approx(
        rates.tokens_per_second * FLOPS_PER_TOKEN / 4 / 1e12
    )
    assert rates.mfu is None, "a CPU's peak is unknown"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v4", 275),
        ("TPU v6 lite", 918),
        ("NVIDIA H200", 989),
    ],
)
def test_mfu_is_the_share_of_a_known_chips_peak(kind: str, peak: float) -> None:
    rates = ThroughputMeter(FLOPS_PER_TOKEN, devices(kind), None)(16, 1.0)
    assert rates.mfu == pytest.approx(rates.tflops_per_device / peak)


def test_a_stated_peak_overrides_the_table() -> None:
    rates = ThroughputMeter(FLOPS_PER_TOKEN, devices("cpu"), 2.0)(16, 1.0)
    assert rates.mfu == pytest.approx(rates.tflops_per_device / 2)
