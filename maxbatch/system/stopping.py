"""Requests to stop a command, by SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class Stopping:
    """A context in which SIGTERM or SIGINT asks to stop; a second SIGINT raises KeyboardInterrupt."""

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None  # of the signal that asked
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_asked(self) -> bool:
        return self.signal_name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in self.numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
