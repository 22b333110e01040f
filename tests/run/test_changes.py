"""A resume reports changed keys and their effects, and nothing without changes."""

from __future__ import annotations

import runpy
import shutil
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest

from maxbatch.run.context import RunContext
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import open_pretraining, train
from maxbatch.run.session import Session
from tests.helpers.command import maxbatch, start_anew
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, one_layer_config

RUN = ("per_device_batch_size=8", "steps=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two devices: a batch of 16."""
    run_dir = tmp_path_factory.mktemp("resuming") / "run"
    train(one_layer_config(*RUN, "steps=2", f"run_dir={run_dir}"), jax.devices()[:2])
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def lines(run_dir: Path, *overrides: str, devices: int = 2) -> list[str]:
    with ExitStack() as stack:
        context = RunContext(
            one_layer_config(*RUN, f"run_dir={run_dir}", *overrides), jax.devices()[:devices], stack
        )
        return Session(context, open_pretraining(context))._changes


@pytest.mark.runs
def test_the_batch_on_other_devices_is_told_with_what_keeps_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    train(one_layer_config(*RUN, "steps=3", f"run_dir={run_dir}"), jax.devices()[:1])
    printed = capsys.readouterr().out.splitlines()
    assert "the batch was 16 before; global_batch_size=16 keeps it" in printed
    assert (
        "steps: 2 before, 3 now: changes the end of the run, and rates that follow its length"
        in printed
    )
    last = lines(run_dir, "steps=4", "global_batch_size=16", devices=1)[-1]
    assert last == "global_batch_size: null before, 16 now: changes the batch"


def test_only_what_changed_is_told(run_dir: Path) -> None:
    (length,) = lines(run_dir)
    assert length.startswith("steps: 2 before, 4 now"), "of the run in the fixture"
    assert lines(run_dir) == [], "the last session is the one that compares, not the first"
    told = lines(
        run_dir,
        "learning_rate=1e-3",
        "data_cache_dir=",
        "run_dir=" + str(run_dir),
        "grain_worker_count=1",
    )
    assert told == ["learning_rate: 0.01 before, 0.001 now: changes the learning rate"]
    kept = lines(run_dir, "learning_rate=1e-3", "global_batch_size=16", devices=1)
    assert kept == [
        "gradient_accumulation_steps: 1 before, null now: changes only the micro-batches",
        "global_batch_size: null before, 16 now: changes only the micro-batches",
    ]


@pytest.mark.runs
def test_a_loss_and_held_out_data_whose_content_changed_are_told(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a word"}\n' * 99)
    data = (
        "dataset_type=jsonl",
        f"dataset_path={tmp_path}/train.jsonl",
        "eval_interval=1",
        f"eval_dataset_path={tmp_path}/held_out.jsonl",
        f"run_dir={tmp_path}/pinned",
    )

    def write(text: str, loss: str) -> Parts:
        (tmp_path / "held_out.jsonl").write_text(f'{{"text": "{text}"}}\n')
        (tmp_path / "losses.py").write_text(f"def loss(model, rows):\n    return {loss}\n")
        return Parts(objective=runpy.run_path(str(tmp_path / "losses.py"))["loss"])

    def told(text: str, loss: str) -> list[str]:
        parts = write(text, loss)
        with ExitStack() as stack:
            context = RunContext(one_layer_config(*RUN, *data), jax.devices()[:2], stack)
            return Session(context, open_pretraining(context, parts))._changes

    write("one", "1")
    train(one_layer_config(*RUN, "steps=1", *data), jax.devices()[:2])
    assert [line for line in told("one", "1") if "last session" in line] == [], (
        "it had no loss of its own"
    )
    assert told("one", "1") == []
    assert told("one", "2") == ["changed since the last session: the file of objective"]
    assert told("two", "2") == ["changed since the last session: content of eval_dataset_path"]
    assert told("two", "2") == []


@pytest.mark.processes
def test_settings_of_jax_that_changed_are_told(tmp_path: Path) -> None:
    keys = [*TINY_RUN, ONE_LAYER, "global_batch_size=2", f"run_dir={tmp_path / 'run'}"]
    assert maxbatch("train", *keys, "steps=1").returncode == 0
    resumed = start_anew(
        "train",
        *keys,
        "steps=2",
        JAX_DEFAULT_MATMUL_PRECISION="highest",
        JAX_RANDOM_SEED_OFFSET="7",
    )
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    told = [line for line in output.splitlines() if " before, " in line]
    assert told == [
        "steps: 1 before, 2 now: changes the end of the run, and rates that follow its length",
        "JAX_DEFAULT_MATMUL_PRECISION: None before, highest now: changes programs, and updates by "
        "rounding",
        "JAX_RANDOM_SEED_OFFSET: 0 before, 7 now: changes programs, and updates by rounding",
    ]


def test_a_ramp_on_other_devices_is_kept_by_its_schedule(run_dir: Path) -> None:
    ramp = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=4",
        "per_device_batch_size_increment=4",
        "global_rampup_samples=64",
        "steps=8",
    )
    lines(run_dir, *ramp)
    schedule = "enable_rampup_batch_size=false batch_size_schedule"
    assert lines(run_dir, *ramp, devices=1) == [
        f'the batch was 8 before; {schedule}="0:8 64:16" keeps it'
    ]


def test_a_config_that_cannot_be_read_is_not_compared(run_dir: Path) -> None:
    (run_dir / "config.yml").write_text("steps: [")
    assert lines(run_dir, "learning_rate=1e-3") == []
