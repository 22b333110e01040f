"""A batch in tokens: the same plan as in samples, or one line with the nearest batch of whole
samples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import BatchPlan, load_config
from maxbatch.cli import main
from maxbatch.config.values import amount

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
PAIRS = [
    "use_dpo=true",
    "dataset_type=jsonl",
    "dataset_path=pairs.jsonl",
    "learning_rate_schedule=constant",
]


def plan_of(*overrides: str, devices: int = 1) -> dict[str, Any]:
    return BatchPlan.from_config(load_config(overrides=list(overrides)), devices).to_dict()


@given(
    st.integers(1, 4096), st.sampled_from([1, 2, 8]), st.sampled_from([256, 2048]), st.booleans()
)
def test_a_batch_in_tokens_is_the_plan_of_its_samples(
    rows: int, devices: int, length: int, of_schedule: bool
) -> None:
    samples, key = (
        rows * devices,
        "batch_size_schedule=0:8Kit 1K:" if of_schedule else "global_batch_size=",
    )
    stated = (f"max_target_length={length}", "per_device_batch_size=1", "batch_padding=true")
    plan = plan_of(f"{key}{samples * length}t", *stated, devices=devices)
    assert plan == plan_of(f"{key}{samples}", *stated, devices=devices)
    assert plan["stages"][-1]["tokens_per_step"] == plan["tokens_per_step"] == samples * length


@given(st.integers(0, 10**6), st.sampled_from(sorted(SUFFIXES)), st.booleans())
def test_suffixes_are_powers_of_1000_or_of_1024(number: int, suffix: str, lower: bool) -> None:
    assert amount(f"{number}{suffix.lower() if lower else suffix}") == number * SUFFIXES[suffix]


@pytest.mark.parametrize(
    ("stated", "samples"),
    [
        ("2Mit", 1024),
        ("4096Kit", 2048),
        ("1Git", 2**19),
        ("2097152t", 1024),
        ("2048Kt", 1000),
        ("0.5Mit", 256),
    ],
)
def test_units_of_a_batch_in_tokens(stated: str, samples: int) -> None:
    assert (
        plan_of(f"global_batch_size={stated}", "max_target_length=2048")[
            "global_batch_size_to_train_on"
        ]
        == samples
    )


def test_a_pair_has_two_rows_of_tokens() -> None:
    assert plan_of(*PAIRS, "global_batch_size=8Kit")[
        "global_batch_size_to_train_on"
    ] == 8 * 1024 // (2 * 256)


def test_the_config_records_what_was_stated_and_the_length_is_the_resolved_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yml"
    file.write_text("max_target_length: 512\nglobal_batch_size: 64Kit\n")
    config = load_config(file, ["max_target_length=1024"])
    assert config.global_batch_size == "64Kit"
    assert BatchPlan.from_config(config, 1).global_batch_size_to_train_on == 64
    again = load_config(
        overrides=[f"{name}={config[name]}" for name in ("max_target_length", "global_batch_size")]
    )
    assert again.global_batch_size == "64Kit"
    assert load_config(global_batch_size="64Kit") == load_config(
        overrides=["global_batch_size=64Kit"]
    )


def test_a_batch_of_gibitokens_is_planned() -> None:
    planned = plan_of("global_batch_size=8Git", "max_target_length=2")
    assert planned["global_batch_size_to_train_on"] == 2**32


def test_plan_prints_samples_and_tokens_of_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = "batch_size_schedule=0:16Kit 32Mit:64Kit"
    assert main(["plan", schedule, "train_tokens=64Mi"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = next(line for line in table if "global" in line and "tokens" in line)
    assert heads.index("tokens") == heads.index("global") + 1
    assert any("16,384" in line for line in table) and any("65,536" in line for line in table)
    assert main(["plan", schedule, "train_tokens=64Mi", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["global_batch_size"], stage["tokens_per_step"]) for stage in stages] == [
        (64, 2**14),
        (256, 2**16),
    ]
