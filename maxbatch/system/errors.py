"""What ends a command: exceptions that are one line instead of a traceback, and exit codes."""

from __future__ import annotations

import sys
import traceback

EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED = 0, 1, 2, 75


class ConfigError(Exception):
    """Input that cannot be used: a config value, a file, a dataset, a checkpoint of another run.

    The message is one line that names the key, the value, the rule and, where there is one, the nearest value
    that works. The command line prints it on standard error and exits with 2.
    """


class TrainingError(Exception):
    """A run that cannot go on although its input was sound; its last checkpoint is intact.

    The message is one line that says what happened, where, and what to try. The command line exits with 1.
    """


def report(error: BaseException) -> int:
    """Print what ended a command, in one line where it is known, and return the exit code."""
    if isinstance(error, ConfigError):
        print(f"maxbatch: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_INPUT
    if isinstance(error, TrainingError):
        print(f"maxbatch: error: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("maxbatch: interrupted", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return EXIT_FAILED
