"""What a swept key may be: one of a list of values, or a number of a range.

A value is a text, as an override would state it; the config key's own reader says what it means.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from maxbatch.config.keys import Key
from maxbatch.config.values import NUMBERS, exact, plain_number
from maxbatch.system.errors import ConfigError

MOST_GRID_VALUES = 10_000


class Parameter(Protocol):
    """A swept key."""

    @property
    def key(self) -> Key: ...

    @property
    def is_log(self) -> bool:
        """Whether its values are spread by their ratio rather than their difference."""
        ...

    def grid(self) -> list[str]:
        """Return every value of a grid."""
        ...

    def draw(self, seed: int, number: int) -> str:
        """Return the value of the trial of this number: a function of the two and of the key's name."""
        ...

    def suggest(self, trial: Any) -> str:
        """Return the value that an Optuna trial suggests."""
        ...

    def to_json(self) -> Any:
        """Return what a sweep's records say about it."""
        ...


@dataclasses.dataclass(frozen=True)
class Choices:
    """A list of values.

    Raises:
      ConfigError: it is empty, holds a value twice, or one that the key does not take.
    """

    key: Key
    values: tuple[str, ...]

    @classmethod
    def read(cls, key: Key, texts: Sequence[tuple[str, bool]]) -> Choices:
        """Read the texts of a list; of each, whether it was written without quotes."""
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
        """Numbers that grow by a ratio: 8, 16, 32 or 1e-4, 1e-3, 1e-2."""
        if self.key.kind not in NUMBERS or len(self.values) < 3:
            return False
        try:
            numbers = sorted(float(Fraction(value)) for value in self.values)
        except ValueError:  # null
            return False
        return numbers[0] > 0 and numbers[-1] / numbers[-2] > 1.4 and numbers[-1] / numbers[0] >= 4

    def grid(self) -> list[str]:
        return list(self.values)

    def draw(self, seed: int, number: int) -> str:
        return self.values[_random(self.key, seed, number).integers(len(self.values))]

    def suggest(self, trial: Any) -> str:
        return trial.suggest_categorical(self.key.name, self.values)

    def to_json(self) -> list[str]:
        return list(self.values)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included.

    Attributes:
      key: the swept key, one of numbers.
      low: the smallest value.
      high: the largest.
      is_log: whether values are spread evenly by their logarithm.
      step: values are low + a multiple of it; None: any.
    """

    key: Key
    low: Fraction
    high: Fraction
    is_log: bool
    step: Fraction | None

    @classmethod
    def read(cls, key: Key, low: str, high: str, is_log: bool, step: str | None) -> Range:
        """Read the texts of a range.

        Raises:
          ConfigError: the key takes no numbers, an end is none of its values, or low, high, log and step do not go
            together.
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

    @property
    def is_whole(self) -> bool:
        return self.key.kind in ("int", "quantity")

    def grid(self) -> list[str]:
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

    def draw(self, seed: int, number: int) -> str:
        random = _random(self.key, seed, number)
        low, high = float(self.low), float(self.high)
        if self.step is not None:
            return self._text(self.low + int(random.integers(self._num_steps + 1)) * self.step)
        if self.is_whole and not self.is_log:
            return self._text(int(random.integers(int(self.low), int(self.high) + 1)))
        if self.is_whole:
            value = round(math.exp(random.uniform(math.log(low - 0.5), math.log(high + 0.5))))
            return self._text(min(max(value, int(self.low)), int(self.high)))
        if self.is_log:
            return self._text(math.exp(random.uniform(math.log(low), math.log(high))))
        return self._text(random.uniform(low, high))

    def suggest(self, trial: Any) -> str:
        name, step = self.key.name, self.step
        if self.is_whole:
            whole = int(step) if step is not None else 1
            return self._text(
                trial.suggest_int(name, int(self.low), int(self.high), step=whole, log=self.is_log)
            )
        width = None if step is None else float(step)
        return self._text(
            trial.suggest_float(name, float(self.low), float(self.high), step=width, log=self.is_log)
        )

    def to_json(self) -> dict[str, Any]:
        ends = {"low": str(plain_number(self.low)), "high": str(plain_number(self.high)), "log": self.is_log}
        return ends if self.step is None else ends | {"step": str(plain_number(self.step))}

    def _text(self, value: Fraction | float | int) -> str:
        """A value as an override states it; a number drawn from the reals to six digits."""
        text = f"{value:.6g}" if isinstance(value, float) else str(plain_number(value))
        return self.key.write(self.key.read(text))


def _step(key: Key, text: str) -> Fraction:
    """Read a step: a number as the key writes them, but outside its bounds."""
    try:
        step = Fraction(text)
    except (ValueError, ZeroDivisionError):
        step = Fraction(0)
    if step <= 0 or (key.kind in ("int", "quantity") and step.denominator != 1):
        rule = "a whole number" if key.kind in ("int", "quantity") else "a number"
        raise ConfigError(f"{key.name}: step={text} must be {rule} greater than 0; works: step: 1")
    return step


def _random(key: Key, seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number, zlib.crc32(key.name.encode())])
