"""Requests to stop a command, answered at once, even while compiled code runs.

SIGTERM asks for a stop (a preemption), and so do SIGHUP (a connection that is lost), SIGUSR1
(SLURM, before the time is over) and Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, Self

from maxbatch.system.errors import EXIT_FAILED, EXIT_PASSING_FAULT, EXIT_STOPPED
from maxbatch.system.storage.patience import begin, patience

# for a command to end by itself after a second Ctrl-C, or after SIGTERM if nothing has to be saved
_GRACE_S = 2.0
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # besides Ctrl-C
_OPEN: list[Stopping] = []  # contexts that a signal asks to stop, the innermost last
_END_S = 10.0  # longer than `end_at_once` takes
_REPEAT_S = 0.02  # until a Ctrl-C is repeated
_REPEATED: list[int] = []  # signals that this module repeats
_RAISED: list[int] = []  # signals that raised KeyboardInterrupt
_can_continue = False  # the same command continues
_UNANSWERED: set[int] = set()  # signals not yet answered by the handler or the watching thread


class Stopping:
    """A context in which SIGINT or one of `STOPS` requests a stop; a second SIGINT raises
    KeyboardInterrupt.

    `waits_for` completes the line "stopping ..." of the first signal; "": the caller prints its own
    line. Inside of another context that a signal has asked to stop, it is asked from the start.
    """

    numbers: tuple[signal.Signals, ...] = (*STOPS, signal.SIGINT)
    # Ends the process on one of `STOPS`, called with its name by the thread that watches; None
    # while there is something to save. Compiled code may keep the main thread from answering for
    # long.
    end_at_once: Callable[[str], None] | None = None
    # Records the end of the work, called with the signal's name by the thread that watches before
    # it ends the process on a second Ctrl-C.
    record_end: Callable[[str], None] | None = None

    def __init__(self, waits_for: str = "") -> None:
        self.signal_name: str | None = None  # signal that requested the stop
        self.waits_for = waits_for
        self._patience = patience()
        self._previous: dict[
            signal.Signals, Callable[[int, FrameType | None], object] | int | None
        ] = {}

    @property
    def is_asked(self) -> bool:
        return self.signal_name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            _interrupt(frame)
            return
        if self.end_at_once and number != signal.SIGINT:
            # the thread that watches ends the process meanwhile; nothing may be written beside it
            time.sleep(_END_S)
        elif self.signal_name is None:
            _answer(number, self.waits_for)
        self.signal_name = signal.Signals(number).name
        self._patience.hurry()  # an unresponsive store must not keep the process

    def __enter__(self) -> Self:
        self._patience = patience() if _OPEN else begin()
        if not _OPEN:
            _UNANSWERED.update(self.numbers)
        _OPEN.append(self)  # before its handlers are set: `_end_if_nothing_waits`
        heeded = [number for number in self.numbers if not _is_ignored(number)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heeded}
        if self.numbers:
            self.signal_name = next(
                (other.signal_name for other in _OPEN if other.signal_name), None
            )
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _OPEN.remove(self)


def _is_ignored(number: signal.Signals) -> bool:
    """Returns whether the command's parent had it ignore a signal, as `nohup` does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def watch_signals(can_continue: bool = False) -> None:
    """Starts the thread that handles a command's signals while its main thread is busy.

    The first signal prints what the command waits for. A second Ctrl-C ends the process if it does
    not end by itself; `STOPS` end it if nothing has to be saved. This leaves the same files as a
    kill, and children end too.

    Args:
      can_continue: the same command continues, so that such an end is a stop on request (exit code
        75).
    """
    global _can_continue
    _can_continue = can_continue
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # The interpreter's C handler writes the signal's number at once; Python's handlers wait for the
    # main thread.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in STOPS:
        if not _is_ignored(number):
            signal.signal(number, _on_stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, _on_sigint)
    _UNANSWERED.update(Stopping.numbers)
    threading.Thread(target=_watch, args=(reading,), name="maxbatch-signals", daemon=True).start()


def keep_signals() -> None:
    """Restores this process's handlers after a library has set its own, as the TPU compiler does on
    loading.
    """
    if threading.current_thread() is threading.main_thread():
        for number in Stopping.numbers:
            signal.signal(number, signal.getsignal(number))


def leave_threads_behind(code: int) -> None:
    """Ends a failed process at once if its threads wait for a store, or may compile after a Ctrl-C.

    The usual exit would wait for them, or crash.
    """
    if code in (EXIT_FAILED, EXIT_PASSING_FAULT) and (_RAISED or patience().keeps_threads):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _on_stop(number: int, frame: FrameType | None) -> None:
    """Ends a command that has nothing to save; an exception is lost while an extension module
    loads.
    """
    _end_with_output(number)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; a little later in a callback of the garbage collector, which would
    drop it.

    While modules load, it ends the process instead: extension modules crash, or raise other
    exceptions.
    """
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    is_collecting = False
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end_with_output(signal.SIGINT)
        is_collecting = is_collecting or frame.f_code in collecting
        frame = frame.f_back
    if not is_collecting:
        _RAISED.append(signal.SIGINT)
        raise KeyboardInterrupt
    _REPEATED.append(signal.SIGINT)
    _later(_REPEAT_S, signal.pthread_kill, threading.get_ident(), signal.SIGINT)


def _end_with_output(number: int) -> None:
    # RuntimeError: it is being written to
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        sys.stdout.flush()
    _end(number)


def _watch(reading: int) -> None:
    is_interrupted = False
    terminals = [number for number in (1, 2) if os.isatty(number)]
    while True:
        number = os.read(reading, 1)[0]
        if number == signal.SIGHUP:
            _discard(terminals)
        if number != signal.SIGINT and number not in STOPS:
            continue
        if number == signal.SIGINT and _REPEATED:
            _REPEATED.pop()
            continue
        if number == signal.SIGINT and is_interrupted:
            time.sleep(_GRACE_S)
            _record_end(number)
            _end(number)
        is_interrupted = is_interrupted or number == signal.SIGINT
        innermost = _OPEN[-1] if _OPEN else None
        # read once: the main thread may set it to None meanwhile
        end_at_once = innermost.end_at_once if innermost else None
        if end_at_once and number != signal.SIGINT:
            end_at_once(signal.Signals(number).name)
        elif innermost:
            _answer(number, innermost.waits_for)
        elif number == signal.SIGINT:
            _later(1.0, _answer, number, "as soon as the current work has ended")
        else:
            _later(_GRACE_S, _end_if_nothing_waits, number)


def _discard(descriptors: Sequence[int]) -> None:
    """Discards what is written to a terminal that is closed: it would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _later(seconds: float, function: Callable[..., None], *arguments: object) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _record_end(number: int) -> None:
    for context in reversed(_OPEN):
        if context.record_end:
            context.record_end(signal.Signals(number).name)
            return


def _end_if_nothing_waits(number: int) -> None:
    if not _OPEN:
        _end(number)


def _end(number: int) -> None:
    if number == signal.SIGINT or not _can_continue:
        _write("maxbatch: interrupted\n")
        os._exit(EXIT_FAILED)
    end_unsaved(signal.Signals(number).name)


def end_unsaved(name: str) -> NoReturn:
    """Ends a command that a signal asked to stop before it had something to save."""
    _write(
        f"maxbatch: stopped by {name} before there was something to save. The same command "
        "continues.\n"
    )
    os._exit(EXIT_STOPPED)


def _answer(number: int, waits_for: str) -> None:
    """Prints what the command waits for, once per signal, by whichever thread comes first."""
    try:
        _UNANSWERED.remove(number)
    except KeyError:
        return
    if waits_for:
        again = "; again to stop now" if number == signal.SIGINT else ""
        _write(f"maxbatch: {signal.Signals(number).name}: stopping {waits_for}{again}\n")


def _write(line: str) -> None:
    """Writes a line to standard error without Python's buffers, after clearing a bar."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stderr.fileno()
        clear = "\r\x1b[K" if os.isatty(descriptor) else ""
        os.write(descriptor, (clear + line).encode())
