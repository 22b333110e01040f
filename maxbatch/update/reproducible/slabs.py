"""Slabs: a large array seen as a matrix, some rows of it at a time.

A loop over slabs has temporaries of one slab only, where elementwise code over the array has some
of the array's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
_VALUES = 2**16  # of a slab


class Slabs(NamedTuple):
    """The slabs of an array. If they do not divide its rows, the last two overlap."""

    num_rows: int  # of the matrix
    num_columns: int
    rows: int  # of a slab
    num_slabs: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Slabs:
        num_columns = shape[-1] if shape else 1
        num_rows = math.prod(shape[:-1])
        rows = min(max(_VALUES // max(num_columns, 1), 1), num_rows)
        return cls(num_rows, num_columns, rows, math.ceil(num_rows / rows))

    def as_matrix(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.num_rows, self.num_columns)

    def first_row(self, number: jax.Array) -> jax.Array:
        """Returns the first row of a slab."""
        return jnp.minimum(number * self.rows, self.num_rows - self.rows)

    def rows_at(self, matrix: jax.Array, first: jax.Array) -> jax.Array:
        """Returns the slab of a matrix that begins at a row."""
        return jax.lax.dynamic_slice_in_dim(matrix, first, self.rows)

    def only_new(self, number: jax.Array, slab: jax.Array) -> jax.Array:
        """Returns a slab with zeros in the rows that the slab before it has too."""
        rows = self.first_row(number) + jnp.arange(self.rows)
        return jnp.where((rows >= number * self.rows)[:, None], slab, jnp.zeros((), slab.dtype))

    def fold(self, add: Callable[[jax.Array, T], T], start: T) -> T:
        """Returns what `add(number, so_far)` makes of the slabs, one after another."""
        if self.num_slabs == 1:
            return add(jnp.int32(0), start)
        folded: T = jax.lax.fori_loop(0, self.num_slabs, add, start)
        return folded
