"""Products whose form depends on the platform: one result, however it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.model.products import gradients_together, two_products


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = ((2, 8, 16), (16, 24), (16, 24))
    x, first, second = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    return x, first, second


def weighted_sum(platform: str, x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    a, b = two_products(x, first, second, platform)
    return jnp.sum(jnp.sin(a) * b)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_two_products_and_their_gradients_are_the_same_on_every_platform(platform: str) -> None:
    x, first, second = inputs()
    a, b = two_products(x, first, second, platform)
    np.testing.assert_allclose(a, jnp.einsum("mld,df->mlf", x, first), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(b, jnp.einsum("mld,df->mlf", x, second), rtol=1e-5, atol=1e-5)
    ours, expected = (
        jax.grad(lambda *arrays, p=p: weighted_sum(p, *arrays), (0, 1, 2))(*inputs()) for p in (platform, "tpu")
    )
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("platform", "products"), [("cpu", 1), ("tpu", 2)])
def test_a_cpu_computes_one_product_and_a_tpu_two(platform: str, products: int) -> None:
    jaxpr = jax.make_jaxpr(lambda *arrays: two_products(*arrays, platform))(*inputs())
    assert str(jaxpr).count("dot_general") == products


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_gradients_that_a_tpu_computes_together_are_the_same(platform: str) -> None:
    def gated(platform: str, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = gradients_together(gate, up, platform)
        return jnp.sum(jax.nn.silu(gate) * up * up)

    _, *arrays = inputs()
    gradients = [jax.grad(gated, (1, 2))(one, *arrays) for one in (platform, "cpu")]
    np.testing.assert_array_equal(gradients[0], gradients[1])
    jaxpr = str(jax.make_jaxpr(jax.grad(gated, (1, 2)), static_argnums=0)(platform, *arrays))
    assert jaxpr.count("optimization_barrier") == (platform == "tpu")
