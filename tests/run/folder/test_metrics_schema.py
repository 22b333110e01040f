"""The schema of metrics: training records exactly the listed ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch import load_config
from maxbatch.run.folder.metrics_schema import Metric, find_metric
from maxbatch.run.pretraining import train
from tests.helpers import policies
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, read_metrics

TYPES: dict[str, tuple[type, ...]] = {
    "whole": (int,),
    "real": (float,),
    "text": (str,),
    "bool": (bool,),
    "map": (dict,),
    "null": (type(None),),
}


def faults(record: Mapping[str, Any], command: str) -> list[str]:
    """Where a record differs from the schema."""
    found = [
        f"{m} is missing"
        for m in Metric
        if m.lines.every and command in m.lines.commands and "{" not in m and m not in record
    ]
    for name, value in record.items():
        metric = find_metric(name)
        if metric is None or command not in metric.lines.commands:
            found.append(f"{name} is not listed")
        elif type(value) not in [t for kind in metric.kind.split(" or ") for t in TYPES[kind]]:
            found.append(f"{name}={value!r} is not {metric.kind}")
    return found


def test_every_record_of_training_matches_the_schema(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in some_texts(200)])
    mixture = write_jsonl(
        tmp_path / "mix.yml", [{n: {"path": f"{n}.jsonl", "weight": 1} for n in "ab"}]
    )
    keys = (
        "dataset_type=jsonl",
        f"dataset_path={mixture}",
        "eval_fraction=0.1",
        "eval_interval=2",
        "steps=2",
        "gradient_noise_scale=true",
        "gradient_accumulation_steps=2",
        f"run_dir={tmp_path / 'run'}",
    )
    train(load_config(overrides=[*TINY_RUN, ONE_LAYER, *keys]), jax.devices()[:1])
    first, last = read_metrics(tmp_path / "run")
    assert faults(first, "train") == faults(last, "train") == []
    some = {
        Metric.SAMPLES_BY_SOURCE,
        Metric.EVAL_LOSS,
        Metric.GRADIENT_NOISE_SCALE,
        Metric.CRITICAL_BATCH_ESTIMATE,
    }
    assert some <= last.keys()


@pytest.mark.runs
def test_every_record_of_reinforcement_learning_matches_the_schema(tmp_path: Path) -> None:
    rewards = policies.reward_file(tmp_path)
    keys = (
        f"{rewards};{rewards.removeprefix('reward=').removesuffix('digits')}is_long",
        "grpo_beta=0.1",
        "steps=1",
        "eval_interval=1",
        "eval_steps=1",
        "eval_num_generations=2",
    )
    (record,) = policies.train(tmp_path / "run", *keys)
    assert faults(record, "rl") == []
    families = {find_metric(name) for name in record}
    assert families >= {metric for metric in Metric if metric.lines.commands == ("rl",)} - {
        Metric.GROUPS_MISSING
    }


def test_what_is_missing_not_listed_or_of_another_type_is_a_fault() -> None:
    found = faults({"step": 1, "losss": 2.0, "stage": 1.0, "reward": 1.0}, "train")
    assert found[-3:] == ["losss is not listed", "stage=1.0 is not whole", "reward is not listed"]
    assert "samples_seen is missing" in found and "step is missing" not in found


def test_families_of_metrics_are_found_by_their_members() -> None:
    assert find_metric("eval_pass_at_1") is Metric.EVAL_PASS_AT_1
    assert find_metric(Metric.EVAL_PASS_AT_K.of(8)) is Metric.EVAL_PASS_AT_K
    assert Metric.REWARD_BY_FUNCTION.of("score") == "reward/score"
    assert find_metric("loss_") is None
