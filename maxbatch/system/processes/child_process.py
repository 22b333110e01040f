"""Processes that end with their parent, even if it is killed.

A child holds the reading end of a pipe; only its parent has the other end open. The system closes
that end when the parent ends for any reason, and the child ends at once. `python -m
maxbatch.system.processes.child_process COMMAND ...` runs a `maxbatch` command in such a child.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from maxbatch.system.errors import EXIT_DONE, report, tell_passing_faults
from maxbatch.system.processes.stopping import STOPS
from maxbatch.system.terminal.warning import note

STOPPED_S = 30.0  # longest stop of a child
_LOOK_S = 5.0
_CONTINUE_S = 0.1  # until a continued child no longer counts as stopped
_TELLS_PASSING_FAULTS = "--tells-passing-faults"  # before the command, in a child's own arguments


def start_child(
    arguments: Sequence[str],
    output: IO[bytes] | None,
    keep_open: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    tells_passing_faults: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts `maxbatch ARGUMENTS` in the caller's process group.

    Args:
      output: receives standard output and standard error; None: the caller's.
      keep_open: file descriptors that the child inherits.
      tells_passing_faults: the child's exit code tells a fault of a disk or a store
        (`EXIT_PASSING_FAULT`) from others.
    """
    flags = [_TELLS_PASSING_FAULTS] if tells_passing_faults else []
    with holding_interrupts():
        return subprocess.Popen(
            [sys.executable, "-m", "maxbatch.system.processes.child_process", *flags, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=keep_open,
            env={**os.environ, **(variables or {})},
        )


def is_stopped(pid: int) -> bool:
    """Returns whether a child of this process is stopped (SIGSTOP, Ctrl-Z) and not continued
    yet.
    """
    return _stopped_child(os.P_PID, pid) is not None


def continue_stopped_children() -> None:
    """Starts a thread that continues stopped children, for which this process may be waiting.

    It continues them after `STOPPED_S`, with a line on standard error. Ctrl-Z needs no such help:
    it also stops this process, and `fg` continues all.
    """
    if hasattr(os, "waitid"):
        threading.Thread(target=_watch_stopped, name="maxbatch-children", daemon=True).start()


def _watch_stopped() -> None:
    since: dict[int, float] = {}  # times when stopped children were first seen
    while True:
        time.sleep(_LOOK_S)
        pid = _stopped_child(os.P_ALL, 0)
        since = {pid: since.get(pid, time.monotonic())} if pid is not None else {}
        if pid is None or time.monotonic() - since[pid] < STOPPED_S:
            continue
        while pid is not None:
            # First the line: this process may end as soon as the child goes on.
            note(f"process {pid} was stopped and is continued")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            time.sleep(_CONTINUE_S)
            pid = _stopped_child(os.P_ALL, 0)


def _stopped_child(kind: int, pid: int) -> int | None:
    """Returns the id of a stopped child without changing it; None if there is none."""
    try:
        status = os.waitid(kind, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return status.si_pid if status is not None else None


def last_line(output: IO[bytes]) -> str:
    """Returns the last line of a child's output, without the prefix of an error."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - 8192))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("maxbatch: error: ") if lines else ""


def end_with_parent(pipe: int = 0, with_group: bool = False) -> None:
    """Ends this process when its parent ends.

    Args:
      pipe: descriptor of a pipe; only the parent has the other end open, and writes nothing.
      with_group: also ends all processes of the group that it leads.
    """

    def watch() -> None:
        os.read(pipe, 1)
        if with_group:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    if sys.platform == "linux":
        # The thread below cannot run while an extension module holds the interpreter, so use the
        # kernel's signal too.
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp() if with_group else os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=watch, name="maxbatch-parent", daemon=True).start()


@contextlib.contextmanager
def holding_interrupts() -> Iterator[None]:
    """Starts children for which Ctrl-C waits until they call `take_interrupts`: until then they
    would print errors.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_interrupts() -> None:
    """Receives Ctrl-C in a child from here on, also an earlier one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def leave_signals_to_parent() -> None:
    """Ignores requests to stop, which reach the whole process group: the parent handles them."""
    for number in (*STOPS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    take_interrupts()


def _main() -> int:
    """Runs the `maxbatch` command in the arguments and returns its exit code."""
    end_with_parent()
    if sys.argv[1:2] == [_TELLS_PASSING_FAULTS]:
        del sys.argv[1]
        tell_passing_faults()
    try:
        take_interrupts()
        runpy.run_module("maxbatch", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt as error:
        return report(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(_main())
