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
_OF_BATCH = _WHOLE_BATCHES | {"per_device_batch_size", "gradient_accumulation_steps"}
_T = TypeVar("_T")
_S = TypeVar("_S", bound=Section)


class Refusal(ConfigError):
    """A broken rule of the config; `works` holds key values that satisfy it with all others
    unchanged.

    It is empty where the values are too long to type; the rule then names the part that is wrong.
    `keeping` holds other values, which keep the samples of the batch; empty if there are none.
    """

    def __init__(
        self,
        config: Keyed,
        name: str,
        rule: str,
        works: Mapping[str, Value],
        keeping: Mapping[str, Value] | None = None,
    ) -> None:
        super().__init__(f"{stated(config, name)}: {rule}")
        self.keeping = dict(keeping or {})
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
        refusal.works = _satisfying(config, plan, refusal.works) or refusal.works
        raise refusal from None


def _satisfying(
    config: _S, plan: Callable[[_S], object], works: dict[str, Value]
) -> dict[str, Value] | None:
    """Returns changes that satisfy all rules, from those that satisfy the first one; None if none
    are found.

    Where a stated batch does not fit them, padding keeps it if that works.
    """
    for _ in range(_MOST_TRIES):
        try:
            plan(config.replaced(works))
        except Refusal as further:
            batches = [key for key in further.works if key in _WHOLE_BATCHES and key not in works]
            if "batch_padding" not in works and any(config[key] is not None for key in batches):
                padded = _satisfying(config, plan, works | {"batch_padding": True})
                if padded and not padded.keys() & set(batches):
                    return padded
            of_batch = further.works if _OF_BATCH & works.keys() else further.keeping
            works = works | (of_batch or further.works)
        else:
            return works
    return None


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
