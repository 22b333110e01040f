"""What to say of a config that breaks a rule of the batch: the rule, and all that must change to keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ml_collections import ConfigDict

from maxbatch.config.values import Number, Value, exact, plain_number, shown
from maxbatch.system.errors import ConfigError

_MOST_TRIES = 8  # a refusal seldom needs more than two
_T = TypeVar("_T")


class Refusal(ConfigError):
    """A rule that the config breaks.

    Attributes:
      fault: the keys, their values and the rule.
      works: values of keys that keep the rule, the other keys left as they are.
    """

    def __init__(self, fault: str, works: Mapping[str, Value]) -> None:
        super().__init__(
            f"{fault}; works: {' '.join(f'{key}={_text(value)}' for key, value in works.items())}"
        )
        self.fault, self.works = fault, works


def stated(config: ConfigDict, *names: str) -> str:
    """Returns keys and their values as a message repeats them: "a=1, b=2"."""
    return ", ".join(f"{name}={shown(_text(config[name], quote=''))}" for name in names)


def in_words(number: Number) -> str:
    """Returns a number as a message shows it."""
    return shown(_text(number))


def accepted(config: ConfigDict, plan: Callable[[ConfigDict], _T]) -> _T:
    """Returns `plan(config)`.

    Raises:
      Refusal: the config breaks a rule. Where keeping it breaks another, the message names what keeps both.
    """
    try:
        return plan(config)
    except Refusal as refusal:
        raise Refusal(refusal.fault, _all_that_must_change(refusal, config, plan)) from None


def _all_that_must_change(
    refusal: Refusal, config: ConfigDict, plan: Callable[[ConfigDict], object]
) -> Mapping[str, Value]:
    works = dict(refusal.works)
    for _ in range(_MOST_TRIES):
        try:
            plan(ConfigDict({**config, **works}))
        except Refusal as further:
            works |= further.works
        else:
            return works
    return refusal.works


def _text(value: Value, quote: str = '"') -> str:
    """Returns a value as an override states it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if " " in value else value
    number = exact(value)
    is_short = number.denominator == 1 or abs(number) < 2**64
    return str(plain_number(number) if is_short else number)
