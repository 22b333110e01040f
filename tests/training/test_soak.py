"""Kills at random moments; `.ci/run` makes more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def soak(*arguments: str) -> None:
    top = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.helpers.soak", *arguments, "--stores", "gs", "s3"]
    # The stores of this process are others: the soak starts its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORSTORE_")}
    done = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every promise held" in done.stdout


@pytest.mark.slow
@pytest.mark.stores
def test_killed_runs_train_what_an_unharmed_run_trains() -> None:
    soak("--kills", "4", "--seed", "4")
