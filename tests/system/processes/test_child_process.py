"""Processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.system.processes.child_process import last_line, start_child
from tests.helpers.processes import alive, wait_for

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, flush=True)
if sys.argv[2] == "later":
    child.stdout.readline()
os.kill(os.getpid(), 9)
"""
CHILD = (
    "from maxbatch.system.processes.child_process import end_with_parent; end_with_parent(); "
    "print(flush=True); "
)


@pytest.mark.parametrize(
    ("when", "work"),
    [
        ("at once", "import time; time.sleep(60)"),  # before the child has looked at its parent
        ("later", "import time; time.sleep(60)"),
        pytest.param(  # an extension module that keeps the interpreter
            "later",
            "import re; re.match('(a+)+b', 'a' * 60)",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs a signal of Linux"),
        ),
    ],
)
def test_a_child_ends_with_its_parent_that_is_killed(when: str, work: str) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD + work, when], stdout=subprocess.PIPE
    )
    pid = int(parent.stdout.split()[0])
    assert parent.returncode == -signal.SIGKILL
    try:
        wait_for(lambda: not alive(pid))
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_child_is_a_command_whose_last_line_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+b") as log:
        child = start_child(["trian"], log, variables={"COLUMNS": "80"})
        assert child.wait() == 2
        assert last_line(log) == "trian: unknown command; nearest: train"
    assert child.stdin is not None
    child.stdin.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a shell's background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_a_child_that_starts_is_one_line(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+b") as log, start_child(["plan"], log) as child:
        child.send_signal(signal.SIGINT)
        assert child.stdin is not None and child.wait() == 1
        log.seek(0)
        assert log.read() == b"maxbatch: interrupted\n"


def test_a_child_that_stays_stopped_is_continued(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from maxbatch.system.processes import child_process\n"
        "child_process.STOPPED_S, child_process._LOOK_S = 0.5, 0.1\n"
        "child_process.continue_stopped_children()\n"
        "children = [subprocess.Popen(['sh', '-c', 'kill -STOP $$; exit 7']) for _ in range(3)]\n"
        "sys.exit(str([child.wait() for child in children]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stderr.count("was stopped and is continued") == 3 and done.stderr.endswith(
        "[7, 7, 7]\n"
    )
