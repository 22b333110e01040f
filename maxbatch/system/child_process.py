"""A `maxbatch` command in a process that ends with its parent: `python -m maxbatch.system.child_process COMMAND ...`.

The parent holds the other end of standard input and writes nothing to it. The system closes that pipe when the
parent ends, also when it is killed, and this process ends at once.
"""

from __future__ import annotations

import os
import runpy
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
    """Start `maxbatch ARGUMENTS` in the caller's process group.

    Args:
      arguments: the command line.
      output: where standard output and standard error go; None: where the caller's go.
      keep_open: file descriptors that stay open for as long as the child lives.
      variables: environment variables of the child, besides the caller's.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "maxbatch.system.child_process", *arguments],
        stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=keep_open,
        env={**os.environ, **(variables or {})},
    )  # fmt: skip


def last_line(output: IO[bytes]) -> str:
    """Return the last line of what a child wrote to a file, without the prefix of an error."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - 8192))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("maxbatch: error: ") if lines else ""


def end_with_parent() -> None:
    """End this process when the pipe from its parent closes."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="maxbatch-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("maxbatch", run_name="__main__", alter_sys=True)
