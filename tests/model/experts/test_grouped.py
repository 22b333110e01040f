"""Grouped products against a dense loop over the groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.model.experts import grouped
from maxbatch.model.experts.grouped import grouped_product

# one group is empty, and of 70 rows 7 belong to none
SIZES = np.asarray([7, 0, 40, 1, 15], np.int32)
ROWS, WIDTH, HIDDEN = 70, 12, 20


def dense(x_nxD: jax.Array, w_ExDxF: jax.Array, sizes_E: np.ndarray) -> jax.Array:
    """Returns the grouped product by a loop over the groups."""
    ends = np.cumsum(sizes_E)
    parts = [
        x_nxD[end - size : end] @ w for size, end, w in zip(sizes_E, ends, w_ExDxF, strict=True)
    ]
    return jnp.concatenate(
        [*parts, jnp.zeros((x_nxD.shape[0] - ends[-1], w_ExDxF.shape[2]), x_nxD.dtype)]
    )


def values_and_gradients(product, x: jax.Array, w: jax.Array):
    """Returns the product and the gradients of a weighted sum of it."""
    weights = jnp.cos(jnp.arange(x.shape[0] * w.shape[2], dtype=jnp.float32)).reshape(
        x.shape[0], w.shape[2]
    )
    loss = jax.jit(
        jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(product(x, w)) * weights), argnums=(0, 1))
    )
    return jax.jit(product)(x, w), *loss(x, w)


@pytest.fixture(scope="module")
def operands() -> tuple[jax.Array, jax.Array]:
    """Rows and the matrices of their groups."""
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(
        keys[1], (len(SIZES), WIDTH, HIDDEN)
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_grouped_products_and_their_gradients_are_those_of_a_loop_over_the_groups(
    platform, operands, monkeypatch
):
    if platform == "tpu":
        monkeypatch.setitem(grouped._PRODUCTS, "tpu", partial(grouped._tpu_product, interpret=True))
        monkeypatch.setitem(
            grouped._OUTER_PRODUCTS, "tpu", grouped._tpu_outer_products(interpret=True)
        )
    sizes = jnp.asarray(SIZES)
    with jax.default_matmul_precision("highest"):
        expected = values_and_gradients(lambda x, w: dense(x, w, SIZES), *operands)
        found = values_and_gradients(lambda x, w: grouped_product(x, w, sizes, platform), *operands)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), found, expected)


@pytest.mark.parametrize("sizes", [(3, 0, 2), (20, 13), (0, 1)])
def test_the_last_block_of_a_cpu_ends_with_the_rows(sizes):
    keys = jax.random.split(jax.random.key(1))
    x, w = (
        jax.random.normal(keys[0], (sum(sizes), 3)),
        jax.random.normal(keys[1], (len(sizes), 3, 2)),
    )
    expected = values_and_gradients(lambda x, w: dense(x, w, np.array(sizes)), x, w)
    found = values_and_gradients(
        lambda x, w: grouped_product(x, w, jnp.asarray(sizes), "cpu"), x, w
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), found, expected)


def test_a_product_that_is_mapped_over_devices_is_the_product_of_each(operands):
    x, w = operands
    mapped = jax.vmap(lambda x, sizes: grouped_product(x, w, sizes, "cpu"))
    sizes = jnp.stack([jnp.asarray(SIZES), jnp.asarray(SIZES[::-1].copy())])
    found = mapped(jnp.stack([x, x]), sizes)
    for part, of_part in zip(found, np.asarray(sizes), strict=True):
        np.testing.assert_allclose(part, dense(x, w, of_part), atol=1e-4)
