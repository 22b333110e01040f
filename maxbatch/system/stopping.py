"""Requests to stop a command, by SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Stopping:
    """A context in which SIGTERM or SIGINT asks to stop; a second SIGINT raises KeyboardInterrupt.

    Attributes:
      numbers: the signals that are handled.
      signal_name: the signal that asked; None before.
    """

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def is_asked(self) -> bool:
        return self.signal_name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __enter__(self) -> Self:
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
