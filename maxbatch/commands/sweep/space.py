"""The values of a swept key: a list of choices, or a range of numbers.

A value is a text, as an override states it; the config key's own reader says what it means.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from maxbatch.config.keys import Key
from maxbatch.config.values import NUMBERS, exact, plain_number, shown
from maxbatch.system.errors import ConfigError

MOST_GRID_VALUES = 10_000


@dataclasses.dataclass(frozen=True)
class Choices:
    """A list of values."""

    key: Key
    values: tuple[str, ...]

    @classmethod
    def read(cls, key: Key, texts: Sequence[tuple[str, bool]]) -> Choices:
        """Reads a list of texts, each with whether it was written without quotes.

        Raises:
          ConfigError: it is empty, states a value twice, or holds one that the key does not take.
        """
        values = tuple(key.write(key.read(text, plain)) for text, plain in texts)
        if not values:
            raise ConfigError(f"{key.name}: a list must hold at least one value; works: [{key.default}]")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{key.name}={twice}: must be in its list once; works: [{', '.join(dict.fromkeys(values))}]"
            )
        return cls(key, values)

    @property
    def is_log(self) -> bool:
        """Whether the values are numbers that grow by a ratio: 8, 16, 32 or 1e-4, 1e-3, 1e-2."""
        if self.key.kind not in NUMBERS or len(self.values) < 3:
            return False
        try:
            numbers = sorted(float(Fraction(value)) for value in self.values)
        except ValueError:  # null
            return False
        return numbers[0] > 0 and numbers[-1] / numbers[-2] > 1.4 and numbers[-1] / numbers[0] >= 4

    def grid(self) -> list[str]:
        """Returns every value of a grid."""
        return list(self.values)

    def suggest(self, trial: Any) -> str:
        """Returns the value that an Optuna trial suggests."""
        return trial.suggest_categorical(self.key.name, self.values)

    def to_json(self) -> list[str]:
        """Returns what a sweep's records say about the key."""
        return list(self.values)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included.

    Attributes:
      key: the swept key, which takes numbers.
      low, high: the smallest and the largest value.
      is_log: whether values are spread evenly over their logarithm.
      step: distance of the values from low on; None: any value.
    """

    key: Key
    low: Fraction
    high: Fraction
    is_log: bool
    step: Fraction | None

    @classmethod
    def read(cls, key: Key, low: str, high: str, is_log: bool, step: str | None) -> Range:
        """Reads a range.

        Raises:
          ConfigError: the key takes no numbers, an end breaks its rule, or low, high, log and step contradict.
        """
        if key.kind not in NUMBERS:
            raise ConfigError(f"{key.name}: takes no numbers, so no low and high; works: [{key.default}]")
        ends = [key.read(text) for text in (low, high)]
        if any(end is None for end in ends):
            raise ConfigError(
                f"{key.name}: low and high must be numbers; works: a list of values with null in it"
            )
        bottom, top = (exact(end) for end in ends if not isinstance(end, str | None))
        if bottom >= top:
            raise ConfigError(
                f"{key.name}: low={low} must be less than high={high}; works: {{low: {high}, high: {low}}}"
            )
        if is_log and bottom <= 0:
            raise ConfigError(
                f"{key.name}: low={low} must be greater than 0 where log is true; works: log: false"
            )
        width = None if step is None else _step(key, step)
        if width is not None and is_log:
            raise ConfigError(
                f"{key.name}: step={step} must not be given where log is true; works: log: false"
            )
        if width is not None and width > top - bottom:
            works = plain_number(top - bottom)
            raise ConfigError(f"{key.name}: step={step} must be at most high - low; works: step: {works}")
        return cls(key, bottom, top, is_log, width)

    def grid(self) -> list[str]:
        """Returns every value of a grid.

        Raises:
          ConfigError: the range has no step, or too many values.
        """
        if self.step is None:
            low, high = plain_number(self.low), plain_number(self.high)
            raise ConfigError(
                f"{self.key.name}: a grid needs a list of values, or a step; works: [{low}, {high}]"
            )
        if self._num_steps > MOST_GRID_VALUES:
            raise ConfigError(
                f"{self.key.name}: step={float(self.step):g} makes {self._num_steps + 1:,} values, more "
                f"than {MOST_GRID_VALUES:,}; works: step: {float((self.high - self.low) / 10):g}"
            )
        return [self._text(self.low + i * self.step) for i in range(self._num_steps + 1)]

    @property
    def _num_steps(self) -> int:
        return math.floor((self.high - self.low) / self.step) if self.step else 0

    def suggest(self, trial: Any) -> str:
        """Returns the value that an Optuna trial suggests."""
        if _is_whole(self.key):
            ends, step = (int(self.low), int(self.high)), int(self.step or 1)
            return self._text(trial.suggest_int(self.key.name, *ends, step=step, log=self.is_log))
        width = None if self.step is None else float(self.step)
        ends = float(self.low), float(self.high)  # type: ignore[assignment]
        return self._text(trial.suggest_float(self.key.name, *ends, step=width, log=self.is_log))

    def to_json(self) -> dict[str, Any]:
        """Returns what a sweep's records say about the key."""
        ends = {"low": str(plain_number(self.low)), "high": str(plain_number(self.high)), "log": self.is_log}
        return ends if self.step is None else ends | {"step": str(plain_number(self.step))}

    def _text(self, value: Fraction | float | int) -> str:
        """Returns a value as an override states it; a suggested real has six digits."""
        text = f"{value:.6g}" if isinstance(value, float) else str(plain_number(value))
        return self.key.write(self.key.read(text))


Parameter = Choices | Range


def _step(key: Key, text: str) -> Fraction:
    """Returns a step: a number of the key's kind, but not within its bounds."""
    try:
        step = Fraction(text)
    except (ValueError, ZeroDivisionError):
        step = Fraction(0)
    if step <= 0 or (_is_whole(key) and step.denominator != 1):
        rule = "a whole number" if _is_whole(key) else "a number"
        raise ConfigError(f"{key.name}: step={shown(text)} must be {rule} greater than 0; works: step: 1")
    return step


def _is_whole(key: Key) -> bool:
    return key.kind in ("int", "quantity")
