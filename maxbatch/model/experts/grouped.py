"""Products of rows with the matrix of their group: `[rows sorted by group] x [groups, D, F]`.

Each platform has its own implementation. On a CPU `jax.lax.ragged_dot` computes every group for
every row; a loop over blocks of rows computes little more than is needed. On a TPU the gradient of
`ragged_dot` with respect to the matrices compiles to a dense product, E times the work; the Pallas
kernels of JAX avoid it (Gale et al. 2023, MegaBlocks, https://arxiv.org/abs/2211.15841). A GPU uses
`ragged_dot`.

Shapes: n rows, E groups, D input, F output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_Kept = tuple[jax.Array, jax.Array, jax.Array]  # rows, matrices and sizes, for the gradient


def _one_by_one(product: Product) -> Product:
    """Returns a product that `jax.vmap` runs once per mapped array; a device has one of them."""
    mapped: Product = sequential_vmap(product)
    return mapped


# Rows of a block on a CPU: at most, and as a share of the rows that a group has on average.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 16
_TILES = (512, 1024, 1024)  # of rows, inputs and outputs, on a TPU


class Groups(NamedTuple):
    """The groups of sorted rows, each with a matrix of its own."""

    sizes_E: jax.Array  # int32: rows of each group
    platform: str  # "cpu", "gpu" or "tpu"
    # Within `shard_map`: the mesh axes that the matrices' inputs and outputs are split over, if
    # they are.
    inputs_over: str | None = None
    outputs_over: str | None = None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array, platform: str
) -> jax.Array:
    """Returns each row times the matrix of its group: [n, F] in x's dtype; rows behind the groups
    give zeros.

    Args:
      x_nxD: the rows of group 0, then those of group 1, and so on; then rows of no group.
      w_ExDxF: the groups' matrices, in x's dtype.
      sizes_E: int32: rows of each group.
      platform: "cpu", "gpu" or "tpu".
    """
    return _forward(x_nxD, w_ExDxF, sizes_E, platform)[0]


def _forward(
    x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array, platform: str
) -> tuple[jax.Array, _Kept]:
    return _PRODUCTS[platform](False)(x_nxD, w_ExDxF, sizes_E), (x_nxD, w_ExDxF, sizes_E)


def _backward(platform: str, kept: _Kept, grad_nxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_nxD, w_ExDxF, sizes_E = kept
    grad_x_nxD = _PRODUCTS[platform](True)(grad_nxF, w_ExDxF, sizes_E)
    return grad_x_nxD, outer_products(x_nxD, grad_nxF, sizes_E, platform), None


grouped_product.defvjp(_forward, _backward)


def grouped_sums(
    x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array, platform: str, is_transposed: bool
) -> jax.Array:
    """Returns each row times the matrix of its group, or times its transpose, of operands in 8
    bits: [n, F].

    Sums are int32 or float32. They have no gradient. On a TPU it is XLA's own kernel: those of JAX
    take no 8 bits.
    """
    sums = jnp.int32 if x_nxD.dtype == jnp.int8 else jnp.float32
    product = (_cpu_product if platform == "cpu" else _ragged_product)(is_transposed, sums)
    return product(x_nxD, w_ExDxF, sizes_E)


def outer_products(
    x_nxD: jax.Array, y_nxF: jax.Array, sizes_E: jax.Array, platform: str
) -> jax.Array:
    """Returns of each group the sum over its rows of x's times y's, [E, D, F]: the gradient by its
    matrix.
    """
    return _OUTER_PRODUCTS[platform](x_nxD, y_nxF, sizes_E)


def _without_rest(y_nxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns y with zeros behind the groups."""
    in_group_n = jnp.arange(y_nxF.shape[0]) < jnp.sum(sizes_E)
    return jnp.where(in_group_n[:, None], y_nxF, jnp.zeros_like(y_nxF))


class _Block(NamedTuple):
    """A block of rows of one group, with others before and behind them."""

    group: jax.Array
    start: jax.Array  # its first row
    is_own_bx1: jax.Array  # bool: rows of the group that no earlier block holds


class _Blocks:
    """The blocks of rows that a CPU processes. The last block of a group may be partly filled."""

    def __init__(self, num_rows: int, sizes_E: jax.Array) -> None:
        mean = num_rows // (2 * sizes_E.shape[0])
        self.size = next(
            (b for b in (256, 128, 64, 32) if b <= min(mean, _LARGEST_BLOCK)), _SMALLEST_BLOCK
        )
        self.size = min(self.size, num_rows)
        self._num_rows = num_rows
        self._ends_E = jnp.cumsum(sizes_E)
        self._starts_E = self._ends_E - sizes_E
        blocks_E = -(-sizes_E // self.size)
        self._last_E = jnp.cumsum(blocks_E)
        self._first_E = self._last_E - blocks_E

    @property
    def count(self) -> jax.Array:
        """The number of blocks."""
        return self._last_E[-1]

    def __getitem__(self, block: jax.Array) -> _Block:
        """Returns a block, which ends within the rows."""
        group = jnp.searchsorted(self._last_E, block, side="right")
        first = self._starts_E[group] + (block - self._first_E[group]) * self.size
        # A slice cannot end behind the rows: the last block begins earlier, and leaves out what the
        # block before it holds.
        start = jnp.minimum(first, self._num_rows - self.size)
        rows_bx1 = start + jnp.arange(self.size, dtype=start.dtype)[:, None]
        return _Block(group, start, (rows_bx1 >= first) & (rows_bx1 < self._ends_E[group]))

    def rows(self, x_nxD: jax.Array, block: _Block) -> jax.Array:
        """Returns the rows of a block."""
        rows: jax.Array = jax.lax.dynamic_slice_in_dim(x_nxD, block.start, self.size)
        return rows


def _cpu_product(is_transposed: bool, sums: jax.typing.DTypeLike | None = None) -> Product:
    """Returns the product with the matrices, or with their transposes; `sums`: its type, None: that
    of the rows.
    """

    @_one_by_one
    def product(x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        blocks = _Blocks(x_nxD.shape[0], sizes_E)
        inputs, outputs = (1, 0) if is_transposed else (0, 1)

        def add_block(number: jax.Array, y_nxF: jax.Array) -> jax.Array:
            block = blocks[number]
            w_DxF = jax.lax.dynamic_index_in_dim(w_ExDxF, block.group, keepdims=False)
            y_bxF = jax.lax.dot_general(
                blocks.rows(x_nxD, block),
                w_DxF,
                (((1,), (inputs,)), ((), ())),
                preferred_element_type=sums,
            )
            # the other rows of the block keep what their own group gave them
            y_bxF = jnp.where(block.is_own_bx1, y_bxF, blocks.rows(y_nxF, block))
            written: jax.Array = jax.lax.dynamic_update_slice_in_dim(
                y_nxF, y_bxF, block.start, axis=0
            )
            return written

        zeros = jnp.zeros((x_nxD.shape[0], w_ExDxF.shape[1 + outputs]), sums or x_nxD.dtype)
        y_nxF: jax.Array = jax.lax.fori_loop(0, blocks.count, add_block, zeros)
        return y_nxF

    return product


@_one_by_one
def _cpu_outer_products(x_nxD: jax.Array, y_nxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    blocks = _Blocks(x_nxD.shape[0], sizes_E)

    def add_block(number: jax.Array, w_ExDxF: jax.Array) -> jax.Array:
        block = blocks[number]
        x_bxD = blocks.rows(x_nxD, block)
        x_bxD = jnp.where(block.is_own_bx1, x_bxD, jnp.zeros_like(x_bxD))
        more_DxF = jax.lax.dot_general(x_bxD, blocks.rows(y_nxF, block), (((0,), (0,)), ((), ())))
        w_DxF = jax.lax.dynamic_index_in_dim(w_ExDxF, block.group, keepdims=False) + more_DxF
        added: jax.Array = jax.lax.dynamic_update_index_in_dim(w_ExDxF, w_DxF, block.group, axis=0)
        return added

    zeros = jnp.zeros((sizes_E.shape[0], x_nxD.shape[1], y_nxF.shape[1]), x_nxD.dtype)
    w_ExDxF: jax.Array = jax.lax.fori_loop(0, blocks.count, add_block, zeros)
    return w_ExDxF


def _tiles(*shape: int) -> tuple[int, ...]:
    return tuple(min(tile, -(-size // 128) * 128) for tile, size in zip(_TILES, shape, strict=True))


def _padded_rows(x_nxD: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x_nxD, ((0, -x_nxD.shape[0] % tile), (0, 0)))


@contextlib.contextmanager
def _standard_promotion() -> Iterator[None]:
    """Lets the kernels mix types, also where the program around them promotes nothing."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _tpu_product(is_transposed: bool, interpret: bool = False) -> Product:
    @_one_by_one
    def product(x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        tiles = _tiles(x_nxD.shape[0], x_nxD.shape[1], w_ExDxF.shape[1 if is_transposed else 2])
        with _standard_promotion():
            y_nxF: jax.Array = gmm(
                _padded_rows(x_nxD, tiles[0]),
                w_ExDxF,
                sizes_E,
                preferred_element_type=x_nxD.dtype,
                tiling=tiles,
                transpose_rhs=is_transposed,
                interpret=interpret,
            )
        return _without_rest(y_nxF[: x_nxD.shape[0]], sizes_E)

    return product


def _tpu_outer_products(interpret: bool = False) -> Product:
    @_one_by_one
    def products(x_nxD: jax.Array, y_nxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        tiles = _tiles(x_nxD.shape[0], x_nxD.shape[1], y_nxF.shape[1])
        x_nxD, y_nxF = _padded_rows(x_nxD, tiles[0]), _padded_rows(y_nxF, tiles[0])
        with _standard_promotion():
            w_ExDxF: jax.Array = tgmm(
                x_nxD.T,
                y_nxF,
                sizes_E,
                preferred_element_type=x_nxD.dtype,
                tiling=tiles,
                interpret=interpret,
            )
        return w_ExDxF

    return products


def _ragged_product(is_transposed: bool, sums: jax.typing.DTypeLike | None = None) -> Product:
    @_one_by_one
    def product(x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        w_ExDxF = w_ExDxF.swapaxes(1, 2) if is_transposed else w_ExDxF
        return _without_rest(
            jax.lax.ragged_dot(x_nxD, w_ExDxF, sizes_E, preferred_element_type=sums), sizes_E
        )

    return product


@_one_by_one
def _ragged_outer_products(x_nxD: jax.Array, y_nxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    w_ExDxF: jax.Array = jax.lax.ragged_dot_general(x_nxD, y_nxF, sizes_E, numbers)
    return w_ExDxF


_PRODUCTS: dict[str, Callable[[bool], Product]] = {
    "cpu": _cpu_product,
    "tpu": _tpu_product,
    "gpu": _ragged_product,
}
_OUTER_PRODUCTS: dict[str, Product] = {
    "cpu": _cpu_outer_products,
    "tpu": _tpu_outer_products(),
    "gpu": _ragged_outer_products,
}
