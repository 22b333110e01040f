"""Requests to stop a command, by SIGTERM or Ctrl-C, answered at once, even while compiled code runs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from maxbatch.system.errors import EXIT_FAILED, EXIT_PASSING_FAULT
from maxbatch.system.patience import begin, patience

_GRACE_S = 2.0  # for a command to end by itself after a second Ctrl-C, or after SIGTERM if nothing has to be saved
_OPEN: list[Stopping] = []  # contexts that a signal asks to stop, the innermost last
_REPEAT_S = 0.02  # until a Ctrl-C is repeated
_REPEATED: list[int] = []  # signals that this module repeats
_RAISED: list[int] = []  # signals that raised KeyboardInterrupt
_UNANSWERED: set[int] = set()  # signals not yet answered by the handler or the watching thread


class Stopping:
    """A context in which SIGTERM or SIGINT requests a stop; a second SIGINT raises KeyboardInterrupt.

    `waits_for` completes the line "stopping ..." of the first signal; "": the caller prints its own line. Inside of
    another context that a signal has asked to stop, it is asked from the start.
    """

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, waits_for: str = "") -> None:
        self.signal_name: str | None = None  # signal that requested the stop
        self.waits_for = waits_for
        self._patience = patience()
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def is_asked(self) -> bool:
        return self.signal_name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            _interrupt(frame)
            return
        if self.signal_name is None:
            _answer(number, self.waits_for)
        self.signal_name = signal.Signals(number).name
        self._patience.hurry()  # an unresponsive store must not keep the process

    def __enter__(self) -> Self:
        self._patience = patience() if _OPEN else begin()
        if not _OPEN:
            _UNANSWERED.update(self.numbers)
        _OPEN.append(self)  # before its handlers are set: `_end_if_nothing_waits`
        self._previous = {number: signal.signal(number, self._on_signal) for number in self.numbers}
        if self.numbers:
            self.signal_name = next((other.signal_name for other in _OPEN if other.signal_name), None)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _OPEN.remove(self)


def watch_signals() -> None:
    """Starts the thread that handles a command's signals while its main thread is busy.

    The first signal prints what the command waits for. A second Ctrl-C ends the process if it does not end by itself;
    SIGTERM ends it if nothing has to be saved. This leaves the same files as a kill, and children end too.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # The interpreter's C handler writes the signal's number at once; Python's handlers wait for the main thread.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, _on_sigint)
    _UNANSWERED.update(Stopping.numbers)
    threading.Thread(target=_watch, args=(reading,), name="maxbatch-signals", daemon=True).start()


def keep_signals() -> None:
    """Restores this process's handlers after a library has set its own, as the TPU compiler does on loading."""
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


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Ends a command that has nothing to save; an exception is lost while an extension module loads."""
    _end_with_output()


def _on_sigint(number: int, frame: FrameType | None) -> None:
    _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; a little later in a callback of the garbage collector, which would drop it.

    While modules load, it ends the process instead: extension modules crash, or raise other exceptions.
    """
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    is_collecting = False
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end_with_output()
        is_collecting = is_collecting or frame.f_code in collecting
        frame = frame.f_back
    if not is_collecting:
        _RAISED.append(signal.SIGINT)
        raise KeyboardInterrupt
    _REPEATED.append(signal.SIGINT)
    _later(_REPEAT_S, signal.pthread_kill, threading.get_ident(), signal.SIGINT)


def _end_with_output() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # RuntimeError: it is being written to
        sys.stdout.flush()
    _end()


def _watch(reading: int) -> None:
    is_interrupted = False
    while True:
        number = os.read(reading, 1)[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        if number == signal.SIGINT and _REPEATED:
            _REPEATED.pop()
            continue
        if number == signal.SIGINT and is_interrupted:
            time.sleep(_GRACE_S)
            _end()
        is_interrupted = is_interrupted or number == signal.SIGINT
        if _OPEN:
            _answer(number, _OPEN[-1].waits_for)
        elif number == signal.SIGINT:
            _later(1.0, _answer, number, "as soon as the current work has ended")
        else:
            _later(_GRACE_S, _end_if_nothing_waits)


def _later(seconds: float, function: Callable[..., None], *arguments: object) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _end_if_nothing_waits() -> None:
    if not _OPEN:
        _end()


def _end() -> None:
    _write("maxbatch: interrupted\n")
    os._exit(EXIT_FAILED)


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
