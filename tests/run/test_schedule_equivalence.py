"""The rows of docs/batch-size.md on schedules, computed both ways: by the arithmetic there, and by
our plan.
"""

from __future__ import annotations

import math
import re

import optax
import pytest

from maxbatch import BatchPlan, RampupBatchManager, load_config
from maxbatch.plan.learning_rate import LearningRate
from tests.helpers.batch_page import PAGE, Checks
from tests.helpers.ramps_elsewhere import maxtext_batches, megatron_rampup, megatron_schedule

check = Checks("The schedule")
W, G = 4, 3  # replicas, passes per update


def test_no_table_of_the_page_has_a_row_without_a_check() -> None:
    of_example = "Balance losses of experts"  # tests/test_examples.py checks these
    sections = ("The count", "The gradient", of_example, "The optimizer", "The schedule")
    assert len(Checks(*sections).rows) == len(re.findall(r"\n\| `[a-z-]+` \|", PAGE))


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    assert set(check) == set(check.rows)


@pytest.mark.parametrize("row", check.rows)
def test_what_the_page_says_to_write_here_gives_the_rate_or_the_batch_there(row: str) -> None:
    check[row]()


def rate_here(*overrides: str, devices: int = 1) -> LearningRate:
    config = load_config(overrides=overrides)
    return LearningRate.from_config(config, RampupBatchManager.from_config(config, devices))


def batches_here(*overrides: str, devices: int) -> RampupBatchManager:
    return RampupBatchManager.from_config(load_config(overrides=overrides), devices)


@check("linear-scaling")
def _() -> None:
    assert (
        "`learning_rate_scaling=linear`, `reference_batch_size`" in check.rows["linear-scaling"][-1]
    )
    shape = ("steps=90", "learning_rate=0.1")
    tuned = rate_here(*shape, "global_batch_size=256")
    scaled = rate_here(
        *shape, "global_batch_size=2048", "learning_rate_scaling=linear", "reference_batch_size=256"
    )
    for step in range(90):
        assert scaled.at(step * 2048) == pytest.approx(8 * tuned.at(step * 256), rel=1e-12)


def check_scheduler(calls: int, calls_per_update: int) -> None:
    there = optax.warmup_cosine_decay_schedule(0, 3e-3, calls // 10, calls, 3e-4)
    ours = rate_here(f"steps={calls // calls_per_update}")
    for update in range(calls // calls_per_update):
        assert ours.at(update * 16) == pytest.approx(
            float(there(update * calls_per_update)), rel=2e-5
        )
    late = calls // calls_per_update * 3 // 4
    as_if_calls_were_updates = rate_here(f"steps={calls}").at(late * 16)
    assert as_if_calls_were_updates > 2 * float(there(late * calls_per_update))


@check("scheduler-per-pass")
def _() -> None:
    assert check.rows["scheduler-per-pass"][-1] == "`steps` = n / g"
    check_scheduler(calls=240, calls_per_update=G)


@check("scheduler-per-replica")
def _() -> None:
    assert check.rows["scheduler-per-replica"][-1] == "`steps` = n / W"
    check_scheduler(calls=240, calls_per_update=W)


@check("schedule-in-samples")
def _() -> None:
    samples, warmup, peak, last = 20_000, 1_500, 3e-3, 3e-4

    def megatron(consumed: int) -> float:
        if consumed <= warmup:
            return peak * consumed / warmup
        done = (consumed - warmup) / (samples - warmup)
        return last + 0.5 * (1 + math.cos(math.pi * done)) * (peak - last)

    length = (f"train_samples={samples}", f"warmup_steps_fraction={warmup / samples}")
    for ramp in ((), ("enable_rampup_batch_size=true",)):
        ours = rate_here(*length, *ramp)
        for consumed in range(0, samples + 1, 100):
            assert ours.at(consumed) == pytest.approx(megatron(consumed), rel=1e-9)


@check("schedule-in-steps")
def _() -> None:
    def furthest_apart(*ramp: str) -> float:
        ours = rate_here("steps=100", "warmup_steps_fraction=0", *ramp)
        there = optax.cosine_decay_schedule(3e-3, 100, alpha=0.1)
        at = ours.manager.position_after
        return max(abs(ours.at(at(step)) / float(there(step)) - 1) for step in range(100))

    assert furthest_apart() < 1e-4
    assert furthest_apart("enable_rampup_batch_size=true") > 0.3


@check("megatron-ramp")
def _() -> None:
    devices, steps = 8, 2
    first, rise, samples, batch = 32, 48, 2_000, 176
    there = megatron_rampup(first, rise, samples, batch)
    per_device = devices * steps
    ours = batches_here(
        "enable_rampup_batch_size=true",
        f"gradient_accumulation_steps={steps}",
        f"per_device_batch_size_start={first}/{per_device}",
        f"per_device_batch_size_increment={rise}/{per_device}",
        f"per_device_batch_size={batch}/{per_device}",
        f"global_rampup_samples={samples}",
        devices=devices,
    )
    assert [ours.batch_size_at(s) for s in range(3_000)] == [there(s) for s in range(3_000)]


@check("megatron-schedule")
def _() -> None:
    (said_there,), (said_here,) = (
        re.findall(r'"([^"]+)"', cell) for cell in check.rows["megatron-schedule"]
    )
    length = 4096
    there = megatron_schedule(said_there, length)
    ours = batches_here(
        f"batch_size_schedule={said_here}", f"max_target_length={length}", devices=8
    )
    threshold = 250 * 10**9 // length
    seen = range(threshold - 3000, threshold + 3000)
    assert {there(s) for s in seen} == {768, 1536}
    # there rounded down
    assert [s for s in seen if ours.batch_size_at(s) != there(s)] in ([], [threshold])


def maxtext_ramp(
    first: int, rise: int, increments: int, samples: int
) -> tuple[list[int], list[int]]:
    """The batches of 60 updates there and here, by the same keys, on 8 devices without
    accumulation.
    """
    devices = 8
    ours = batches_here(
        "enable_rampup_batch_size=true",
        f"per_device_batch_size_start={first}",
        f"per_device_batch_size_increment={rise}",
        f"per_device_batch_size={first + increments * rise}",
        f"global_rampup_samples={samples}",
        devices=devices,
    )
    sizes = (devices * first, devices * rise, devices * (first + increments * rise))
    there = maxtext_batches(*sizes, increments, samples, updates=60)
    return there, [ours.batch_size_at(ours.position_after(k)) for k in range(60)]


@check("maxtext-ramp")
def _() -> None:
    there, ours = maxtext_ramp(first=1, rise=1, increments=3, samples=3 * 8 * 6)
    assert there == ours and len(set(ours)) == 4


@check("maxtext-ramp-late")
def _() -> None:
    there, ours = maxtext_ramp(first=2, rise=3, increments=4, samples=1_200)
    begins, begins_here = (
        {batch: sum(batches[: batches.index(batch)]) for batch in sorted(set(batches))}
        for batches in (there, ours)
    )
    assert begins != begins_here and all(begins[batch] >= begins_here[batch] for batch in begins)
    schedule = " ".join(f"{sample}:{batch}" for batch, sample in begins.items())
    stated = batches_here(f"batch_size_schedule={schedule}", devices=8)
    assert [stated.batch_size_at(stated.position_after(k)) for k in range(60)] == there


@check("maxtext-fraction")
def _() -> None:
    devices, p, steps = 32, 0.25, 2
    keys = (
        f"per_device_batch_size={p}",
        f"gradient_accumulation_steps={steps}",
        "ici_tensor_parallelism=4",
    )
    # MaxText's, before and after its cut
    loaded, trained_on = devices * steps, int(devices * p) * steps
    plan = BatchPlan.from_config(load_config(overrides=keys), devices)
    assert plan.global_batch_size_to_train_on == plan.global_batch_size_to_load == trained_on
    assert plan.manager.position_after(10) == 10 * trained_on == 10 * loaded * p
