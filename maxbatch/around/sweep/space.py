"""The values of a swept key: a list of choices, or a range of numbers.

A value is the text of an override; the config key's own reader interprets it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from maxbatch.config.keys import Key
from maxbatch.config.values import NUMBERS, exact, plain_number, shown, value_text
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    import optuna

MOST_GRID_VALUES = 10_000


@dataclasses.dataclass(frozen=True)
class Choices:
    """A list of values."""

    key: Key
    values: tuple[str, ...]

    @classmethod
    def read(cls, key: Key, texts: Sequence[tuple[str, bool]]) -> Choices:
        """Reads a list of texts, each with whether it was written without quotes."""
        values = tuple(value_text(key.read(text, plain)) for text, plain in texts)
        if not values:
            raise ConfigError(
                f"{key.name}: a list must hold at least one value; works: [{key.default}]"
            )
        for value in values:
            if values.count(value) > 1:
                works = ", ".join(dict.fromkeys(values))
                raise ConfigError(f"{key.name}={value}: must be in its list once; works: [{works}]")
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
        return list(self.values)

    def suggest(self, trial: optuna.Trial) -> str:
        value: str = trial.suggest_categorical(self.key.name, self.values)
        return value

    def text(self, value: str) -> str:
        return value

    def suggested(self, text: str) -> str:
        """Returns the suggestion behind the text of an override."""
        return text

    def to_json(self) -> list[str]:
        """Returns the entry of the key in a sweep's records."""
        return list(self.values)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included."""

    key: Key
    low: Fraction
    high: Fraction
    is_log: bool  # whether values are spread evenly over their logarithm
    step: Fraction | None  # distance of the values from low on; None: any value

    @classmethod
    def read(cls, key: Key, low: str, high: str, is_log: bool, step: str | None) -> Range:
        if key.kind not in NUMBERS:
            raise ConfigError(
                f"{key.name}: takes no numbers, so no low and high; works: [{key.default}]"
            )
        ends = [key.read(text) for text in (low, high)]
        if None in ends:
            raise ConfigError(
                f"{key.name}: low and high must be numbers; works: a list of values with null in it"
            )
        if any(isinstance(end, str) for end in ends):
            raise ConfigError(
                f"{key.name}: low and high must be numbers of samples; works: a list, [{low}, "
                f"{high}]"
            )
        bottom, top = (exact(end) for end in ends if not isinstance(end, str | None))
        width = None if step is None else _step(step)
        number = "a whole number" if _is_whole(key) else "a number"
        for is_broken, rule, works in (
            (
                bottom >= top,
                f"low={low} must be less than high={high}",
                f"{{low: {high}, high: {low}}}",
            ),
            (
                is_log and bottom <= 0,
                f"low={low} must be greater than 0 where log is true",
                "log: false",
            ),
            (
                width is not None and (width <= 0 or (_is_whole(key) and width.denominator != 1)),
                f"step={shown(step or '')} must be {number} greater than 0",
                "step: 1",
            ),
            (
                is_log and width is not None,
                f"step={step} must not be given where log is true",
                "log: false",
            ),
            (
                width is not None and width > top - bottom,
                f"step={step} must be at most high - low",
                f"step: {plain_number(top - bottom)}",
            ),
        ):
            if is_broken:
                raise ConfigError(f"{key.name}: {rule}; works: {works}")
        return cls(key, bottom, top, is_log, width)

    def grid(self) -> list[str]:
        if self.step is None:
            works = f"[{plain_number(self.low)}, {plain_number(self.high)}]"
            raise ConfigError(
                f"{self.key.name}: a grid needs a list of values, or a step; works: {works}"
            )
        number = (self.high - self.low) // self.step + 1
        if number > MOST_GRID_VALUES:
            raise ConfigError(
                f"{self.key.name}: step={float(self.step):g} makes {number:,} values, more "
                f"than {MOST_GRID_VALUES:,}; works: step: {float((self.high - self.low) / 10):g}"
            )
        return [self.text(self.low + i * self.step) for i in range(number)]

    def suggest(self, trial: optuna.Trial) -> str:
        name, low, high, step = self.key.name, self.low, self.high, self.step
        if _is_whole(self.key):
            width = 1 if step is None else int(step)
            return self.text(
                trial.suggest_int(name, int(low), int(high), step=width, log=self.is_log)
            )
        gap = None if step is None else float(step)
        return self.text(
            trial.suggest_float(name, float(low), float(high), step=gap, log=self.is_log)
        )

    def suggested(self, text: str) -> float:
        """Returns the suggestion behind the text of an override, which has only the first six
        digits of a real.
        """
        number = min(max(Fraction(text), self.low), self.high)
        if self.step is not None:
            steps = min(round((number - self.low) / self.step), (self.high - self.low) // self.step)
            number = self.low + steps * self.step
        return int(number) if _is_whole(self.key) else float(number)

    def to_json(self) -> dict[str, object]:
        """Returns the entry of the key in a sweep's records."""
        ends = {
            "low": str(plain_number(self.low)),
            "high": str(plain_number(self.high)),
            "log": self.is_log,
        }
        return ends if self.step is None else ends | {"step": str(plain_number(self.step))}

    def text(self, value: Fraction | float | int) -> str:
        """Returns a value as text for an override; a suggested real has six digits."""
        text = f"{value:.6g}" if isinstance(value, float) else str(plain_number(value))
        return value_text(self.key.read(text))


Parameter = Choices | Range


def _step(text: str) -> Fraction:
    """Returns a step; 0 for a text that is no number."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)


def _is_whole(key: Key) -> bool:
    return key.kind in ("int", "quantity", "batch")
