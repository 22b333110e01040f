"""What a start continues from is found in one place, without a session."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError
from maxbatch.run.context import RunContext
from maxbatch.run.pretraining import open_pretraining, train
from maxbatch.run.resume import IN_RUN_DIR, Resume
from tests.helpers.tiny import one_layer_config

KEYS = ("per_device_batch_size=4", "steps=3", "checkpoint_period=1", "generate_prompt=")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    train(one_layer_config(*KEYS, f"run_dir={run_dir}"), jax.devices()[:1])
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def resumed(run_dir: Path, *overrides: str) -> tuple[int, int, str]:
    """The step, the samples and the source of what a start finds."""
    with ExitStack() as stack:
        config = one_layer_config(*KEYS, f"run_dir={run_dir}", *overrides)
        context = RunContext(config, jax.devices()[:1], stack)
        resume = Resume.find(context, open_pretraining(context))
        assert resume.start.is_new == (resume.restored is None)
        assert resume.planned.plan.total_samples == 12
        return resume.position.step, resume.position.samples_seen, resume.source


def test_a_new_run_continues_from_nothing(tmp_path: Path) -> None:
    assert resumed(tmp_path) == (0, 0, "")


def test_a_run_continues_from_its_newest_whole_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resumed(run_dir) == (3, 12, IN_RUN_DIR) and "warning" not in capsys.readouterr().err
    (run_dir / "checkpoints" / "3" / "position" / "metadata").write_text("{")
    assert resumed(run_dir) == (2, 8, IN_RUN_DIR)
    assert "checkpoint 3 cannot be read" in capsys.readouterr().err
    assert (run_dir / "checkpoints-damaged" / "3").is_dir()


def test_a_run_without_a_whole_checkpoint_keeps_its_lines_beside_the_damaged_ones(
    run_dir: Path,
) -> None:
    for checkpoint in (run_dir / "checkpoints").glob("[0-9]"):
        (checkpoint / "position" / "metadata").write_text("{")
    lines = (run_dir / "metrics.jsonl").read_bytes()
    assert resumed(run_dir) == (0, 0, "")
    assert (run_dir / "checkpoints-damaged" / "metrics.jsonl").read_bytes() == lines


def test_a_checkpoint_of_other_data_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="its checkpoint of step 3 belongs to another run"):
        resumed(run_dir, "data_shuffle_seed=7")
