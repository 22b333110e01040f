"""Days and device-hours: of a stated step, of an assumed share of the peak, and of a run that
measured them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import BatchPlan, load_config, train
from maxbatch.cli import main
from maxbatch.plan.run_time import UpdateTime, run_time
from tests.helpers.tiny import tiny_config


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_stated_step_gives_days_and_device_hours(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(
        capsys, "steps=7200", "--devices", "64", "--hosts", "16", "--step-seconds", "12"
    )
    assert plan["run_seconds"] == 86_400 and plan["device_hours"] == 24 * 64
    assert (
        main(["plan", "steps=7200", "--devices", "64", "--hosts", "16", "--step-seconds", "12"])
        == 0
    )
    assert (
        "time: 1 days, 1,536 device-hours on 64 devices; 12 s per update, stated"
        in capsys.readouterr().out
    )


def test_earlier_stages_take_time_by_their_samples_or_as_measured() -> None:
    stated = ["batch_size_schedule=0:8 80:16 400:32", "train_samples=1040"]
    plan = BatchPlan.from_config(load_config(overrides=stated), 4)
    assert [stage.num_steps for stage in plan.stages] == [10, 20, 20]
    assert run_time(plan, UpdateTime(4.0, "stated"), 4).run_seconds == 10 * 1 + 20 * 2 + 20 * 4
    measured = run_time(plan, UpdateTime(4.0, "measured", {8: 3.0, 16: 3.5}), 4)
    assert measured.run_seconds == 10 * 3 + 20 * 3.5 + 20 * 4
    assert measured.device_hours == measured.run_seconds * 4 / 3600


def test_a_share_of_the_peak_is_the_flops_of_an_update_over_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = [
        "model_name=llama2-7b",
        "per_device_batch_size=4",
        "global_batch_size=512",
        "steps=1000",
    ]
    plan = plan_json(capsys, *stated, "--topology", "v5p-128", "--mfu", "0.4")
    assert (plan["num_devices"], plan["num_hosts"], plan["mfu_peak"]["tflops"]) == (64, 16, 459)
    seconds = plan["tokens_per_step"] * plan["flops_per_token"] / (64 * 459e12 * 0.4)
    assert plan["step_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert (
        plan["run_seconds"] == pytest.approx(1000 * seconds)
        and "assumed" in plan["step_seconds_source"]
    )
    own = plan_json(capsys, *stated, "peak_tflops_per_device=100", "--devices", "8", "--mfu", "0.5")
    assert own["step_seconds"] == pytest.approx(
        plan["tokens_per_step"] * plan["flops_per_token"] / (8 * 1e14 * 0.5)
    )


def test_a_length_that_is_unknown_has_no_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text")
    data = (
        "dataset_type=text",
        f"dataset_path={tmp_path / 'a.txt'}",
        "num_epochs=3",
        "--step-seconds",
        "2",
    )
    plan = plan_json(capsys, *data)
    assert plan["run_seconds"] is plan["device_hours"] is None and plan["step_seconds"] == 2


def test_a_run_that_was_measured_says_how_long_a_longer_one_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stated = [
        f"run_dir={tmp_path / 'run'}",
        "steps=6",
        "global_batch_size=8",
        "enable_checkpointing=false",
    ]
    train(tiny_config(*stated))
    capsys.readouterr()
    times = [
        json.loads(line)["step_time_s"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    config = str(tmp_path / "run" / "config.yml")
    plan = plan_json(capsys, config, "steps=1000")
    assert plan["step_seconds"] == pytest.approx(
        sorted(times[2:])[1] / 2 + sorted(times[2:])[2] / 2
    )
    assert plan["run_seconds"] == pytest.approx(1000 * plan["step_seconds"])
    assert plan["device_hours"] == pytest.approx(plan["run_seconds"] * 8 / 3600), (
        "it ran on eight devices"
    )
    assert plan_json(capsys, config, "steps=1000", "--devices", "4").get("run_seconds") is None, (
        "of other devices"
    )
    assert plan_json(capsys, config, "base_emb_dim=128").get("run_seconds") is None, (
        "of another model"
    )
    twice = plan_json(capsys, config, "steps=1000", "global_batch_size=16")
    assert twice["step_seconds"] == pytest.approx(2 * plan["step_seconds"]), (
        "in proportion to the samples"
    )


def test_the_compilers_model_of_a_step_is_read_from_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest = {"shapes": [[64, 4]], "modelled_step_s": [2.0], "devices": {"devices": 8}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    stated = (
        "per_device_batch_size=8",
        "global_batch_size=128",
        "steps=100",
        f"compiled_dir={tmp_path}",
    )
    plan = plan_json(capsys, *stated, "--devices", "8")
    assert (
        plan["step_seconds"] == 1.0
        and plan["run_seconds"] == 100
        and "modelled" in plan["step_seconds_source"]
    )
    assert plan_json(capsys, *stated, "--devices", "4").get("run_seconds") is None
