"""The average of a run's parameters: the same for any cut and after a resume, and read by
--averaged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.cli import main
from maxbatch.run.pretraining import train
from maxbatch.run.weights.parameters import open_source, restored
from tests.helpers.corpus import write_jsonl
from tests.helpers.tiny import LENGTH, read_metrics, tiny_config

pytestmark = pytest.mark.runs

HALF_LIFE = 700
BATCHES = (8, 8, 16, 16)


def run(folder: Path, steps: int, devices: int, rows: int, *overrides: str) -> Path:
    config = tiny_config(
        f"parameter_average_half_life={HALF_LIFE}t",
        "batch_size_schedule=0:8 16:16",
        f"per_device_batch_size={rows}",
        f"steps={steps}",
        "checkpoint_period=1",
        "max_num_checkpoints_to_keep=null",
        f"run_dir={folder}",
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
        "eval_fraction=0.1",
        *overrides,
    )
    train(config, jax.devices()[:devices])
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole"), 4, 1, 16, "eval_interval=4")


def leaves(folder: Path, step: int, averaged: bool = False) -> list[np.ndarray]:
    source = open_source(folder / "checkpoints" / str(step), averaged)
    _, params = restored(source, source.config().decoder)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(params)]


def test_the_average_halves_in_tokens_over_a_ramp_another_cut_and_a_resume(
    whole: Path, tmp_path: Path
) -> None:
    for step, batch in enumerate(BATCHES[1:], 2):
        b = 0.5 ** (batch * LENGTH / HALF_LIFE)
        for found, before, params in zip(
            leaves(whole, step, True),
            leaves(whole, step - 1, True),
            leaves(whole, step),
            strict=True,
        ):
            np.testing.assert_allclose(found, before * b + params * (1 - b), rtol=1e-5, atol=1e-7)
    run(tmp_path / "cut", 2, 4, 1)
    run(tmp_path / "cut", 4, 2, 4)
    for found, wanted in zip(
        leaves(tmp_path / "cut", 4, True), leaves(whole, 4, True), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_evals_and_commands_can_use_the_average(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = read_metrics(whole)[-1]
    assert last["eval_loss_averaged"] > last["eval_loss"], "the average lags"
    file = str(write_jsonl(Path("a.jsonl"), [{"tokens": [1, 2, 3, 4, 5, 6, 7]}]))

    def logprobs(model: Any, *flags: str) -> list[float]:
        capsys.readouterr()
        assert main(["score", str(model), file, "--json", *flags]) == 0
        found: list[float] = json.loads(capsys.readouterr().out)["records"][0]["logprobs"]
        return found

    averaged = logprobs(whole, "--averaged")
    assert np.abs(np.subtract(averaged, logprobs(whole))).max() > 1e-3
    assert main(["export", str(whole), "--output", "exported", "--averaged"]) == 0
    assert logprobs("exported") == pytest.approx(averaged, abs=1e-5)
    assert main(["score", "exported", file, "--averaged"]) == 2
    assert "exported is a Hugging Face folder, which has no average" in capsys.readouterr().err
