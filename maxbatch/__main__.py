"""The command `maxbatch`, also as `python -m maxbatch`."""

from __future__ import annotations

import os
import signal
import sys

from maxbatch.system.errors import report


def main() -> int:
    """Runs the command line and returns the exit code; SIGTERM and Ctrl-C end it with one also while modules load."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(1))
    try:
        from maxbatch.cli import main as run

        code = run()
    except KeyboardInterrupt as error:
        code = report(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a finished command keeps its exit code while Python ends
    return code


if __name__ == "__main__":
    sys.exit(main())
