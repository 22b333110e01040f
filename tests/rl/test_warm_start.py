"""The warm start of reinforcement learning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maxbatch import load_config
from maxbatch.rl import warm_start
from maxbatch.training.pretraining import Pretraining


def test_a_warm_start_names_no_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[type[Pretraining]] = []
    monkeypatch.setattr(warm_start, "train", lambda *_, task: tasks.append(task))
    batch: Any = SimpleNamespace(micro_batch_size=4, num_trainer_devices=1, effective_batch_size=4)
    warm_start.warm_up(load_config("rl", ["warm_start_path=examples.jsonl"]), batch, [])
    (task,) = tasks
    assert list(task.conclusion(object.__new__(task), state=None)) == []  # type: ignore[arg-type]
