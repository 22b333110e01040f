"""`query_weights_scaled` stores the scale of scores in the query weights, and
`gemma_weights_scaled` the factors of the embedding and the norms: other parameters, the same
function.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import load_config
from maxbatch.around.huggingface.arrays.tensors import layouts_of
from maxbatch.model.decoder import Decoder
from tests.helpers.tiny import TINY_MODEL

SMALL = [*TINY_MODEL, "head_dim=16", "base_num_decoder_layers=1"]
QUERY = ("layers", "attention", "query")
GEMMA = [*SMALL, "decoder_block=gemma", "logits_via_embedding=true"]


@pytest.mark.parametrize(
    ("words", "key"), [(SMALL, "query_weights_scaled"), (GEMMA, "gemma_weights_scaled")]
)
def test_a_models_first_scores_do_not_depend_on_where_the_scale_is(
    words: list[str], key: str
) -> None:
    tokens = jnp.arange(8)[None]

    def logits(scaled: str) -> np.ndarray:
        config = load_config(overrides=[*words, f"{key}={scaled}"])
        model = Decoder(config.decoder, rngs=nnx.Rngs(params=0))
        return np.asarray(model(tokens, jnp.ones_like(tokens)))

    np.testing.assert_allclose(logits("true"), logits("false"), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "usual"), [(("embedding",), 1 / math.sqrt(64)), (("final_norm", "scale"), 0.0)]
)
def test_gemmas_factors_leave_its_tensors_and_return(path: tuple[str, ...], usual: float) -> None:
    model = load_config(overrides=[*GEMMA, "base_emb_dim=64", "gemma_weights_scaled=true"]).model
    layout = layouts_of(model)[path]
    ones = np.ones((8, 64)[-len(layout.axes) :], np.float32)
    tensor = layout.from_parameter(ones)
    np.testing.assert_array_equal(tensor, np.float32(usual) * ones)
    np.testing.assert_array_equal(layout.to_parameter(tensor, ones.shape), ones)


def test_query_weights_return_from_a_tensor_to_the_bit_where_the_root_is_a_power_of_two() -> None:
    model = load_config(overrides=[*SMALL, "query_weights_scaled=true"]).model
    layout = layouts_of(model)[QUERY]
    weights = np.asarray(jax.random.normal(jax.random.key(0), (4, 2, 16)))
    tensor = layout.from_parameter(weights)
    np.testing.assert_array_equal(tensor.T.reshape(weights.shape), weights * 4)
    np.testing.assert_array_equal(layout.to_parameter(tensor, weights.shape), weights)
