"""A short run of the adversary; `python -m tests.helpers.adversary` makes long ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fuzzed_command_lines_and_damaged_files_end_as_the_contract_says() -> None:
    root = Path(__file__).parents[1]
    flags = ("--seed", "5", "--lines", "60", "--files", "40", "--quick", "--workers", "1", "--longest", "60")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.adversary", *flags],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
