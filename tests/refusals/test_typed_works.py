"""What an error names after `works:` is typed after the test that met it, and a wrong one is
found.
"""

from __future__ import annotations

import pytest

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.plan import microbatches
from maxbatch.system import errors
from tests.helpers.works import TYPIST


def faults_after(overrides: list[str], devices: int = 1) -> list[str]:
    """Returns what is found wrong with the error of a config's plan."""
    with pytest.raises(ConfigError):
        BatchPlan.from_config(load_config(overrides=overrides), devices)
    return TYPIST.faults(are_all_typed=True)


def test_a_right_works_is_no_fault() -> None:
    assert faults_after(["steps=ten"]) == []
    assert faults_after(["batch_size_schedule=0:16 100:24 200:30"], 16) == []
    assert faults_after(["max_steps=7"]) == []


def test_a_value_that_does_not_work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "stated_schedule", lambda batches, length: "0:16 100:17")
    [fault] = faults_after(["batch_size_schedule=0:16 100:24 200:30"], 16)
    assert "still refused" in fault


def test_a_schedule_that_is_cut_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "stated_schedule", lambda batches, length: "0:16 100:32")
    [fault] = faults_after(["batch_size_schedule=0:16 100:24 200:1000"], 16)
    assert "makes the batch of 1000 from sample 200 on one of 32" in fault


def test_a_text_that_nobody_can_type_is_found() -> None:
    with pytest.raises(ConfigError):
        raise errors.ConfigError("steps=0: must be more; works: 5 steps")
    [fault] = TYPIST.faults(are_all_typed=True)
    assert "'5 steps' cannot be typed" in fault


def test_an_error_that_the_code_catches_itself_is_not_typed() -> None:
    assert TYPIST.faults() == []
    BatchPlan.from_config(load_config(overrides=["steps=3"]))
    assert TYPIST.faults() == []
