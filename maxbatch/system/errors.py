"""Exceptions that end a command with one line instead of a traceback, and exit codes."""

from __future__ import annotations

import errno
import sys
import traceback

from maxbatch.system.folding import printable

EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED = 0, 1, 2, 75
EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_INPUT: "invalid input; one line on standard error names the fault and a value that works",
    EXIT_STOPPED: "stopped early on request, with a checkpoint saved; run the same command again",
    EXIT_FAILED: "anything else",
}
_DISK_FULL = "no space left on the disk; free some and run the same command again"


class ConfigError(Exception):
    """Input that cannot be used: a config value, a file, a dataset, a checkpoint of another run.

    The message is one line that names the key, the value, the rule and, if there is one, the nearest value that works.
    """


class TrainingError(Exception):
    """A command that cannot continue although its input was valid; a run's last checkpoint is intact.

    The message is one line: what happened, where, and what to try.
    """


class DivergedError(TrainingError):
    """A run whose updates are no longer finite."""


class LeaseLost(TrainingError):
    """Another process may be writing to the folder that this one wrote to; this one has to stop."""


class StoreRefused(ConfigError, OSError):
    """A request that an object store refuses permanently: no permission, no such bucket, credentials that expired."""


class StoreFailed(TrainingError, OSError):
    """A request that failed at every try until the patience ended."""


class StoreFull(TrainingError, OSError):
    """A write that an object store has no room for."""


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error means that a disk, or the user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_read(path: object, error: OSError) -> ConfigError | TrainingError:
    """Returns the exception for a file that the system refuses to read, whatever its content."""
    if isinstance(error, ConfigError | TrainingError):
        return error
    return ConfigError(f"{path}: cannot be read ({error.strerror})")


def cannot_write(path: object, error: OSError, remedy: str = "give another place") -> ConfigError | TrainingError:
    """Returns the exception for a file that could not be written. A full or failing disk is no fault of the input."""
    if isinstance(error, ConfigError | TrainingError):
        return error
    if is_disk_full(error):
        return TrainingError(f"{path}: {_DISK_FULL}")
    if error.errno == errno.EIO:
        return TrainingError(f"{path}: the disk fails ({error.strerror})")
    return ConfigError(f"{path}: cannot be written ({error.strerror or error}); {remedy}")


def report(error: BaseException) -> int:
    """Prints the error that ended a command, in one line unless it is a bug, and returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("maxbatch: interrupted", file=sys.stderr)
    elif isinstance(error, ConfigError | TrainingError) or is_disk_full(error):
        if isinstance(error, OSError) and not isinstance(error, ConfigError | TrainingError):
            error = TrainingError(f"{error.filename}: {_DISK_FULL}" if error.filename else _DISK_FULL)
        said = " ".join(str(error).split())
        print(f"maxbatch: error: {printable(said, keep='')}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return EXIT_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
