"""The batch in other frameworks' words: their arithmetic on the output of `plan --words` gives our
batch.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maxbatch import BatchPlan, ConfigError, RampupBatchManager, load_config
from maxbatch.cli import main
from maxbatch.plan.frameworks import FrameworkSettings, settings_of
from tests.helpers.pages import commands_of
from tests.helpers.ramps_elsewhere import maxtext_batches, megatron_rampup, megatron_schedule

PAGE = Path(__file__).parents[2] / "docs" / "batch-size.md"

# Any tensor and pipeline axis up to 4 divides it.
MODEL = ("base_num_query_heads=12", "base_num_decoder_layers=12")


@st.composite
def plans(draw: st.DrawFn) -> tuple[BatchPlan, int]:
    """A plan that the devices can hold: any mesh, accumulation, pipeline, fractions, constant or
    ramped.
    """
    fsdp, tensor, pipeline = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    devices, parts = fsdp * tensor * pipeline, pipeline * draw(st.integers(1, 3))
    overrides = [
        *MODEL,
        f"ici_tensor_parallelism={tensor}",
        f"ici_pipeline_parallelism={pipeline}",
        f"num_pipeline_microbatches={parts}",
    ]

    def per_device(rows: int) -> str:
        return f"{fsdp * parts * rows}/{devices}"

    stated = draw(st.sampled_from(("constant", "ramp", "schedule")))
    if stated == "schedule":
        thresholds = [0, *sorted(draw(st.sets(st.integers(1, 2000), max_size=3)))]
        pairs = [f"{t}:{fsdp * parts * draw(st.integers(1, 8))}" for t in thresholds]
        overrides += [
            f"batch_size_schedule={' '.join(pairs)}",
            f"per_device_batch_size={per_device(3)}",
        ]
    else:
        start, rise, stages = (
            draw(st.integers(1, 4)),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 3)),
        )
        overrides += [f"gradient_accumulation_steps={draw(st.integers(1, 3))}"]
        overrides += [f"per_device_batch_size={per_device(start + rise * stages)}"]
    if stated == "ramp":
        overrides += [
            "enable_rampup_batch_size=true",
            f"per_device_batch_size_start={per_device(start)}",
            f"per_device_batch_size_increment={per_device(rise)}",
            f"global_rampup_samples={draw(st.integers(1, 2000))}",
        ]
    return BatchPlan.from_config(load_config(overrides=overrides), devices), devices


def spoken(plan: BatchPlan) -> dict[str, FrameworkSettings]:
    return {words.framework: words for words in settings_of(plan)}


def numbers(text: str) -> dict[str, str]:
    """Return the settings of a line, `key=value`, `key: value` or `--flag value`, by name."""
    pairs = re.findall(r'([\w-]+)(?:=|: | )("[^"]*"|\d[\d./e+-]*)', text)
    return {name.lstrip("-"): value.strip('"') for name, value in pairs}


def batches(manager: RampupBatchManager, until: int = 3000) -> list[int]:
    return [manager.batch_size_at(s) for s in range(until)]


@given(plans())
def test_rows_times_passes_times_replicas_is_the_batch(planned: tuple[BatchPlan, int]) -> None:
    plan, _ = planned
    words, batch, replicas = spoken(plan), plan.global_batch_size_to_train_on, plan.batch_shards
    trainer = numbers(words["Hugging Face Trainer"].settings)
    rows, steps = trainer["per_device_train_batch_size"], trainer["gradient_accumulation_steps"]
    assert int(rows) * int(steps) * replicas == batch
    axolotl = numbers(words["Axolotl"].settings)
    assert (axolotl["micro_batch_size"], axolotl["gradient_accumulation_steps"]) == (rows, steps)
    keras = numbers(words["TensorFlow MirroredStrategy"].settings)
    assert int(keras["BATCH_SIZE_PER_REPLICA"]) * replicas == int(keras["GLOBAL_BATCH_SIZE"])
    assert (
        int(keras["GLOBAL_BATCH_SIZE"]) * int(keras.get("gradient_accumulation_steps", 1)) == batch
    )
    ddp = words["PyTorch DDP"].settings
    passes = int(re.search(r"(\d+) x backward|$", ddp)[1] or 1)
    assert int(numbers(ddp)["batch_size"]) * passes * replicas == batch
    assert all(words[name].update.split(" (")[0].endswith(f"={batch}") for name in words)


@given(plans())
def test_deepspeed_accepts_its_three_numbers(planned: tuple[BatchPlan, int]) -> None:
    """It refuses a train_batch_size that is not micro x accumulation x data-parallel GPUs."""
    plan, _ = planned
    said = {name: int(value) for name, value in numbers(spoken(plan)["DeepSpeed"].settings).items()}
    micro, steps = said["train_micro_batch_size_per_gpu"], said["gradient_accumulation_steps"]
    assert (
        said["train_batch_size"]
        == micro * steps * plan.batch_shards
        == plan.global_batch_size_to_train_on
    )
    assert steps % (plan.num_pipeline_microbatches if plan.num_pipeline_stages > 1 else 1) == 0


@given(plans())
def test_megatron_runs_the_same_batch_at_every_sample(planned: tuple[BatchPlan, int]) -> None:
    plan, _ = planned
    words = spoken(plan)["Megatron-LM"]
    said = numbers(" ".join((words.settings, *words.ramp)))
    for stage in plan.stages:
        assert stage.global_batch_size % (int(said["micro-batch-size"]) * plan.batch_shards) == 0
    expected = batches(plan.manager)
    if not words.ramp:
        assert set(expected) == {int(said["global-batch-size"])}
        return
    schedule = megatron_schedule(said["step-batch-size-schedule"], plan.max_target_length)
    assert [schedule(s) for s in range(3000)] == expected
    if older := re.search(
        r"--rampup-batch-size (\d+) (\d+) (\d+) --global-batch-size (\d+)", words.ramp[-1]
    ):
        ramp = megatron_rampup(*map(int, older.groups()))
        assert [ramp(s) for s in range(3000)] == expected


@given(plans())
def test_maxtext_computes_the_same_numbers_by_truncation(planned: tuple[BatchPlan, int]) -> None:
    plan, devices = planned
    words = spoken(plan)["MaxText"]
    said = {
        name: float(value)
        for name, value in numbers(" ".join((words.settings, *words.ramp))).items()
    }
    p, steps = said["per_device_batch_size"], int(said["gradient_accumulation_steps"])
    assert int(devices * p) * steps == plan.global_batch_size_to_train_on
    loads = int(devices * max(p, 1)) * steps
    assert words.update.endswith(f"(loads {loads})") == (
        loads != plan.global_batch_size_to_train_on
    )
    if words.ramp:
        start, rise = said["per_device_batch_size_start"], said["per_device_batch_size_increment"]
        sizes = int(devices * start), int(devices * rise), int(devices * p)
        there = maxtext_batches(
            *sizes, len(plan.stages) - 1, said["global_rampup_samples"], updates=200
        )
        here = [plan.manager.batch_size_at(plan.manager.position_after(k)) for k in range(200)]
        assert there == here


@pytest.mark.runs
@given(plans())
def test_maxbatchs_own_words_state_the_same_run_on_these_and_on_other_devices(
    planned: tuple[BatchPlan, int],
) -> None:
    plan, devices = planned
    words = spoken(plan)["maxbatch"]
    mesh = [f"ici_{axis}_parallelism={plan.mesh.sizes[axis]}" for axis in ("tensor", "pipeline")]
    overrides = [*shlex.split(" ".join((words.settings, *words.ramp))), *MODEL, *mesh]
    overrides += [f"num_pipeline_microbatches={plan.num_pipeline_microbatches}"]
    again = BatchPlan.from_config(load_config(overrides=overrides), devices)
    assert batches(again.manager) == batches(plan.manager)
    if len(plan.stages) == 1:
        assert again.micro_batch_size_to_train_on == plan.micro_batch_size_to_train_on
    try:
        elsewhere = BatchPlan.from_config(load_config(overrides=overrides), 2 * devices)
    except ConfigError:
        assume(False)  # twice the replicas do not divide the batch
    assert batches(elsewhere.manager) == batches(plan.manager)


def test_there_are_examples_and_they_cover_layout_fraction_ramp_and_pipeline() -> None:
    commands = " ".join(
        " ".join(command.arguments) for command in commands_of("docs/batch-size.md")
    )
    for part in (
        "--layout",
        "per_device_batch_size=0.25",
        "rampup",
        "num_pipeline_microbatches",
        "--words",
    ):
        assert part in commands


def test_the_page_names_every_framework_and_every_setting_that_plan_prints() -> None:
    text = PAGE.read_text()
    table = text[text.index("## Four questions") : text.index("## The same examples")]
    plan = BatchPlan.from_config(load_config(overrides=["gradient_accumulation_steps=2"]), 4)
    for words in settings_of(plan):
        assert f"| {words.framework} |" in table
        for name in numbers(words.settings):
            assert name in table, name


def test_json_holds_the_words_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--devices", "2", "--json"]) == 0
    assert "words" not in json.loads(capsys.readouterr().out)
    assert main(["plan", "--devices", "2", "--json", "--words"]) == 0
    said = {w["framework"]: w for w in json.loads(capsys.readouterr().out)["words"]}
    assert said["DeepSpeed"] == {
        "framework": "DeepSpeed",
        "settings": "train_micro_batch_size_per_gpu=16 gradient_accumulation_steps=1 train_batch_size=32",
        "update": "train_batch_size=32",
        "ramp": [],
    }
