"""Divisors of whole numbers. Numbers are factored, so that one of 63 bits takes milliseconds."""

from __future__ import annotations

import functools
import itertools
import math

_TRIAL_DIVISORS = 1 << 10  # what no number below this divides is prime below its square
# Bases with which the test of Miller and Rabin is exact below 3.3e24: https://oeis.org/A014233.
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@functools.lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Returns every divisor of a number from 1 on, in rising order."""
    found = [1]
    for prime, power in _factors(number).items():
        found = [d * prime**k for d in found for k in range(power + 1)]
    return tuple(sorted(found))


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of number that is at most `most`; 0 where `most` is below 1."""
    return number if number <= most else max((d for d in divisors(number) if d <= most), default=0)


def nearest_divisor(number: int, near: int, unit: int = 1) -> int | None:
    """Returns the divisor of number nearest to `near` of those that are multiples of unit, or None."""
    if number < 1 or number % unit:
        return None
    return min((unit * d for d in divisors(number // unit)), key=lambda d: abs(d - near))


def _factors(number: int) -> dict[int, int]:
    """Returns the primes that divide a number, each with its power."""
    factors: dict[int, int] = {}
    for d in range(2, _TRIAL_DIVISORS):
        if d * d > number:
            break
        while number % d == 0:
            factors[d] = factors.get(d, 0) + 1
            number //= d
    rest = [number] if number > 1 else []
    while rest:
        part = rest.pop()
        if _is_prime(part):
            factors[part] = factors.get(part, 0) + 1
        else:
            factor = _some_factor(part)
            rest += [factor, part // factor]
    return factors


def _is_prime(number: int) -> bool:
    """Returns whether a number without divisors below _TRIAL_DIVISORS is prime (Miller 1976, Rabin 1980)."""
    if number < _TRIAL_DIVISORS**2:
        return True
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for base in _BASES:
        x = pow(base, (number - 1) >> twos, number)
        if x in (1, number - 1):
            continue
        if not any((x := x * x % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


def _some_factor(number: int) -> int:
    """Returns a divisor, neither 1 nor the number, of one that is not prime (Pollard 1975, the rho method)."""
    for c in itertools.count(1):
        slow = fast = 2
        factor = 1
        while factor == 1:
            slow = (slow * slow + c) % number
            fast = (fast * fast + c) % number
            fast = (fast * fast + c) % number
            factor = math.gcd(slow - fast, number)
        if factor != number:
            return factor
    raise AssertionError("unreachable")
