"""The tests that docs/testing.md shows run, and fail as it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import environment
from tests.helpers.pages import blocks_of


@pytest.mark.processes
def test_the_tests_of_the_page_end_as_it_shows(tmp_path: Path) -> None:
    blocks = blocks_of("docs/testing.md")
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    own = {
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
        "JAX_NUMPY_RANK_PROMOTION": "allow",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest"],
        env=environment() | own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "2 failed, 4 passed" in done.stdout, done.stdout
    (console,) = (block.text for block in blocks if block.language == "console")
    _, _, shown = console.partition("...\ntest_hosts.py F.F")
    for part in shown.rpartition("=====")[0].split("\n...\n")[1:]:
        lines = [line for line in part.splitlines() if line.strip() and "===" not in line]
        assert "\n".join(lines) in "\n".join(
            line.rstrip() for line in done.stdout.splitlines() if line.strip()
        ), part
