"""Divisors of whole numbers. Numbers are factored, so that one of 63 bits takes milliseconds."""

from __future__ import annotations

import functools
import math

_TRIAL_DIVISORS = 1 << 10  # a number without divisors below this is prime if it is below its square
# Bases with which the test of Miller and Rabin is exact below 3.3e24: https://oeis.org/A014233.
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@functools.lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Returns every divisor of a number from 1 on, in rising order."""
    products = {1}
    for prime in _primes(number):
        products |= {divisor * prime for divisor in products}
    return tuple(sorted(products))


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of number that is at most `most`; 0 where `most` is below 1."""
    return number if number <= most else max((d for d in divisors(number) if d <= most), default=0)


def nearest_divisor(number: int, near: int, unit: int = 1) -> int | None:
    """Returns the divisor of number nearest to `near` of those that are multiples of unit, or
    None.
    """
    if number < 1 or number % unit:
        return None
    return min((unit * d for d in divisors(number // unit)), key=lambda d: abs(d - near))


def _primes(number: int) -> list[int]:
    """Returns the primes that multiply to a number."""
    if number == 1:
        return []
    factor = _factor(number)
    return [number] if factor == number else [*_primes(factor), *_primes(number // factor)]


def _factor(number: int) -> int:
    """Returns a divisor above 1 (Pollard 1975, the rho method); of a prime, the prime."""
    trials = range(2, min(_TRIAL_DIVISORS, math.isqrt(number) + 1))
    if small := next((d for d in trials if number % d == 0), None):
        return small
    if _is_prime(number):
        return number
    factor, c = number, 0
    while factor == number:
        slow = fast = 2
        factor, c = 1, c + 1
        while factor == 1:
            slow = (slow * slow + c) % number
            fast = (fast * fast + c) % number
            fast = (fast * fast + c) % number
            factor = math.gcd(slow - fast, number)
    return factor


def _is_prime(number: int) -> bool:
    """Returns whether a number without divisors below _TRIAL_DIVISORS is prime (Miller 1976, Rabin
    1980).
    """
    if number < _TRIAL_DIVISORS**2:
        return True
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for base in _BASES:
        x = pow(base, (number - 1) >> twos, number)
        composite = x not in (1, number - 1)
        if composite and not any((x := x * x % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True
