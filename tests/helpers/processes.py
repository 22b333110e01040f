"""Processes of a test: liveness, and waits for their actions."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from maxbatch.system.processes.worker_pool import WorkerPool
from tests.helpers.forks import Fork


def pids_of(pool: WorkerPool) -> list[int]:
    """Returns the process ids of the workers that have been started."""
    return [worker._process.pid for worker in pool._workers if worker._process is not None]


def alive(pid: int) -> bool:
    """Whether a process runs; a child that has ended and is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(
    condition: Callable[[], object],
    process: subprocess.Popen[str] | Fork | None = None,
    seconds: float = 600,
) -> None:
    """Waits until the condition holds; fails after so many seconds, and at once if the process that
    brings it ends.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)  # each look at a bucket is a request


def children_of(pid: int) -> list[int]:
    """Returns the process ids of the children of a process that lives, in the order in which they
    started.
    """
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in lists for child in file.read_text().split())
