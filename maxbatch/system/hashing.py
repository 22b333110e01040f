"""Hashes of rows, and their sum modulo 2^64, independent of order and placement.

The same code runs in numpy and inside a jitted step, since it uses only uint32 operators, which
wrap around in both. A 64-bit row hash is two uint32 lanes. The sum is four 16-bit limbs in uint32,
low ones first, which hold 65,536 summands; more rows are summed in blocks.

Legend: R rows, L slots of a row.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array", bound=Any)  # of NumPy or JAX

_U32 = np.uint32
# Multipliers of MurmurHash3 (Appleby, 2011) and of its finaliser fmix32; the lanes differ in their
# start value.
_FMIX = _U32(0x85EBCA6B), _U32(0xC2B2AE35)
POSITION, TOKEN, _SEGMENT, _WEIGHT = map(_U32, (0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x9E3779B1))
LANES = _U32(0x2545F491), _U32(0x8F1BBCDC)
_LOW_HALF, _HALF = _U32(0xFFFF), _U32(16)
_BLOCK = 1 << 16  # rows whose limbs fit a 32-bit sum


def row_hashes(xp: ModuleType, tokens_RxL: Array, segments_RxL: Array, weights_RxL: Array) -> Array:
    """Hashes each row's tokens, segments and weights, slot by slot.

    Args:
      xp: numpy or jax.numpy; both give the same bits.
      tokens_RxL, segments_RxL: int32.
      weights_RxL: float32; its bits count.

    Returns:
      uint32[R, 2]: low and high half of each row's hash; 0 for padding rows (all segments 0).
    """
    position_1xL = xp.arange(tokens_RxL.shape[1], dtype=xp.uint32)[None, :]
    lanes = slot_lanes(xp, position_1xL, tokens_RxL, segments_RxL, weights_RxL)
    low, high = halves_of(*(lane.sum(axis=1, dtype=xp.uint32) for lane in lanes))
    real_R = (segments_RxL != 0).any(axis=1)
    hashes_Rx2: Array = xp.stack([low, high], axis=1) * real_R.astype(xp.uint32)[:, None]
    return hashes_Rx2


def slot_lanes(
    xp: ModuleType, places: Array, tokens: Array, segments: Array, weights: Array
) -> tuple[Array, Array]:
    """Hashes slots: the two lanes, uint32 arrays, whose sums over a row give its hash.

    Args:
      places: the slots' places in their row.
    """
    positions = places.astype(xp.uint32) * POSITION
    parts = (
        tokens.astype(xp.uint32) * TOKEN,
        segments.astype(xp.uint32) * _SEGMENT,
        weights.astype(xp.float32).view(xp.uint32) * _WEIGHT,
    )

    def lane_of(start: np.uint32) -> Array:
        slots: Array = mixed(positions + start)
        for part in parts:
            slots = mixed(slots ^ part)
        return slots

    return lane_of(LANES[0]), lane_of(LANES[1])


def halves_of(sum_0: Array, sum_1: Array) -> tuple[Array, Array]:
    """Returns the low and the high half of a row's hash, from its lanes' sums over the slots."""
    # Otherwise the sum over rows would be linear in slots and miss tokens swapped between two rows
    # at the same slot.
    low = mixed(sum_0 ^ mixed(sum_1 + LANES[0]))
    high = mixed(sum_1 ^ mixed(low + LANES[1]))
    return low, high


def mixed(x: Array) -> Array:
    """Returns MurmurHash3's finaliser of uint32 values, a bijection."""
    x = (x ^ (x >> _HALF)) * _FMIX[0]
    x = (x ^ (x >> _U32(13))) * _FMIX[1]
    x = x ^ (x >> _HALF)
    return x


def limb_sums(xp: ModuleType, hashes_Rx2: Array) -> Array:
    """Returns uint32[4]: the sum of row hashes (uint32[R, 2]) in limbs of 16 bits, not yet
    carried.
    """
    limbs_Rx4 = xp.stack([hashes_Rx2 & _LOW_HALF, hashes_Rx2 >> _HALF], axis=2).reshape(-1, 4)
    sums = [
        limbs_Rx4[i : i + _BLOCK].sum(axis=0, dtype=xp.uint32)
        for i in range(0, max(len(limbs_Rx4), 1), _BLOCK)
    ]
    total: Array = sums[0]
    for more in sums[1:]:
        total = carry(xp, carry(xp, total) + carry(xp, more))
    return total


def carry(xp: ModuleType, limbs: Array) -> Array:
    """Carries limbs: uint32[4] with the same sum modulo 2^64 and every limb below 2^16, so 65,535
    more can be added.
    """
    carried: list[Array] = []
    over: Array | np.uint32 = _U32(0)
    for limb in (limbs[0], limbs[1], limbs[2], limbs[3]):
        # Split the limb before adding the carry from below: their sum could exceed 2^32.
        low = (limb & _LOW_HALF) + (over & _LOW_HALF)
        carried.append(low & _LOW_HALF)
        over = (limb >> _HALF) + (over >> _HALF) + (low >> _HALF)
    limbs = xp.stack(carried)
    return limbs


def to_hex(limbs: Any) -> str:
    """Returns the sum modulo 2^64 as 16 hex digits."""
    total = sum(int(limb) << (16 * place) for place, limb in enumerate(np.asarray(limbs)))
    return f"{total % (1 << 64):016x}"
