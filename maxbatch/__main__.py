"""The command `maxbatch`, also as `python -m maxbatch`."""

from __future__ import annotations

import os
import signal
import sys

from maxbatch.system.processes.command_start import can_continue

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> int:
    """Runs the command line and returns the exit code; signals and Ctrl-C end it with one also
    while modules load.
    """
    _open_closed_streams()
    code_of_stop = 75 if can_continue(sys.argv[1:]) else 1
    for number in _STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: os._exit(code_of_stop))
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    try:
        from maxbatch.cli import main as run

        code = run()
    except KeyboardInterrupt as error:
        from maxbatch.system.errors import report

        code = report(error)
    except (ImportError, MemoryError) as error:  # modules that memory has no room for
        from maxbatch.system.errors import failure_of_memory, report

        failure = failure_of_memory(error)
        if failure is None:
            raise
        code = report(failure)
    # a finished command keeps its exit code while Python ends
    for number in (*_STOPS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return code


def _open_closed_streams() -> None:
    """Opens the standard streams that the parent closed, as some services do.

    Python has None for them. Their descriptors would be those of the next files that are opened,
    into which native code would then write its messages.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _end(number: int, frame: object) -> None:
    os.write(2, b"maxbatch: interrupted\n")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
