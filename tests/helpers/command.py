"""The command line as a user meets it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def environment() -> dict[str, str]:
    """The test's environment without its fake devices: the command makes its own."""
    return os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "COLUMNS": "100"}


def maxbatch(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maxbatch", *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "maxbatch", *map(str, arguments)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
