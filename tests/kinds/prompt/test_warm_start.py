"""The warm start of reinforcement learning: worked examples and messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxbatch import load_config
from maxbatch.config.paths import configs_dir
from maxbatch.kinds.prompt import warm_start
from maxbatch.plan.batch import BatchPlan
from maxbatch.run.pretraining import RunningPretraining


def test_worked_examples_that_no_checkpoint_was_trained_on_are_written_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warm_start, "train", lambda *_, concludes: None)
    folder = Path(warm_start.warm_start_folder(str(tmp_path)))

    def examples(seed: int) -> str:
        overrides = [
            f"run_dir={tmp_path}",
            "warm_start_steps=1",
            f"data_shuffle_seed={seed}",
            "batch_size=4",
        ]
        config = load_config(str(configs_dir() / "post_train" / "rl.yml"), overrides=overrides)
        batch = BatchPlan.from_config(config, 1).rl
        assert batch is not None
        warm_start.warm_up(config, batch, jax.devices()[:1])
        return (folder / "worked_examples.jsonl").read_text()

    first = examples(seed=0)
    assert examples(seed=1) != first, "a start without a checkpoint left those of another seed"
    assert examples(seed=0) == first
    (folder / "checkpoints" / "1").mkdir(parents=True)
    assert examples(seed=1) == first, "its data are in the identity of the checkpoint"


def test_a_warm_start_names_no_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        warm_start, "train", lambda *_, **keywords: opened.append(SimpleNamespace(**keywords))
    )
    batch: Any = SimpleNamespace(micro_batch_size=4, num_trainer_devices=1, effective_batch_size=4)
    warm_start.warm_up(load_config("rl", ["warm_start_path=examples.jsonl"]), batch, [])
    nothing: list[Any] = [None] * 8
    running = RunningPretraining(*opened, *nothing)
    assert list(running.conclusion(nothing[0])) == []
