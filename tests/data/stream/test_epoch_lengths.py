"""Tests of the lengths of epochs that the cache remembers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxbatch.data.stream.epoch_lengths import remembered_length
from maxbatch.data.stream.stream import open_stream
from tests.helpers.configs import config_of

KEYS = ("dataset_type=text", "dataset_path=texts", "data_cache_dir=cache", "max_target_length=16")


def remembered(*overrides: str) -> int | None:
    return remembered_length(config_of(*KEYS, *overrides).stream)


@pytest.fixture(autouse=True)
def texts() -> None:
    Path("texts").mkdir()
    for name, words in (("a.txt", 100), ("b.txt", 37)):
        Path("texts", name).write_text("word " * words)


@pytest.mark.parametrize(
    "override",
    ["packing=false", "max_target_length=24", "add_eos=false", "packing_strategy=best_fit"],
)
def test_a_length_is_remembered_for_the_settings_that_it_was_found_with(override: str) -> None:
    stream = open_stream(config_of(*KEYS))
    assert remembered() == stream.samples_per_epoch
    assert remembered("data_shuffle_seed=7", "learning_rate=1") == stream.samples_per_epoch
    assert remembered(override) is None
    assert open_stream(config_of(*KEYS, override)).samples_per_epoch == remembered(override)


def test_the_length_of_changed_files_is_not_remembered() -> None:
    open_stream(config_of(*KEYS))
    Path("texts/b.txt").write_text("word " * 38)
    assert remembered() is None


@pytest.mark.parametrize("refused", ["folder", "file"])
def test_a_cache_that_may_only_be_read_is_no_fault(refused: str) -> None:
    open_stream(config_of(*KEYS))
    for path in Path("cache").glob("epoch-lengths/*"):
        path.unlink()
        if refused == "file":
            path.mkdir()
    if refused == "folder":
        Path("cache/epoch-lengths").rmdir()
        Path("cache/epoch-lengths").write_text("in the way")
    assert open_stream(config_of(*KEYS)).samples_per_epoch and remembered() is None


def test_a_plan_of_a_remembered_epoch_imports_neither_numpy_nor_jax() -> None:
    length = open_stream(config_of(*KEYS)).samples_per_epoch
    program = (
        "import sys; from maxbatch.cli import main\n"
        f"assert main(['plan', *{KEYS!r}, '--json']) == 0\n"
        "assert not {'numpy', 'jax'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f'"samples_per_epoch": {length}' in done.stdout
