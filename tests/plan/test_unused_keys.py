"""Values that do nothing are told once, by the plan and by training."""

from __future__ import annotations

import pytest

from maxbatch import BatchPlan, load_config
from maxbatch.cli import main
from maxbatch.plan.batch import Resume
from maxbatch.plan.unused_keys import _enough_samples, _visits_all


def warnings_of(overrides: list[str], devices: int = 1, path: str | None = None, **keywords: Resume) -> tuple[str, ...]:
    return BatchPlan.from_config(load_config(path, overrides), devices, **keywords).warnings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reference_batch_size=64"], "reference_batch_size=64 has no effect without learning_rate_scaling"),
        (["per_device_batch_size_start=8"], "per_device_batch_size_start=8 has no effect without enable_rampup"),
        (
            ["per_device_batch_size_start=8", "global_rampup_samples=1K"],
            "per_device_batch_size_start=8, global_rampup_samples=1000 have no effect without enable_rampup",
        ),
        (["expansion_factor_real_data=0.5"], "expansion_factor_real_data=0.5 has no effect on a new run"),
        (["num_pipeline_microbatches=4"], "num_pipeline_microbatches=4 has no effect without pipeline stages"),
        (["steps=1"], "every rate of the run is 0"),
        (["batch_size=4", "steps=2", "num_iterations=2"], "every rate of the run is 0"),
        (["batch_size_schedule=0:256 100:512 200:1024"], "stage 1 of the ramp has no update"),
    ],
)
def test_a_value_without_an_effect_is_told_once(overrides: list[str], said: str) -> None:
    (warning,) = warnings_of(overrides)
    assert warning.startswith(said)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["reference_batch_size=64", "learning_rate_scaling=sqrt"],
        ["per_device_batch_size_start=8", "enable_rampup_batch_size=true"],
        ["per_device_batch_size_start=4", "global_rampup_samples=500"],  # the defaults
        ["num_pipeline_microbatches=4", "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1"],
        ["steps=1", "warmup_steps_fraction=0"],
        ["steps=2"],
        ["batch_size=4", "steps=2"],
        ["expansion_factor_real_data=2"],
    ],
)
def test_a_value_with_an_effect_is_not_told(overrides: list[str]) -> None:
    plan = BatchPlan.from_config(load_config(overrides=overrides), 2, 2 if "expansion" in " ".join(overrides) else 1)
    assert plan.warnings == ()


def test_a_factor_below_one_is_for_a_resume() -> None:
    assert warnings_of(["expansion_factor_real_data=0.5"], resume=Resume(5, 80, 2, 2)) == ()


def test_the_ramp_that_a_warning_names_visits_all_its_stages_and_is_the_shortest() -> None:
    ramp = ["enable_rampup_batch_size=true"]
    (warning,) = warnings_of(ramp, 16)
    _, _, works = warning.partition("works: ")
    assert warning.startswith("stages 3, 5 of the ramp have no update") and works.startswith("global_rampup_samples=")
    assert warnings_of([*ramp, works], 16) == ()
    for batches in ([4, 6, 8, 10, 12, 14, 16], [16, 8], [5, 12, 19, 26], [12, 10, 8, 6]):
        shortest = next(length for length in range(1, 1000) if _visits_all(batches, length))
        assert _enough_samples(batches) == shortest
    for length in range(50, 900, 7):  # as the plan itself counts
        plan = BatchPlan.from_config(load_config(overrides=[*ramp, f"global_rampup_samples={length}", "steps=900"]), 16)
        visits = all(stage.num_steps for stage in plan.stages)
        assert visits == _visits_all([stage.global_batch_size for stage in plan.stages], length)


def test_the_words_of_others_leave_out_a_pipeline_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "num_pipeline_microbatches=4", "--words", "--devices", "1"]) == 0
    output = capsys.readouterr()
    assert "train_micro_batch_size_per_gpu=16 gradient_accumulation_steps=1" in output.out
    assert "--micro-batch-size 16 " in output.out and output.err.count("has no effect") == 1
