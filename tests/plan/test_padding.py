"""Padding: any global batch on any number of devices, in the fewest passes and the fewest rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import BatchPlan, load_config
from maxbatch.cli import main


def padded(*overrides: str, devices: int) -> BatchPlan:
    return BatchPlan.from_config(
        load_config(overrides=["batch_padding=true", *overrides]), num_devices=devices
    )


@given(st.integers(1, 100), st.integers(1, 12), st.integers(1, 6), st.sampled_from((1, 2, 3)))
def test_passes_and_rows_are_the_fewest_that_hold_the_batch(
    batch: int, devices: int, rows: int, parts: int
) -> None:
    pipeline = f"num_pipeline_microbatches={parts}"
    plan = padded(
        f"global_batch_size={batch}",
        f"per_device_batch_size={rows * parts}",
        pipeline,
        devices=devices,
    )
    unit = devices * parts
    held = [
        (passes, units * unit)
        for passes, units in itertools.product(range(1, batch + 1), range(1, rows + 1))
        if passes * units * unit >= batch
    ]
    passes, micro = min(held)
    assert (plan.gradient_accumulation_steps, plan.micro_batch_size_to_train_on) == (passes, micro)
    assert plan.padded_slots_per_step == passes * micro - batch
    assert plan.global_batch_size_to_train_on == batch and (passes - 1) * micro < batch


def test_each_sample_has_one_slot_in_stream_order_and_empty_slots_are_last() -> None:
    parts = [
        part
        for micro in padded("global_batch_size=16", "per_device_batch_size=2", devices=5).layout()
        for part in micro
    ]
    assert [end for _, end in parts] == [2, 4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert sum(end - first for first, end in parts) == 16


def test_plan_prints_what_padding_wastes(capsys: pytest.CaptureFixture[str]) -> None:
    stated = ["global_batch_size=16", "per_device_batch_size=2", "--devices", "3", "--layout"]
    assert main(["plan", "batch_padding=true", *stated]) == 0
    out = capsys.readouterr().out
    assert "2 empty" in out and "padded_slots_per_step" in out
    plan = padded("global_batch_size=16", "per_device_batch_size=2", devices=3).to_dict()
    assert (plan["padded_slots_per_step"], plan["stages"][0]["padded_slots_per_step"]) == (2, 2)
    assert plan["padded_share"] == pytest.approx(2 / 18)
    assert (plan["samples_per_host"], plan["per_replica_batch_size"]) == (16, pytest.approx(16 / 3))


def test_a_ramp_of_which_an_earlier_stage_is_padded_shows_it_and_no_words_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = [
        "batch_size_schedule=0:8 800:18",
        "per_device_batch_size=2",
        "train_samples=9000",
        "--devices",
        "3",
    ]
    assert main(["plan", "batch_padding=true", *stated, "--words"]) == 0
    out = capsys.readouterr().out
    assert "padded" in out and "batch_padding=true" in out and "DeepSpeed" not in out
