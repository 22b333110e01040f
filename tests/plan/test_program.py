"""What the compiled update asks of a config: the plan refuses it, with a value that works."""

from __future__ import annotations

import shlex

import pytest

from maxbatch import BatchPlan, ConfigError, load_config


@pytest.mark.parametrize(
    ("overrides", "devices", "said"),
    [
        (["attention=splash", "max_target_length=100"], 1, "divisible by 128"),
        (
            ["attention=splash", "max_target_length=256", "ici_context_parallelism=4"],
            4,
            "divisible by 128 x 4 context",
        ),
        (["attention=cudnn"], 1, "have dtype=bfloat16"),
    ],
)
def test_what_no_program_computes_is_refused_with_what_works(
    overrides: list[str], devices: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        BatchPlan.from_config(load_config(overrides=overrides), devices)
    message, _, works = str(refused.value).partition("; works: ")
    assert said in message
    BatchPlan.from_config(load_config(overrides=[*overrides, *shlex.split(works)]), devices)
