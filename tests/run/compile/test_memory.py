"""The memory and the time of an update of several programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from maxbatch import load_config
from maxbatch.around.compile.modelled import Modelled, sum_of_times
from maxbatch.data.feed.placement import BatchShape
from maxbatch.run.compile.memory import Memory, Verdict, largest_of
from maxbatch.system.hardware.chips import TPUS


def verdict(memory: Memory) -> Verdict:
    return Verdict(True, memory.needed_bytes, 1000, memory, 2.0)


def test_an_update_needs_the_memory_of_its_largest_program_among_all_arrays() -> None:
    small = verdict(Memory(100, 30, 10, 5, 1))
    large = verdict(Memory(200, 50, 50, 90, 1))
    of_update = largest_of([(small, 940), (large, 800)], 1000)
    assert (of_update.fits, of_update.needed_bytes, of_update.seconds) == (True, 966, 4.0)
    assert of_update.memory == Memory(940, 30, 10, 5, 1)
    assert not largest_of([(small, 940), (large, 950)], 1000).fits
    # the TPU compiler reports a peak in place of the sum
    on_tpu = verdict(Memory(100, 30, 10, 5, 1, peak_bytes=110))
    assert largest_of([(on_tpu, 940)], 1000).needed_bytes == 951


def test_an_update_takes_the_time_of_all_its_programs_as_often_as_they_run() -> None:
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", process_index=0)
    target: Any = SimpleNamespace(devices=[device] * 4, chip=TPUS["v5e"])
    atom, piece = (
        Modelled(
            compute_cycles=c,
            kernel_cycles=0,
            hidden_collective_bytes=7,
            exposed_collective_bytes=0,
            modelled_step_s=s,
        )
        for c, s in ((1000, 0.25), (10, 0.5))
    )
    config = load_config(overrides=["model_name=tiny"]).decoder
    shape = BatchShape(8, 2)
    modelled = sum_of_times([(atom, 3), (piece, 2)], target, config, 100, None, shape)
    assert (modelled.compute_cycles, modelled.hidden_collective_bytes) == (3020, 35)
    assert modelled.modelled_step_s == 1.75
    assert modelled.modelled_tokens_per_second_per_device == 1600 / 4 / 1.75
