"""Scalars: values survive writing and reading, and any text gives a value or an error."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError
from maxbatch.config.values import NUMBERS, Bounds, Scalar, exact, plain_number, value_text


@given(st.fractions(min_value=Fraction(1, 10**6), max_value=2**31))
def test_exact_numbers_survive_writing_and_reading(number: Fraction) -> None:
    scalar = Scalar("per_device_batch_size", "exact", default="16")
    assert exact(scalar.read(value_text(plain_number(number)))) == number  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_no_text_ends_in_anything_but_a_value_or_a_config_error(text: str) -> None:
    for kind in (*NUMBERS, "bool", "choice", "text"):
        scalar = Scalar("key", kind, choices=("a", "b"), default="1")
        try:
            scalar.read(text)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (Bounds(at_least=1), ">= 1"),
        (Bounds(at_least=1, also=-1), ">= 1 | -1"),
        (Bounds(at_least=1, at_most=2**40), ">= 1 and <= 2^40"),
        (Bounds(above=0, at_most=1), "> 0 and <= 1"),
        (Bounds(at_least=0, at_most=2**32 - 1), ">= 0 and <= 4294967295"),
    ],
)
def test_bounds_say_their_whole_rule(bounds: Bounds, said: str) -> None:
    assert str(bounds) == said


@pytest.mark.parametrize(("bounds", "value"), [(Bounds(at_most=2**31), 5e9), (Bounds(0.1), 0)])
def test_a_broken_bound_is_said_in_full(bounds: Bounds, value: float) -> None:
    broken = bounds.broken(value)
    assert broken is not None
    assert float(broken[0].split()[-1]) == broken[1]
