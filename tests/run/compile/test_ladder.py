"""No stage change compiles or waits: one step can run every stage, the steady state's own follows
later.
"""

from __future__ import annotations

import threading

import pytest

from maxbatch import RampupBatchManager
from maxbatch.run.compile.background import Background
from maxbatch.run.compile.ladder import BatchShape, StepLadder, plan_shapes
from tests.helpers.tiny import tiny_config

RAMP = (
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=2",
    "per_device_batch_size_increment=2",
    "per_device_batch_size=8",
    "gradient_accumulation_steps=3",
)


def test_the_first_executable_runs_every_stage_and_the_second_the_steady_state() -> None:
    stages = RampupBatchManager.from_config(tiny_config(*RAMP), num_devices=4).stages
    assert plan_shapes(stages) == [BatchShape(8, 12), BatchShape(32, 3)]


def test_a_long_stage_has_an_executable_of_its_own_and_a_short_one_has_not() -> None:
    """A doubling ramp: 10, 100, 10 and 100 updates at 16, 32, 64 and 128 rows in one pass."""
    ramp = (
        "batch_size_schedule=0:16 160:32 3360:64 4000:128",
        "train_samples=16800",
        "per_device_batch_size=128",
    )
    stages = RampupBatchManager.from_config(tiny_config(*ramp)).stages
    assert [stage.num_steps for stage in stages] == [10, 100, 10, 100]
    assert plan_shapes(stages) == [BatchShape(16, 8), BatchShape(32, 4), BatchShape(128, 1)]


def test_an_executable_whose_stage_is_over_is_never_used() -> None:
    ramp = ("batch_size_schedule=0:16 1600:24 4000:16", "steps=300", "per_device_batch_size=128")
    stages = RampupBatchManager.from_config(tiny_config(*ramp)).stages
    with Background() as background:
        steps = StepLadder(lambda shape: shape.micro_batch, stages)
        steps.compile_first()
        steps.compile_rest(background)
        background.start(lambda: None).result(10)
        assert steps.shape_for(stages[2], False).micro_batch == 16, (
            "24 is behind; 16 runs for the first time"
        )
        assert steps.shape_for(stages[2], False).micro_batch == 16
        shapes = "8 (any stage), of 16 (the last stage), of 24 (stages of 64 updates or more)"
        assert steps.describe() == f"compiled for micro-batches of {shapes}"


def test_a_constant_batch_needs_one_executable() -> None:
    stages = RampupBatchManager.from_config(tiny_config("gradient_accumulation_steps=5")).stages
    assert plan_shapes(stages) == [BatchShape(16, 5)]


def test_a_stage_takes_the_coarsest_executable_that_is_ready() -> None:
    stages = RampupBatchManager.from_config(tiny_config(*RAMP), num_devices=4).stages
    go_on = threading.Event()

    def compile_step(shape: BatchShape) -> str:
        if shape.micro_batch == 32:
            assert go_on.wait(10)
        return f"step of {shape.micro_batch}"

    with Background() as background:
        steps = StepLadder(compile_step, stages)
        assert steps.shape_for(stages[0], True) == BatchShape(8, 12), (
            "the feed may ask before it is compiled"
        )
        assert steps.compile_first() == [(BatchShape(8, 12), "step of 8")]
        steps.compile_rest(background)
        assert [steps.shape_for(stage, False).micro_batch for stage in stages] == [8, 8, 8, 8]
        go_on.set()
        background.start(lambda: None).result(10)
        assert steps.shape_for(stages[-1], True).micro_batch == 8, (
            "no first run in the update that opens a stage"
        )
        assert steps.shape_for(stages[1], False).micro_batch == 32, (
            "its first run, padded, within a stage"
        )
        assert [steps.shape_for(stage, False).micro_batch for stage in stages] == [8, 8, 8, 32]
        assert steps[steps.shape_for(stages[-1], True)] == "step of 32"


def test_what_fails_in_the_background_fails_the_run() -> None:
    def out_of_memory() -> None:
        raise MemoryError("too large")

    with Background() as background:
        job = background.start(out_of_memory)
        with pytest.raises(MemoryError):
            job.result(10)
        with pytest.raises(MemoryError):
            background.check()
