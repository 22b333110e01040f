"""The balanced order of split rows: every device attends from an early and a late part of each row.

In a causal row that n devices split in order, the queries of the first device see one share of n,
those of the last one all of them. In the balanced order a row has 2n parts, and device i attends
from parts i and 2n - 1 - i, which together see as much on every device. Inside of attention the
parts travel there and back; nothing else sees another order.

All functions but `places` run inside of `shard_map`. Tokens are on axis 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def places(length: int, size: int) -> np.ndarray:
    """Returns the places in the row of the tokens of all devices, device by device: int32[L]."""
    parts = np.arange(length, dtype=np.int32).reshape(2 * size, -1)
    return np.concatenate([parts[[i, 2 * size - 1 - i]].reshape(-1) for i in range(size)])


def dealt(x: jax.Array, axis: str, size: int) -> jax.Array:
    """Returns this device's parts, from the shares of the devices of a mesh axis."""
    even, odd = (
        jax.lax.ppermute(half, axis, moves)
        for half, moves in zip(jnp.split(x, 2, axis=1), _moves(size), strict=True)
    )
    return _in_turn(even, odd, axis)


def collected(x: jax.Array, axis: str, size: int) -> jax.Array:
    """Returns this device's share of the row, from the parts of all; undoes `dealt`."""
    first, second = jnp.split(x, 2, axis=1)
    even_and_odd = jnp.split(_in_turn(first, second, axis), 2, axis=1)
    halves = [
        jax.lax.ppermute(half, axis, [(to, start) for start, to in moves])
        for half, moves in zip(even_and_odd, _moves(size), strict=True)
    ]
    return jnp.concatenate(halves, axis=1)


def _moves(size: int) -> list[list[tuple[int, int]]]:
    """Returns the ways of the first halves of shares, the parts with even numbers, and of the
    second ones.
    """
    last = 2 * size - 1
    return [[(i, min(2 * i + half, last - 2 * i - half)) for i in range(size)] for half in (0, 1)]


def _in_turn(even: jax.Array, odd: jax.Array, axis: str) -> jax.Array:
    """Returns the parts with even and odd numbers in their order: the first part of a device has
    its own number.
    """
    is_even = jax.lax.axis_index(axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)
