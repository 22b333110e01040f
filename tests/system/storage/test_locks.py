"""Locks on files, which no ended process holds."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxbatch.system.storage.locks import exclusive, take_lock

HOLDER = """
import subprocess, sys
from pathlib import Path
from maxbatch.system.storage.locks import take_lock
file = take_lock(Path("lock"))
if "child" in sys.argv:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(command, pass_fds=[file.fileno()], stdout=subprocess.DEVNULL).pid, flush=True)
print(flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_by_one_and_free_when_it_is_closed() -> None:
    first = take_lock(Path("lock"))
    assert first is not None and take_lock(Path("lock")) is None
    begin = time.monotonic()
    assert take_lock(Path("lock"), wait_s=0.3) is None
    assert time.monotonic() - begin >= 0.3
    threading.Timer(0.2, first.close).start()
    second = take_lock(Path("lock"), wait_s=60)
    assert second is not None
    second.close()


@pytest.mark.parametrize("argument", ["alone", "child"])
def test_a_lock_is_free_once_all_who_hold_it_are_killed_or_gone(argument: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert take_lock(Path("lock")) is None
        holder.kill()
    if argument == "child":
        assert take_lock(Path("lock")) is None
        os.kill(int(said), signal.SIGKILL)
    lock = take_lock(Path("lock"), wait_s=60 if argument == "child" else 0)
    assert lock is not None
    lock.close()


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        take_lock(tmp_path / "nowhere" / "lock")


def test_exclusive_blocks_run_one_after_the_other_and_leave_no_file(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with exclusive(tmp_path / "lock"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and not os.listdir(tmp_path)


def test_exclusive_runs_without_a_lock_where_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with exclusive(tmp_path / "lock"):
        ran = True
    assert ran
