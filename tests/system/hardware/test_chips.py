"""One table of chips, by JAX device."""

from __future__ import annotations

import pytest

from maxbatch.system.hardware.chips import GPUS, TPUS, chip_of


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
    ],
)
def test_a_device_kind_is_of_the_longest_name_it_begins_with(kind: str, chip: str) -> None:
    assert chip_of(kind) is TPUS[chip]


def test_a_gpu_is_known_with_what_follows_its_name() -> None:
    assert chip_of("NVIDIA H100 80GB HBM3") is GPUS[1]
    assert chip_of("cpu") is None


def test_a_v4_or_v5p_chip_is_one_device_and_a_tpu7x_chip_two() -> None:
    """Peaks of whole chips: 275, 459 and 2,307 TFLOP/s."""
    assert (TPUS["v4"].tflops, TPUS["v5p"].tflops, 2 * TPUS["tpu7x"].tflops) == (275, 459, 2307)
