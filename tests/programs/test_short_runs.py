"""Short runs of programs that search for faults; CONTRIBUTING.md has the long ones.

That of `differing_hosts` is in `tests/parallel/test_agreement.py`. Lost hosts, `pods`, `budgets` and
`to_the_bit` take CI too long: fixed cases of theirs are in `tests/run/test_lost_hosts.py`,
`tests/kinds/prompt/test_hosts.py`, `tests/run/test_passes.py` and `tests/run/test_to_the_bit.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.programs.{program}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.runs
def test_fuzzed_command_lines_and_damaged_files_end_as_the_contract_says() -> None:
    few = ("--lines", "60", "--files", "40", "--quick", "--workers", "1", "--longest", "60")
    run("adversary", "--seed", "5", *few)


@pytest.mark.processes
def test_a_run_that_is_killed_at_a_random_moment_loses_and_repeats_nothing() -> None:
    run("soak", "--kills", "1", "--seed", "1", "--stores", "gs")


@pytest.mark.processes
def test_a_writer_that_was_stopped_for_longer_than_its_lease_changes_nothing() -> None:
    run("soak", "--suspends", "1", "--seed", "1", "--stores", "s3")


@pytest.mark.processes
def test_a_run_on_a_random_mesh_is_that_of_one_device() -> None:
    run("meshes", "--runs", "1", "--seed", "26", "--load", "0")
