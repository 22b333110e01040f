"""The refusal of a config that breaks a rule of the batch: the rule, and all changes that satisfy
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeVar

from maxbatch.config.keys import Keyed, Section
from maxbatch.config.values import Number, Value, exact, plain_number, shown, value_text
from maxbatch.system.errors import ConfigError

# characters of a value after `works:`; a longer one is left out, since a part of it is another
# value
MOST_TYPED = 500
_MOST_TRIES = 8  # a refusal seldom needs more than two
# keys that state a batch for all devices, which `batch_padding` keeps on any number of them
_WHOLE_BATCHES = {"global_batch_size", "batch_size_schedule", "batch_size"}
_T = TypeVar("_T")
_S = TypeVar("_S", bound=Section)


class Refusal(ConfigError):
    """A broken rule of the config; `works` holds key values that satisfy it with all others
    unchanged.

    It is empty where the values are too long to type; the rule then names the part that is wrong.
    """

    def __init__(self, config: Keyed, name: str, rule: str, works: Mapping[str, Value]) -> None:
        super().__init__(f"{stated(config, name)}: {rule}")
        self.works = {
            key: plain_number(v) if isinstance(v, Fraction) else v for key, v in works.items()
        }

    def __str__(self) -> str:
        works = " ".join(f"{key}={_text(value)}" for key, value in self.works.items())
        return super().__str__() + (f"; works: {works}" if works else "")


def stated(config: Keyed, *names: str) -> str:
    """Returns keys and their values for a message: "a=1, b=2"."""
    return ", ".join(f"{name}={shown(_text(config[name], quote=''))}" for name in names)


def in_words(number: Number) -> str:
    """Returns a number for a message."""
    return shown(_text(number))


def accepted(config: _S, plan: Callable[[_S], _T]) -> _T:
    """Returns `plan(config)`.

    Raises:
      Refusal: the config breaks a rule. If satisfying it breaks others, the message names values
        that satisfy all.
    """
    try:
        return plan(config)
    except Refusal as refusal:
        works = dict(refusal.works)
        for _ in range(_MOST_TRIES):
            try:
                plan(config.replaced(works))
            except Refusal as further:
                works |= _keeping_the_batch(further.works, works)
            else:
                refusal.works = works
                break
        raise refusal from None


def _keeping_the_batch(
    further: Mapping[str, Value], works: Mapping[str, Value]
) -> Mapping[str, Value]:
    """Returns the changes of a further refusal, or padding in place of another batch than the
    stated one.

    Args:
      works: the changes so far; where they state another batch, the batch itself was at fault.
    """
    tried = _WHOLE_BATCHES | {"batch_padding"}
    return (
        {"batch_padding": True}
        if _WHOLE_BATCHES & further.keys() and not tried & works.keys()
        else further
    )


def _text(value: Value, quote: str = '"') -> str:
    """Returns a value as text for an override."""
    if value is None or isinstance(value, bool):
        return value_text(value)
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if " " in value else value
    number = exact(value)
    bits = number.numerator.bit_length() - number.denominator.bit_length()
    if max(abs(bits), number.denominator.bit_length()) > 10_000:
        return f"about 2^{bits}"  # more digits than Python turns into text
    # a larger one may be beyond any float
    return str(plain_number(number) if bits < 64 else number)
