"""The command `maxbatch`, also as `python -m maxbatch`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line and returns the exit code, also if SIGTERM comes while modules load."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from maxbatch.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
