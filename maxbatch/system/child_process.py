"""Processes that end with their parent, also when it is killed.

A child holds the reading end of a pipe whose other end only its parent has open. The system closes that end when the
parent ends, by whatever cause, and the child ends at once. `python -m maxbatch.system.child_process COMMAND ...` is a
`maxbatch` command in such a child.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO


def start_child(
    arguments: Sequence[str],
    output: IO[bytes] | None,
    keep_open: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `maxbatch ARGUMENTS` in the caller's process group.

    Args:
      arguments: the command line.
      output: where standard output and standard error go; None: where the caller's go.
      keep_open: file descriptors that the child inherits.
      variables: environment variables of the child, besides the caller's.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "maxbatch.system.child_process", *arguments],
        stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=keep_open,
        env={**os.environ, **(variables or {})},
    )  # fmt: skip


def last_line(output: IO[bytes]) -> str:
    """Returns the last line that a child wrote to a file, without the prefix of an error."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - 8192))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("maxbatch: error: ") if lines else ""


def end_with_parent(pipe: int = 0, with_group: bool = False) -> None:
    """Ends this process as soon as its parent ends.

    Args:
      pipe: the file descriptor of a pipe whose other end only the parent has open, and writes nothing to.
      with_group: ends all processes of its group, which it leads.
    """

    def watch() -> None:
        os.read(pipe, 1)
        if with_group:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    if sys.platform == "linux":
        # The thread below cannot run while an extension module holds the interpreter; the kernel's signal does.
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp() if with_group else os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=watch, name="maxbatch-parent", daemon=True).start()


def leave_signals_to_parent() -> None:
    """Ignores Ctrl-C and SIGTERM, which reach the whole process group: the parent handles them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("maxbatch", run_name="__main__", alter_sys=True)
