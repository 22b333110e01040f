"""Stopping a command on request. Without JAX, which would take the accelerator of processes that a command starts."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Stopping:
    """Remembers that SIGTERM or SIGINT asked to stop; a second SIGINT raises KeyboardInterrupt."""

    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)  # that are listened to

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
