"""Products whose form depends on the platform: one result, however it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.model import attention, decoder, latent_attention, mlp, products
from maxbatch.model.experts import experts
from maxbatch.model.products import gradients_together, join_heads, product, two_products
from maxbatch.parallel.trees import State
from maxbatch.update.state import abstract_model
from tests.helpers.tiny import tiny_config

EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16")
FAMILIES = {
    "llama2": (),
    "gpt2": (
        "decoder_block=gpt2",
        "mlp_activations=gelu",
        "trainable_position_size=32",
        "base_num_kv_heads=4",
    ),
    "mixtral": ("decoder_block=mixtral", "norm_topk_prob=true", *EXPERTS),
    "deepseek": ("model_name=tiny-deepseek", "max_target_length=32"),
}


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = ((2, 8, 16), (16, 24), (16, 24))
    x, first, second = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)
    )
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
        jax.grad(lambda *arrays, p=p: weighted_sum(p, *arrays), (0, 1, 2))(*inputs())
        for p in (platform, "tpu")
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


def test_heads_are_joined_by_a_turned_matrix_on_a_tpu_with_the_same_values_and_gradients() -> None:
    x, w = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((2, 8, 4, 6), (4, 6, 16)))
    )

    def joined(platform: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(join_heads(x, w, platform)))

    values = {
        platform: jax.value_and_grad(joined, (1, 2))(platform, x, w) for platform in ("cpu", "tpu")
    }
    for one, other in zip(*map(jax.tree.leaves, values.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    turns = [
        str(jax.make_jaxpr(join_heads, static_argnums=2)(x, w, one)).count("transpose")
        for one in values
    ]
    assert turns == [0, 1], "a CPU's numbers are those of the plain product"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_but_the_routers_is_applied_by_the_one_product(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("logits_via_embedding=false", *FAMILIES[family])
    graphdef, shapes = abstract_model(config.decoder)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), shapes
    )
    tokens = jnp.asarray(rng.integers(0, 256, (2, 8)), jnp.int32)

    def matrices_with_gradient() -> set[str]:
        def loss(params: State) -> jax.Array:
            logits = nnx.merge(graphdef, params)(tokens, jnp.ones_like(tokens))
            return jnp.sum(
                logits * jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
            )

        gradients = jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params))
        names = {
            jax.tree_util.keystr(path): bool(jnp.any(gradient)) for path, gradient in gradients
        }
        others = ("scale", "bias", "router", "embedding", "positions")  # norms, biases, lookups
        return {
            name
            for name, has in names.items()
            if has and not any(other in name for other in others)
        }

    assert {"mlp", "output"} & {
        part for name in matrices_with_gradient() for part in name.split("'")
    }

    def constant(x: jax.Array, w: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        return product(x, jax.lax.stop_gradient(w), *args, **kwargs)  # type: ignore[arg-type]

    for module in (attention, decoder, experts, latent_attention, mlp, products):
        monkeypatch.setattr(module, "product", constant)
    assert matrices_with_gradient() == set()
