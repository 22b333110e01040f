"""Commands in a terminal of a given width, and its final screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable


class Terminal:
    """A command in a pseudo-terminal; everything that it writes is kept in `written`."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 50) -> None:
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {
            name: text
            for name, text in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "maxbatch", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(terminal)
        self._controller, self.written = controller, ""

    def read(self, until: Callable[[str], bool] = lambda _: False, timeout: float = 120) -> str:
        """Reads until something was written, or the command has ended."""
        end = time.monotonic() + timeout
        while not until(self.written):
            assert time.monotonic() < end, self.written[-2000:]
            if not select.select([self._controller], [], [], 0.2)[0]:
                continue
            try:
                chunk = os.read(self._controller, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            self.written += chunk.decode(errors="replace")
        return self.written

    def type(self, text: str) -> None:
        """Types a text; \\n is the return key."""
        os.write(self._controller, text.encode())

    def end(self) -> int:
        """Waits for the end of the command; returns its exit code."""
        self.read()
        code = self.process.wait(60)
        os.close(self._controller)
        return code


def plain(written: str) -> list[str]:
    """Returns the written lines, without colours; of an overwritten line, the last text."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written).replace("\r\n", "\n")
    return [line.split("\r")[-1] for line in text.split("\n")]


def in_terminal(*arguments: str, columns: int = 80) -> list[str]:
    """Runs a command in a terminal of so many columns, and returns its lines."""
    terminal = Terminal(*arguments, columns=columns)
    assert terminal.end() == 0, terminal.written
    return plain(terminal.written)
