"""A disk with little room: a file system in memory, where the machine lets tests mount one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, num_kilobytes: int) -> Iterator[Path]:
    """Mounts a disk of so many kilobytes on a folder for the length of a block; skips the test
    where that is denied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={num_kilobytes}k", "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", *options], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
