"""The batch of reinforcement learning: one vocabulary of prompts, pairs and chunks, checked before
anything runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import BatchPlan, RampupBatchManager, load_config
from maxbatch.cli import main
from maxbatch.config.keys import Part
from maxbatch.config.loading import dump_config
from maxbatch.config.sections import names_of
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.place import Place

RL = str(Path(__file__).parents[2] / "configs/post_train/rl.yml")
BATCH = ("batch_size=8", "num_generations=4", "micro_batch_size=-1", "max_target_length=20")


def plan(*overrides: str, devices: int = 1) -> BatchPlan:
    return BatchPlan.from_config(load_config(RL, [*BATCH, *overrides]), devices)


@pytest.mark.parametrize(
    ("overrides", "devices", "expected"),
    [
        ((), 1, {"micro_batch_size": 32, "num_micro_batches": 1, "per_device_batch_size": 32}),
        (("micro_batch_size=8",), 4, {"num_micro_batches": 4, "per_device_batch_size": 2}),
        (("train_micro_batch_size=4",), 1, {"micro_batch_size": 16, "rollout_micro_batch_size": 8}),
        (
            ("micro_batch_size=4", "rollout_micro_batch_size=2"),
            2,
            {"train_micro_batch_size": 1, "rollout_micro_batch_size": 2, "num_micro_batches": 8},
        ),
        (
            ("trainer_devices_fraction=0.75", "sampler_devices_fraction=0.25", "batch_size=6"),
            8,
            {
                "num_trainer_devices": 6,
                "num_sampler_devices": 2,
                "batch_shards": 6,
                "micro_batch_size": 24,
            },
        ),
        (("num_iterations=2", "steps=10"), 1, {"total_steps": 10, "total_samples": 40}),
        (("train_samples=20",), 1, {"total_steps": 3, "total_samples": 20}),
        (
            ("num_minibatches=4", "num_iterations=2", "steps=16", "micro_batch_size=8"),
            1,
            {
                "total_steps": 16,
                "total_samples": 16,
                "minibatch_size": 2,
                "updates_per_batch": 8,
                "tokens_per_step": 160,
            },
        ),
        (
            ("num_minibatches=4", "train_samples=20"),
            2,
            {"total_steps": 12, "train_micro_batch_size": 2},
        ),
        (
            ("batch_padding=true", "batch_size=6", "micro_batch_size=20"),
            5,
            {
                "micro_batch_size": 15,
                "num_micro_batches": 2,
                "padded_slots_per_step": 6,
                "padded_share": 0.2,
            },
        ),
        (
            ("filter_groups=true", "steps=6"),
            1,
            {"total_samples": None, "max_prompts_per_batch": 32},
        ),
    ],
)
def test_every_number_of_the_batch_is_planned(
    overrides: tuple[str, ...], devices: int, expected: dict[str, int]
) -> None:
    numbers = plan(*overrides, devices=devices).to_dict()
    pairs = numbers["batch_size"] * 4
    assert numbers["effective_batch_size"] == numbers["global_batch_size_to_train_on"] == pairs
    slots = numbers["padded_slots_per_step"] * numbers["num_minibatches"]
    assert numbers["micro_batch_size"] * numbers["num_micro_batches"] == pairs + slots
    assert {name: numbers[name] for name in expected} == expected


def test_a_position_counts_prompts_and_moves_after_the_last_update_of_a_batch() -> None:
    config = load_config(RL, [*BATCH, "num_iterations=3", "steps=9"])
    manager = RampupBatchManager.from_config(config)
    assert [manager.position_after(step) for step in range(7)] == [0, 0, 0, 8, 8, 8, 16]
    assert [manager.step_at(samples) for samples in (0, 8, 16)] == [0, 3, 6]
    assert manager.batch_size_at(8) == 32 and manager.total_samples == 24
    assert RampupBatchManager.from_state(config, manager.state_at(6)).total_steps == 9
    planned = list(manager.steps_from(2))
    assert [(p.step, p.first_sample, p.end_sample) for p in planned[:4]] == [
        (3, 0, 8),
        (4, 8, 8),
        (5, 8, 8),
        (6, 8, 16),
    ]
    assert {p.num_rows for p in planned} == {32} and len(planned) == 7


def test_the_config_of_a_run_says_the_same_again(tmp_path: Path) -> None:
    config = load_config(RL, BATCH)
    (tmp_path / "config.yml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yml") == config


@pytest.mark.parametrize("name", names_of(Part.PROMPT_BATCH))
def test_keys_of_pairs_that_would_do_nothing_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "true" if name == "filter_groups" else "6"
    assert main(["plan", f"{name}={value}"]) == 2
    error = capsys.readouterr().err
    assert f"{name}={value}: belongs to reinforcement learning" in error
    (tmp_path / "pairs.yml").write_text(f"{name}: {value}\n")
    assert main(["plan", str(tmp_path / "pairs.yml")]) == 2
    assert main(["plan", str(tmp_path / "pairs.yml"), *error.partition("works: ")[2].split()]) == 0
    assert main(["plan", RL, "batch_size=null", f"{name}={value}"]) == 0, (
        "what rl.yml says is left, and said to be"
    )


def test_plan_takes_hosts_and_refuses_those_that_rl_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "rl", "--devices", "4", "--hosts", "2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (
        planned["num_hosts"] == 2
        and planned["num_trainer_devices"] == planned["num_sampler_devices"] == 4
    )
    assert planned["rows_per_loading_host"] == planned["batch_size"], "every host reads all prompts"
    apart = ["trainer_devices_fraction=0.75", "sampler_devices_fraction=0.25"]
    errors = []
    for command, devices, hosts in (
        ("plan", "--devices", "--hosts"),
        ("rl", "--simulate-devices", "--simulate-hosts"),
    ):
        assert main([command, RL, *apart, devices, "4", hosts, "2"]) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] and errors[0].count("\n") == 1
    rule = "x 2 devices of each host = 1.5 must be a whole number that leaves devices to the others"
    assert rule in errors[0] and errors[0].endswith(
        "works: trainer_devices_fraction=0.5 sampler_devices_fraction=0.5\n"
    )
    assert (
        main(["plan", RL, *apart, "batch_padding=true", "--devices", "8", "--hosts", "2", "--json"])
        == 0
    )
    planned = json.loads(capsys.readouterr().out)
    assert (planned["num_trainer_devices"], planned["num_sampler_devices"]) == (6, 2)


def test_only_an_override_of_a_config_of_pretraining_is_noted_as_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "rl", "batch_size=1", "--devices", "1"]) == 0
    assert "pre-training" not in capsys.readouterr().err
    assert main(["plan", "batch_size=1", "--devices", "1"]) == 0
    assert (
        "the batch of pre-training is global_batch_size=1 (of all devices), "
        in capsys.readouterr().err
    )


def test_a_batch_of_prompts_is_told_in_the_words_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [
        "plan",
        "rl",
        "batch_size=16",
        "num_generations=4",
        "micro_batch_size=32",
        "num_iterations=2",
        "steps=8",
    ]
    assert main([*line, "--devices", "4", "--words"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    # 8 rows x 4 replicas x 2 passes = 64 pairs
    assert (
        "per_device_train_batch_size=8 gradient_accumulation_steps=2 num_generations=4 "
        "num_iterations=2" in said
    )
    assert "data.train_batch_size=16 actor_rollout_ref.rollout.n=4" in said
    assert (
        "ppo_mini_batch_size=16" in said
        and "ppo_micro_batch_size_per_gpu=8" in said
        and "ppo_epochs=2" in said
    )
    assert "train_micro_batch_size=8 rollout_micro_batch_size=8" in said


def test_the_plan_is_shown_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RL, *BATCH, "--layout"]) == 0
    out = capsys.readouterr().out
    assert (
        "32 pairs per update = 8 prompts x 4 responses" in out
        and "S1 to S4 are the pairs of stream[s]" in out
    )
    assert main(["plan", RL, *BATCH, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effective_batch_size"] == 32


def test_a_resume_of_filtered_groups_goes_on_from_the_prompts_of_its_batches() -> None:
    keys = ("filter_groups=true", "num_iterations=2", "steps=10", "batch_size=8")

    def planned_at(samples_planned: int | None) -> tuple[int, int | None]:
        config = load_config(RL, [*BATCH, *keys])
        resumed = BatchPlan.from_config(
            config, 1, resume=ResumePoint(4, Place(55, samples_planned))
        )
        return resumed.manager.anchor[1], resumed.manager.total_samples

    assert planned_at(8) == (8, 8 + 3 * 8), "two batches of 4 prompts, three more of 8"
    assert planned_at(None) == (16, 40), (
        "an older checkpoint states none: all batches have today's size"
    )
