"""Sums without rounding: equal to the last bit in any order and grouping of their summands.

A summand is cut into digits at fixed exponents, as in ReproBLAS (Demmel and Nguyen, "Parallel
Reproducible Summation", 2015, https://doi.org/10.1109/TC.2014.2345391), and integers count the
digits. Level m has the unit 2^(13 m - 125). A summand belongs to the highest level of whose unit it
is at least half. It has three digits, in units of this level and the two below, each rounded to the
nearest. A sum keeps the three highest levels that any of its summands reaches. What it drops
depends on the largest summand alone, so it depends on no order:

    |error| <= n * 2^-24 * max |x|, subnormals count as 0

Infinities and NaN are a level above all others, where the three integers count inf, -inf and NaN.

Each of the three integers has 30 bits for its digits and 2 for a part of the level's number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.update.reproducible.slabs import Slabs

MOST_SUMMANDS = 2**17 - 1  # a digit is at most 2^12, and a count of digits below 2^29
_WIDTH = 13  # bits of a digit
_NOT_FINITE = 63  # the level of infinities and NaN
_SMALLEST = 2.0**-126  # the least normal float32


class ExactSum(NamedTuple):
    """Sums of many float32 arrays, element by element, or of none of them: zeros."""

    high: jax.Array  # int32
    middle: jax.Array
    low: jax.Array


class _Digits(NamedTuple):
    """Counts of digits at a level and at the two levels below it: int32."""

    level: jax.Array
    high: jax.Array
    middle: jax.Array
    low: jax.Array


def empty_sum(shape: tuple[int, ...]) -> ExactSum:
    """Returns sums without a summand."""
    return ExactSum(*(jnp.zeros(shape, jnp.int32) for _ in ExactSum._fields))


def with_summand(sums: ExactSum, x: jax.Array) -> ExactSum:
    """Adds an array of float32 to sums of its shape; at most `MOST_SUMMANDS` per sum."""
    before, new = _digits_of_sum(sums), _digits_of(x)
    level = jnp.maximum(before.level, new.level)
    parts = zip(_at_level(before, level), _at_level(new, level), strict=True)
    return _packed(_Digits(level, *(a + b for a, b in parts)))


def empty_bits(shape: tuple[int, ...]) -> ExactSum:
    """Returns sums without a summand, the bits of whose integers are those of float32.

    So they can pass as gradients of float32.
    """
    return ExactSum(*(jnp.zeros(shape, jnp.float32) for _ in ExactSum._fields))


def with_summand_in_place(sums: ExactSum, x: jax.Array, layer: jax.Array | int = 0) -> ExactSum:
    """Adds an array to `empty_bits` as `with_summand` does, by slabs: where the sums are donated,
    only a slab of them is in memory twice. Slabs of zeros are left out.

    Args:
      sums: arrays like x, or stacked ones.
      layer: of the stack, to which x is added.
    """
    slabs = Slabs.of(x.shape)
    matrix, begin = slabs.as_matrix(x), layer * slabs.num_rows
    matrices = ExactSum(*(part.reshape(-1, slabs.num_columns) for part in sums))

    def add_slab(number: jax.Array, sums: ExactSum) -> ExactSum:
        first = slabs.first_row(number)
        x = slabs.only_new(number, slabs.rows_at(matrix, first))
        before = ExactSum(*(_as_int(slabs.rows_at(part, begin + first)) for part in sums))
        # A branch, so that no program joins the reads of a slab and the writes into one.
        added = jax.lax.cond(jnp.any(x != 0), with_summand, lambda sums, _: sums, before, x)
        return ExactSum(
            *(
                jax.lax.dynamic_update_slice_in_dim(part, _as_float(slab), begin + first, 0)
                for part, slab in zip(sums, added, strict=True)
            )
        )

    added: ExactSum = slabs.fold(add_slab, matrices)
    return ExactSum(*(x.reshape(part.shape) for x, part in zip(added, sums, strict=True)))


def _as_int(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _as_float(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def merged(sums: ExactSum, axes: tuple[str, ...] = ()) -> ExactSum:
    """Adds up sums along the first axis and, inside of `shard_map`, along axes of the mesh."""
    digits = _digits_of_sum(sums)
    level = jnp.max(digits.level, axis=0)
    level = jax.lax.pmax(level, axes) if axes else level
    parts = [jnp.sum(part, axis=0, dtype=jnp.int32) for part in _at_level(digits, level[None])]
    return _packed(_Digits(level, *(jax.lax.psum(parts, axes) if axes else parts)))


def rounded(sums: ExactSum) -> jax.Array:
    """Returns the sums as float32, rounded to the nearest; subnormal ones are 0."""
    level, high, middle, low = _digits_of_sum(sums)
    counts = high, middle, low
    # One number of 56 bits: `high` above 2 x 13 bits without a sign.
    middle += low >> _WIDTH
    high += middle >> _WIDTH
    rest = ((middle & 0x1FFF) << _WIDTH) | (low & 0x1FFF)
    is_negative, has_rest = high < 0, rest != 0
    high = jnp.where(is_negative, -high - has_rest.astype(jnp.int32), high)
    rest = jnp.where(is_negative & has_rest, (1 << 26) - rest, rest)
    # Its first 30 bits. The last of them is set if any bit is dropped, so that one rounding, to the
    # 24 bits of a float32, rounds the whole number.
    shift = jnp.minimum(jax.lax.clz(high) - 2, 26)
    dropped = 26 - shift
    first = (high << shift) | (rest >> dropped)
    first |= (rest & ((1 << dropped) - 1) != 0).astype(jnp.int32)
    exponent = _WIDTH * level - 125 - shift
    half = exponent >> 1
    total = first.astype(jnp.float32) * _power_of_two(half) * _power_of_two(exponent - half)
    total = jnp.where(total < _SMALLEST, 0.0, total)
    total = jnp.where(is_negative, -total, total)
    return jnp.where(level == _NOT_FINITE, _not_finite(*counts), total)


def merged_and_rounded(sums: ExactSum, axes: tuple[str, ...] = ()) -> jax.Array:
    """Returns `rounded(merged(sums, axes))` of `empty_bits` with summands; without axes by slabs."""
    shape = sums.high.shape[1:]
    slabs = Slabs.of(shape)
    if axes or slabs.num_slabs == 1:
        return rounded(merged(ExactSum(*map(_as_int, sums)), axes))
    matrices = ExactSum(*(jax.vmap(slabs.as_matrix)(part) for part in sums))

    def round_slab(number: jax.Array, total: jax.Array) -> jax.Array:
        first = slabs.first_row(number)
        parts = (jax.lax.dynamic_slice_in_dim(x, first, slabs.rows, 1) for x in matrices)
        slab = ExactSum(*map(_as_int, parts))
        array: jax.Array = jax.lax.dynamic_update_slice_in_dim(
            total, rounded(merged(slab)), first, 0
        )
        return array

    nothing = jnp.zeros((slabs.num_rows, slabs.num_columns), jnp.float32)
    return slabs.fold(round_slab, nothing).reshape(shape)


def _digits_of(x: jax.Array) -> _Digits:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    is_finite = exponent < 255
    level, place = _divided_by_width(jnp.maximum(exponent, 1) - 1)
    # in units of its level: from 2^-1 to 2^12
    scaled_bits = (bits & ~0x7F800000) | ((126 + place) << 23)
    scaled = jax.lax.bitcast_convert_type(scaled_bits, jnp.float32)
    scaled = jnp.where((exponent > 0) & is_finite, scaled, 0.0)
    high, rest = _next_digit(scaled)
    middle, rest = _next_digit(rest * 2.0**_WIDTH)
    low, _ = _next_digit(rest * 2.0**_WIDTH)
    is_infinite = fraction == 0
    kinds = is_infinite & (bits > 0), is_infinite & (bits < 0), ~is_infinite
    digits = zip((high, middle, low), kinds, strict=True)
    return _Digits(
        jnp.where(is_finite, level, _NOT_FINITE),
        *(jnp.where(is_finite, digit, kind.astype(jnp.int32)) for digit, kind in digits),
    )


def _divided_by_width(number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides numbers from 0 to 253 by the width of a digit; returns quotient and remainder."""
    quotient = (number * 79) >> 10
    return quotient, number - _WIDTH * quotient


def _next_digit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest whole number of x, and the rest, exactly."""
    digit = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return digit.astype(jnp.int32), x - digit


def _at_level(digits: _Digits, level: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the counts of digits at a level that is no lower than theirs, and the two below."""
    steps = level - digits.level
    zero = jnp.int32(0)
    high = jnp.where(steps == 0, digits.high, zero)
    middle = jnp.where(steps == 0, digits.middle, jnp.where(steps == 1, digits.high, zero))
    low = jnp.where(
        steps == 0,
        digits.low,
        jnp.where(steps == 1, digits.middle, jnp.where(steps == 2, digits.high, zero)),
    )
    return high, middle, low


def _packed(digits: _Digits) -> ExactSum:
    level, *counts = digits
    return ExactSum(
        *((count << 2) | ((level >> 2 * place) & 3) for place, count in enumerate(counts))
    )


def _digits_of_sum(sums: ExactSum) -> _Digits:
    level = sum(((part & 3) << 2 * place for place, part in enumerate(sums)), jnp.int32(0))
    return _Digits(level, *(part >> 2 for part in sums))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((127 + exponent) << 23, jnp.float32)


def _not_finite(infinite: jax.Array, negative: jax.Array, nan: jax.Array) -> jax.Array:
    """Returns the sum of so many inf, -inf and NaN."""
    both = (infinite != 0) & (negative != 0)
    infinity = jnp.where(negative != 0, -jnp.inf, jnp.inf)
    total: jax.Array = jnp.where(both | (nan != 0), jnp.nan, infinity).astype(jnp.float32)
    return total
