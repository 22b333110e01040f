"""Models of DeepSeek's form: their cache, their first layers without experts, their counts and
their places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.families.matrices import active_model_size, parameters, size_of
from maxbatch.model.decoder import Decoder
from maxbatch.model.flops import model_flops_per_token
from maxbatch.update.adapters import Adapters
from maxbatch.update.state import abstract_model
from tests.helpers.configs import config_of

ROWS, LENGTH, PROMPT = 2, 10, 7
YARN = (
    "rope_type=yarn",
    "rope_factor=4",
    "original_max_position_embeddings=8",
    "base_num_decoder_layers=4",
    "first_num_dense_layers=2",
)


def decoder_of(*overrides: str) -> Decoder:
    keys = ("model_name=tiny-deepseek", *YARN, f"max_target_length={LENGTH}", *overrides)
    return Decoder(config_of(*keys).decoder, rngs=nnx.Rngs(params=0))


@pytest.mark.runs
@pytest.mark.parametrize(
    "keys",
    [("scan_layers=true",), ("scan_layers=false",), ("scan_layers=true", "quantization=int8")],
)
def test_the_cache_of_latents_gives_what_the_whole_row_gives(keys: tuple[str, ...]) -> None:
    decoder = decoder_of(*keys, "remat_policy=none")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 260, (ROWS, LENGTH)), jnp.int32)
    graphdef, params = nnx.split(decoder)

    @jax.jit
    def both(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        decoder = nnx.merge(graphdef, params)
        cache, found = decoder.empty_caches(ROWS, LENGTH), []
        for begin, end in [(0, PROMPT), *((place, place + 1) for place in range(PROMPT, LENGTH))]:
            positions = jnp.broadcast_to(jnp.arange(begin, end), (ROWS, end - begin))
            hidden, cache = decoder.hidden_with_caches(tokens[:, begin:end], positions, cache)
            found.append(hidden)
        return decoder.hidden(tokens, jnp.ones_like(tokens)).x_MxLxD, jnp.concatenate(found, axis=1)

    [cache] = decoder.empty_caches(ROWS, LENGTH).places
    assert [array.shape for array in (cache.keys_NxBxKxLxh, cache.values_NxBxKxLxh)] == [
        (4, ROWS, 1, LENGTH, 16 + 8),
        (4, ROWS, 1, LENGTH, 16),
    ]
    with jax.default_matmul_precision("highest"):
        whole, cached = both(params)
    np.testing.assert_allclose(cached, whole, atol=2e-5)


@pytest.mark.runs
def test_a_loop_has_the_gradients_of_its_layers_one_by_one() -> None:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 260, (ROWS, LENGTH)), jnp.int32)

    def gradient(*overrides: str) -> nnx.State:
        graphdef, params = nnx.split(decoder_of(*overrides))

        def loss(params: nnx.State) -> jax.Array:
            return jnp.sum(jnp.square(nnx.merge(graphdef, params)(tokens, jnp.ones_like(tokens))))

        return jax.jit(jax.grad(loss))(params)

    expected = gradient("scan_layers=true", "remat_policy=none")
    found = gradient("scan_layers=false", "remat_policy=minimal")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()) + 1e-6)


def test_parameters_that_a_token_meets_and_flops_are_those_of_deepseek_v3() -> None:
    config = config_of("model_name=deepseek3-671b").decoder
    # 37 in the report, without the embedding
    assert round(active_model_size(config) / 1e9, 1) == 37.6
    attention = 3 * 61 * 4096 * 128 * (192 + 128)
    lookup = 129280 * 7168
    vectors = sum(size_of(row, config) for row in parameters(config) if not row.inputs)
    matrices = active_model_size(config) - lookup - vectors
    assert model_flops_per_token(config) == 6 * matrices + attention


def test_adapters_are_of_attention_and_of_mlps_and_never_of_experts() -> None:
    base = abstract_model(config_of("model_name=tiny-deepseek").decoder)[1]
    paths = {target.path for target in Adapters(2, 2.0, frozenset()).targets(base)}
    names = ("query_down", "query_up", "latent", "latent_up", "out")
    attention = {
        (stack, "attention", name) for stack in ("dense_layers", "layers") for name in names
    }
    mlps = (("dense_layers", "mlp"), ("layers", "shared_experts"))
    assert paths == attention | {
        (*module, name) for module in mlps for name in ("gate", "up", "down")
    }
