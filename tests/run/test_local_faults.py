"""Disk faults during a run: one line, for any file being written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import environment, maxbatch
from tests.helpers.full_disk import small_disk
from tests.run.test_remote_runs import RAMPED

ORDINARY_USER = 65534  # nobody
KEYS = [key for key in RAMPED if "rampup" not in key and "per_device_batch_size" not in key]


@pytest.mark.processes
@pytest.mark.parametrize("num_kilobytes", [4, 32, 180])
def test_a_disk_that_fills_up_at_any_moment_ends_the_run_in_one_line(
    tmp_path: Path, num_kilobytes: int
) -> None:
    with small_disk(tmp_path / "disk", num_kilobytes) as disk:
        ended = maxbatch("train", *KEYS, "per_device_batch_size=1", f"run_dir={disk}/run")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert len(lines) == 1 and "no space left on the disk; free some" in lines[0], ended.stderr


@pytest.mark.processes
def test_a_path_that_an_ordinary_user_may_not_use_is_one_line_and_exit_2(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    drops = (
        "import os, sys; from maxbatch.cli import main; import "
        f"maxbatch.run.pretraining;os.setgroups([]); os.setgid({ORDINARY_USER}); "
        f"os.setuid({ORDINARY_USER}); sys.exit(main())"
    )
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    train = ["train", *KEYS, "per_device_batch_size=1", "compilation_cache_dir="]
    for command, said in (
        ([*train, f"run_dir={forbidden}"], "cannot be written (Permission denied)"),
        ([*train, f"run_dir={forbidden / 'run'}"], "cannot be written (Permission denied)"),
        ([*train, f"run_dir={closed / 'run'}"], "cannot be read (Permission denied)"),
        (["generate", str(closed / "run")], "cannot be opened (Permission denied)"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", drops, *command],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            cwd="/",
        )
        assert ended.returncode == 2, ended.stderr
        assert len(ended.stderr.splitlines()) == 1 and said in ended.stderr
    assert list(forbidden.iterdir()) == []
