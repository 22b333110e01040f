"""Layers that add their gradients to sums: the same gradients as those of the plain loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.model.decoder import Decoder
from maxbatch.parallel.remat import Remat
from maxbatch.parallel.sharding import unconstrained
from maxbatch.training.update.layer_gradients import SummingLayers
from maxbatch.training.update.state import abstract_model
from tests.helpers.tiny import loss_sums, tiny_config


def assert_close(actual: jax.Array, desired: jax.Array) -> None:
    """What is rounded is the sum over tokens, whose terms are as large as the largest elements."""
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6 * float(np.abs(desired).max()))


@pytest.mark.runs
@pytest.mark.parametrize("remat_policy", ["none", "minimal", "save_qkv_proj", "full", "custom"])
def test_the_gradient_of_the_sums_is_the_sums_and_the_gradients(remat_policy: str) -> None:
    custom = ("decoder_layer_input=offload", "key_proj=offload", "mlpwo=device") if remat_policy == "custom" else ()
    config = tiny_config(
        "scan_layers=true", f"remat_policy={remat_policy}", *custom, "base_num_decoder_layers=3", "dtype=float32"
    )
    params = nnx.state(Decoder(config.decoder, rngs=nnx.Rngs(0)), nnx.Param)
    tokens_MxL = jnp.asarray(np.random.default_rng(0).integers(1, 200, (2, config.max_target_length)), jnp.int32)
    rows = (tokens_MxL, jnp.ones_like(tokens_MxL), jnp.ones(tokens_MxL.shape, jnp.float32))

    def loss(params: nnx.State, sums: nnx.State | None) -> jax.Array:
        runner = None if sums is None else SummingLayers(sums, Remat.of(config.remat), unconstrained)
        graphdef, _ = abstract_model(config.decoder, layer_runner=runner)
        return loss_sums(nnx.merge(graphdef, params), *rows)[0]

    layers = params["layers"]
    before = jax.tree.map(lambda p: jnp.full(p.shape, 0.25, jnp.float32), layers)
    plain_loss, plain = jax.jit(jax.value_and_grad(loss))(params, None)
    summed_loss, (own, sums) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, before)

    assert summed_loss == pytest.approx(float(plain_loss), rel=1e-6)
    for summed, gradient in zip(jax.tree.leaves(sums), jax.tree.leaves(plain["layers"]), strict=True):
        assert_close(summed, gradient + 0.25)
    assert all(not np.any(g) for g in jax.tree.leaves(own["layers"])), "nothing is counted twice"
    assert_close(own["embedding"][...], plain["embedding"][...])


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
