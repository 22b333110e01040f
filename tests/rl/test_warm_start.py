"""The worked examples of a warm start are those of the settings that it is started with."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from maxbatch import load_config
from maxbatch.config.loading import configs_dir
from maxbatch.plan.batch import BatchPlan
from maxbatch.rl.warm_start import warm_start_folder, warm_up


def test_worked_examples_that_no_checkpoint_was_trained_on_are_written_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("maxbatch.rl.warm_start.train", lambda config, devices: None)
    folder = Path(warm_start_folder(str(tmp_path)))

    def examples(seed: int) -> str:
        overrides = [f"run_dir={tmp_path}", "warm_start_steps=1", f"data_shuffle_seed={seed}", "batch_size=4"]
        config = load_config(str(configs_dir() / "post_train" / "rl.yml"), overrides=overrides)
        batch = BatchPlan.from_config(config, 1).rl
        assert batch is not None
        warm_up(config, batch, jax.devices()[:1])
        return (folder / "worked_examples.jsonl").read_text()

    first = examples(seed=0)
    assert examples(seed=1) != first, "a start without a checkpoint left those of another seed"
    assert examples(seed=0) == first
    (folder / "checkpoints" / "1").mkdir(parents=True)
    assert examples(seed=1) == first, "its data are in the identity of the checkpoint"
