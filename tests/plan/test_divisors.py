"""Divisors against counting, and fast where counting is not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.plan.divisors import divisors, largest_divisor, nearest_divisor


@given(st.integers(1, 5000))
def test_every_divisor_is_found_in_order(number: int) -> None:
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.lists(st.integers(1, 2**21), min_size=1, max_size=3))
def test_the_divisors_of_a_product_hold_its_parts(parts: list[int]) -> None:
    number = 1
    for part in parts:
        number *= part
    found = divisors(number)
    assert set(parts) <= set(found) and all(number % d == 0 for d in found)
    assert [number // d for d in reversed(found)] == list(found)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2**63 - 25, (1, 2**63 - 25)),  # prime
        (3037000493**2, (1, 3037000493, 3037000493**2)),  # the square of a prime
        (2147483647 * 4294967291, (1, 2147483647, 4294967291, 2147483647 * 4294967291)),
        (1031**6, tuple(1031**k for k in range(7))),
    ],
)
def test_63_bits_are_factored_at_once(number: int, expected: tuple[int, ...]) -> None:
    started = time.process_time()
    assert divisors(number) == expected
    assert time.process_time() - started < 5


@given(st.integers(1, 3000), st.integers(-10, 4000), st.integers(1, 40))
def test_the_nearest_divisor_is_the_nearest(number: int, near: int, unit: int) -> None:
    fitting = [d for d in range(unit, number + 1, unit) if number % d == 0]
    found = nearest_divisor(number, near, unit)
    assert found == min(fitting, key=lambda d: abs(d - near), default=None)
    assert largest_divisor(number, near) == max(
        (d for d in divisors(number) if d <= near), default=0
    )
