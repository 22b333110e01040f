"""Seesaw: its stages against an independent transcription, and its rates."""

from __future__ import annotations

import math
import random

import pytest

from maxbatch import BatchPlan, LearningRate, load_config
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.place import Place
from maxbatch.plan.view import ramp_table

FALLING = (
    "train_samples=20000",
    "learning_rate=0.001",
    "warmup_steps_fraction=0.1",
    "learning_rate_final_fraction=0",
)


def transcribed(
    first: int, factor: int, total: int, warmup: float, schedule: str, last: float, decay: float
) -> list:
    """Walks over every update: the batch has grown by `factor` for each time that the rate has
    fallen by it.
    """

    def rate(s: int) -> float:
        if schedule == "cosine":
            return last + (1 - last) * 0.5 * (
                1 + math.cos(math.pi * (s - warmup * total) / (total - warmup * total))
            )
        return min(1.0, last + (1 - last) * (total - s) / (decay * total))

    position, found = 0, []
    while position < total:
        power = 0
        if position >= warmup * total:
            power = max((i for i in range(60) if rate(position) <= factor**-i + 1e-15), default=0)
        if not found or found[-1][1] != first * factor**power:
            found.append((position, first * factor**power))
        position += first * factor**power
    return found


@pytest.mark.parametrize("seed", range(50))
def test_stages_are_those_of_an_independent_transcription(seed: int) -> None:
    """Ten random runs each."""
    rng = random.Random(seed)
    for _ in range(10):
        first, factor, total = (
            rng.choice([8, 32, 96]),
            rng.choice([2, 2, 3]),
            rng.randrange(500, 20_000),
        )
        schedule, warmup = rng.choice(["cosine", "wsd"]), rng.choice([0, 0.01, 0.1])
        last, decay = rng.choice([0, 0.01, 0.1]), rng.choice([0.2, 0.5])
        config = load_config(
            overrides=[
                f"batch_size_schedule=seesaw {first} {factor}",
                f"train_samples={total}",
                f"warmup_steps_fraction={warmup}",
                f"learning_rate_schedule={schedule}",
                f"learning_rate_final_fraction={last}",
                f"wsd_decay_steps_fraction={decay}",
                "per_device_batch_size=8",
            ]
        )
        stages = BatchPlan.from_config(config).stages
        visited = [
            (stage.first_sample, stage.global_batch_size) for stage in stages if stage.num_steps
        ]
        assert visited == transcribed(first, factor, total, warmup, schedule, last, decay)


def test_after_the_warm_up_the_rate_falls_by_the_root_of_the_factor_at_each_cut_alone() -> None:
    config = load_config(overrides=[*FALLING, "batch_size_schedule=seesaw 64 2"])
    rate = LearningRate.from_config(config)
    cut = rate.manager.stages[1].threshold
    assert cut == 11_000, "half of the peak, halfway from 2,000 to 20,000"
    assert rate(1_000) == pytest.approx(0.0005)
    assert rate(2_000) == rate(10_999) == 0.001
    assert rate(11_000) == pytest.approx(0.001 / math.sqrt(2))
    assert [stage.learning_rate_scale for stage in rate.manager.stages[:3]] == pytest.approx(
        [1, 0.5**0.5, 0.5]
    )


@pytest.mark.parametrize(
    ("total", "factor", "keys", "cuts"),
    [
        (4_395, 4, (), [2_930]),  # two thirds of a half wave: a quarter of the peak
        (4_396, 4, (), [2_931]),
        (3_000_000_003, 4, ("warmup_steps_fraction=0.1",), [2_100_000_003]),
        (7_000, 2, (), [3_500]),
        (7_001, 2, (), [3_501]),
        (1_100, 2, ("learning_rate_schedule=wsd", "wsd_decay_steps_fraction=0.3"), [935]),
        (
            1_000,
            2,
            (
                "learning_rate_schedule=wsd",
                "wsd_decay_steps_fraction=0.7",
                "learning_rate_final_fraction=0.4",
            ),
            [884],
        ),
        (9_000, 2, ("learning_rate_final_fraction=0.1",), [4_819]),
    ],
)
def test_a_cut_is_the_first_sample_at_which_the_rate_is_at_most_its_share_of_the_peak(
    total: int, factor: int, keys: tuple[str, ...], cuts: list[int]
) -> None:
    config = load_config(
        overrides=[
            "per_device_batch_size=1",
            f"batch_size_schedule=seesaw 1 {factor}",
            f"train_samples={total}",
            "warmup_steps_fraction=0",
            "learning_rate_final_fraction=0",
            *keys,
        ]
    )
    stages = BatchPlan.from_config(config).stages
    assert [stage.threshold for stage in stages[1 : 1 + len(cuts)]] == cuts


def test_a_seesaw_lists_no_stage_without_updates_at_the_start_nor_on_resume() -> None:
    rng, left_out = random.Random(0), 0
    for _ in range(100):
        config = load_config(
            overrides=[
                f"batch_size_schedule=seesaw {rng.choice([1, 8, 32])} {rng.choice([2, 3])}",
                "per_device_batch_size=1",
                f"train_samples={rng.randrange(300, 5_000)}",
                "learning_rate_final_fraction=0",
                f"learning_rate_schedule={rng.choice(['cosine', 'wsd'])}",
            ]
        )
        assert all(stage.num_steps for stage in BatchPlan.from_config(config).stages)
        resumed = BatchPlan.from_config(
            config, resume=ResumePoint(rng.randrange(1, 50), Place(rng.randrange(1, 290)))
        )
        listed = resumed.to_dict()["stages"]
        left_out += len(resumed.stages) - len(listed)
        assert listed and all(stage["num_steps"] for stage in listed)
        assert ramp_table(resumed).row_count == len(listed)
        assert resumed.global_batch_size_to_train_on == listed[-1]["global_batch_size"]
    assert left_out, "a grid of updates from elsewhere passes stages"


def test_a_resume_lists_no_stage_behind_it_whose_updates_are_unknown() -> None:
    config = load_config(overrides=["batch_size_schedule=0:8 100:16 1000:24", "train_samples=900"])
    resumed = BatchPlan.from_config(config, num_devices=8, resume=ResumePoint(7, Place(123)))
    assert [
        (one["global_batch_size"], one["num_steps"]) for one in resumed.to_dict()["stages"]
    ] == [(16, 49), (24, 0)]
