"""Layers that add their gradients to sums: the same gradients as those of the plain loop."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.model.decoder import Decoder
from maxbatch.parallel.remat import Remat
from maxbatch.parallel.sharding import unconstrained
from maxbatch.update.layer_gradients import SummingLayers
from maxbatch.update.state import abstract_model
from tests.helpers.tiny import LENGTH, loss_sums, tiny_config

LAYERS = ("scan_layers=true", "base_num_decoder_layers=3", "dtype=float32")
TOKENS_MxL = jnp.asarray(np.random.default_rng(0).integers(1, 200, (2, LENGTH)), jnp.int32)


def loss(
    config: DecoderConfig, params: nnx.State, runner: SummingLayers | None = None
) -> jax.Array:
    graphdef, _ = abstract_model(config, layer_runner=runner)
    rows = (TOKENS_MxL, jnp.ones_like(TOKENS_MxL), jnp.ones(TOKENS_MxL.shape, jnp.float32))
    return loss_sums(nnx.merge(graphdef, params), *rows)[0]


@pytest.fixture(scope="module")
def plain() -> tuple[nnx.State, jax.Array, nnx.State]:
    """Parameters, and their loss and gradients without sums and without rematerialisation."""
    config = tiny_config(*LAYERS).decoder
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    return params, *jax.jit(jax.value_and_grad(partial(loss, config)))(params)


def assert_close(actual: jax.Array, desired: jax.Array) -> None:
    """What is rounded is the sum over tokens, whose terms are as large as the largest elements."""
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6 * float(np.abs(desired).max()))


@pytest.mark.runs
@pytest.mark.parametrize("remat_policy", ["none", "minimal", "save_qkv_proj", "full", "custom"])
def test_the_gradient_of_the_sums_is_the_sums_and_the_gradients(
    remat_policy: str, plain: tuple[nnx.State, jax.Array, nnx.State]
) -> None:
    custom = (
        ("decoder_layer_input=offload", "key_proj=offload", "mlpwo=device")
        if remat_policy == "custom"
        else ()
    )
    config, (params, loss_of_all, gradients) = (
        tiny_config(*LAYERS, f"remat_policy={remat_policy}", *custom),
        plain,
    )

    def summing(params: nnx.State, sums: nnx.State) -> jax.Array:
        return loss(
            config.decoder, params, SummingLayers(sums, Remat.of(config.remat), unconstrained)
        )

    before = jax.tree.map(lambda p: jnp.full(p.shape, 0.25, jnp.float32), params["layers"])
    summed_loss, (own, sums) = jax.jit(jax.value_and_grad(summing, argnums=(0, 1)))(params, before)

    assert summed_loss == pytest.approx(float(loss_of_all), rel=1e-6)
    for summed, gradient in zip(
        jax.tree.leaves(sums), jax.tree.leaves(gradients["layers"]), strict=True
    ):
        assert_close(summed, gradient + 0.25)
    assert all(not np.any(g) for g in jax.tree.leaves(own["layers"])), "nothing is counted twice"
    assert_close(own["embedding"][...], gradients["embedding"][...])


def test_layers_that_would_run_twice_in_one_gradient_are_refused() -> None:
    config = tiny_config("scan_layers=true")
    _, shapes = abstract_model(config.decoder)
    sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), shapes["layers"])
    runner = SummingLayers(sums, Remat.of(config.remat), unconstrained)
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(0), layer_runner=runner)
    tokens_MxL = jnp.ones((1, config.max_target_length), jnp.int32)
    decoder.hidden(tokens_MxL, tokens_MxL)
    with pytest.raises(RuntimeError, match="must run once per gradient"):
        decoder.hidden(tokens_MxL, tokens_MxL)
