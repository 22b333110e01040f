"""`profile_steps=2:4` traces updates 2 and 3 into the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.run.pretraining import train
from tests.helpers.tiny import one_layer_config, read_metrics


@pytest.mark.runs
@pytest.mark.parametrize(("window", "steps"), [("2:4", 5), ("3:9", 4)])
def test_a_window_of_updates_is_traced(tmp_path: Path, window: str, steps: int) -> None:
    train(
        one_layer_config(
            "global_batch_size=8",
            f"profile_steps={window}",
            f"steps={steps}",
            f"run_dir={tmp_path}",
        )
    )
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(read_metrics(tmp_path)) == steps
