"""Values without effect are reported once, by the plan and by training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxbatch import BatchPlan, load_config
from maxbatch.cli import main
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.place import Place
from maxbatch.plan.unused_keys import enough_samples, visits_all
from maxbatch.run.folder.position import CheckpointRecord, Position
from tests.helpers.configs import write


def warnings_of(
    overrides: list[str], devices: int = 1, path: str | None = None, **keywords: ResumePoint
) -> tuple[str, ...]:
    return BatchPlan.from_config(load_config(path, overrides), devices, **keywords).warnings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reference_batch_size=64"],
            "reference_batch_size=64 has no effect without learning_rate_scaling",
        ),
        (
            ["learning_rate_scaling=linear"],
            "learning_rate_scaling=linear has no effect without reference_batch_size",
        ),
        (
            ["per_device_batch_size_start=8"],
            "per_device_batch_size_start=8 has no effect without enable_rampup",
        ),
        (
            ["per_device_batch_size_start=8", "global_batch_size=64"],
            "per_device_batch_size_start=8 has no effect: global_batch_size=64 replaces the",
        ),
        (
            ["per_device_batch_size_start=8", "global_rampup_samples=1K"],
            "per_device_batch_size_start=8, global_rampup_samples=1000 have no effect without "
            "enable_rampup",
        ),
        (
            ["expansion_factor_real_data=0.5"],
            "expansion_factor_real_data=0.5 has no effect on a new run",
        ),
        (
            ["num_pipeline_microbatches=4"],
            "num_pipeline_microbatches=4 has no effect without pipeline stages",
        ),
        (
            ["context_parallel_strategy=ring"],
            "context_parallel_strategy=ring has no effect without a context axis",
        ),
        (
            ["skip_step_interval=64"],
            "skip_step_interval=64 has no effect without skip_step_on_spikes=true",
        ),
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
        ["batch_size_schedule=0:16 800:32", "learning_rate_scaling=linear"],
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
    plan = BatchPlan.from_config(
        load_config(overrides=overrides), 2, 2 if "expansion" in " ".join(overrides) else 1
    )
    assert plan.warnings == ()


def test_a_factor_below_one_is_for_a_resume() -> None:
    assert (
        warnings_of(["expansion_factor_real_data=0.5"], resume=ResumePoint(5, Place(80), 2, 2))
        == ()
    )


def test_plan_compares_a_factor_below_one_with_the_checkpoint_in_run_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = CheckpointRecord(Position(5, Place(80)), {"data": {}, "model": {}}, 0, (2, 2))
    monkeypatch.setattr("maxbatch.run.folder.position.newest_record", lambda _: record)
    line = ["plan", "--devices", "4", f"run_dir={tmp_path}"]
    assert main([*line, "expansion_factor_real_data=0.5"]) == 0
    assert "no effect" not in capsys.readouterr().err
    assert main([*line, "expansion_factor_real_data=0.25"]) == 2
    assert "hosts now / loading hosts of the checkpoint = 1/2; works" in capsys.readouterr().err


def test_a_batch_over_the_ramp_of_a_file_says_that_there_is_no_ramp() -> None:
    ramp = write(
        Path("ramp.yml"), "enable_rampup_batch_size: true\nper_device_batch_size_increment: 4\n"
    )
    (warning,) = warnings_of(["global_batch_size=64"], path=ramp)
    assert "global_batch_size=64 replaces the ramp" in warning and "enable_rampup" not in warning


@pytest.mark.parametrize(
    "batch",
    ["global_batch_size=64", "batch_size_schedule=0:64 100:128"],
    ids=["global batch", "schedule"],
)
def test_a_batch_over_a_files_ramp_of_default_keys_is_warned_about(
    batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ramp = str(write(Path("default_ramp.yml"), "enable_rampup_batch_size: true\n"))
    assert main(["plan", ramp, batch, "--devices", "4"]) == 0
    said = f"warning: enable_rampup_batch_size=true has no effect: {batch} replaces the ramp\n"
    assert said in capsys.readouterr().err
    for fine in ([batch], [ramp], [ramp, "per_device_batch_size=10"]):
        assert main(["plan", *fine, "--devices", "4"]) == 0
        assert "no effect" not in capsys.readouterr().err


def test_plan_shows_decays_in_tokens_and_only_sections_that_apply(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["plan", "--devices", "1", "adam_b2_half_life=2Mt", "weight_decay_timescale=1.0run"])
        == 0
    )
    said = capsys.readouterr().out
    *_, heads, numbers = said.splitlines()
    stage = dict(
        zip(re.split(r"\s{2,}", heads.strip()), re.split(r"\s{2,}", numbers.strip()), strict=True)
    )
    assert (
        float(stage["b2"]) == pytest.approx(0.5 ** (4096 / 2e6), abs=1e-4)
        and "weight_decay" in stage
    )
    assert not any(
        title in said.split()
        for title in ("b1", "pipeline", "ramp", "num_increments", "padded_share")
    )


def test_the_ramp_that_a_warning_names_visits_all_its_stages_and_is_the_shortest() -> None:
    ramp = ["enable_rampup_batch_size=true"]
    (warning,) = warnings_of(ramp, 16)
    _, _, works = warning.partition("works: ")
    assert warning.startswith("stages 3, 5 of the ramp have no update") and works.startswith(
        "global_rampup_samples="
    )
    assert warnings_of([*ramp, works], 16) == ()
    for batches in ([4, 6, 8, 10, 12, 14, 16], [16, 8], [5, 12, 19, 26], [12, 10, 8, 6]):
        shortest = next(length for length in range(1, 1000) if visits_all(batches, length))
        assert enough_samples(batches) == shortest
    for length in range(50, 900, 7):  # as the plan itself counts
        plan = BatchPlan.from_config(
            load_config(overrides=[*ramp, f"global_rampup_samples={length}", "steps=900"]), 16
        )
        visits = all(stage.num_steps for stage in plan.stages)
        assert visits == visits_all([stage.global_batch_size for stage in plan.stages], length)


def test_the_words_of_others_leave_out_a_pipeline_that_there_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "num_pipeline_microbatches=4", "--words", "--devices", "1"]) == 0
    output = capsys.readouterr()
    assert "train_micro_batch_size_per_gpu=16 gradient_accumulation_steps=1" in output.out
    assert "--micro-batch-size 16 " in output.out and output.err.count("has no effect") == 1
