"""Exceptions that end a command with one line instead of a traceback, and exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping

from maxbatch.system.terminal.folding import error_width, folded, printable

EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED = 0, 1, 2, 75
# Of a child of `maxbatch sweep` or `critical-batch` alone, in place of 1 and 2: a full disk or a
# store ended the run, not the run itself. Its log may be on that disk, so the log cannot tell.
EXIT_PASSING_FAULT = 74
EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_INPUT: "invalid input; one line on standard error names the fault and a value that works",
    EXIT_STOPPED: "stopped early on request (SIGTERM, SIGHUP, SIGUSR1, Ctrl-C), with a checkpoint saved or "
    "nothing to save yet, or because another host died; run the same command again",
    EXIT_FAILED: "anything else",
}
_DISK_FULL = "no space left on the disk; free some and run the same command again"
_MOST_SAID = 2000  # characters of a line
_MOST_REASON = 200  # characters of what a library says
# What errors of libraries say, by their types, where memory ran out.
_MEMORY_WORDS = {
    "RuntimeError": ("can't start new thread", "std::bad_alloc", "RESOURCE_EXHAUSTED"),
    "JaxRuntimeError": ("RESOURCE_EXHAUSTED", "std::bad_alloc", "Cannot allocate memory"),
    "XlaRuntimeError": ("RESOURCE_EXHAUSTED", "std::bad_alloc", "Cannot allocate memory"),
    "ImportError": ("failed to map segment", "Cannot allocate memory", "cannot allocate memory"),
}


class ConfigError(Exception):
    """Input that cannot be used: a config value, a file, a dataset, a checkpoint of another run.

    The message is one line that names the key, the value, the rule and, if there is one, the
    nearest value that works.
    """


class TrainingError(Exception):
    """A failure despite valid input; a run's last checkpoint is intact.

    The message is one line: what happened, where, and what to try.
    """

    figures: Mapping[str, object] = {}  # facts that `--json` prints beside the message


class DivergedError(TrainingError):
    """A run whose updates are no longer finite."""


class PassingFault(TrainingError):
    """A fault of a disk or a store, after which the same command continues."""


class StopTraining(Exception):
    """Raised by an output to stop the run after the update that it was given, with a checkpoint, as
    SIGTERM does.
    """


class LeaseLost(PassingFault):
    """The loss of a folder: another process may be writing to it, so this one must stop."""


class StoreRefused(ConfigError, OSError):
    """A request that an object store refuses permanently: no permission, no such bucket,
    credentials that expired.
    """


class StoreFailed(PassingFault, OSError):
    """A request that failed at every try until the patience ended."""


class StoreFull(PassingFault, OSError):
    """A write that an object store has no room for."""


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error means that a disk, or the user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def reading(
    path: object, remedy: str = "", blame: Callable[[str], ConfigError] | None = None
) -> Iterator[None]:
    """Turns a system's refusal to read a file, whatever its content, into a one-line error.

    A store's error is such a line already.

    Args:
      remedy: ends the message.
      blame: makes the error from "cannot read PATH: REASON", for a file named by a key.
    """
    try:
        yield
    except TrainingError:
        raise
    except OSError as error:
        if blame is not None:
            raise blame(f"cannot read {path}: {reason(error)}") from error
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: cannot be read ({reason(error)}){remedy and f'; {remedy}'}"
        ) from error


@contextlib.contextmanager
def writing(path: object, remedy: str = "give another place") -> Iterator[None]:
    """Turns a failure to write a file into a one-line error; a full or failing disk is not the
    input's fault.

    A store's error is such a line already.
    """
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except OSError as error:
        if is_disk_full(error):
            raise PassingFault(f"{path}: {_DISK_FULL}") from error
        if error.errno == errno.EIO:
            raise PassingFault(f"{path}: the disk fails ({error.strerror})") from error
        raise ConfigError(f"{path}: cannot be written ({reason(error)}); {remedy}") from error


def reason(error: BaseException) -> str:
    """Returns the system's message for an error, or else the error's own, on one line."""
    return one_line(getattr(error, "strerror", None) or error)


def one_line(error: object, most: int | None = None) -> str:
    """Returns an error's message on one line of at most `most` characters; its type if it has
    none.
    """
    return " ".join(str(error).split())[:most] or type(error).__name__


def is_interruption(error: BaseException) -> bool:
    """Returns whether Ctrl-C caused an error: extension modules that it stops while they load raise
    ImportError.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, KeyboardInterrupt):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def failure_of_memory(error: BaseException) -> TrainingError | None:
    """Returns an error with one line for one that the lack of memory caused; None for any other
    error.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if _lacks_memory(link):
            problem = (
                type(link).__name__
                if isinstance(link, MemoryError)
                else reason(link)[:_MOST_REASON]
            )
            return TrainingError(f"memory ran out ({problem}); {_more_memory(problem)}")
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    words = _MEMORY_WORDS.get(type(error).__name__, ())
    return any(word in str(error) for word in words)


def _more_memory(problem: str) -> str:
    """Returns advice for a process that lacks memory."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        return f"the limit of this process is {most >> 10} kB (ulimit -v): raise it"
    if "RESOURCE_EXHAUSTED" in problem:
        return (
            "a smaller per_device_batch_size or another remat_policy needs less; maxbatch fit "
            "finds what fits"
        )
    return "end other programs, or use a machine with more"


_tells_passing_faults = False


def tell_passing_faults() -> None:
    """Makes this process, which a supervisor started, end with `EXIT_PASSING_FAULT` after such a
    fault.
    """
    global _tells_passing_faults
    _tells_passing_faults = True


def _without_middle(text: str) -> str:
    """Shortens a long text to its beginning and its end, which states what works."""
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 505]} ... {text[-500:]}"


def report(error: BaseException, as_json: bool = False) -> int:
    """Prints the error that ended a command, in one line unless it is a bug, and returns the exit
    code.

    A terminal's lines break between words.

    Args:
      as_json: prints it on standard output too, as an object.
    """
    if not isinstance(error, ConfigError | TrainingError):
        error = failure_of_memory(error) or error
    code, message = EXIT_INPUT if isinstance(error, ConfigError) else EXIT_FAILED, ""
    if is_interruption(error):
        code, message = EXIT_FAILED, "interrupted"
        print(f"maxbatch: {message}", file=sys.stderr)
    elif isinstance(error, ConfigError | TrainingError) or is_disk_full(error):
        if isinstance(error, OSError) and not isinstance(error, ConfigError | TrainingError):
            error = PassingFault(
                f"{error.filename}: {_DISK_FULL}" if error.filename else _DISK_FULL
            )
        message = printable(_without_middle(" ".join(str(error).split())), keep="")
        if _tells_passing_faults and isinstance(error, PassingFault | StoreRefused):
            code = EXIT_PASSING_FAULT
        with contextlib.suppress(OSError):  # the disk that is full may hold the log
            print(folded(f"maxbatch: error: {message}", 0, error_width()), file=sys.stderr)
    else:
        traceback.print_exception(error)
    if as_json:
        bug = traceback.format_exception_only(error)[-1]
        figures = error.figures if isinstance(error, TrainingError) else {}
        message = message or printable(_without_middle(" ".join(bug.split())), keep="")
        with contextlib.suppress(OSError):  # the reader may be gone, or the disk full
            print(json.dumps({**figures, "error": message, "exit_code": code}), flush=True)
    return code
